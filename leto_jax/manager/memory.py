"""Memory behind a descriptor: it lives as long as any process holds the descriptor or a mapping, whoever made it.

Two kinds. An *arena* has real pages from the start and a sealed size: no process can grow, shrink or freeze it under the others. A *blob*
is sealed against every change, so its digest, once checked, stays true. Generators yield for how long they need not be resumed (`hub`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from collections.abc import Generator
from pathlib import Path

from leto_jax.errors import MemoryBudgetError, RecordError, UsageError
from leto_jax.manager import limits

PIECE_BYTES = 32 * 1024 * 1024
HASH_BYTES = 4 * 1024 * 1024
_NAME_BYTES = 200  # the kernel takes 249, of which "leto:" is ours
_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3
_SIZE_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
_BLOB_SEALS = _SIZE_SEALS | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def create(name: str) -> int:
    """An empty memfd that can be sealed, close-on-exec; `name` is what /proc/PID/fd and /proc/PID/maps show of it."""
    label = ("leto:" + name).encode()[:_NAME_BYTES]
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(os.fsdecode(label), flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(os.fsdecode(label), flags)


def reserve_steps(name: str, nbytes: int, root: str | Path = "/") -> Generator[float, None, int]:
    """`reserve` as a generator that pauses after each piece, for callers that have to answer others meanwhile; its value is the fd."""
    if nbytes < 1:
        raise UsageError(f"an arena has at least 1 byte, found {nbytes} for {name!r}")
    what = f"arena {name!r}"
    limits.check(nbytes, what, root)
    fd = create(name)
    try:
        done = 0
        while done < nbytes:
            piece = min(PIECE_BYTES, nbytes - done)
            try:
                os.posix_fallocate(fd, done, piece)
            except OSError as error:
                raise MemoryBudgetError(
                    f"the kernel gave {done} of {nbytes} bytes for {what}, then refused ({error.strerror}): "
                    "check `ulimit -f`, vm.overcommit_memory and what else fills the memory"
                ) from error
            done += piece
            if done < nbytes:
                yield 0.0
                limits.check(nbytes - done, f"the rest of {what}", root)  # others reserve too
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
        return fd
    except BaseException:
        os.close(fd)
        raise


def reserve(name: str, nbytes: int, root: str | Path = "/") -> int:
    """A memfd of `nbytes` zero bytes with real pages and a sealed size; the caller owns the descriptor.

    Raises:
      MemoryBudgetError: it does not fit (`limits.check`, before and during), or the kernel refuses.

    *Cost*: about 0.5 s per GiB (the kernel clears the pages), blocking.
    *Crash*: the memory is gone with the process; nobody else has the descriptor yet.
    """
    steps = reserve_steps(name, nbytes, root)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            fd: int = end.value
            return fd


def seals(fd: int) -> int:
    """The seals of a descriptor; 0 if it cannot have any (not a memfd)."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return 0


def is_sealed(fd: int) -> bool:
    """Whether nobody can change content or size of this memory any more (as `seal_blob` leaves it)."""
    return seals(fd) & _BLOB_SEALS == _BLOB_SEALS


def has_sealed_size(fd: int) -> bool:
    """Whether nobody can change the size of this memory (as `reserve` leaves it)."""
    return seals(fd) & _SIZE_SEALS == _SIZE_SEALS


def seal_blob(fd: int) -> None:
    """Freezes content and size for ever.

    Raises:
      UsageError: not a memfd that can be sealed, or somebody still has it mapped writable.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _BLOB_SEALS)
    except OSError as error:
        if is_sealed(fd):
            return
        why = "it is mapped writable somewhere: close the mapping first" if error.errno == errno.EBUSY else error.strerror
        raise UsageError(f"cannot seal descriptor {fd}: {why}") from error


def make_blob(name: str, data: bytes | bytearray | memoryview, root: str | Path = "/") -> tuple[int, str]:
    """A sealed memfd that holds `data`, and its SHA-256 in hexadecimal; the caller owns the descriptor."""
    view = memoryview(data).cast("B")
    limits.check(len(view), f"blob {name!r}", root)
    fd = create(name)
    try:
        written = 0
        while written < len(view):
            written += os.pwrite(fd, view[written : written + PIECE_BYTES], written)
        seal_blob(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd, hashlib.sha256(view).hexdigest()


def digest_steps(fd: int, nbytes: int) -> Generator[float, None, str]:
    """SHA-256 of the first `nbytes` of `fd`, pausing after each `HASH_BYTES`; does not move the file offset, which processes share."""
    digest = hashlib.sha256()
    offset = 0
    while offset < nbytes:
        piece = os.pread(fd, min(HASH_BYTES, nbytes - offset), offset)
        if not piece:
            raise RecordError(f"expected {nbytes} bytes behind descriptor {fd}, it ends after {offset}")
        digest.update(piece)
        offset += len(piece)
        yield 0.0
    return digest.hexdigest()


def digest(fd: int, nbytes: int) -> str:
    """SHA-256 of the first `nbytes` of `fd` in hexadecimal."""
    steps = digest_steps(fd, nbytes)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            value: str = end.value
            return value


def size(fd: int) -> int:
    """Size in bytes of what is behind `fd`; -1 if that cannot be told."""
    with contextlib.suppress(OSError):
        return os.fstat(fd).st_size
    return -1

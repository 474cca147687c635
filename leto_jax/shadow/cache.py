"""Executables of earlier jobs, in the compile cache that the user keeps (`JAX_COMPILATION_CACHE_DIR`).

On the CPU the first trainer of a job cannot take its programs from JAX's own cache, since XLA cannot serialize for the shadows what it has
loaded from there (`executables.compile_all`). So what is made for them is kept whole, under the hash of all that it depends on.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path

import jax

from leto_jax.shadow.executables import Identity

_DIGEST_BYTES = 32


def load(identity: Identity) -> bytes | None:
    """What `store` kept for the same programs on the same kind of machine; None if there is nothing good.

    Executables are code: a file that others could have written is not used.
    """
    path = _path(identity)
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            status, data = os.fstat(file.fileno()), file.read()
    except OSError:
        return None
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        print(f"leto: {path} is not used: others may write to it", file=sys.stderr, flush=True)
        return None
    blob = data[_DIGEST_BYTES:]
    return blob if hashlib.sha256(blob).digest() == data[:_DIGEST_BYTES] else None


def store(identity: Identity, blob: bytes) -> None:
    """Keeps executables. Crash: the file is there as a whole or not at all. What cannot be written is not kept."""
    path = _path(identity)
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
            file.write(hashlib.sha256(blob).digest() + blob)
        os.replace(file.name, path)
    except OSError as exception:
        print(f"leto: compiled programs are not kept in {path.parent}: {exception}", file=sys.stderr, flush=True)


def _path(identity: Identity) -> Path | None:
    directory = jax.config.jax_compilation_cache_dir
    if not directory:
        return None
    key = hashlib.sha256(identity.to_bytes() + _processor().encode()).hexdigest()
    return Path(directory) / f"leto-{key}.bin"


def _processor() -> str:
    """What XLA compiles for: the features of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")

"""What the state manager keeps: named memory behind descriptors, and who may write it. No sockets, no waiting."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Any

from leto_jax.errors import JobError, UsageError
from leto_jax.manager.fence import ProcessId

ARENA = "arena"
BLOB = "blob"
MAX_ENTRIES = 4096
_GPU = re.compile(r"gpu(\d{1,3})")
_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LISTED_NAMES = 20


def check_name(name: str) -> str:
    """The name itself, if memory can be called that; `UsageError` otherwise."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"a name of retained memory is 1 to 128 of the characters A-Z a-z 0-9 . _ : / -, found {name!r}")
    return name


def gpu_kind(ordinal: int) -> str:
    """Kind of an arena in the memory of GPU `ordinal`, as CUDA counts them in this environment."""
    return f"gpu{ordinal}"


def gpu_of(kind: str) -> int | None:
    """The GPU of a kind of arena; None for host memory and for blobs."""
    found = _GPU.fullmatch(kind)
    return int(found[1]) if found else None


def check_kind(kind: str) -> str:
    """The kind itself; `UsageError` if it is none."""
    if kind not in (ARENA, BLOB) and gpu_of(kind) is None:
        raise UsageError(f"expected a kind out of {ARENA}, {BLOB}, gpu0, gpu1, ..., found {kind!r}")
    return kind


def check_sha256(digest: str) -> str:
    """The digest itself, if it is a SHA-256 in lower-case hexadecimal; `UsageError` otherwise."""
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        raise UsageError(f"a digest is 64 lower-case hexadecimal digits (SHA-256), found {digest!r}")
    return digest


@dataclasses.dataclass(frozen=True)
class Entry:
    """One piece of retained memory. The store owns `fd`.

    holder: the one process that may write; None if nobody does. orphaned_by: the holder that died last, until the next lease.
    """

    name: str
    kind: str
    nbytes: int
    fd: int
    sha256: str | None = None
    holder: ProcessId | None = None
    orphaned_by: int | None = None

    @property
    def is_arena(self) -> bool:
        """Whether it has writers; blobs are sealed."""
        return self.kind != BLOB

    def describe(self) -> dict[str, Any]:
        """The entry as a JSON object, without its descriptor."""
        described: dict[str, Any] = {"name": self.name, "kind": self.kind, "bytes": self.nbytes}
        if self.sha256 is not None:
            described["sha256"] = self.sha256
        if self.holder is not None:
            described["holder"] = {"pid": self.holder.pid, "start": self.holder.start}
        if self.orphaned_by is not None:
            described["orphaned_by"] = self.orphaned_by
        return described


class Store:
    """Owns the entries and their descriptors; nothing leaves it but by `close` and `discard` (a blob by its replacement).

    *Crash*: every descriptor closes with the process. The memory lives on where an agent or a trainer holds a duplicate or a mapping.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(sorted(self._entries.values(), key=lambda entry: entry.name))

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def get(self, name: str, kind: str | None = None) -> Entry:
        """The entry; `JobError` with the names that exist if there is none, `UsageError` if it is of another kind."""
        entry = self._entries.get(check_name(name))
        if entry is None:
            names = sorted(self._entries)
            listed = ", ".join(names[:_LISTED_NAMES]) + (", ..." if len(names) > _LISTED_NAMES else "")
            raise JobError(f"nothing is kept under the name {name!r}; there is: {listed or 'nothing'}")
        if kind is not None and entry.kind != kind:
            raise UsageError(f"{name!r} is kept as {entry.kind}, expected {kind}")
        return entry

    def get_arena(self, name: str) -> Entry:
        """`get` for an arena of whatever memory."""
        entry = self.get(name)
        return entry if entry.is_arena else self.get(name, ARENA)

    def check_room(self, name: str) -> None:
        """Refuses a new name when the store is full; a name that exists takes no room."""
        if name not in self._entries and len(self._entries) >= MAX_ENTRIES:
            raise UsageError(f"at most {MAX_ENTRIES} pieces of memory are kept, refused {name!r}: put several things into one blob")

    def check_blob_place(self, name: str) -> None:
        """Refuses a name that cannot become, or be replaced by, a blob."""
        self.check_room(name)
        if name in self._entries:
            self.get(name, BLOB)

    def put(self, entry: Entry) -> None:
        """Takes the entry and its descriptor in; closes the descriptor that had the name before (only blobs are replaced)."""
        before = self._entries.get(entry.name)
        self._entries[entry.name] = entry
        if before is not None and before.fd != entry.fd:
            os.close(before.fd)

    def replace(self, name: str, by: str) -> Entry:
        """The arena `by` takes the name and the lease of `name`, whose descriptor is closed. Returns the entry as it is now.

        Raises UsageError if they are not of one kind and size.
        """
        old, new = self.get_arena(name), self.get_arena(by)
        if (old.kind, old.nbytes) != (new.kind, new.nbytes) or name == by:
            raise UsageError(
                f"{name!r} is {old.kind} of {old.nbytes} bytes, {by!r} is {new.kind} of {new.nbytes}: expected two arenas of one kind and size"
            )
        del self._entries[by]
        self._entries[name] = dataclasses.replace(new, name=name, holder=old.holder, orphaned_by=old.orphaned_by)
        os.close(old.fd)
        return self._entries[name]

    def discard(self, name: str) -> None:
        """Gives one arena up. The caller has checked that nobody writes to it."""
        os.close(self.get_arena(name).fd)
        del self._entries[name]

    def lease(self, name: str, holder: ProcessId) -> Entry:
        """Makes `holder` the one writer of an arena; returns the entry as it was. The caller has checked that no other holder lives."""
        entry = self.get_arena(name)
        self._entries[name] = dataclasses.replace(entry, holder=holder, orphaned_by=None)
        return entry

    def orphan(self, holder: ProcessId) -> list[str]:
        """The holder is dead: its arenas have no writer and keep their content. Returns their names."""
        names = [entry.name for entry in self if entry.holder == holder]
        for name in names:
            self._entries[name] = dataclasses.replace(self._entries[name], holder=None, orphaned_by=holder.pid)
        return names

    def close(self) -> None:
        """Gives all memory up, as far as this process is concerned."""
        for entry in self._entries.values():
            os.close(entry.fd)
        self._entries.clear()

"""The tier in host memory: whole copies of the state in memory that the state manager owns, two generations in turn (Gemini, SOSP '23).

    0      record: step, bytes and CRC-32 of the header. Stored last; void while the copy is written
    64     header, JSON: step, position, leaves, their CRC-32 each
    DATA   the leaves, each at a multiple of 64 bytes

A copy is complete or absent: its generation is void from the first byte that is overwritten until its record is stored. The other generation
stays as it is meanwhile. What a rank keeps is its own shards; the same two generations may lie with peer ranks, too, where they go when the own
copy is complete.
"""

from __future__ import annotations

import base64
import functools
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from leto_jax import errors
from leto_jax.arena.memory import Arena
from leto_jax.checkpoint.frozen import Form, Frozen
from leto_jax.faults import Point
from leto_jax.layout import round_up
from leto_jax.records import BYTES, Kind, Record

GENERATIONS = (0, 1)
POSITION_BYTES = 1 << 17
FORMAT = 1


def names(rank: int, peer: int | None = None) -> list[str]:
    """Names under which the state manager keeps the generations of a rank, its own or those with a peer."""
    return [f"copy.{rank}.{generation}" if peer is None else f"copy.{rank}.at{peer}.{generation}" for generation in GENERATIONS]


def peers(rank: int, ranks: int, copies: int) -> list[int]:
    """The ranks that keep the other `copies - 1` copies of a rank: those after it, round."""
    return [(rank + n) % ranks for n in range(1, min(copies, ranks))]


def nbytes(form: Form) -> int:
    """Size of one generation."""
    return _offsets(form)[-1]


class HostMemory:
    """Arenas of `nbytes(form)` bytes, one for each generation. One process writes: whoever has the lease.

    peers: the same number of arenas at each peer, by rank. epoch: kept in the record of each copy.
    """

    def __init__(self, form: Form, arenas: Sequence[Arena], peers: Mapping[int, Sequence[Arena]] | None = None, epoch: int = 0):
        self._form, self._arenas, self._peers, self._epoch, self._offsets = form, arenas, peers or {}, epoch, _offsets(form)

    def copies(self) -> list[tuple[int, str, Callable[[], Frozen]]]:
        """(step, where it lies, what reads and checks it) of the complete copies, newest first, of equal ones the own first.

        What reads one raises CheckpointError where it is not what was stored, LayoutError if it is of another model.
        """
        places = [("host memory", self._arenas), *((f"host memory of rank {peer}", arenas) for peer, arenas in self._peers.items())]
        found = [
            (record.step, where, functools.partial(self._restore, arena))
            for where, arenas in places
            for arena in arenas
            if (record := _record(arena)) is not None
        ]
        return sorted(found, key=lambda item: -item[0])

    def versions(self) -> list[int]:
        """Steps of the complete copies, newest first. Whether their bytes are good shows when one is restored."""
        return sorted({step for step, _, _ in self.copies()}, reverse=True)

    def begin(self, step: int, leaves: Callable[[str], Iterable[np.ndarray]], position: bytes) -> Callable[[], None]:
        """Copies the leaves over one generation, never over the newest but of the same step.

        Returns what is left to do, beside the training: checksums, header, record; then the same at each peer.

        Crash: this generation is void, the other one is not.
        Cost: one copy of the state, blocking.
        """
        held = [None if (record := _record(arena)) is None else record.step for arena in self._arenas]
        # A void one; else one of this very step, which was trained again; else the older one.
        number = min(range(len(held)), key=lambda n: (held[n] is not None, held[n] != step, held[n] or 0))
        arena = self._arenas[number]
        arena.store_record(Point.COPY_RECORD, 0, Record(Kind.COPY, index=number))
        places = iter(self._offsets)
        for name, specs in self._form.specs.items():
            for leaf, _ in zip(leaves(name), specs, strict=True):
                arena.store(Point.COPY_DATA, next(places), np.ascontiguousarray(leaf))

        def finish() -> None:
            header = {
                "format": FORMAT,
                "step": step,
                "position": base64.b64encode(position).decode(),
                "leaves": self._form.describe(),
                "crc32": [zlib.crc32(data) for data in self._data(arena)],
            }
            text = np.frombuffer(json.dumps(header).encode(), np.uint8)
            if BYTES + text.size > self._offsets[0]:
                raise errors.CheckpointError(
                    f"the data position of step {step} takes {len(position)} bytes, expected at most {POSITION_BYTES // 2}"
                )
            sealed = Record(Kind.COPY, self._epoch, step, number, body=(1, text.size, zlib.crc32(text)))
            arena.store(Point.COPY_HEADER, BYTES, text)
            arena.store_record(Point.COPY_RECORD, 0, sealed)
            for its in self._peers.values():
                its[number].store_record(Point.COPY_RECORD, 0, Record(Kind.COPY, index=number))
                for offset, data in zip(self._offsets, self._data(arena), strict=False):
                    its[number].store(Point.COPY_DATA, offset, data)
                its[number].store(Point.COPY_HEADER, BYTES, text)
                its[number].store_record(Point.COPY_RECORD, 0, sealed)

        return finish

    def restore(self, step: int) -> Frozen:
        """The first copy of `step`. Raises as what `copies` gives does."""
        return next(load for number, _, load in self.copies() if number == step)()

    def look(self, step: int) -> Frozen | None:
        """The own copy of `step`, if it was made in this epoch, over the arena's memory: nothing may be copied there meanwhile. Raises as above."""
        for arena in self._arenas:
            record = _record(arena)
            if record is not None and (record.step, record.epoch) == (step, self._epoch):
                return self._restore(arena, own=False)
        return None

    def _restore(self, arena: Arena, own: bool = True) -> Frozen:
        record = _record(arena)
        if record is None:
            raise errors.CheckpointError("it is being overwritten")
        text = arena.view(BYTES, min(record.body[1], self._offsets[0] - BYTES)).tobytes()
        if zlib.crc32(text) != record.body[2]:
            raise errors.CheckpointError("its header does not have its checksum")
        header = json.loads(text)
        if header["format"] != FORMAT:
            raise errors.CheckpointError(f"expected format {FORMAT}, found {header['format']!r}; use the version of leto_jax that wrote it")
        self._form.require(header["leaves"], f"the copy of step {record.step} in host memory")
        data = list(self._data(arena))
        for what, stored, wanted in zip(header["leaves"], data, header["crc32"], strict=True):
            if zlib.crc32(stored) != wanted:
                raise errors.CheckpointError(f"{what} does not have its checksum")
        leaves, rest = {}, iter(data)
        for name, specs in self._form.specs.items():
            views = [next(rest).view(jnp.dtype(spec.dtype)).reshape(spec.shape) for spec in specs]
            leaves[name] = [view.copy() for view in views] if own else views
        return Frozen(record.step, leaves, (base64.b64decode(header["position"], validate=True),))

    def _data(self, arena: Arena) -> Iterable[np.ndarray]:
        """The bytes of each leaf."""
        specs = itertools.chain.from_iterable(self._form.specs.values())
        return (arena.view(offset, spec.nbytes) for offset, spec in zip(self._offsets[:-1], specs, strict=True))


def _record(arena: Arena) -> Record | None:
    """What says that a generation is complete, None while it is not."""
    record = arena.record(0, Kind.COPY)
    return record if record is not None and record.body[0] == 1 else None


def _offsets(form: Form) -> list[int]:
    """Where each leaf lies, and the end of the last one."""
    described = form.describe()
    first = round_up(BYTES + len(json.dumps(described)) + 12 * len(described) + 256 + POSITION_BYTES, 4096)
    sizes = (round_up(spec.nbytes, 64) for group in form.specs.values() for spec in group)
    return list(itertools.accumulate(sizes, initial=first))

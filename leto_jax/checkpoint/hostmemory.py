"""The tier in host memory: whole copies of the state in memory that the state manager owns, two generations in turn (Gemini, SOSP '23).

    0      record: step, bytes and CRC-32 of the header. Stored last; void while the copy is written
    64     header, JSON: step, position, leaves, their CRC-32 each
    DATA   the leaves, each at a multiple of 64 bytes

A copy is complete or absent: its generation is void from the first byte that is overwritten until its record is stored. The other generation
stays as it is meanwhile.
"""

from __future__ import annotations

import base64
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Sequence

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


def names(rank: int) -> list[str]:
    """Names under which the state manager keeps the generations of a rank."""
    return [f"copy.{rank}.{generation}" for generation in GENERATIONS]


def nbytes(form: Form) -> int:
    """Size of one generation."""
    return _offsets(form)[-1]


class HostMemory:
    """Two arenas of `nbytes(form)` bytes. One process writes: whoever has the lease."""

    def __init__(self, form: Form, arenas: Sequence[Arena]):
        self._form, self._arenas, self._offsets = form, arenas, _offsets(form)

    def versions(self) -> list[int]:
        """Steps of the complete copies, newest first. Whether their bytes are good shows when one is restored."""
        return sorted({record.step for record in map(_record, self._arenas) if record is not None}, reverse=True)

    def begin(self, step: int, leaves: Callable[[str], Iterable[np.ndarray]], position: bytes) -> Callable[[], None]:
        """Copies the leaves over one generation, never over the newest but of the same step.

        Returns what is left to do, beside the training: checksums, header, record.

        Crash: this generation is void, the other one is not.
        Cost: one copy of the state, blocking.
        """
        held = [None if (record := _record(arena)) is None else record.step for arena in self._arenas]
        # A void one; else one of this very step, which was trained again; else the older one.
        number = min(GENERATIONS, key=lambda n: (held[n] is not None, held[n] != step, held[n] or 0))
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
            arena.store(Point.COPY_HEADER, BYTES, text)
            arena.store_record(Point.COPY_RECORD, 0, Record(Kind.COPY, step=step, index=number, body=(1, text.size, zlib.crc32(text))))

        return finish

    def restore(self, step: int) -> Frozen:
        """The copy of `step`, checked. Raises CheckpointError where it is not what was stored, LayoutError if it is of another model."""
        arena, record = next((arena, found) for arena in self._arenas if (found := _record(arena)) is not None and found.step == step)
        text = arena.view(BYTES, min(record.body[1], self._offsets[0] - BYTES)).tobytes()
        if zlib.crc32(text) != record.body[2]:
            raise errors.CheckpointError("its header does not have its checksum")
        header = json.loads(text)
        if header["format"] != FORMAT:
            raise errors.CheckpointError(f"expected format {FORMAT}, found {header['format']!r}; use the version of leto_jax that wrote it")
        self._form.require(header["leaves"], f"the copy of step {step} in host memory")
        data = list(self._data(arena))
        for what, stored, wanted in zip(header["leaves"], data, header["crc32"], strict=True):
            if zlib.crc32(stored) != wanted:
                raise errors.CheckpointError(f"{what} does not have its checksum")
        leaves, rest = {}, iter(data)
        for name, specs in self._form.specs.items():
            leaves[name] = [next(rest).view(jnp.dtype(spec.dtype)).reshape(spec.shape).copy() for spec in specs]
        return Frozen(step, leaves, base64.b64decode(header["position"], validate=True))

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

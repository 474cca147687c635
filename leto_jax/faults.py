"""Named crash points: where a process may be stopped on purpose.

Every store to retained memory goes through `arena.Arena.store`, which asks here before, inside and after it; the training step also says
which phase it has reached. Nothing happens unless a test or `leto inject` has armed a hook, and then the hook decides: raise, kill, stop.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator


class Point(enum.StrEnum):
    """Every kind of store to retained memory. The crash matrix proves that each one fires and that a crash at each one is survived."""

    # filling a fresh arena
    LIFE_FILLING = enum.auto()
    FILL_LANES = enum.auto()
    FILL_SCALARS = enum.auto()
    FILL_EXTRAS = enum.auto()
    LIFE_LIVE = enum.auto()
    # one step
    RING_PAYLOAD = enum.auto()
    RING_RECORD = enum.auto()
    GRADIENTS_CLEAR = enum.auto()
    GRADIENTS = enum.auto()
    EXTRAS = enum.auto()
    METRICS = enum.auto()
    GRADIENT_SUMS = enum.auto()
    GRADIENTS_STORED = enum.auto()
    SCALARS = enum.auto()
    INTENT = enum.auto()
    PIECE = enum.auto()
    STAGING = enum.auto()
    MARK = enum.auto()
    COMMIT = enum.auto()
    # parity on its way to the host arena
    DRAIN_FLUX = enum.auto()
    DRAIN_PARITY = enum.auto()
    DRAIN_VERSION = enum.auto()
    # and to the peer
    PEER_FLUX = enum.auto()
    PEER_PARITY = enum.auto()
    PEER_VERSION = enum.auto()
    # takeover
    EPOCH = enum.auto()
    PROMOTION = enum.auto()
    LOG_REPAIR = enum.auto()
    REGION_COPY = enum.auto()
    INTENT_COPY = enum.auto()
    REVOKE = enum.auto()
    LOST = enum.auto()
    REPAIR_PAGE = enum.auto()
    LOST_CLEAR = enum.auto()
    # a whole copy of the state in host memory
    COPY_DATA = enum.auto()
    COPY_HEADER = enum.auto()
    COPY_RECORD = enum.auto()


class Moment(enum.StrEnum):
    """Where at a store: nothing written yet, a part of the bytes written, all written."""

    BEFORE = enum.auto()
    TORN = enum.auto()
    AFTER = enum.auto()


class Phase(enum.StrEnum):
    """Where a rank is. The words of `leto inject --phase`, of `leto status` and of the journal."""

    INIT = enum.auto()
    BODY = enum.auto()
    COMPUTE = enum.auto()
    DECIDE = enum.auto()
    UPDATE = enum.auto()
    COMMIT = enum.auto()
    DRAIN = enum.auto()
    TAKEOVER = enum.auto()
    SECTION = enum.auto()
    DONE = enum.auto()


StoreHook = Callable[[Point, Moment, int], bool]
PhaseHook = Callable[[Phase, int, int], None]

# Process-wide by necessity: a crash stops a process, not an object. None means not armed, which costs one comparison.
_store_hook: StoreHook | None = None
_phase_hook: PhaseHook | None = None


def store_hook() -> StoreHook | None:
    return _store_hook


def reach(phase: Phase, step: int, chunk: int = -1) -> None:
    """Says that `step` has come to `phase` (for UPDATE: that `chunk` chunks carry their mark)."""
    if _phase_hook is not None:
        _phase_hook(phase, step, chunk)


@contextlib.contextmanager
def armed(on_store: StoreHook | None = None, on_phase: PhaseHook | None = None) -> Iterator[None]:
    """Arms hooks for a block. `on_store(point, moment, nbytes)` may raise or kill; at Moment.TORN it returns True to have a part stored first."""
    global _store_hook, _phase_hook
    before = _store_hook, _phase_hook
    _store_hook, _phase_hook = on_store, on_phase
    try:
        yield
    finally:
        _store_hook, _phase_hook = before

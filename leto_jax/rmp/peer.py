"""The second tier: H2 parity rows of every piece in memory of a peer, two versions of each, sent behind the commit.

A rank whose own parity is lost, or that has lost more pages of a group than its own rows rebuild, takes what the peer has, if it is of the
data's version. The memory belongs to the state manager of the node that the peer runs on; with one node that is the rank's own, which is
then no other failure domain than the host arena's.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from leto_jax import errors
from leto_jax.arena.memory import HostArena
from leto_jax.faults import Point
from leto_jax.layout import Layout, Piece
from leto_jax.rmp import blocks

WAIT_SECS = 60.0


class Parcel(NamedTuple):
    """What is sent of one piece. version: of its data. rows: uint8[H2, row_bytes]; checksums: uint32[pages, 2]; both copies."""

    piece: Piece
    version: int
    rows: np.ndarray
    checksums: np.ndarray


class PeerTier:
    """The blocks that a peer keeps for one rank. Version v of a piece lies in the second of its two places if v is odd."""

    def __init__(self, arena: HostArena, layout: Layout):
        self._arena, self._layout = arena, layout

    def store(self, parcel: Parcel) -> None:
        """Crash: the version before the last is gone, the last one is whole.
        Cost: H2/D of the piece, blocking."""
        piece, form, offset = parcel.piece, parcel.piece.peered, self._place(parcel.piece, parcel.version)
        self._arena.store_record(Point.PEER_FLUX, offset + form.record_offset, blocks.void_record(piece))
        for at, part in ((0, parcel.rows), (form.sums_offset, parcel.checksums)):
            self._arena.write_through(Point.PEER_PARITY, offset + at, memoryview(np.ascontiguousarray(part).reshape(-1).view(np.uint8)))
        sealed = blocks.seal_record(piece, parcel.version, parcel.checksums)
        self._arena.store_record(Point.PEER_VERSION, offset + form.record_offset, sealed)

    def has(self, piece: Piece, version: int) -> bool:
        record = blocks.valid(self._arena, self._place(piece, version), piece.peered, piece)
        return record is not None and record.step == version

    def parity(self, piece: Piece, version: int) -> np.ndarray:
        """uint8[H2, row_bytes] of a version that it has."""
        return blocks.parity(self._arena, self._place(piece, version), piece.peered)

    def checksums(self, piece: Piece, version: int) -> np.ndarray:
        """uint32[pages, 2] of a version that it has."""
        return blocks.checksums(self._arena, self._place(piece, version), piece.peered)

    def _place(self, piece: Piece, version: int) -> int:
        return piece.peer + version % 2 * piece.peered.nbytes


class Sender:
    """Sends parcels to a `PeerTier` in a thread; newer ones take the place of those of their pieces that have not begun to go.

    A peer that does not take them is behind from then on, and that is said once: training does without it. stale_ns: for how long it was behind
    the data, in all. wait: send before `offer` returns (`--wait-for-parity`), and raise what goes wrong.
    """

    def __init__(self, tier: PeerTier, wait: bool = False):
        self._tier, self._wait = tier, wait
        self._changed = threading.Condition()
        self._next: dict[int, Parcel] = {}  # by piece
        self._busy = self._closed = False
        self._behind_since = self._stale_ns = 0
        self.problem = ""
        self._thread: threading.Thread | None = None

    @property
    def stale_ns(self) -> int:
        with self._changed:
            return self._stale_ns + (time.monotonic_ns() - self._behind_since if self._behind_since else 0)

    def offer(self, parcels: Sequence[Parcel], committed_ns: int) -> None:
        """The peer shall have these; since `committed_ns` it is behind."""
        if self._wait:
            for parcel in parcels:
                self._tier.store(parcel)
            self._stale_ns += time.monotonic_ns() - committed_ns
            return
        with self._changed:
            self._next.update({parcel.piece.index: parcel for parcel in parcels})
            self._behind_since = self._behind_since or committed_ns
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="leto-peer", daemon=True)
                self._thread.start()

    def wait(self, secs: float = WAIT_SECS) -> None:
        """Until nothing is on its way. Raises DeadlineError."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._busy and not self._next, secs):
                raise errors.DeadlineError(f"parity: the peer did not take it within {secs:.0f} s")

    def close(self) -> None:
        """Sends what there is, and ends the thread. Raises DeadlineError."""
        self.wait()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next or self._closed)
                if self._closed:
                    return
                parcels, self._next, self._busy = list(self._next.values()), {}, True
            problem = self._send(parcels)
            del parcels
            with self._changed:
                self._busy = False
                if problem and not self.problem:
                    print(f"leto: the peer does not take parity: {problem}; training goes on without it", file=sys.stderr, flush=True)
                self.problem = problem
                if not self._next and not problem:
                    self._stale_ns += time.monotonic_ns() - self._behind_since
                    self._behind_since = 0
                self._changed.notify_all()

    def _send(self, parcels: Sequence[Parcel]) -> str:
        """What went wrong, '' if nothing."""
        try:
            for parcel in parcels:
                self._tier.store(parcel)
        except Exception as exception:
            return repr(exception)
        return ""

"""Spare nodes: a pool that failures draw from and repairs refill."""

import heapq


class SparePool:
    """Nodes standing by. `count` None means that a spare is always there."""

    def __init__(self, count: int | None):
        self._free = count
        self._back_at: list[int] = []

    def replace(self, nodes: int, now: int, repair_ns: int) -> int:
        """Send `nodes` nodes to repair at `now` and take as many spares; returns when the last of these is there.

        First come, first served: a spare that is awaited belongs to the job at once, whatever fails meanwhile. The repaired nodes
        themselves come back, so the wait is bounded.
        """
        if self._free is None:
            return now
        for _ in range(nodes):
            heapq.heappush(self._back_at, now + repair_ns)
        while self._back_at and self._back_at[0] <= now:
            heapq.heappop(self._back_at)
            self._free += 1
        ready = now
        for _ in range(nodes):
            if self._free:
                self._free -= 1
            else:
                ready = max(ready, heapq.heappop(self._back_at))
        return ready

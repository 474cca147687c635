"""What is kept aside for ranks that cannot go on where they are: other GPUs, and on the CPU other memory."""

from __future__ import annotations

from collections.abc import Collection


class Spares:
    """Who drives which GPU, and what is left. count: as the user said. gpus: of each rank, as CUDA numbers what it shows; a GPU that was left
    is not used again."""

    def __init__(self, count: int, ranks: int):
        self.count, self.left = count, count
        self.gpus = list(range(ranks))
        self._given_up: set[int] = set()

    def can_move(self, bad: Collection[int], visible: int) -> str:
        """'' if everybody can go on, else why not. bad: GPUs that cannot. visible: how many GPUs there are; 0 on the CPU."""
        if not self.count:
            return "there is none; start with --spares 1 and --checkpoint-every or --copy-every"
        if not self.left:
            return "none is left"
        wanted, free = len(self._hurt(bad)), self._free(bad, visible)
        if wanted > self.left:
            return f"{wanted} GPUs cannot go on, {self.left} spares are left"
        if wanted > len(free):
            return f"expected {wanted} more GPUs for the job, found {len(free)} (CUDA_VISIBLE_DEVICES)"
        return ""

    def move(self, bad: Collection[int], visible: int) -> list[int]:
        """Gives the ranks on bad GPUs others, after `can_move` said that it can; who stays, or is on the CPU, takes other memory. Returns the
        ranks that change their GPU."""
        ranks, free = self._hurt(bad), self._free(bad, visible)
        self.left -= max(1, len(ranks))
        self._given_up |= set(bad)
        for rank, gpu in zip(ranks, free, strict=False):
            self.gpus[rank] = gpu
        return ranks

    def _hurt(self, bad: Collection[int]) -> list[int]:
        return [rank for rank, gpu in enumerate(self.gpus) if gpu in bad]

    def _free(self, bad: Collection[int], visible: int) -> list[int]:
        return [gpu for gpu in range(visible) if gpu not in {*self.gpus, *self._given_up, *bad}]

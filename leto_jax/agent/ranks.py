"""What the agent keeps of every rank: control words and metadata. Epochs, promotions, and what is done to memory between two generations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from leto_jax import errors
from leto_jax import layout as layouts
from leto_jax.agent.generation import Generation
from leto_jax.agent.processes import Child
from leto_jax.arena import control as controls
from leto_jax.arena import damage, metadata
from leto_jax.arena.control import Control, Word
from leto_jax.arena.memory import HostArena
from leto_jax.arena.metadata import HostMetadata, LostRange
from leto_jax.arena.rank import arena_names
from leto_jax.faults import Phase, Point
from leto_jax.manager.client import Descriptor, ManagerClient
from leto_jax.manager.store import gpu_of
from leto_jax.records import Kind, Record
from leto_jax.rmu.recovery import Life
from leto_jax.shadow.inject import FailureKind
from leto_jax.shadow.member import IDENTITY, control_name


class Ranks:
    """Control words and metadata of all ranks of a job, reserved if the job has none yet.

    Raises UsageError if it holds the state of another number of ranks.
    """

    def __init__(self, manager: ManagerClient, count: int):
        self.count = count
        kept = {item.name for item in manager.list()}
        before = next(number for number in range(len(kept) + 1) if arena_names(number)[2] not in kept)
        self.controls: list[Control] = []
        self.metadata: list[HostMetadata] = []
        for rank in range(max(count, before)):
            with manager.reserve(arena_names(rank)[2], metadata.BYTES) as item:
                self.metadata.append(HostMetadata(HostArena(item.fd, metadata.BYTES, item.name)))
            with manager.reserve(control_name(rank), controls.BYTES) as item:
                self.controls.append(Control(item.fd))
        filled = [rank for rank, facts in enumerate(self.metadata) if facts.latest(Kind.LIFE) is not None]
        if filled and not filled[-1] < count <= before:
            held = filled[-1] + 1
            raise errors.UsageError(
                f"--nproc-per-node {count}: expected {held}, since the job holds the state of {held} rank{'s' * (held > 1)}; "
                f"run it with --nproc-per-node {held}, or free the state with `leto stop`"
            )
        del self.metadata[count:], self.controls[count:]

    # What they say ----------------------------------------------------------------------------------------------------------------

    @property
    def commit(self) -> int:
        """The job's step: what every rank has committed."""
        return min(control[Word.COMMIT] for control in self.controls)

    @property
    def steps(self) -> int:
        return max(control[Word.STEPS] for control in self.controls)

    @property
    def incarnation(self) -> int:
        """The highest that has trained."""
        return max(control[Word.INCARNATION] for control in self.controls)

    @property
    def trained(self) -> bool:
        """Whether these trainers have committed a step on every rank."""
        return all(control[Word.STEPS_DONE] > 0 for control in self.controls)

    @property
    def filled(self) -> bool:
        """Whether a rank was filled, or begun to."""
        return any(rank.latest(Kind.LIFE) is not None for rank in self.metadata)

    @property
    def live(self) -> bool:
        """Whether every rank holds a whole state."""
        found = [rank.latest(Kind.LIFE) for rank in self.metadata]
        return all(life is not None and life.body[0] == Life.LIVE for life in found)

    @property
    def epoch(self) -> int:
        return max(rank.epoch for rank in self.metadata)

    def describe(self, generation: Generation, child: Child) -> dict[str, Any]:
        """One process for `leto status`."""
        control, trainer = self.controls[child.rank], generation.role == "trainer"
        try:
            phase = control.phase.value if trainer else ("ready" if child.ready else f"loading: {child.stage}")
        except errors.RecordError:
            phase = "unknown"
        return {
            "rank": child.rank,
            "pid": child.pid,
            "role": generation.role,
            "phase": phase,
            "level": None if trainer else child.shown_level,
            "step": control[Word.COMMIT] if trainer else None,
        }

    # What the agent says ----------------------------------------------------------------------------------------------------------

    def begin(self, phase: Phase) -> None:
        """Clears what the last trainers left in words that are looked at before the next ones write them."""
        for control in self.controls:
            for word in (Word.ARMED_SINCE_NS, Word.STEPS_DONE, Word.PID):
                control[word] = 0
            control.enter(phase)

    def raise_epoch(self) -> int:
        """One new epoch for all ranks, before anybody may map anything."""
        return self.metadata[0].raise_epoch(*self.metadata[1:])

    def promote(self, incarnation: int) -> int:
        """Writes down that the processes of `incarnation` are the trainers from here on. Returns their epoch.

        Crash: the epoch may be raised without a promotion, and on some ranks only; the next agent raises it again.
        """
        epoch = self.raise_epoch()
        for rank, control in zip(self.metadata, self.controls, strict=True):
            rank.write(Point.PROMOTION, Record(Kind.PROMOTION, epoch, control[Word.COMMIT], incarnation))
        self.begin(Phase.TAKEOVER)
        return epoch

    def empty(self, manager: ManagerClient, kept: Mapping[str, Descriptor]) -> None:
        """Gives the memory of the device up: whoever comes next fills other memory.

        Crash: of the agent in between, the retained state is gone or empty, and what attaches goes on from the newest copy too.
        """
        for number, rank in enumerate(self.metadata):
            rank.write(Point.LIFE_FILLING, Record(Kind.LIFE, rank.epoch, 0, body=(Life.EMPTY,)))
            rank.clear_lost()
            device, host, _ = arena_names(number)
            for name in list(kept):
                if name in (device, host) or name.startswith(f"{device}."):
                    manager.discard(name)

    def damage(self, rank: int, kind: FailureKind, phase: Phase, seed: int, kept: Mapping[str, Descriptor]) -> tuple[int, int]:
        """Carries out an injected page loss or corruption: after the fence, before the attach. phase: in which the rank failed.

        Returns (offset, bytes) of what was spoiled, one page of parameters or optimizer state.
        """
        name = arena_names(rank)[0]
        layout = layouts.from_bytes(json.loads(kept[IDENTITY].read())["layout"].encode())
        # The piece that is updated last, where it lies now.
        step = self.controls[rank][Word.COMMIT] + (phase is Phase.COMMIT)
        piece = layout.pieces_of_chunk[layout.order(step + 1)[-1]][0]
        offset, page = layout.address(piece, step), piece.page_bytes
        if kind is FailureKind.PAGE_LOSS:
            self.metadata[rank].add_lost(LostRange("device", offset, page))
        if name in kept:
            arena = HostArena(kept[name].fd, kept[name].nbytes, name)
            arena.damage(offset, np.random.default_rng(seed).integers(0, 256, page, np.uint8))
            arena.close()
        else:
            segment, begin = damage.segment_of(name, offset)
            found = kept[segment]
            damage.damage_gpu(gpu_of(found.kind) or 0, found.fd, found.nbytes, begin, page, seed)
        return offset, page

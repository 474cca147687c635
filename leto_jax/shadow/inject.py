"""Failures on request: what `leto inject` asks of a trainer, carried out by the trainer itself at a named place.

The request lies in the control words; looking at it costs one read per phase. Only page loss and corruption are done by the agent, after
the fence and before the attach, and what makes a device inoperable is its word alone.
"""

from __future__ import annotations

import enum
import os
import signal
import time

from leto_jax.arena.control import PHASES, Control, Word
from leto_jax.faults import Phase


class FailureKind(enum.StrEnum):
    """Kinds of failure that can be injected."""

    SIGKILL = enum.auto()
    SIGSTOP = enum.auto()
    EXCEPTION = enum.auto()
    ILLEGAL_ADDRESS = enum.auto()
    TRAP = enum.auto()
    SPIN = enum.auto()
    OOM = enum.auto()
    PAGE_LOSS = enum.auto()
    PAGE_CORRUPTION = enum.auto()
    EXIT = enum.auto()
    INOPERABLE = enum.auto()


KINDS = tuple(FailureKind)
GPU_ONLY = (FailureKind.ILLEGAL_ADDRESS, FailureKind.TRAP)
ANY = -1


class InjectedFault(RuntimeError):
    """The exception of `--kind exception`. It stands for one of the script's, so it is none of ours."""


class Injector:
    """Looks for a request in the control words and carries it out when its phase, step and chunk are reached. gpu: of the trainer, if any."""

    def __init__(self, control: Control | None, chunks: int, gpu: int | None = None):
        self._gpu = gpu
        # Between two marks unless a chunk is named: before the first mark nothing of the update is in place yet. One chunk has no between.
        self._control, self._between = control, range(min(1, chunks - 1), chunks)
        self._fired = 0  # how often the request has that is not taken yet

    def check(self, phase: Phase, step: int, chunk: int) -> None:
        """Called at each phase of each step; does nothing unless there is a new request that names this place."""
        control = self._control
        if control is None:
            return
        sequence = control[Word.INJECT_SEQUENCE]
        if sequence == control[Word.INJECT_TAKEN]:
            return
        if PHASES.index(phase) != control[Word.INJECT_PHASE]:
            return
        if control[Word.INJECT_STEP] not in (ANY, step):
            return
        wanted = control[Word.INJECT_CHUNK]
        if phase is Phase.UPDATE and (chunk not in self._between if wanted == ANY else chunk != wanted):
            return
        self._fired, kind = self._fired + 1, KINDS[control[Word.INJECT_KIND]]
        if kind is not FailureKind.OOM or self._fired >= control[Word.INJECT_TIMES]:
            self._fired = 0
            control[Word.INJECT_TAKEN] = sequence
        control[Word.INJECT_FIRED_STEP] = step
        control[Word.INJECT_FIRED_NS] = time.monotonic_ns()
        fail(kind, step, self._gpu)


def fail(kind: FailureKind, step: int, gpu: int | None = None) -> None:
    """Fails, here and now. On a GPU an endless loop is an endless kernel."""
    if kind in (FailureKind.SIGKILL, FailureKind.PAGE_LOSS, FailureKind.PAGE_CORRUPTION, FailureKind.INOPERABLE):
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind is FailureKind.SIGSTOP:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind is FailureKind.EXIT:
        os._exit(17)
    elif gpu is not None and kind in (*GPU_ONLY, FailureKind.SPIN):
        from leto_jax.shadow import gpu_faults

        gpu_faults.run(kind.value, gpu)
    elif kind is FailureKind.SPIN:
        while True:
            pass
    elif kind is FailureKind.OOM:
        import jax.numpy as jnp

        jnp.zeros((1 << 50,), jnp.uint8).block_until_ready()  # XLA's own out-of-memory error
    else:
        raise InjectedFault(f"injected at step {step}")

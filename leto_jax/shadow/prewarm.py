"""Making a shadow ready: everything that a first step would do for the first time is done before, on memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from leto_jax import errors
from leto_jax.arena.host import private_arenas
from leto_jax.manager import limits
from leto_jax.rmu import rollforward
from leto_jax.rmu.programs import Job, structs
from leto_jax.rmu.retained import Retained
from leto_jax.rmu.transaction import Transaction


def blank_batch(job: Job) -> list[np.ndarray]:
    return [np.zeros(item.shape, item.dtype) for item in structs(job.layout.spec.batch)]


def rehearse(
    job: Job, run: Mapping[str, Callable], key: jax.Array, device: jax.Device, use: Sequence[Callable[[Retained, int], None]]
) -> str:
    """Fills scratch arenas, trains two steps on zeros, crashes between two marks, rolls forward; then calls each of `use` with the result.

    So all programs, both address sets and the takeover path have run once. Returns '' or why it was not done.
    Cost: memory of one state, freed at the end; a few steps of time.
    """
    try:
        limits.check(job.layout.device_bytes + job.layout.host_bytes, "rehearsing a takeover on scratch memory")
    except errors.MemoryBudgetError as exception:
        return str(exception)
    arenas = private_arenas(job.layout)
    try:
        retained = Retained(job, arenas.device, arenas.host, arenas.metadata, device)
        transaction = Transaction(retained, run, epoch=1, at=lambda *_: None)
        blank = lambda items: [np.zeros(item.shape, item.dtype) for item in items]
        transaction.fill(0, *(blank(items) for items in jax.eval_shape(job.programs["init"].function, *job.programs["init"].arguments)))
        batch, commit = blank_batch(job), 0
        try:
            for _ in range(2):
                transaction.step(commit + 1, batch, key)
                commit += 1
            transaction.compute(commit + 1, batch, key)
            transaction.decide(commit + 1)
        except errors.NonFiniteLossError:
            pass  # zeros may not suit the loss; the programs have run
        recovered = rollforward.recover(retained, Transaction(retained, run, epoch=2, at=lambda *_: None))
        for function in use:
            function(retained, recovered.commit or 0)
        return ""
    finally:
        arenas.close()

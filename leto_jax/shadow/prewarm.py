"""Making a shadow ready: everything that a first step would do for the first time is done before, on memory of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from leto_jax import errors
from leto_jax.arena import views
from leto_jax.arena.rank import Arenas, scratch_arenas
from leto_jax.distributed import ALONE, Ranks
from leto_jax.manager import limits
from leto_jax.records import Kind, Record
from leto_jax.rmu import rollforward
from leto_jax.rmu.device import transaction_type
from leto_jax.rmu.programs import Job, structs
from leto_jax.rmu.retained import Retained

MEET_SECS = 600.0  # ranks load their programs at their own pace


def blank_batch(job: Job) -> list[np.ndarray]:
    return [np.zeros(item.shape, item.dtype) for item in structs(job.layout.spec.batch)]


def _once(function: Callable) -> Callable:
    """What it returned the first time, every time."""
    results: list = []

    def call(*arguments):
        if not results:
            results.append(function(*arguments))
        return results[0]

    return call


def rehearse(
    job: Job,
    run: Mapping[str, Callable],
    key: jax.Array,
    device: jax.Device,
    use: Sequence[Callable[[Retained, int], None]],
    ranks: Ranks = ALONE,
    enter: Callable[[str], None] = lambda stage: None,
) -> str:
    """Fills scratch arenas, trains two steps on zeros, crashes before the third update, recovers (CPU); then calls each of `use` with the result.

    So all programs, both address sets and the takeover path have run once, and the ranks are connected. Returns '' or why it was not done: too
    little memory, for one, on any rank. enter: told what begins.
    Cost: on the CPU memory of one state, freed at the end, and one compute, whose result stands for the others; on a GPU memory of the
    gradients, and the time of three steps.
    """
    gpu = views.gpu_number(device)
    if gpu is None:
        run = {**run, "compute": _once(run["compute"])}
    nbytes = job.layout.host_bytes + job.layout.peer_bytes + (job.layout.device_bytes if gpu is None else 0)
    arenas, problem = None, ""
    try:
        enter("scratch memory")
        limits.check(nbytes, "rehearsing a takeover on scratch memory")
        arenas = scratch_arenas(job.layout, gpu)
    except errors.MemoryBudgetError as exception:
        problem = str(exception)
    enter("meet")
    try:
        if problem := ranks.agree("memory to rehearse", problem, MEET_SECS):
            return problem
        assert arenas is not None
        _rehearse(job, run, key, device, use, arenas, ranks.rank, enter)
        return ""
    except jax.errors.JaxRuntimeError as exception:
        if not errors.out_of_memory(exception) or ranks.count > 1:  # else the others would wait for what does not come
            raise
        return f"no memory to rehearse: {str(exception).splitlines()[0]}"
    finally:
        if arenas is not None:
            arenas.close()


def _rehearse(
    job: Job,
    run: Mapping[str, Callable],
    key: jax.Array,
    device: jax.Device,
    use: Sequence[Callable[[Retained, int], None]],
    arenas: Arenas,
    rank: int,
    enter: Callable[[str], None],
) -> None:
    enter("rehearse the fill")
    gpu = views.gpu_number(device)
    retained = Retained(job, arenas.device, arenas.host, arenas.metadata, device, arenas.peer)
    transaction = transaction_type(job)(retained, run, epoch=1, at=lambda *_: None, rank=rank)
    if gpu is not None:
        transaction.scrub_bytes = 0  # scratch memory is mapped over and over: no page of it is what it was
    transaction.fill(0, *transaction.init(key))
    batch, commit = blank_batch(job), 0
    # Zeros may not suit the loss. What a GPU's scratch memory holds may differ between ranks, and so may what they make of it.
    unfit = (errors.NonFiniteLossError,) if gpu is None else (errors.NonFiniteLossError, errors.UnrecoverableError)
    for _ in range(2):
        enter("rehearse compute")
        transaction.compute(commit + 1, batch, key)
        enter("rehearse decide")
        try:
            intent = transaction.decide(commit + 1)
        except unfit:
            intent = Record(Kind.INTENT, 1, commit + 1, body=(*retained.digest(commit + 1), len(job.layout.chunks)))
        commit += 1
        enter("rehearse the update")
        transaction.update(commit, intent)
        transaction.commit(commit, intent)
        transaction.drain(commit)
    enter("rehearse a takeover")
    transaction.compute(commit + 1, batch, key)
    with contextlib.suppress(*unfit):
        transaction.decide(commit + 1)
    transaction.close()
    again = transaction_type(job)(retained, run, epoch=2, at=lambda *_: None, rank=rank)
    if gpu is None:
        commit = rollforward.recover(retained, again).commit or 0
    else:
        retained.picture(again.gradient_sums)
        for piece in {piece.row_bytes: piece for piece in job.layout.pieces}.values():
            jax.block_until_ready(again.checksums(piece, commit))
    again.close()
    enter("rehearse the script")
    for function in use:
        function(retained, commit)

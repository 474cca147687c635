"""Carrying out the plan of `recovery.plan`: from whatever a crash left to a committed state with current parity."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import jax
import numpy as np

from leto_jax import errors
from leto_jax.arena.metadata import LostRange, touches
from leto_jax.faults import Phase, Point
from leto_jax.layout import Piece
from leto_jax.records import Kind, Record
from leto_jax.rmp import checksum
from leto_jax.rmp.groups import Block
from leto_jax.rmu import recovery
from leto_jax.rmu.recovery import Action, Picture, Plan
from leto_jax.rmu.retained import Retained
from leto_jax.rmu.transaction import Transaction

Stage = Callable[[str], AbstractContextManager]
Gather = Callable[[Picture], Sequence[Picture]]
Exchange = Callable[[bytes], Sequence[bytes]]


@dataclasses.dataclass(frozen=True)
class Recovered:
    """What a takeover found and did. commit: the step that the state is of now, None if the arenas must be filled.

    repaired_pages: pages rebuilt from parity.
    """

    plan: Plan
    commit: int | None
    repaired_pages: int = 0


def recover(
    retained: Retained,
    transaction: Transaction,
    stage: Stage = lambda name: contextlib.nullcontext(),
    gather: Gather = lambda mine: [mine],
    rank: int = 0,
    exchange: Exchange = lambda mine: [mine],
) -> Recovered:
    """Brings one rank's retained memory to a commit. Called by the process that holds the lease, before its first step.

    gather: this rank's picture in, the pictures of all ranks out, in rank order; `rank` is the place of this one. exchange: the same for bytes.
    Raises UnrecoverableError (with the reason; nothing was changed) where the pictures must not be guessed at, and
    TooManyErasuresError where more pages are lost than parity rebuilds.
    Crash: a picture that `recover` reads again; every part of it may be repeated.
    Cost: reads the state once to verify it; writes at most one update.
    """
    transaction.at(Phase.TAKEOVER, 0, -1)
    with stage("verify"):
        retained.device.renew([(item.offset, item.nbytes) for item in retained.metadata.lost() if item.arena == "device"])
        picture = retained.picture(transaction.gradient_sums)
        plan = recovery.plan(gather(picture), retained.layout.order)
        if plan.action is Action.FILL:
            return Recovered(plan, None)
        if plan.action is Action.REFUSE:
            raise errors.UnrecoverableError(
                f"{plan.reason}; the retained state is kept, restore from a checkpoint or stop the job with `leto stop`"
            )
        placed = plan.first[rank] if plan.action is Action.ROLL_FORWARD else 0
        retained.log.repair()
        if plan.loans:
            _borrow(retained, plan, rank, exchange)
        _void_lost_blocks(retained)
        repaired = _repair_pages(retained, transaction, plan.target, placed)
        # From here no byte that counts is lost. The list names addresses, and rolling forward moves other data to them.
        retained.metadata.clear_lost()
    with stage("roll_forward"):
        if plan.action is Action.REVOKE:
            retained.log.write(Point.REVOKE, Record(Kind.REVOKE, transaction.epoch, plan.target))
        commit = plan.target - 1
        if plan.action is Action.ROLL_FORWARD:
            assert plan.intent is not None
            if rank in plan.copy_to:
                retained.log.write(Point.INTENT_COPY, plan.intent)
            transaction.update(plan.target, plan.intent, placed)
            transaction.commit(plan.target, plan.intent)
            transaction.drain(plan.target)
            commit = plan.target
        else:
            transaction.drain_stale(commit)
        transaction.encode_all(commit)
        transaction.refill_peer(commit)
        if rank in plan.unknown_metrics:
            transaction.forget_metrics(commit)
    return Recovered(plan, commit, repaired)


def _borrow(retained: Retained, plan: Plan, rank: int, exchange: Exchange) -> None:
    """Ranks that have a copied region give it to those that lack it. All ranks take part."""
    given = {f"{loan.name} {loan.step}": retained.copied(loan.name, loan.step).hex() for loan in plan.loans if loan.donor == rank}
    brought = exchange(json.dumps(given).encode())
    for loan in plan.loans:
        if loan.rank == rank:
            data = bytes.fromhex(json.loads(brought[loan.donor])[f"{loan.name} {loan.step}"])
            retained.device.store(Point.REGION_COPY, retained.region(f"{loan.name}{loan.step % 2}"), np.array(bytearray(data)))


def _void_lost_blocks(retained: Retained) -> None:
    """Blocks with a lost page no longer count, in either tier; what the plan leads to is encoded again."""
    lost = retained.metadata.lost()
    for piece in retained.layout.pieces if lost else ():
        staged, host = retained.guard.ranges(piece)
        retained.guard.invalidate(piece, touches(lost, "device", *staged), touches(lost, "host", *host))


def _repair_pages(retained: Retained, transaction: Transaction, target: int, placed: int) -> int:
    """Rebuilds what is on the LOST list or fails its checksum, when `placed` chunks of update `target` are marked. Returns how many pages."""
    lost, guard, repaired = retained.metadata.lost(), retained.guard, 0
    marked = set(list(retained.layout.order(target))[:placed])
    checked: list[tuple[Piece, int, Block, set[int]]] = []
    sums = []
    for piece in retained.layout.pieces:
        commit = target if piece.chunk in marked else target - 1
        address, version = retained.layout.address(piece, commit), transaction.version(piece, commit)
        block = guard.block(piece, version)
        pages = {page for item in lost if item.arena == "device" for page in _pages(item, piece, address)}
        if block is not None:
            checked.append((piece, address, block, pages))
            sums.append(transaction.checksums(piece, commit))
        elif pages:
            raise errors.UnrecoverableError(
                f"piece {piece.index}: {len(pages)} pages are lost and no parity of step {version} exists; not repairable here, restore from a checkpoint"
            )  # else there is nothing to compare with: it is encoded again
    for (piece, address, block, pages), found in zip(checked, jax.device_get(sums), strict=True):
        pages.update(int(page) for page in checksum.locate(block.checksums, found))
        if pages:
            repaired += guard.repair(piece, address, sorted(pages), block)
    return repaired


def _pages(lost: LostRange, piece: Piece, address: int) -> range:
    begin, end = max(lost.offset, address), min(lost.offset + lost.nbytes, address + piece.nbytes)
    return range((begin - address) // piece.page_bytes, -(-(end - address) // piece.page_bytes)) if begin < end else range(0)

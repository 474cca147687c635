"""The update of one step as a transaction over chunks.

    compute    gradients into the retained buffer; stored = 0 before, stored = step after
    decide     scalars, then the intent; from here the step will be finished by somebody
    update     chunk by chunk: pieces to their other place, parity to staging, mark
    commit     one record
    drain      staged parity to the host arena

Here the host is the stream: each store waits for the outputs of its program, so an exception ends the step before the store. On a GPU
`rmu.device` puts programs in the place of some of the stores; the order is the same. Retained memory changes only in these two files, in
rmp.groups and in train.ring, always through `Arena.store` or through a program that owns the place.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from leto_jax import errors, faults, records
from leto_jax.faults import Phase, Point
from leto_jax.layout import Packed, Piece
from leto_jax.records import BATCH_WORD, EXTRAS_WORD, INTENT_WORD, LOSS_WORD, METRICS_WORD, SQUARES_WORD, Kind, Record
from leto_jax.rmp.peer import Sender
from leto_jax.rmu import programs
from leto_jax.rmu.recovery import Life
from leto_jax.rmu.retained import Retained

MAX_COMPUTES = 8  # of one step, each repeated because scrub found a damaged page
Observer = Callable[[Phase, int, int], None]


class Transaction:
    """Writes one rank's retained memory. One at a time exists per rank: the lease, and the fence before it, see to that.

    run: compiled programs by name. epoch: of this incarnation; it goes into every record. at(phase, step, chunk): told where the step is. rank:
    whose memory it is, among those of `job.spread`. wait_for_peer: a step is done when the peer has its parity too.
    """

    def __init__(
        self,
        retained: Retained,
        run: Mapping[str, Callable],
        epoch: int,
        at: Observer = faults.reach,
        rank: int = 0,
        wait_for_peer: bool = False,
    ):
        self.retained, self.layout, self._run, self.epoch, self.at, self.rank = retained, retained.layout, run, epoch, at, rank
        self._device = retained.device
        self._committed_ns = 0
        self.stale_ns = 0  # how long the host copy of the parity was behind the data, in all
        self.scrub_bytes = self.layout.spec.protection.scrub_bytes_per_step
        spread, peer = retained.job.spread, retained.guard.peer
        self._alike = spread.alike()[: records.BATCH_WORDS] if spread is not None else []
        self._last_intent = 0  # its CRC-32, of the step before, if this incarnation decided it
        self._warned = False
        self._sender = Sender(peer, wait_for_peer) if peer is not None else None
        self._cursor = (0, 0)  # piece and page at which the next scrub slice begins

    def init(self, key: jax.Array) -> Sequence[Sequence]:
        """The job's first state, in the form that `fill` takes. key: base key in storage form."""
        return self._run["init"](key)

    # Fill -------------------------------------------------------------------------------------------------------------------------

    def fill(self, step: int, params: Sequence, opt_state: Sequence, companions: Sequence, extras: Sequence, copies: Sequence = ()) -> None:
        """Places a whole state as commit `step` would have left it. Leaves in storage form; copies: of the leaves in `job.copied`.

        Crash: life stays FILLING and the next process fills again.
        Cost: writes the state once and encodes it.
        """
        job, retained = self.retained.job, self.retained
        dirty = retained.life() is not Life.EMPTY or bool(retained.metadata.lost())
        retained.metadata.write(Point.LIFE_FILLING, Record(Kind.LIFE, self.epoch, step, body=(Life.FILLING,)))
        self._wipe(dirty)
        if dirty:
            retained.metadata.clear_lost()
        homes = [
            *zip(job.param_homes, params, strict=True),
            *zip(job.opt_homes, opt_state, strict=True),
            *zip(job.companion_homes, companions, strict=True),
        ]
        homes += [(job.compute_homes[i], copy) for i, copy in zip(job.copied, copies, strict=True)]
        shared: list = [None] * len(self.layout.spec.shared)
        for home, leaf in homes:
            if home.kind == "shared":
                shared[home.index] = leaf
            else:
                self._store(Point.FILL_LANES, retained.place(home, step), leaf)
        blanks = [np.zeros(spec.nbytes, np.uint8) for spec in self.layout.scalars.leaves[len(shared) :]]
        self._store_packed(Point.FILL_SCALARS, "scalars", self.layout.scalars, step, [*shared, *blanks])
        self._store_packed(Point.FILL_EXTRAS, "extras", self.layout.extras, step, extras)
        for piece in self.layout.pieces:
            self._encode(piece, step)
        self._committed_ns = time.monotonic_ns()
        self._drain(self.layout.pieces, step)
        self.wait_drained()
        retained.log.write(Point.COMMIT, Record(Kind.COMMIT, self.epoch, step, body=(0, *retained.digest(step))))
        retained.metadata.write(Point.LIFE_LIVE, Record(Kind.LIFE, self.epoch, step, body=(Life.LIVE,)))

    # One step ---------------------------------------------------------------------------------------------------------------------

    def step(self, step: int, batch: Sequence, key: jax.Array) -> None:
        """From commit `step - 1` to commit `step`. batch: stored leaves; key: base key in storage form.

        Raises NonFiniteLossError before anything of the update is stored, if the policy is to stop.
        Crash: see each part; `recover` finishes or repeats the step.
        """
        self.compute(step, batch, key)
        intent = self.decide(step)
        self.update(step, intent)
        self.commit(step, intent)
        self.drain(step)

    def compute(self, step: int, batch: Sequence, key: jax.Array) -> None:
        """Gradients, extras and metrics of `step` into retained memory. Behind the program: one slice of scrub.

        Crash: the header says 0 or another step, so the gradients do not count.
        """
        retained, header = self.retained, self.retained.region("gradient_header")
        self._device.store_record(Point.GRADIENTS_CLEAR, header, Record(Kind.GRADIENTS, self.epoch, 0))
        for _ in range(MAX_COMPUTES):
            outputs = self._compute(step, (retained.seen_params(step - 1), retained.extras(step - 1), list(batch), key, np.int32(step)))
            self.at(Phase.COMPUTE, step, -1)
            damaged = self._scrub(step - 1)
            self.wait_drained()
            self._announce(step)
            jax.block_until_ready(outputs)
            if not damaged:
                break  # else compute may have read a damaged page: it was repaired, run it again
        else:
            raise errors.UnrecoverableError(
                f"step {step}: pages were found damaged behind each of {MAX_COMPUTES} computes; the memory cannot be trusted, the state of step {step - 1} is kept"
            )
        grads, *rest = outputs
        extras, metrics, loss = jax.device_get(rest)
        self.at(Phase.DECIDE, step, -1)
        self._store_packed(Point.EXTRAS, "extras", self.layout.extras, step, extras)
        self._store_packed(Point.METRICS, "metrics", self.layout.metrics, step, metrics)
        for home, grad in zip(retained.job.grad_homes, grads, strict=True):
            self._store(Point.GRADIENTS, retained.grad_place(home), grad)
        sumsq, sums = jax.device_get(self._inspected())
        if sums.size:
            self._device.store(Point.GRADIENT_SUMS, self.retained.region("gradient_sums"), sums)
        body = [records.float_bits(float(loss)), records.float_bits(float(sumsq)), zlib.crc32(np.ascontiguousarray(sums))]
        if self.retained.job.spread is not None:
            body += [
                *self.retained.digest(step, ("extras", "metrics")),
                self._last_intent,
                *(_crc([batch[n] for n in leaves]) for leaves, _ in self._alike),
            ]
        self._device.store_record(Point.GRADIENTS_STORED, header, Record(Kind.GRADIENTS, self.epoch, step, self.rank, tuple(body)))

    def decide(self, step: int) -> Record:
        """Reads the gradient record back, runs the whole-tree part of the optimizer, stores scalars and intent. Returns the intent.

        With several ranks the records of all of them are gathered and checked: who stores an intent knows that every rank has its gradients.

        Raises NonFiniteLossError (nothing stored) and UnrecoverableError if what was stored does not read back, here or on another rank.
        Crash: without a valid intent the step is redone; with one it is rolled forward.
        """
        retained = self.retained
        header = self._own(retained.header(), step, self.rank)
        decided = self._decided(step, header)
        shared, values, verdict, *gathered = jax.device_get(decided)
        loss, sumsq = self._reduced(gathered[0], step) if gathered else _found(header)
        if int(verdict) == programs.STOP:
            raise errors.NonFiniteLossError(
                f"step {step}: loss {float(loss)!r}, sum of squared gradients {float(sumsq)!r}; the state of step {step - 1} is kept. "
                "Pass non_finite='skip' or 'continue' to TrainStep to go on over such steps"
            )
        self._store_packed(Point.SCALARS, "scalars", self.layout.scalars, step, [*shared, *values, loss, sumsq, verdict])
        intent = Record(Kind.INTENT, self.epoch, step, body=(*retained.digest(step), len(self.layout.chunks)))
        retained.log.write(Point.INTENT, intent)
        if not retained.log.holds(intent):
            raise errors.UnrecoverableError(
                f"step {step}: the intent does not read back from the log; nothing of the update was dispatched"
            )
        self._last_intent = intent.crc
        return intent

    def _own(self, header: Record | None, step: int, rank: int) -> Record:
        """A rank's gradient record, if it is that of `step`."""
        if header is None or (header.step, header.epoch, header.index) != (step, self.epoch, rank):
            raise errors.UnrecoverableError(
                f"gradient record of rank {rank}: expected step {step}, epoch {self.epoch}, found {header}; no intent was stored, the step can be redone"
            )
        return header

    def _reduced(self, rows: np.ndarray, step: int) -> tuple[np.float32, np.float32]:
        """Loss and sum of squares from the records of all ranks, uint32[ranks, 16] in rank order, each of which is checked."""
        found = [self._own(records.unpack(row.tobytes(), Kind.GRADIENTS), step, rank) for rank, row in enumerate(rows)]
        self._compare(found, step)
        loss, sumsq = _found(found[0])
        for rank, record in enumerate(found[1:], 1):
            other, more = _found(record)
            if record.body[LOSS_WORD] != found[0].body[LOSS_WORD]:
                raise errors.UnrecoverableError(
                    f"gradient record of rank {rank}: expected the loss {loss!r} of rank 0, found {other!r}; no intent was stored, the step can be redone"
                )
            if record.body[INTENT_WORD] != found[0].body[INTENT_WORD]:
                raise errors.UnrecoverableError(
                    f"step {step - 1}: rank {rank} has decided otherwise than rank 0, so their parameters may differ; the state of step {step - 1} is kept"
                )
            sumsq = np.float32(sumsq + more)
        return loss, sumsq

    def _compare(self, found: Sequence[Record], step: int) -> None:
        """What ranks must have alike, though no collective sees to it. Raises UsageError for batches that differ; says it of extras and metrics."""
        for n, (leaves, groups) in enumerate(self._alike):
            for rank, record in enumerate(found):
                first = groups.index(groups[rank])
                if record.body[BATCH_WORD + n] != found[first].body[BATCH_WORD + n]:
                    paths = ", ".join(self.layout.spec.batch[leaf].path for leaf in leaves)
                    raise errors.UsageError(
                        f"batch of step {step}: ranks {first} and {rank} feed the same part of {paths} and have drawn different ones; draw by "
                        "the rank's place in the mesh, or cut the leaf over all axes (leto.Sharding(batch=...))"
                    )
        for name, word in (("extras", EXTRAS_WORD), ("metrics", METRICS_WORD)):
            others = [rank for rank, record in enumerate(found) if record.body[word] != found[0].body[word]]
            if others and not self._warned and self.rank == 0:
                self._warned = True
                print(
                    f"leto: {name} of step {step} differ between rank 0 and rank {others[0]}; they should be made of what is equal on all ranks: "
                    "a failure within an update cannot be recovered in place while they differ",
                    file=sys.stderr,
                    flush=True,
                )

    def update(self, step: int, intent: Record, first: int = 0) -> None:
        """Applies the chunks of update `step` from number `first` of its order on.

        Crash: marked chunks lie at their new place with staged parity, the others at their old one; the piece in flight is intact at its old place.
        Cost: reads and writes every lane once, reads the gradients, encodes what it wrote.
        """
        for done, index in enumerate(self.layout.order(step)):
            if done < first:
                continue
            self.at(Phase.UPDATE, step, done)
            self._update_chunk(step, index, self._mark(step, index, intent))

    def commit(self, step: int, intent: Record) -> None:
        """One record; which copies and addresses are active follows from it.

        Crash: all chunks are marked, or the commit counts.
        """
        self.at(Phase.COMMIT, step, -1)
        self.retained.log.write(Point.COMMIT, Record(Kind.COMMIT, self.epoch, step, body=(intent.crc, *intent.body[:3])))
        self._committed_ns = time.monotonic_ns()

    def drain(self, commit: int) -> None:
        """Brings the host copy of the parity to `commit`. Before the next intent this is always done.

        Crash: pieces without a valid host copy are drained from staging, or encoded again.
        Cost: H/D of the state, blocking: on the CPU nothing is won by doing it behind compute, which wants the same cores.
        """
        self.at(Phase.DRAIN, commit, -1)
        self._drain([piece for piece in self.layout.pieces if piece.chunk is not None], commit)
        self.at(Phase.BODY, commit, -1)

    def close(self) -> None:
        """Ends what runs behind the transaction. Needed only where its memory goes before the process does."""
        if self._sender is not None:
            self._sender.close()

    def abandon(self) -> None:
        """Waits until nothing that was dispatched runs any more, whatever becomes of it: another transaction takes this one's place.

        Crash: as before.
        """
        self.close()

    def wait_drained(self) -> None:
        """Until the host copy of the parity is that of the last commit. Raises what went wrong on its way."""

    # ------------------------------------------------------------------------------------------------------------------------------

    def forget_metrics(self, commit: int) -> None:
        """Stores what says that the metrics of `commit` are unknown: not a number, or zero for integers."""
        kinds = programs.structs(self.layout.metrics.leaves)
        blanks = [np.full(x.shape, np.nan if jnp.issubdtype(x.dtype, jnp.inexact) else 0, x.dtype) for x in kinds]
        self._store_packed(Point.METRICS, "metrics", self.layout.metrics, commit, blanks)

    def encode_all(self, commit: int) -> None:
        """Encodes every piece of which no tier has a block of `commit` again, from the data. For a takeover that found stale parity."""
        guard = self.retained.guard
        for piece in self.layout.pieces:
            version = self.version(piece, commit)
            if guard.version(piece) == version or (
                (staged := guard.staged(piece)) is not None and staged.step == version and self._draining
            ):
                continue  # what is on its way arrives before the next intent
            self.wait_drained()
            self._encode(piece, commit)
            guard.drain([piece], version)

    def drain_stale(self, commit: int) -> None:
        """Brings the host copies up to `commit` that a crash has left behind, from what is staged."""
        guard = self.retained.guard
        self._drain([piece for piece in self.layout.pieces if guard.version(piece) != self.version(piece, commit)], commit)

    def refill_peer(self, commit: int) -> None:
        """Sends the parity of read-only pieces that the peer does not have; that of all others goes with the next commit. After a takeover."""
        peer = self.retained.guard.peer
        if peer is None:
            return
        lacking = [piece for piece in self.layout.read_only_pieces if not peer.has(piece, self.version(piece, commit))]
        if lacking:
            self.wait_drained()
            for piece in lacking:
                self._encode(piece, commit)
            self._send(lacking, self.version(lacking[0], commit))

    @property
    def peer_stale_ns(self) -> int:
        """How long the parity with the peer was behind the data, in all; -1 without one."""
        return self._sender.stale_ns if self._sender is not None else -1

    def version(self, piece: Piece, commit: int) -> int:
        """Version of a piece's data while the state is that of `commit`: read-only pieces are of the fill's for ever."""
        fill = self.retained.metadata.latest(Kind.LIFE)
        return commit if piece.chunk is not None or fill is None else fill.step

    def checksums(self, piece: Piece, commit: int) -> jax.Array:
        """Page checksums of a piece as it is now, where `commit` leaves it: uint32[pages, 2]. Cost: reads the piece once, on all cores."""
        return self._run[programs.checksum_name(piece.row_bytes // 4)](self.retained.words(piece, commit))

    def gradient_sums(self) -> np.ndarray:
        """A checksum of what each chunk reads of each gradient, as it is now: uint32[gradient parts, 2]. Cost: reads the gradients once, at memory bandwidth."""
        return jax.device_get(self._run["inspect"](self.retained.grads)[1])

    def _mark(self, step: int, index: int, intent: Record) -> Record:
        return Record(Kind.MARK, self.epoch, step, index, body=(intent.crc,))

    # What a device does in another way: `rmu.device` ------------------------------------------------------------------------------

    def _wipe(self, dirty: bool) -> None:
        """Before a fill. dirty: there was one that was cut short, or another life; no byte of it may count."""
        for region in self.layout.regions if dirty else ():
            if region.arena == "device" and region.nbytes:
                self._device.store(Point.FILL_LANES, region.offset, np.zeros(region.nbytes, np.uint8))

    def _announce(self, step: int) -> None:
        """The host copy of all parity is current, and `step` has begun."""

    def _compute(self, step: int, arguments: tuple) -> tuple:
        return self._run["compute"](*arguments)

    def _grads(self) -> Sequence[jax.Array]:
        return self.retained.grads

    def _inspected(self) -> tuple[jax.Array, jax.Array]:
        """Of the retained gradients: their sum of squares, and the checksum of each part."""
        return self._run["inspect"](self._grads())

    def _decided(self, step: int, header: Record) -> tuple:
        """Shared scalars, values and verdict of `step`, from the retained gradients and their record; the records of all ranks, if there are
        several."""
        if self.retained.job.spread is None:
            return self._decide(step, *_found(header))
        return self._decide(step, np.frombuffer(header.pack(), np.uint32)[None])

    def _decide(self, step: int, *found: Any) -> tuple:
        return self._run["decide"](self._grads(), *self.retained.decided_from(step - 1), *found, np.int32(step))

    def _store(self, point: Point, offset: int, leaf) -> None:
        """What a program has made goes to its place."""
        self._device.store(point, offset, np.asarray(leaf))

    def _update_chunk(self, step: int, index: int, mark: Record) -> None:
        retained, (_, chunk) = self.retained, self.layout.chunks[index]
        run = self._run[programs.update_name(self.layout, index)]
        new = run(retained.values(step), retained.verdict(step), retained.grad_piece(chunk), retained.pieces(chunk, step - 1))
        jax.block_until_ready(new)
        pieces = self.layout.pieces_of_chunk[index]
        for piece, array in zip(pieces, new, strict=True):
            self._store(Point.PIECE, self.layout.address(piece, step), array)
        for piece in pieces:
            self._encode(piece, step)
        retained.log.write(Point.MARK, mark)

    @property
    def _draining(self) -> bool:
        """Whether a drain may still be on its way."""
        return False

    def _drain(self, pieces: Sequence[Piece], commit: int) -> None:
        self.retained.guard.drain(pieces, commit)
        self.stale_ns += time.monotonic_ns() - self._committed_ns
        self._send(pieces, commit)

    def _send(self, pieces: Sequence[Piece], version: int) -> None:
        """Parity of the pieces that are staged in this version is on its way to the peer."""
        if self._sender is not None:
            self._sender.offer(self.retained.guard.parcels(pieces, version), self._committed_ns)

    def _encode(self, piece: Piece, commit: int) -> None:
        parity, checksums = self._run[programs.encode_name(piece.row_bytes // 4)](self.retained.words(piece, commit))
        self.retained.guard.stage(piece, parity, checksums, self.version(piece, commit))

    def _scrub(self, commit: int) -> bool:
        """Verifies the next slice of pages against the host copy of their checksums; repairs what differs. True if anything did."""
        budget = self.scrub_bytes // self.layout.spec.protection.page_bytes
        guard, damaged = self.retained.guard, False
        number, page = self._cursor
        while budget > 0:
            piece = self.layout.pieces[number]
            count = min(budget, piece.pages - page)
            block = guard.block(piece, self.version(piece, commit))
            if block is not None:
                address = self.layout.address(piece, commit)
                if guard.verify(piece, address, block.checksums, page, count):
                    # A group reaches beyond the slice, and is repaired as a whole or not at all.
                    guard.repair(piece, address, guard.verify(piece, address, block.checksums, 0, piece.pages), block)
                    damaged = True
            budget, page = budget - count, page + count
            if page == piece.pages:
                number, page = (number + 1) % len(self.layout.pieces), 0
                if number == 0:
                    break
        self._cursor = number, page
        return damaged

    def _store_packed(self, point: Point, name: str, packed: Packed, step: int, leaves: Sequence) -> None:
        """Stores small leaves into the copy of a region that belongs to `step`, as one store."""
        region = self.layout.by_name[f"{name}{step % 2}"]
        if not region.nbytes:
            return
        data = np.zeros(region.nbytes, np.uint8)
        for offset, spec, leaf in zip(packed.offsets, packed.leaves, leaves, strict=True):
            flat = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
            data[offset : offset + spec.nbytes] = flat
        self._device.store(point, region.offset, data)


def _found(header: Record) -> tuple[np.float32, np.float32]:
    """Loss and sum of squares that a gradient record holds."""
    loss, sumsq = (np.float32(records.bits_float(header.body[word])) for word in (LOSS_WORD, SQUARES_WORD))
    return loss, sumsq


def _crc(leaves: Sequence) -> int:
    """CRC-32 of arrays, one after the other."""
    found = 0
    for leaf in leaves:
        found = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8), found)
    return found

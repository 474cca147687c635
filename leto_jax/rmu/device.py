"""The same transaction where the memory is a GPU's: programs write to their places themselves.

What differs from `transaction` is who stores, never in which order:

    gradients        outputs of compute, which owns their place (a donated view)
    a chunk          outputs of one program: new lanes at their other place, parity and page checksums in staging
    its mark         a program of its own behind it: marks, and the records of the staged blocks. Inside one program XLA may reorder them
    parity           copied to the host behind the next compute, by a thread

One compute stream runs the programs of a device in the order of their dispatch. Besides, each chunk takes the mark before it as an argument,
and each mark the checksums of its chunk: so an error anywhere stops all that follows. The host waits twice a step: for
compute, with decide behind it, and for the last mark.

On the CPU backend donated views are not written in place; there the outputs are copied, so that the same order can be tested without a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from leto_jax import errors, faults
from leto_jax.arena import cuda
from leto_jax.arena.device import DeviceArena
from leto_jax.arena.memory import HostArena
from leto_jax.arena.views import view
from leto_jax.faults import Moment, Point
from leto_jax.layout import Piece
from leto_jax.records import BYTES, LOSS_WORD, SQUARES_WORD, Kind, Record
from leto_jax.rmp.blocks import unsealed_record, void_record
from leto_jax.rmu import placed, programs
from leto_jax.rmu.log import COPIES
from leto_jax.rmu.programs import Job
from leto_jax.rmu.recovery import Life
from leto_jax.rmu.retained import Retained
from leto_jax.rmu.transaction import Observer, Transaction

DRAIN_SECS = 60.0
DRAIN_THREAD = "leto-drain"


class Spot(NamedTuple):
    """A place in the device arena that a program owns: byte offset, and the array that lies there."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


class ChunkPlan(NamedTuple):
    """A chunk's programs, and the places of what they write: lanes, parity rows, page checksums; marks, records of the staged blocks."""

    program: str
    mark: str
    lanes: list[Spot]
    rows: list[Spot]
    sums: list[Spot]
    marks: list[Spot]
    records: list[Spot]


class Guess(NamedTuple):
    """What decide says if the gradient record holds this loss and this sum of squares."""

    step: int
    loss: jax.Array
    sumsq: jax.Array
    decided: tuple


class DeviceTransaction(Transaction):
    """See `Transaction`; for programs that `programs.trace(..., in_place=True)` has made."""

    def __init__(
        self,
        retained: Retained,
        run: Mapping[str, Callable],
        epoch: int,
        at: Observer = faults.reach,
        rank: int = 0,
        wait_for_peer: bool = False,
    ):
        super().__init__(retained, run, epoch, at, rank, wait_for_peer)
        self._places: dict[tuple, list[jax.Array]] = {}  # donated to the next program that owns the place
        self._checked: set[tuple] = set()
        self._cleared = False
        self._plans: dict[tuple[int, int], ChunkPlan] = {}
        self._moving = [piece for piece in self.layout.pieces if piece.chunk is not None]
        self._voids = jax.device_put(np.stack([_words(void_record(piece)) for piece in self._moving]), retained.jax_device)
        self._voided = -1  # the step before whose update nothing that is staged counts any more
        self._records: Sequence[jax.Array] = ()  # by chunk: what the marks of the update that has begun store
        self._computed: Sequence[jax.Array] = ()  # gradients
        self._pending: tuple[jax.Array, jax.Array]  # what is found in them
        self._guess: Guess | None = None
        self._token: jax.Array = jnp.zeros(16, jnp.uint32)
        self._drainer = Drainer(retained, self._send)
        if isinstance(self._device, DeviceArena):
            self._device.settle = lambda: jax.block_until_ready(self._token)

    def init(self, key: jax.Array) -> Sequence[Sequence]:
        """The first state, written where it belongs; what has no place of its own comes back as arrays."""
        job, device = self.retained.job, self._device
        if isinstance(device, DeviceArena):
            # Before the first byte goes: another rank may have been filled to the end, and this one too.
            self.retained.metadata.write(Point.LIFE_FILLING, Record(Kind.LIFE, self.epoch, 0, body=(Life.FILLING,)))
            device.clear()
            self._cleared = True
        spots = [Spot(self.retained.place(home, 0), spec.shape, spec.dtype) for home, spec in placed.init_homes(job)]
        leaves, loose = self._run["init"](key, self._take(("init",), spots))
        self._arrived("init", ("init",), Point.FILL_LANES, leaves, spots, keep=False)
        return placed.init_leaves(job, leaves, loose)

    def _wipe(self, dirty: bool) -> None:
        if not isinstance(self._device, DeviceArena):
            super()._wipe(dirty)
        elif not self._cleared:  # else `init` has, and what it has written since then stays
            self._device.clear()

    @property
    def _draining(self) -> bool:
        return self._drainer.busy

    def wait_drained(self) -> None:
        secs = self._drainer.wait()
        self.stale_ns += int(1e9 * secs)

    def close(self) -> None:
        self.wait_drained()
        super().close()

    def abandon(self) -> None:
        held = [self._places, self._records, self._computed, self._guess, self._token]
        for array in jax.tree.leaves(held):
            with contextlib.suppress(RuntimeError):  # it is an error, or was donated to a program that is one
                jax.block_until_ready(array)
        if isinstance(self._device, DeviceArena):
            cuda.synchronize(self._device.ordinal)
        super().abandon()

    def commit(self, step: int, intent: Record) -> None:
        jax.block_until_ready(self._token)  # raises what went wrong in any chunk: then there is no commit
        super().commit(step, intent)

    # What Transaction asks for ----------------------------------------------------------------------------------------------------

    def _compute(self, step: int, arguments: tuple) -> tuple:
        spots = [Spot(self.retained.grad_place(home), form.shape, form.dtype.name) for home, form in placed.gradients(self.retained.job)]
        outputs = self._run["compute"](*arguments, self._take(("gradients",), spots))
        self._arrived("compute", ("gradients",), Point.GRADIENTS, [grad for grad in outputs[0] if grad.size], spots)
        self._computed = outputs[0]
        # On the device right behind it, so that the host waits once for all of it. `decide` takes the guess only if the record says the same.
        self._pending = super()._inspected()
        ahead = [*outputs[1:], *self._pending]
        if self.retained.job.spread is None:  # else decide wants the records of all ranks
            loss, sumsq = outputs[-1], self._pending[0]
            self._guess = Guess(step, loss, sumsq, self._decide(step, loss, sumsq))
            ahead += self._guess.decided
        for array in jax.tree.leaves(ahead):
            array.copy_to_host_async()
        return outputs

    def _inspected(self) -> tuple[jax.Array, jax.Array]:
        return self._pending

    def _decided(self, step: int, header: Record) -> tuple:
        guess, self._guess = self._guess, None
        if guess is not None and guess.step == step:
            bits = [int(np.asarray(value).view(np.uint32)) for value in (guess.loss, guess.sumsq)]
            if bits == [header.body[word] for word in (LOSS_WORD, SQUARES_WORD)]:
                return guess.decided
        return super()._decided(step, header)

    def _grads(self) -> Sequence[jax.Array]:
        return self._computed

    def _store(self, point: Point, offset: int, leaf: Any) -> None:
        if not self._is_there(leaf, offset):
            super()._store(point, offset, leaf)

    def _is_there(self, leaf: Any, offset: int) -> bool:
        """Whether a program has put a leaf at its place already."""
        if not (isinstance(leaf, jax.Array) and isinstance(self._device, DeviceArena)):
            return False
        return not leaf.size or leaf.unsafe_buffer_pointer() == self._device.address + offset

    def _announce(self, step: int) -> None:
        """Voids what is staged of the moving pieces, by a program behind compute."""
        if self._voided == step:
            return
        pieces = self._moving
        spots = [self._record_spot(piece) for piece in pieces]
        with self._stored_by_program(Point.STAGING, BYTES * len(pieces)):
            places = [self._take(("staged", piece.index), [spot])[0] for piece, spot in zip(pieces, spots, strict=True)]
            voids = self._run["void"](self._voids, self._token, places)
            for piece, spot, array in zip(pieces, spots, voids, strict=True):
                self._arrived("void", ("staged", piece.index), Point.STAGING, [array], [spot])
            self._token = voids[0]
        self._voided = step

    def update(self, step: int, intent: Record, first: int = 0) -> None:
        self.wait_drained()
        if first == 0:
            self._announce(step)
        else:  # of the marked chunks the staged blocks stay
            for done, index in enumerate(self.layout.order(step)):
                for piece in self.layout.pieces_of_chunk[index] if done >= first else ():
                    self.retained.guard.void(piece)
        self._records = ()
        super().update(step, intent, first)

    def _records_of(self, mark: Record) -> jax.Array:
        """What goes with a mark. The records of all marks go to the device in one transfer, behind the first chunk of the update."""
        if not self._records:
            marks = [dataclasses.replace(mark, index=index) for index in range(len(self.layout.chunks))]
            self._records = self._run["records"](np.stack([words for one in marks for words in self._mark_records(one)]))
        return self._records[mark.index]

    def _mark_records(self, mark: Record) -> list[np.ndarray]:
        """What the mark of a chunk stores: itself, and the records of the staged blocks, whose checksums the device fills in."""
        return [_words(mark), *(_words(unsealed_record(piece, mark.step)) for piece in self.layout.pieces_of_chunk[mark.index])]

    def _update_chunk(self, step: int, index: int, mark: Record) -> None:
        retained, (_, chunk), plan = self.retained, self.layout.chunks[index], self._plan(index, step % 2)
        pieces, name = self.layout.pieces_of_chunk[index], plan.program
        moved, rows, sums = ("pieces", index, step % 2), ("parity", index), ("checksums", index)
        with self._stored_by_program(Point.PIECE, sum(piece.nbytes for piece in pieces)):
            targets = self._take(moved, plan.lanes), self._take(rows, plan.rows), self._take(sums, plan.sums)
            new, parity, checksums = self._run[name](
                retained.values(step),
                retained.verdict(step),
                retained.grad_piece(chunk),
                retained.pieces(chunk, step - 1),
                self._token,
                targets,
            )
            self._arrived(name, moved, Point.PIECE, new, plan.lanes)
            self._arrived(name, rows, Point.STAGING, parity, plan.rows)
            self._arrived(name, sums, Point.STAGING, checksums, plan.sums)
        records = self._records_of(mark)
        key = ("mark", index, step % 2)
        with self._stored_by_program(Point.MARK, BYTES * (len(COPIES) + len(pieces))):
            sealed = [self._take(("staged", piece.index), [spot])[0] for piece, spot in zip(pieces, plan.records, strict=True)]
            found = self._run[plan.mark](records, list(checksums), [*self._take(key, plan.marks), *sealed])
            self._arrived("mark", key, Point.MARK, found[: len(COPIES)], plan.marks)
            for piece, spot, array in zip(pieces, plan.records, found[len(COPIES) :], strict=True):
                self._arrived("mark", ("staged", piece.index), Point.STAGING, [array], [spot])
            self._token = found[0]

    def _plan(self, index: int, parity: int) -> ChunkPlan:
        """Where the programs of a chunk write in steps of one parity. Made once."""
        if (index, parity) not in self._plans:
            pieces, (number, chunk) = self.layout.pieces_of_chunk[index], self.layout.chunks[index]
            lanes = self.layout.signatures[number].lanes
            rows, sums = self._staging(pieces)
            offsets = [self.retained.log.offset(copy, Kind.MARK, parity, index) for copy in COPIES]
            name = programs.update_name(self.layout, index)
            self._plans[index, parity] = ChunkPlan(
                name,
                placed.mark_name(name),
                [Spot(self.layout.address(piece, parity), (chunk.length,), lane.dtype) for piece, lane in zip(pieces, lanes, strict=True)],
                rows,
                sums,
                [Spot(offset, (16,), "uint32") for offset in offsets],
                [self._record_spot(piece) for piece in pieces],
            )
        return self._plans[index, parity]

    def _record_spot(self, piece: Piece) -> Spot:
        return Spot(self.retained.guard.record_place(piece), (16,), "uint32")

    def _encode(self, piece: Piece, commit: int) -> None:
        guard, name = self.retained.guard, programs.encode_name(piece.row_bytes // 4)
        spots = [spot for spots in self._staging([piece]) for spot in spots]
        guard.void(piece)
        places = self._take(("encode", piece.index), spots)
        parity, checksums = self._run[name](self.retained.words(piece, commit), places)
        # The chunk's own arrays over the same places stay as they are.
        self._arrived(name, ("encode", piece.index), Point.STAGING, [parity, checksums], spots, keep=False)
        guard.seal(piece, self.version(piece, commit), np.asarray(checksums))

    def _drain(self, pieces: Sequence[Piece], commit: int) -> None:
        self._drainer.start(pieces, commit)

    def _scrub(self, commit: int) -> bool:
        """As `Transaction._scrub`, a whole piece at a time: its checksums are made where it lies."""
        budget, guard, damaged = self.scrub_bytes, self.retained.guard, False
        number = self._cursor[0]
        while budget > 0:
            piece = self.layout.pieces[number]
            block = guard.block(piece, self.version(piece, commit))
            if block is not None:
                pages = np.flatnonzero(np.any(block.checksums != np.asarray(self.checksums(piece, commit)), axis=-1))
                if len(pages):
                    guard.repair(piece, self.layout.address(piece, commit), pages.tolist(), block)
                    damaged = True
            budget, number = budget - piece.nbytes, (number + 1) % len(self.layout.pieces)
            if number == 0:
                break
        self._cursor = number, 0
        return damaged

    # Places -----------------------------------------------------------------------------------------------------------------------

    def _take(self, key: tuple, spots: Sequence[Spot]) -> list[jax.Array]:
        """Arrays over `spots`, to be donated: what the last program left there, or fresh views."""
        found = self._places.pop(key, None)
        if found is not None:
            return found
        return [view(self._device, spot.offset, spot.shape, jnp.dtype(spot.dtype), self.retained.jax_device) for spot in spots]

    def _staging(self, pieces: Sequence[Piece]) -> tuple[list[Spot], list[Spot]]:
        """The places of parity rows and of page checksums of each piece."""
        rows, sums = [], []
        for piece in pieces:
            start = self.retained.guard.ranges(piece)[0][0]
            rows.append(Spot(start, (piece.parity_rows, piece.row_bytes // 4), "uint32"))
            sums.append(Spot(start + piece.staged.sums_offset, (piece.pages, 2), "uint32"))
        return rows, sums

    def _arrived(
        self, program: str, key: tuple, point: Point, arrays: Sequence[jax.Array], spots: Sequence[Spot], keep: bool = True
    ) -> None:
        """Notes what a program left at its places; keep: it is what the next program there is given.

        Looks at the addresses the first time that these places are written by this program.
        Raises LayoutError if XLA has put an output elsewhere: nothing of it counts then.
        """
        if not isinstance(self._device, DeviceArena):
            for array, spot in zip(arrays, spots, strict=True):
                self._device.store(point, spot.offset, np.asarray(array))
        elif (program, key) not in self._checked:
            for number, (array, spot) in enumerate(zip(arrays, spots, strict=True)):
                found, wanted = array.unsafe_buffer_pointer(), self._device.address + spot.offset
                if found != wanted:
                    raise errors.LayoutError(
                        f"program {program!r}, output {number} ({array.dtype}{list(array.shape)}): expected it at its place {wanted:#x}, XLA has "
                        f"put it at {found:#x}; please report this with the versions of jax and of the driver"
                    )
            self._checked.add((program, key))
        if keep:
            self._places[key] = list(arrays)

    @contextlib.contextmanager
    def _stored_by_program(self, point: Point, nbytes: int):
        """The crash points of a store that a program makes: before it is dispatched, and when it is done."""
        hook = faults.store_hook()
        if hook is not None and isinstance(self._device, DeviceArena):
            hook(point, Moment.BEFORE, nbytes)
            yield
            jax.block_until_ready(self._places[next(reversed(self._places))])
            hook(point, Moment.AFTER, nbytes)
        else:
            yield


class Drainer:
    """Copies staged parity to the host arena, behind the next compute, in a thread. behind(pieces, version): what comes then.

    Crash: as `Guard.drain`: a piece whose copy was cut short is drained or encoded again.
    """

    def __init__(self, retained: Retained, behind: Callable[[Sequence[Piece], int], None]):
        self._retained, self._behind = retained, behind
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._secs = 0.0
        device = retained.device
        self._copies = cuda.copies(device.ordinal) if isinstance(device, DeviceArena) else None

    @property
    def busy(self) -> bool:
        """A drain was begun and nobody has waited for it."""
        return self._thread is not None

    def start(self, pieces: Sequence[Piece], version: int) -> None:
        """Begins to drain blocks of `version`."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(list(pieces), version), name=DRAIN_THREAD, daemon=True)
        self._thread.start()

    def wait(self) -> float:
        """Until nothing is on its way; returns for how many seconds the last drain ran. Raises its error, or DeadlineError."""
        if self._thread is None:
            return 0.0
        self._thread.join(DRAIN_SECS)
        if self._thread.is_alive():
            raise errors.DeadlineError(
                f"the copy of the parity to host memory did not end within {DRAIN_SECS:.0f} s; the GPU or its driver hangs"
            )
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._secs

    def _run(self, pieces: Sequence[Piece], version: int) -> None:
        begin = time.monotonic()
        try:
            if self._copies is None:
                self._retained.guard.drain(pieces, version)
            else:
                self._copy(pieces, version, self._copies)
            self._secs = time.monotonic() - begin
            self._behind(pieces, version)
        except BaseException as exception:
            self._error = exception

    def _copy(self, pieces: Sequence[Piece], version: int, copies: cuda.Copies) -> None:
        guard, device, host = self._retained.guard, self._retained.device, self._retained.host
        assert isinstance(host, HostArena)
        for piece in pieces:
            staged = guard.staged(piece)
            if staged is None or staged.step != version:
                continue
            target, source = guard.begin_drain(piece), guard.ranges(piece)[0][0]
            for begin, place, nbytes in piece.drained:
                for at, part in copies.read(device.address + source + begin, nbytes):
                    host.write_through(Point.DRAIN_PARITY, target + place + at, part)
            guard.end_drain(piece, staged)


def transaction_type(job: Job) -> type[Transaction]:
    """The transaction that fits the programs of a job."""
    return DeviceTransaction if job.in_place else Transaction


def _words(record: Record) -> np.ndarray:
    return np.frombuffer(record.pack(), np.uint32)

"""`session`: the training loop's frame. It decides what this process is (alone, trainer, shadow), and gives it a state to go on from."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from leto_jax import distributed, errors, faults, records
from leto_jax.arena import cuda, views
from leto_jax.arena.control import Control, Word
from leto_jax.arena.rank import Arenas, private_arenas
from leto_jax.checkpoint import frozen
from leto_jax.checkpoint.announced import Announced
from leto_jax.checkpoint.frozen import Form, Frozen
from leto_jax.config import IN_PLACE, METRICS_FILE, PARKED, PERSISTENT_TIER, TIERS, Level, Process, Protection, for_gpu
from leto_jax.faults import Phase
from leto_jax.layout import LeafSpec
from leto_jax.records import Kind
from leto_jax.rmu import programs, rollforward
from leto_jax.rmu.device import transaction_type
from leto_jax.rmu.recovery import Action, Picture
from leto_jax.rmu.retained import Retained
from leto_jax.rmu.spread import Sharding
from leto_jax.shadow import cache, executables, prewarm
from leto_jax.shadow.inject import Injector
from leto_jax.shadow.member import Member, Promotion, member_of
from leto_jax.train import budget, data
from leto_jax.train.device import count_compiles, only_device
from leto_jax.train.digest import state_digest
from leto_jax.train.retry import Retry
from leto_jax.train.ring import Ring
from leto_jax.train.rows import MetricsFile
from leto_jax.train.state import State, retained_state, user_tree
from leto_jax.train.step import TrainStep

if TYPE_CHECKING:
    from leto_jax.checkpoint.hostmemory import HostMemory
    from leto_jax.checkpoint.keeper import Keeper, Leaves
    from leto_jax.checkpoint.stage import Stage

PyTree = Any
PROGRAMS_DEADLINE_SECS = 600.0
CHECKPOINT_SECS = 3600.0
LAST_SECS = 30.0
REQUEST = "request"  # of the agent's, for a checkpoint
RESTORED = "restore"  # action of an attach that began from a copy of the state


def session(
    init: Callable,
    step: TrainStep,
    dataset: Any,
    *,
    key: jax.Array,
    steps: int,
    warm: Sequence[Callable] = (),
    protection: Protection | None = None,
    sharding: Sharding | None = None,
) -> Session:
    """A training session of `steps` steps, used as a context manager and iterated once.

    init(key) -> (params, extras): the first state; only traced in a shadow. step: a TrainStep. dataset: a Grain dataset, or
    f(step) -> batch, a pure function. key: base PRNG key; step t gets fold_in(key, t). Steps count from 1: step t leads to commit t.
    warm: jitted f(state, batch) that a shadow must have compiled before it is ready. protection: how the state is guarded. sharding: how
    parameters and batch are spread over the ranks of `leto run --nproc-per-node`; by default parameters are the same on all, and the batch is
    what the ranks' datasets give, end to end.

    Under `leto run` a shadow blocks on entering until it is promoted. Without `leto run` the same programs run unprotected.
    Raises UsageError, LayoutError, UnsupportedOptimizerError, IdentityError, MemoryBudgetError, UnrecoverableError.
    """
    if not isinstance(step, TrainStep):
        raise errors.UsageError(f"session: step: expected a TrainStep, found {type(step).__name__}")
    if not isinstance(steps, int) or steps < 1:
        raise errors.UsageError(f"session: steps: expected a positive int, found {steps!r}")
    process = Process.from_environ()
    if process is not None and process.recovery != IN_PLACE and process.role != "plan":
        from leto_jax.train.plain import PlainSession

        return PlainSession(init, step, dataset, key, steps, tuple(warm), protection, sharding)
    return Session(init, step, dataset, key, steps, tuple(warm), protection, sharding)


@dataclasses.dataclass
class _Takeover:
    """What an attach took, for the journal. Times in CLOCK_MONOTONIC nanoseconds.

    restored: the step of the copy that it began from, None if the retained state was there. goal: the step that was running when the failure
    came, where steps are to be done again first.
    """

    attached_ns: int
    stages: dict[str, float]
    compiles: int
    action: str
    reason: str
    repaired_pages: int = 0
    restored: int | None = None
    goal: int = 0
    first_began_ns: int = 0


class Session:
    """See `session`. Iterating yields (step number, batch).

    state: the current State. replayed: this step was already done, `s.step` returns what is retained. step_secs: how long each step that
    this process computed took, in seconds.
    """

    def __init__(
        self,
        init: Callable,
        step: TrainStep,
        dataset: Any,
        key: jax.Array,
        steps: int,
        warm: tuple,
        protection: Protection | None,
        sharding: Sharding | None,
    ):
        self._init, self._step, self._dataset, self._key, self.steps, self._warm, self._protection = (
            init,
            step,
            dataset,
            key,
            steps,
            warm,
            protection,
        )
        self._sharding, self._ranks = sharding, distributed.current()
        self._process = Process.from_environ()
        self._member: Member | None = None
        self._control: Control | None = None
        self._keeper: Keeper | None = None
        self._retry: Retry | None = None
        self._copies: HostMemory | None = None
        self._announced: Announced | None = None
        self._entered = self._iterated = False
        self._current: int | None = None
        self.replayed = False
        self.step_secs: list[float] = []

    # Entering ---------------------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        if self._entered:
            raise errors.UsageError("session: expected to be entered once, found a second time; make a new session")
        self._entered = True
        if self._process is None or self._process.role == "plan":
            self._enter()
            return self
        self._member = member = member_of(self._process)
        try:
            self._enter()
        except (errors.ProtocolError, errors.DeadlineError):
            raise  # of the processes around us, not of the script: the next one may have better luck
        except errors.LetoError as exception:
            lost = isinstance(exception, errors.UnrecoverableError | errors.TooManyErasuresError)
            member.event("refused", reason=str(exception), lost=lost)
            raise
        return self

    def _look_around(self) -> tuple[jax.Array, PyTree]:
        """Finds out about device and data; the base key as a typed one, and a batch for its shapes, drawn from an iterator of its own."""
        self._device = only_device()
        self._gpu = views.gpu_number(self._device)
        key = self._key if programs.is_key(self._key) else jax.random.wrap_key_data(self._key)
        self._key_data = jax.random.key_data(key)
        self._source = data.source(self._dataset)
        if self._gpu is None and self._process is not None and self._process.shadow_level == PARKED:
            raise errors.UsageError(
                f"--shadow-level {PARKED}: expected a GPU, whose state CUDA moves to host memory, found the CPU backend; take auto, 3, 2, 1 or 0"
            )
        return key, data.source(self._dataset).next(1)

    def _enter(self) -> None:
        key, batch = self._look_around()
        if self._gpu is None:
            protection = self._protection or Protection()
        else:
            protection = for_gpu(self._protection, cuda.granularity(self._gpu))
        if protection.peer_parity and self._ranks.count == 1:
            raise errors.UsageError(
                f"peer_parity: expected 0 for a job of one rank, which has no peer, found {protection.peer_parity}; use local_parity"
            )
        if self._process is not None and self._process.wait_for_parity and not protection.peer_parity:
            raise errors.UsageError(
                "--wait-for-parity: expected Protection(peer_parity=1) or more in the session, found 0: there is no peer to wait for"
            )
        in_place = None if self._gpu is None else self._device
        if self._member is not None:
            self._member.enter("trace")
        self._job = programs.trace(self._init, self._step.spec, batch, key, protection, in_place, self._sharding)
        if self._process is not None and self._process.role == "plan":
            if self._ranks.rank == 0:
                budget.print_plan(self._job.layout, self._gpu)
            self._ranks.agree("the plan", "", PROGRAMS_DEADLINE_SECS)  # nobody ends while another one still comes
            raise SystemExit(0)
        lowered = executables.lower(self._job)
        self._compiles = count_compiles()
        if self._process is None or self._member is None:
            print(
                "leto: not started by `leto run`: training unprotected, with the same programs and the same results",
                file=sys.stderr,
                flush=True,
            )
            self._injector = Injector(None, len(self._job.layout.chunks))
            if self._ranks.count > 1:
                self._identify(lowered)
            compiled = self._compile(lowered)
            self._begin(compiled, private_arenas(self._job.layout, self._gpu), epoch=1)
            return
        self._listen(self._member, len(self._job.layout.chunks))
        identity = self._identify(lowered)
        if self._process.role == "shadow":
            self._wait_as_shadow(lowered, identity)
        else:
            run = self._compile_or_load(lowered, identity)
            self._ranks.agree("ready to train", "", PROGRAMS_DEADLINE_SECS)  # who is done first waits while nobody watches its steps
            self._claim()
            arenas = self._member.take_arenas(self._job.layout, self._gpu)
            self._begin(run, arenas, arenas.metadata.epoch)

    def _identify(self, lowered) -> executables.Identity:
        """What this process would train, once it is known that all ranks would train the same."""
        identity = executables.identify(self._job, lowered)
        arguments = {"session key": np.asarray(self._key_data).tobytes().hex(), "session steps": str(self.steps)}
        executables.require_equal_ranks(identity, arguments, self._ranks, PROGRAMS_DEADLINE_SECS)
        return identity

    def _compile(self, lowered, to_pack: bool = False) -> Mapping[str, Any]:
        """Compiled programs, once it is known that they write where they should and that there is memory for all of it."""
        compiled = executables.compile_all(lowered, to_pack)
        if self._gpu is not None:
            executables.check_in_place(self._job, compiled)
            alone = self._process is None  # then XLA has taken what it wants already
            level = str(Level.NONE.value) if self._process is None else self._process.shadow_level
            budget.check(self._job.layout, {} if alone else compiled, self._gpu, level)
        return compiled

    def _compile_or_load(self, lowered, identity: executables.Identity) -> Mapping[str, Callable]:
        """As trainer: executables from the job if it has any, else compiled here and published."""
        member = self._member
        assert member is not None
        found = member.published()
        if self._ranks.agree("programs", "" if found is not None else "has none", PROGRAMS_DEADLINE_SECS):  # then all make them together
            kept = cache.load(identity) if self._keeps_programs else None
            run: Mapping[str, Callable]
            if kept is None:
                compiled = self._compile(lowered, to_pack=True)
                run, blob = compiled, executables.pack(compiled)
                if self._keeps_programs:
                    cache.store(identity, blob)
            else:
                run, blob = executables.unpack(memoryview(kept), lowered), kept
            member.lease()
            member.publish(identity.to_bytes(), blob)
            member.event("published", bytes=len(blob))
            return run
        assert found is not None
        return self._load(found, lowered, identity)

    @property
    def _keeps_programs(self) -> bool:
        """Whether compiled programs outlive the job: on the CPU, where the user has a compile cache of his own (JAX's does it on a GPU)."""
        directory, process = jax.config.jax_compilation_cache_dir, self._process
        own = process is not None and directory and Path(directory).is_relative_to(process.job_dir)
        return self._gpu is None and bool(directory) and not own and self._ranks.count == 1

    def _load(self, found, lowered, identity: executables.Identity) -> Mapping[str, Callable]:
        theirs, blob = found
        with blob:
            executables.Identity.from_bytes(theirs).require_equal(identity)
            return executables.unpack(memoryview(blob.read()), lowered)

    def _wait_as_shadow(self, lowered, identity: executables.Identity) -> None:
        """Loads, rehearses, and blocks until promoted, at its level; then does what is left, maps the retained state and goes on."""
        member = self._member
        assert member is not None
        member.wait_at(Level.DEVICE)
        before = self._compiles()
        member.enter("load")
        found = member.published(PROGRAMS_DEADLINE_SECS)
        if found is None:
            raise errors.DeadlineError(
                f"shadow: expected the first trainer to publish its programs within {PROGRAMS_DEADLINE_SECS:.0f} s, found none"
            )
        run = self._load(found, lowered, identity)
        if member.promotion is None:
            programs_over_ranks = executables.over_ranks(self._job, run)
            skipped = prewarm.rehearse(
                self._job, programs_over_ranks, self._key_data, self._device, [self._rehearse_user], self._ranks, member.enter
            )
            member.wait_at(Level.LOADED, skipped)
            before = self._compiles()
        promotion = member.promotion
        assert promotion is not None
        started = time.monotonic_ns()
        self._claim()
        arenas = member.take_arenas(self._job.layout, self._gpu)
        self._begin(run, arenas, promotion.epoch, promotion, before, started)

    def _rehearse_user(self, retained: Retained, commit: int) -> None:
        """State views, metrics and the user's warm programs, on scratch memory."""
        state = retained_state(retained, commit)
        batch = jax.tree_util.tree_unflatten(self._job.trees.batch, prewarm.blank_batch(self._job))
        if self._gpu is None:
            _ = state.params, state.opt_state, state.companions, state.extras
        for function in self._warm:  # on a GPU only these are worth the memory of a copy of what they read
            jax.block_until_ready(function(state, batch))
        jax.block_until_ready(self._metrics_of(retained, commit))
        state.die()

    def _begin(
        self,
        run: Mapping[str, Callable],
        arenas: Arenas,
        epoch: int,
        promotion: Promotion | None = None,
        compiles: int = 0,
        started: int = 0,
    ) -> None:
        """Fills the arenas or recovers what is in them; leaves the session at a commit."""
        stages: dict[str, float] = {}
        clock = time.monotonic_ns()
        if promotion is not None:
            if promotion.level < Level.LOADED:
                stages["rise"] = (started - promotion.ns) / 1e9
            stages["attach"] = (clock - started) / 1e9

        @contextlib.contextmanager
        def stage(name: str):
            begin = time.monotonic_ns()
            yield
            stages[name] = (time.monotonic_ns() - begin) / 1e9

        self._programs, self._arenas = run, arenas
        self._ring = Ring(arenas.host, self._job.layout)
        recovered = self._attach(epoch, stage)
        action, reason, again = recovered.plan.action.value, recovered.plan.reason, False
        if recovered.plan.action is Action.FILL:
            self._at(Phase.INIT, 0, -1)  # no takeover: nothing was there
            found = self._newest()
            again = self._process is not None and self._process.incarnation > 1 and (found is not None or self._failed_commit > 0)
            with stage("restore" if again else "fill"):
                self._commit = self._fill(found)
            if again:
                action, reason = RESTORED, f"from step {self._commit}"
        else:
            assert recovered.commit is not None
            self._commit = recovered.commit
        self._keep()
        self._announce(self._commit)
        self._ranks.agree("at a commit", "", PROGRAMS_DEADLINE_SECS)  # a revocation counts on all ranks before one of them computes
        filled = self._retained.metadata.latest(Kind.LIFE)
        self._first = filled.step if filled is not None else 0
        self.state = self._view()
        with stage("data"):
            self._pending = self._reposition()
        self._takeover = None
        if again:
            self._takeover = self._way_back(stages, compiles)
        elif recovered.plan.action is not Action.FILL:
            self._takeover = _Takeover(time.monotonic_ns(), stages, compiles, action, reason, recovered.repaired_pages)
        self._rows = MetricsFile(self._process.job_dir / METRICS_FILE if self._process and self._ranks.rank == 0 else None, self._commit)
        if self._commit > self._first:
            self._rows.add(self._commit, self._metrics())
        if self._control is not None:
            self._control[Word.COMMIT] = self._commit
        if self._member is not None:
            self._member.event("attached", commit=self._commit, action=action, reason=reason, stages=stages)
        if self._control is not None:
            self._control.enter(Phase.BODY)  # what the script does from here on is its own
            if self._member is not None and self._ranks.count == 1:  # of several, the others would wait in a collective
                self._retry = Retry(self._member, self._control, self._let_go, self._attach_again)

    def _attach(self, epoch: int, stage: rollforward.Stage = lambda name: contextlib.nullcontext()) -> rollforward.Recovered:
        """Views of the retained memory, a transaction over it, and what the last one has left brought to a commit."""
        arenas = self._arenas
        self._retained = Retained(self._job, arenas.device, arenas.host, arenas.metadata, self._device, arenas.peer)
        self._transaction = transaction_type(self._job)(
            self._retained,
            executables.over_ranks(self._job, self._programs),
            epoch,
            self._at,
            self._ranks.rank,
            self._process is not None and self._process.wait_for_parity,
        )
        return rollforward.recover(self._retained, self._transaction, stage, self._pictures, self._ranks.rank, self._exchange)

    def _let_go(self) -> None:
        """Drops what lives in device memory besides what is retained, for `_attach_again`."""
        self.state.die()
        self._transaction.abandon()

    def _attach_again(self, epoch: int) -> rollforward.Recovered:
        """The step that was cut off is done now, or is to be tried again."""
        stale_ns = self._transaction.stale_ns
        recovered = self._attach(epoch)
        self._transaction.stale_ns += stale_ns
        if recovered.commit is not None and recovered.commit > self._commit:
            self._at(Phase.BODY, recovered.commit, -1)
        return recovered

    def _pictures(self, mine: Picture) -> list[Picture]:
        """What every rank's retained memory shows."""
        if self._ranks.count == 1:
            return [mine]
        return [Picture.from_bytes(data) for data in self._ranks.gather("pictures", mine.to_bytes(), PROGRAMS_DEADLINE_SECS)]

    def _exchange(self, mine: bytes) -> list[bytes]:
        return self._ranks.gather("copies", mine, PROGRAMS_DEADLINE_SECS)

    def _fill(self, found: Frozen | None) -> int:
        """The first state, or a copy of one. Returns its step."""
        if found is None:
            self._transaction.fill(0, *self._transaction.init(self._key_data))
            return 0
        self._ring.mark(found.step, found.positions[0])
        self._transaction.fill(found.step, *found.for_fill(self._job))
        return found.step

    def _listen(self, member: Member, chunks: int) -> Control:
        """Maps the control words, and what is read there. chunks: of an update."""
        control = self._control = member.control()
        if self._ranks.count > 1:
            self._announced = Announced(member.control(0), (REQUEST, *TIERS))
        self._injector = Injector(control, chunks, self._gpu)
        return control

    def _claim(self) -> None:
        """The control words are this trainer's from here on."""
        assert self._process is not None
        assert self._control is not None
        self._failed_commit = self._control[Word.COMMIT]
        self._control.claim(os.getpid(), self._process.incarnation, self.steps)

    def _way_back(self, stages: dict[str, float], compiles: int) -> _Takeover:
        """From a copy of the state to the step that was running when the failure came."""
        goal = min(self._failed_commit + 1, self.steps)
        return _Takeover(time.monotonic_ns(), stages, compiles, RESTORED, f"from step {self._commit}", restored=self._commit, goal=goal)

    def _newest(self) -> Frozen | None:
        """This rank's part of the newest copy that the ranks may go on from: of those of this job, if they are not its first, and of the
        directory that the job was asked to start from. Raises CheckpointError if it was asked to, and there is none."""
        process = self._process
        if process is None or (process.incarnation == 1 and not process.resume):
            return None
        from leto_jax.checkpoint import keeper, persistent

        if process.incarnation == 1:
            versions = persistent.versions(process.resume)
            found = keeper.newest(self._form, None, [process.resume], self._ranks)
            if found is None:
                raise persistent.none_good(process.resume, versions)
        else:
            own = process.tiers.directory if process.tiers.every else ""  # else it is only for what is asked for
            found = keeper.newest(self._form, self._host_memory(), filter(None, (own, process.resume)), self._ranks)
            if found is None:
                return None
        state, where = found
        print(f"leto: resumed from step {state.step} of {where}", file=sys.stderr, flush=True)
        return state

    def _host_memory(self) -> HostMemory | None:
        """The tier in the state manager's memory, if the job has one."""
        member, process = self._member, self._process
        if member is None or process is None or not process.tiers.copies_every:
            return None
        if self._copies is None:
            from leto_jax.checkpoint import hostmemory

            nbytes = hostmemory.nbytes(self._form)
            arenas = member.take_memory(hostmemory.names(process.rank), nbytes)
            peers = hostmemory.peers(process.rank, process.ranks, process.tiers.copies)
            theirs = {peer: member.take_memory(hostmemory.names(process.rank, peer), nbytes) for peer in peers}
            self._copies = hostmemory.HostMemory(self._form, arenas, theirs)
        return self._copies

    def _keep(self) -> None:
        """From here on, copies are taken when they are due."""
        process, member = self._process, self._member
        if process is not None and member is not None and (process.tiers.every or process.tiers.copies_every):
            from leto_jax.checkpoint.keeper import Keeper

            if process.tiers.every and process.ranks > 1:
                _ = self._stage  # now, since there may be no memory for it
            tell = functools.partial(member.event, "saved")
            self._keeper = Keeper(self._form, process.tiers, self._commit, self._host_memory(), self._freeze, tell)

    def _freeze(self, step: int, leaves: Leaves, position: bytes) -> Callable[[], Frozen | None]:
        """Copies this rank's part of the state. Returns what is left to do to have the whole of it, None where another rank has it then."""
        if self._ranks.count > 1:
            return self._stage.freeze(step, leaves, position)
        state = frozen.copy(step, leaves, position)
        return lambda: state

    @functools.cached_property
    def _stage(self) -> Stage:
        """Where the ranks put their parts of a checkpoint. All of them come here."""
        member, process = self._member, self._process
        assert member is not None
        assert process is not None
        from leto_jax.checkpoint import hostmemory, stage

        nbytes, names = hostmemory.nbytes(self._form), [stage.name(rank) for rank in range(process.ranks)]
        arenas = member.take_memory([names[process.rank]], nbytes)
        if process.rank == 0:
            arenas += [member.open_memory(name, nbytes, stage.WAIT_SECS) for name in names[1:]]
        return stage.Stage(self._form, arenas, process.incarnation)

    def _reposition(self) -> dict[int, PyTree]:
        """Puts the data stream where it stood: batches that were already drawn, by step (the replayed one, and one that must be redone)."""
        drawn: dict[int, PyTree] = {}
        for step in (self._commit, self._commit + 1):
            entry = self._ring.get(step)
            if entry is None:
                if step == self._commit > self._first and self._ring.get(step + 1) is None:
                    raise errors.UnrecoverableError(
                        f"ring: the entry of step {step} is damaged, so the data position is lost; restore from a checkpoint"
                    )
                continue
            if step <= self._first or step > self.steps:
                continue
            if not drawn:
                self._source.restore(entry.position)
            batch = self._source.next(step)
            leaves = stored_batch(batch)
            if self._ring.digest(leaves) != entry.digest:
                if entry.leaves is None:
                    raise errors.UsageError(
                        f"dataset: expected the same batch for step {step} as before the failure, found another one; "
                        "f(step) must be a pure function, a Grain dataset deterministic"
                    )
                batch = jax.tree_util.tree_unflatten(self._job.trees.batch, entry.leaves)
            drawn[step] = batch
        if not drawn and self._commit == self._first > 0:
            entry = self._ring.get(self._first)
            if entry is None:
                raise errors.UnrecoverableError(
                    f"ring: the data position of checkpoint {self._first} is damaged; resume from the checkpoint again"
                )
            self._source.restore(entry.position)
        return drawn

    def _position(self) -> bytes:
        """Where the data stands: before the first batch whose step is not committed."""
        for step in sorted(self._pending):
            entry = self._ring.get(step)
            if step > self._commit and entry is not None:
                return entry.position
        return self._source.position()

    def _serve_checkpoint(self) -> None:
        """Copies the state where a copy is due, or if the agent asks for one. Between two steps: nothing is updated meanwhile."""
        step, several = self._commit, self._ranks.count > 1
        due = self._announced.take(step) if several and self._announced is not None else self._due(step)
        if due - {REQUEST}:
            assert self._keeper is not None
            with self.section("checkpoint", CHECKPOINT_SECS):
                self._keeper.take(due, step, self._leaves, self._position)
        if REQUEST in due:
            self._save_as_asked()
        if several:
            self._announce(step + 1)

    def _due(self, step: int) -> set[str]:
        """The copies that are to be taken of `step`, as far as this rank knows."""
        due = self._keeper.due(step) if self._keeper is not None else set()
        control, several = self._control, self._ranks.count > 1
        busy = several and self._keeper is not None and self._keeper.is_saving  # the ranks have one place for their parts
        if control is not None and control[Word.CHECKPOINT_ASKED] != control[Word.CHECKPOINT_TAKEN] and not busy:
            due = due - {PERSISTENT_TIER} if several else due
            due.add(REQUEST)
        return due

    def _announce(self, step: int) -> None:
        """Rank 0 of several says which copies all of them take of `step`."""
        if self._announced is not None and self._ranks.rank == 0:
            self._announced.say(step, self._due(step))

    def _save_as_asked(self) -> None:
        """A checkpoint that the agent asks for; of several ranks the first one writes it."""
        control, member = self._control, self._member
        assert control is not None
        assert member is not None
        from leto_jax.checkpoint import persistent

        asked, begin, problem = control[Word.CHECKPOINT_ASKED], time.monotonic(), ""
        directory, last = member.checkpoint_request()
        if not directory and self._ranks.rank == 0:  # another rank may have seen it, and leaves its part for nobody
            return
        with self.section("checkpoint", CHECKPOINT_SECS):
            try:
                state = self._freeze(self._commit, self._leaves, self._position())()
                if state is not None:
                    persistent.save(self._form.whole, state, directory)
            except errors.LetoError as exception:
                problem = str(exception)
        if self._ranks.rank == 0:
            control[Word.CHECKPOINT_TAKEN] = asked
            member.event("checkpoint", commit=self._commit, path=directory, secs=time.monotonic() - begin, error=problem)
        elif problem:
            print(f"leto: no part of checkpoint {self._commit}: {problem}", file=sys.stderr, flush=True)
        if last:
            time.sleep(LAST_SECS)  # the agent ends this process; no step is trained that nobody would see

    # The loop ---------------------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[tuple[int, PyTree]]:
        if not self._entered or self._iterated:
            raise errors.UsageError(
                "session: expected `with leto.session(...) as s:` and one `for t, batch in s:`, found iteration outside or a second one"
            )
        self._iterated = True
        self._serve_checkpoint()
        if self._takeover is not None and self._commit in self._pending:
            self.replayed, self._current = True, self._commit
            if self._control is not None:
                self._control.enter(Phase.BODY)
            yield self._commit, self._pending.pop(self._commit)
            self._require_stepped()
        self.replayed = False
        while self._commit < self.steps:
            self._serve_checkpoint()
            step = self._commit + 1
            if step in self._pending:
                batch, position = self._pending.pop(step), None
            else:
                position = self._source.position()
                try:
                    batch = self._source.next(step)
                except StopIteration:
                    print(f"leto: the dataset ended before step {step} of {self.steps}", file=sys.stderr, flush=True)
                    return
            if position is not None:
                self._drawn(step, position, batch)
            self._current = step
            yield step, batch
            self._require_stepped()
        self._serve_checkpoint()

    def _require_stepped(self) -> None:
        if self._current is not None:
            raise errors.UsageError(
                f"session: the loop body of step {self._current} ended without `state, metrics = s.step(state, batch)`; call it once in each iteration"
            )

    def step(self, state: State, batch: PyTree) -> tuple[State, dict[str, jax.Array]]:
        """One training step: (the next state, metrics as arrays, 'loss' among them). The state passed in is dead afterwards.

        batch: the one that the loop gave, or what a deterministic body made of it, with the same leaves.
        Raises DeadStateError, UsageError (batch of another shape), NonFiniteLossError (policy 'stop').
        Crash: at any instruction, another process finishes or repeats this step with the same result.
        """
        if not isinstance(state, State) or state is not self.state or not state.alive:
            found = f"the state of step {state.step}" if isinstance(state, State) else type(state).__name__
            raise errors.DeadStateError(
                f"s.step: expected the current state (step {self._commit}), found {found}, already consumed; write: state, metrics = s.step(state, batch)"
            )
        if self._current is None:
            raise errors.UsageError(
                "s.step: expected one call in each iteration of `for t, batch in s`, found a call outside or a second one"
            )
        step, self._current = self._current, None
        if self.replayed:
            return self.state, self._metrics()
        leaves = self._checked(batch, step)
        if jax.local_devices()[0] is not self._device:
            raise errors.UsageError(
                "s.step: the JAX backend was replaced (jax.clear_backends, jax.extend.backend.clear_backends); its views of the state are gone, do not call it in a session"
            )
        begin = time.monotonic_ns()
        if self._control is not None:
            self._control[Word.ARMED_SINCE_NS] = begin
        old = self.state
        begin += self._advance(step, leaves)
        end = time.monotonic_ns()
        self._commit = step
        self.step_secs.append((end - begin) / 1e9)
        self.state = self._view()
        old.die()
        if self._control is not None:
            self._observe_commit(begin, end)
        metrics = self._metrics()
        self._rows.add(step, metrics)
        return self.state, metrics

    @contextlib.contextmanager
    def section(self, name: str, timeout_secs: float) -> Iterator[None]:
        """Anything long outside of `s.step` (evaluation, a checkpoint): the watchdog waits for it up to `timeout_secs`."""
        if not timeout_secs > 0:
            raise errors.UsageError(f"section {name!r}: timeout_secs: expected a positive number of seconds, found {timeout_secs!r}")
        control = self._control
        outer = control[Word.SECTION_DEADLINE_NS] if control is not None else 0
        if control is not None:
            control[Word.SECTION_DEADLINE_NS] = time.monotonic_ns() + int(timeout_secs * 1e9)
            control.enter(Phase.SECTION)
        try:
            yield
        finally:
            if control is not None:
                control[Word.SECTION_DEADLINE_NS] = outer
                control.enter(Phase.SECTION if outer else Phase.BODY)

    # Leaving ----------------------------------------------------------------------------------------------------------------------

    def __exit__(self, kind, exception, traceback) -> None:
        if kind is None and self._iterated:
            self._finish()
        elif isinstance(exception, errors.NonFiniteLossError):
            print(f"leto: stopped: {exception}", file=sys.stderr, flush=True)
            if self._member is not None:
                self._member.event("stopped", reason=str(exception))
            raise SystemExit(errors.GAVE_UP) from exception

    def _finish(self) -> None:
        if self._keeper is not None:
            self._keeper.close()
        self._settle()
        if self._control is not None:
            self._control.enter(Phase.DONE)  # now, so that nobody takes the wait for a body that hangs
        self._ranks.agree("the final commit", "", CHECKPOINT_SECS)  # who is done stays until nobody may need the step once more
        digest = state_digest(self._form, self._leaves, self._commit, self._source.position())
        loss = self._loss()
        if self._control is not None:
            if self._takeover is not None and not self._control[Word.STEPS_DONE]:  # what was cut off was the last step
                now = time.monotonic_ns()
                self._taken_over(self._takeover, now, now)
            self._control[Word.ARMED_SINCE_NS] = 0
        print(f"final step={self._commit} loss={loss!r} digest=sha256:{digest}", flush=True)
        if self._member is not None:
            self._member.event("done", commit=self._commit, loss=loss, digest=digest)

    # What a session over memory of its own does in another way: `train.plain` -------------------------------------------------------

    @functools.cached_property
    def _form(self) -> Form:
        return frozen.form_of(self._job)

    @property
    def _batch_form(self) -> tuple[tuple[LeafSpec, ...], Any]:
        """The leaves of a batch, and the tree that they make."""
        return self._job.layout.spec.batch, self._job.trees.batch

    def _advance(self, step: int, leaves: Sequence[np.ndarray]) -> int:
        """From commit `step - 1` to commit `step`. Returns the nanoseconds that do not belong to the step."""
        attempt = lambda: self._transaction.step(step, leaves, self._key_data)
        if self._retry is not None:
            return self._retry.run(step, attempt)
        attempt()
        return 0

    def _view(self) -> State:
        return retained_state(self._retained, self._commit)

    def _leaves(self, group: str) -> Iterable[np.ndarray]:
        """The leaves of a group of the state as it is now, in storage form. Between two steps only."""
        return self._retained.arrays(group, self._commit)

    def _metrics(self) -> dict[str, jax.Array]:
        return self._metrics_of(self._retained, self._commit)

    def _drawn(self, step: int, position: bytes, batch: PyTree) -> None:
        """A batch was drawn, from where `position` says."""
        self._ring.put(step, position, self._checked(batch, step))

    @property
    def _stale_ns(self) -> tuple[int, int]:
        """How long the parity on the host was behind the data, and that with the peer, -1 without one."""
        return self._transaction.stale_ns, self._transaction.peer_stale_ns

    def _settle(self) -> None:
        """Nothing is on its way any more."""
        self._transaction.wait_drained()

    def _loss(self) -> float:
        header = self._retained.header()
        if self._commit == self._first or header is None:
            return float("nan")
        return records.bits_float(header.body[0])

    # ------------------------------------------------------------------------------------------------------------------------------

    def _at(self, phase: Phase, step: int, chunk: int) -> None:
        """Told by the transaction where the step is: control words for the agent, then crash points."""
        control = self._control
        if control is not None:
            control.enter(phase)
            if phase in (Phase.DRAIN, Phase.BODY):
                control[Word.COMMIT] = step
            if phase is Phase.BODY:
                control[Word.ARMED_SINCE_NS] = 0
            self._injector.check(phase, step, chunk)
        faults.reach(phase, step, chunk)

    def _observe_commit(self, begin: int, end: int) -> None:
        """Counts a step of this process; begin, end: in CLOCK_MONOTONIC nanoseconds."""
        control, takeover, member = self._control, self._takeover, self._member
        assert control is not None
        assert member is not None
        control[Word.LAST_STEP_NS] = end - begin
        control[Word.STEP_NS_TOTAL] = control[Word.STEP_NS_TOTAL] + end - begin
        control[Word.STALE_NS_TOTAL], control[Word.PEER_STALE_NS_TOTAL] = self._stale_ns
        control[Word.STEPS_DONE] = control[Word.STEPS_DONE] + 1
        first, on_its_way = control[Word.STEPS_DONE] == 1, takeover is not None
        if first and (takeover is None or takeover.restored is not None):
            member.event("first_step", commit=self._commit, secs=(end - begin) / 1e9, recovering=on_its_way)
        if takeover is None:
            return
        if first:
            takeover.first_began_ns = begin
        if self._commit >= takeover.goal:
            self._taken_over(takeover, begin, end)
            self._takeover = None

    def _taken_over(self, takeover: _Takeover, begin: int, end: int) -> None:
        """Tells the agent that the training goes on; begin, end: of the step with which that is so."""
        assert self._member is not None
        first = takeover.first_began_ns or begin
        takeover.stages["body"] = (first - takeover.attached_ns) / 1e9
        if takeover.restored is not None:
            takeover.stages["recompute"] = (begin - first) / 1e9
        takeover.stages["first_step"] = (end - begin) / 1e9
        self._member.event(
            "takeover",
            commit=self._commit,
            finished_ns=end,
            stages=takeover.stages,
            compiles=self._compiles() - takeover.compiles,
            action=takeover.action,
            reason=takeover.reason,
            repaired_pages=takeover.repaired_pages,
            restored=takeover.restored,
        )

    def _checked(self, batch: PyTree, step: int) -> list[np.ndarray]:
        """A batch's leaves in storage form. Raises UsageError naming the first leaf that is not as planned."""
        canonical, (expected, tree) = data.canonical(batch), self._batch_form
        found = programs.leaf_specs(canonical)
        if jax.tree_util.tree_structure(canonical) != tree or found != expected:
            pair = next(((a, b) for a, b in zip(expected, found, strict=False) if a != b), None)
            detail = (
                f"expected {pair[0].describe()}, found {pair[1].describe()}"
                if pair
                else f"expected {len(expected)} leaves as in the first batch, found {len(found)}"
            )
            raise errors.UsageError(
                f"batch of step {step}: {detail}; every batch must have the shapes of the first one (drop or pad the last, partial one)"
            )
        return stored_batch(canonical)

    def _metrics_of(self, retained: Retained, commit: int) -> dict[str, jax.Array]:
        return user_tree(retained.metrics(commit), retained.layout.spec.metrics, self._job.trees.metrics, self._device)


def stored_batch(batch: PyTree) -> list[np.ndarray]:
    return [
        np.asarray(programs.to_storage(leaf)) if leaf.dtype.name.startswith(("int4", "uint4", "int2", "uint2")) else leaf
        for leaf in jax.tree_util.tree_leaves(batch)
    ]

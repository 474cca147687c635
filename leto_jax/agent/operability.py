"""Can the machine and the devices of a job go on after a failure? Asked after the fence, before any recovery in place.

Facts are read in `nvml`, `xid` and `probe`; here they are judged, by pure functions. Fails closed: a question that cannot be answered means
no. What is not supported is said, and where it matters (recovery action, Xids) a probe kernel decides in its place.
`python -m leto_jax.agent.operability` prints the verdict on each GPU as JSON, for `leto doctor`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leto_jax import errors
from leto_jax.agent import nvml, probe, xid
from leto_jax.agent.nvml import GpuFacts, RecoveryAction, Snapshot
from leto_jax.agent.xid import Xid, XidClass, XidWatch
from leto_jax.arena import cuda
from leto_jax.manager import limits

MIN_FREE_BYTES = 256 << 20
MIN_DISK_BYTES = 64 << 20
NVML_SECS = 10.0
POLL_SECS = 1.0

OPERABLE_ACTIONS = (RecoveryAction.NONE, RecoveryAction.DRAIN_AND_RESET)
"""The second means a contained error of the memory: a new process may use the GPU at once; reset it when that is convenient."""
CUDA_KINDS = frozenset({"illegal_address", "trap", "spin", "hang", "cuda_error", "sigabrt"})
"""Kinds of failure that a GPU may be the cause of. An abort is how XLA ends on some CUDA errors."""
KILL_KINDS = frozenset({"sigkill", "sigterm", "sigstop", "stopped", "page_loss", "page_corruption", "inoperable"})
"""Kinds in which the process was ended from outside: what the driver then cleans up says nothing about the GPU."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """operable: whether a recovery in place may be tried. reason: for the journal. evidence: what it rests on, ready for JSON. gpus: those that
    cannot go on, as far as it is one of them."""

    operable: bool
    reason: str
    evidence: dict[str, Any] = dataclasses.field(default_factory=dict)
    gpus: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What is known of a job's GPUs. start: when the job began. last: at the last check. fresh: Xids since then; seen: all of them.

    failure_kind: the journal's kind, for a signal its name in small letters. unwatched: GPUs that do not tell of Xids.
    probe_failed: the last one that was run.
    """

    failure_kind: str
    start: Snapshot
    last: Snapshot
    now: Snapshot
    seen: tuple[Xid, ...] = ()
    fresh: tuple[Xid, ...] = ()
    unwatched: tuple[int, ...] = ()
    probe_failed: bool = False


def check(job_dir: Path) -> tuple[bool, str]:
    """(operable, reason) of the machine alone: memory, limits, disk. Cost: three small reads of /proc and /sys."""
    try:
        budget = limits.available_bytes()
        disk = shutil.disk_usage(job_dir).free
    except (OSError, errors.MemoryBudgetError) as exception:
        return False, f"memory or disk cannot be read: {exception}"
    if budget.available < MIN_FREE_BYTES:
        return False, f"expected {MIN_FREE_BYTES >> 20} MiB of free memory, found {budget.available >> 20} MiB ({budget.source})"
    if disk < MIN_DISK_BYTES:
        return False, f"expected {MIN_DISK_BYTES >> 20} MiB of free disk at {job_dir}, found {disk >> 20} MiB"
    return True, f"{budget.available >> 20} MiB of memory, {disk >> 20} MiB of disk free"


# Judging ----------------------------------------------------------------------------------------------------------------------------


def action_name(number: int | None) -> str:
    """A recovery action in words."""
    if number is None:
        return "unknown to this driver"
    known = number in RecoveryAction.__members__.values()
    return RecoveryAction(number).name.lower().replace("_", " ") if known else f"{number}, which is newer than this program"


def problems_of(facts: GpuFacts) -> list[str]:
    """Why one GPU cannot go on, from its own state; [] if it can."""
    found = []
    if facts.mig:
        found.append("MIG is on, which is not supported: switch it off (`nvidia-smi -mig 0`)")
    if facts.mps_clients:
        found.append(
            f"MPS is active with {facts.mps_clients} clients: a fatal fault of one reaches all; end it (`echo quit | nvidia-cuda-mps-control`)"
        )
    if facts.recovery_action is not None and facts.recovery_action not in OPERABLE_ACTIONS:
        found.append(f"the driver asks for a recovery action first: {action_name(facts.recovery_action)}")
    if facts.remap_failed:
        found.append("a row of its memory could not be remapped: reset it, and replace it if that does not help")
    return found


def problems(evidence: Evidence) -> list[tuple[int, str]]:
    """Why GPUs of a job cannot go on, each with its number; [] if they can by themselves, as far as NVML knows."""
    found = [(facts.gpu, problem) for facts in evidence.now.gpus for problem in problems_of(facts)]
    for item in evidence.seen:
        wanted = xid.classify(item.number)
        if wanted is XidClass.UNKNOWN:
            found.append((item.gpu, f"Xid {item.number}, whose meaning is unknown here"))
        elif wanted not in xid.OPERABLE:
            found.append((item.gpu, f"Xid {item.number}, after which one has to {wanted}"))
    return found


def links_lost(start: Snapshot, now: Snapshot) -> list[str]:
    """Links between several GPUs that were there and are not."""
    if len(now.gpus) < 2:
        return []
    found = []
    for before, after in zip(start.gpus, now.gpus, strict=True):
        down = sorted(set(before.links_up or ()) - set(after.links_up or ()))
        if down:
            found.append(f"GPU {after.gpu}: NVLink {', '.join(map(str, down))} was up at the start of the job and is down")
    for one, other, capability in sorted(set(start.peers) - set(now.peers)):
        found.append(f"GPUs {one} and {other}: peer-to-peer {capability} worked at the start of the job and does not")
    return found


def needs_probe(evidence: Evidence) -> str:
    """Why a probe kernel has to be run before the GPUs are used again; '' if it need not.

    A process that was merely killed needs none, nor does the Xid that the driver's cleaning up after it may leave.
    """
    why = []
    if evidence.failure_kind in CUDA_KINDS:
        why.append(f"the failure was {evidence.failure_kind}")
    if evidence.probe_failed:
        why.append("the last probe failed")
    killed = evidence.failure_kind in KILL_KINDS
    numbers = sorted({item.number for item in evidence.fresh if not (killed and item.number == xid.CLEANUP)})
    if numbers:
        why.append(f"Xid {', '.join(map(str, numbers))}")
    for last, now in zip(evidence.last.gpus, evidence.now.gpus, strict=True):
        if (now.ecc_uncorrected or 0) > (last.ecc_uncorrected or 0):
            why.append(f"GPU {now.gpu} has new uncorrected ECC errors")
        if now.remap_pending and not last.remap_pending:
            why.append(f"GPU {now.gpu} has a new row to remap")
        if (now.retired_pages or 0) > (last.retired_pages or 0) or (now.retirement_pending and not last.retirement_pending):
            why.append(f"GPU {now.gpu} has new retired pages")
        if now.recovery_action is None:
            why.append(f"GPU {now.gpu} has no recovery action to ask for")
        elif now.recovery_action != last.recovery_action:
            why.append(f"GPU {now.gpu} has a new recovery action")
        if now.gpu in evidence.unwatched:
            why.append(f"GPU {now.gpu} does not tell of Xids")
    return "; ".join(why)


def describe(facts: GpuFacts, links: bool) -> str:
    """The state of a GPU in a line. links: whether its links were asked for."""
    remap, retired = "not supported", "not supported"
    if facts.remap_failed is not None:
        remap = "failed" if facts.remap_failed else "pending, reset it when convenient" if facts.remap_pending else "none"
    if facts.retired_pages is not None:
        retired = f"{facts.retired_pages}{', more after a reset' if facts.retirement_pending else ''}"
    said = {
        "recovery action": action_name(facts.recovery_action),
        "uncorrected ECC errors": "not supported" if facts.ecc_uncorrected is None else facts.ecc_uncorrected,
        "row remapping": remap,
        "retired pages": retired,
        "MPS": "not supported" if facts.mps_clients is None else f"{facts.mps_clients} clients" if facts.mps_clients else "none",
    }
    if links:
        said["NVLinks up"] = "not supported" if facts.links_up is None else len(facts.links_up)
    return ", ".join(f"{name} {value}" for name, value in said.items())


# Asking -----------------------------------------------------------------------------------------------------------------------------


def within(secs: float, what: str, call: Callable[[], Any]) -> Any:
    """Result of `call`, made in a thread of its own. Raises what it raises; DeadlineError after `secs`, and the thread is left behind."""
    box: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            box.put((call(), None))
        except BaseException as exception:
            box.put((None, exception))

    threading.Thread(target=work, name="leto-nvml", daemon=True).start()
    try:
        result, raised = box.get(timeout=secs)
    except queue.Empty:
        raise errors.DeadlineError(f"{what} did not answer within {secs:g} s") from None
    if raised is not None:
        raise raised
    return result


def _no_mps(environ: Mapping[str, str]) -> None:
    """Raises DeviceError if MPS is active."""
    try:
        found = cuda.mps_is_active(environ.get("CUDA_MPS_PIPE_DIRECTORY"))
    except OSError as exception:
        raise errors.DeviceError(f"whether MPS is active cannot be told: {exception}") from exception
    if found:
        raise errors.DeviceError(cuda.MPS_FOUND)


class Operability:
    """The question for one job. `start` once its GPUs are known, `poll` now and then, `check` after each failure, `close` at the end.

    gpus: as CUDA numbers them under `environ`; none on the CPU. library, run_probe, clock: for tests. One thread uses it.
    """

    def __init__(
        self,
        job_dir: Path,
        gpus: Sequence[int],
        environ: Mapping[str, str] = os.environ,
        *,
        library: Callable[[], Any] = nvml.library,
        run_probe: Callable[[Sequence[int], Mapping[str, str]], dict[int, str]] = probe.run,
        clock: Callable[[], float] = time.time,
        nvml_secs: float = NVML_SECS,
    ):
        self._job_dir, self._gpus, self._environ = job_dir, tuple(gpus), environ
        self._library, self._run_probe, self._clock, self._nvml_secs = library, run_probe, clock, nvml_secs
        self._nvml: Any = None
        self._indices: dict[int, int] = {}
        self._watch: XidWatch | None = None
        self._start: Snapshot | None = None
        self._last: Snapshot | None = None
        self._polled = 0.0
        self._probe_failed = False
        self._failed = "it was not asked at the start of the job"
        self._stuck = False  # a thread of ours waits for NVML: nobody else shall

    def start(self) -> Verdict:
        """Opens NVML, remembers how things are, and begins to watch for Xids. Does not raise: the verdict says what is wrong.

        Cost: `NVML_SECS` at most, usually milliseconds where the driver is in use.
        """
        if not self._gpus:
            return self._verdict([], [])
        try:
            self._ask(self._open)
        except errors.LetoError as exception:
            self._failed = str(exception)
            return self._verdict([self._failed], [])
        assert self._start is not None
        return self._judge(Evidence("", self._start, self._start, self._start), "")

    def _open(self) -> None:
        _no_mps(self._environ)
        self._nvml = self._library()
        self._indices = nvml.job_indices(self._nvml, self._environ, self._gpus)
        self._watch = XidWatch(self._nvml, self._indices)  # before the facts: what comes in between is seen twice, not missed
        self._start = self._last = nvml.read(self._nvml, self._indices)

    def poll(self) -> None:
        """Collects Xids, once in `POLL_SECS` at most. Cost: microseconds; once `NVML_SECS`, if NVML hangs."""
        now = time.monotonic()
        if self._watch is not None and not self._stuck and now >= self._polled + POLL_SECS:
            self._polled, watch = now, self._watch
            with contextlib.suppress(errors.LetoError):  # then nothing is asked any more, and the next check says why
                self._ask(lambda: watch.poll(self._clock()))

    def check(self, failure_kind: str) -> Verdict:
        """Whether the job can go on with its devices. Does not raise.

        failure_kind: the kind of the failure as the journal has it, or the signal's name for a signal; letters of any size.
        Cost: milliseconds; where `needs_probe` says so, a probe kernel on each GPU too (0.3 s or more). `NVML_SECS` and `probe.PROBE_SECS` at most.
        """
        if not self._gpus:
            return self._verdict([], [])
        watch, start, last = self._watch, self._start, self._last
        if watch is None or start is None or last is None:
            return self._verdict([f"nothing is known of the GPUs: {self._failed}"], [])

        def look() -> Snapshot:
            _no_mps(self._environ)
            watch.poll(self._clock())
            return nvml.read(self._nvml, self._indices)

        try:
            now = self._ask(look)
        except errors.LetoError as exception:
            return self._verdict([str(exception)], [])
        if watch.failed:
            return self._verdict([f"Xids may have been missed: {watch.failed}"], [])
        seen, fresh = tuple(watch.seen.values()), watch.take()
        evidence = Evidence(failure_kind.lower(), start, last, now, seen, fresh, watch.unwatched, self._probe_failed)
        self._last = now
        return self._judge(evidence, needs_probe(evidence))

    def _judge(self, evidence: Evidence, why: str) -> Verdict:
        wrong, lost = problems(evidence), links_lost(evidence.start, evidence.now)
        several = len(evidence.now.gpus) > 1
        notes = [f"GPU {facts.gpu}: {describe(facts, links=several)}" for facts in evidence.now.gpus]
        shown: dict[str, Any] = {
            **dataclasses.asdict(evidence.now),
            "xids": [{**item._asdict(), "class": xid.classify(item.number).value} for item in evidence.seen],
            "probe": None,
        }
        if why and not wrong and not lost:
            began = time.monotonic()
            results = self._run_probe(self._gpus, self._environ)
            shown["probe"] = {"why": why, "results": results, "secs": time.monotonic() - began}
            wrong = [(gpu, problem) for gpu, problem in results.items() if problem]
            self._probe_failed = bool(wrong)
            notes.append(f"a probe kernel ran well ({why})")
        gpus = tuple(sorted({gpu for gpu, _ in wrong}))
        return self._verdict([*(f"GPU {gpu}: {problem}" for gpu, problem in wrong), *lost], notes, shown, gpus)

    def _verdict(
        self, found: Sequence[str], notes: Sequence[str], evidence: dict[str, Any] | None = None, gpus: tuple[int, ...] = ()
    ) -> Verdict:
        """With the machine's own part. found: what is wrong with the GPUs. notes: what to say if nothing is."""
        well, reason = check(self._job_dir)
        wrong = [*([] if well else [reason]), *found]
        return Verdict(not wrong, "; ".join(wrong or [reason, *notes]), {"machine": reason, **(evidence or {})}, gpus if well else ())

    @property
    def visible_gpus(self) -> int:
        """How many GPUs CUDA shows to the job; 0 where it has none. Does not raise. Cost: milliseconds, `NVML_SECS` at most."""
        library = self._nvml
        if library is None:
            return 0
        try:
            return len(self._ask(lambda: nvml.job_indices(library, self._environ)))
        except errors.LetoError:
            return 0

    def _ask(self, call: Callable[[], Any]) -> Any:
        if self._stuck:
            raise errors.DeadlineError("NVML has not answered an earlier question yet")
        try:
            return within(self._nvml_secs, "NVML", call)
        except errors.DeadlineError:
            self._stuck = True
            raise

    def close(self) -> None:
        """Ends the watch and lets NVML go."""
        if self._nvml is None or self._stuck:
            return
        if self._watch is not None:
            self._watch.close()
        library, self._nvml, self._watch = self._nvml, None, None
        self._failed = "NVML is closed"
        with contextlib.suppress(nvml.QueryError):
            nvml.ask(library, "nvmlShutdown")


def examine(environ: Mapping[str, str] = os.environ, library: Callable[[], Any] = nvml.library) -> dict[str, Any]:
    """What NVML says here: `gpus` (fields of `GpuFacts`, with `ok` and `reason`), `peers`, and `reason` if something could not be told."""
    try:
        _no_mps(environ)
        module = library()
        indices = nvml.job_indices(module, environ)
    except errors.LetoError as exception:
        return {"gpus": [], "peers": [], "reason": str(exception)}
    rows: list[dict[str, Any]] = []
    for gpu, index in indices.items():
        try:
            facts = nvml.read_gpu(module, gpu, index, links=True)
        except errors.LetoError as exception:
            rows.append({"gpu": gpu, "ok": False, "reason": str(exception)})
            continue
        found = problems_of(facts)
        rows.append({**dataclasses.asdict(facts), "ok": not found, "reason": "; ".join(found) or describe(facts, links=True)})
    try:
        return {"gpus": rows, "peers": nvml.read_peers(module, indices), "reason": ""}
    except errors.LetoError as exception:
        return {"gpus": rows, "peers": [], "reason": str(exception)}


if __name__ == "__main__":
    print(json.dumps(examine()))

"""The command line: `leto run | demo | ls | status | inject | report | doctor | checkpoint | stop | simulate`.

Exit codes: 0 done, 2 bad usage or input, 3 gave up with the state kept, 4 the verdict of a check is no, 5 preempted and a checkpoint
written, 128 + n ended by signal n (143 also by `leto stop`), with the memory freed.
"""

from __future__ import annotations

import json as jsonlib
import os
import sys
import uuid
from pathlib import Path
from typing import Annotated, Any

import typer

from leto_jax import errors
from leto_jax.config import AUTO, IN_PLACE, METRICS_FILE, PARKED, RECOVERY, SHADOW_LEVELS, Deadlines, Interval, Tiers, state_root
from leto_jax.config import deterministic as repeatable

app = typer.Typer(
    name="leto", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Fault tolerance for JAX training."
)
STOP_SECS = 60.0
Job = Annotated[str | None, typer.Option("--job", help="Name of the job; by default the only running one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def main() -> None:
    """Entry point: errors of ours end with their message and exit code 2, never with a traceback."""
    try:
        app()
    except errors.LetoError as exception:
        print(f"leto: {exception}", file=sys.stderr)
        sys.exit(2)


def _later(option: str, issue: str) -> None:
    raise errors.UsageError(f"{option}: not in this version ({issue})")


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The training script; what follows goes to it.")],
    job: Annotated[str | None, typer.Option("--job", help="Name of the job; an existing one is attached to.")] = None,
    nproc_per_node: Annotated[int, typer.Option("--nproc-per-node", help="Ranks on this machine.")] = 1,
    nnodes: Annotated[int, typer.Option("--nnodes", hidden=True)] = 1,
    rdzv_endpoint: Annotated[str | None, typer.Option("--rdzv-endpoint", hidden=True)] = None,
    max_restarts: Annotated[int | None, typer.Option("--max-restarts", help="Give up after so many restarts; no limit by default.")] = None,
    max_restarts_without_progress: Annotated[
        int,
        typer.Option(
            "--max-restarts-without-progress", help="Give up after so many restarts that led to the same failure at the same step."
        ),
    ] = 3,
    shadow_level: Annotated[
        str,
        typer.Option(
            "--shadow-level",
            help="How far a shadow goes before it waits: 3 (everything loaded), parked (its GPU state moved to host memory), 2 (device open, programs "
            "traced), 1 (libraries imported), 0 (no shadow), or auto (3, and lower while device memory is short).",
        ),
    ] = AUTO,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Set XLA flags that make GPU programs repeatable; CPU programs are.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Directory of checkpoints whose newest good one a fresh state starts from.")
    ] = None,
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint-dir",
            help="Where checkpoints go: as --checkpoint-every says, and on SIGTERM (finish the step, write one, exit with code 5).",
        ),
    ] = None,
    checkpoint_every: Annotated[
        str, typer.Option("--checkpoint-every", help="Steps (100), seconds (30s) or auto between Orbax checkpoints; none by default.")
    ] = "",
    keep: Annotated[int, typer.Option("--keep", help="Checkpoints that stay in --checkpoint-dir.")] = Tiers.keep,
    synchronous: Annotated[
        bool, typer.Option("--synchronous", help="Training waits while a checkpoint is written, instead of going on beside it.")
    ] = False,
    copy_every: Annotated[
        str, typer.Option("--copy-every", help="The same as --checkpoint-every for whole copies in the state manager's memory.")
    ] = "",
    copies: Annotated[
        int, typer.Option("--copies", help="How many ranks keep each rank's copies, itself one of them (--copy-every, --nproc-per-node).")
    ] = Tiers.copies,
    mttf_secs: Annotated[
        float, typer.Option("--mttf-secs", help="Mean time between failures, for intervals that are auto.")
    ] = Tiers.mttf_secs,
    recovery: Annotated[
        str,
        typer.Option(
            "--recovery", help=f"How to go on after a failure: {', '.join(RECOVERY)}. All but the first train with plain programs."
        ),
    ] = IN_PLACE,
    spares: Annotated[
        int, typer.Option("--spares", help="Devices kept aside, for when one cannot go on: the state comes from the newest copy then.")
    ] = 0,
    wait_for_parity: Annotated[
        bool, typer.Option("--wait-for-parity", help="A step is done when the peer has its parity too (Protection(peer_parity=...)).")
    ] = False,
    metrics_port: Annotated[
        int | None, typer.Option("--metrics-port", min=0, max=65535, help="Prometheus metrics on this port of 127.0.0.1.")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option("--tensorboard", help="Directory for TensorBoard scalars: each step's metrics, and takeovers.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print the memory plan and stop before anything is allocated.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="No shadow, no watchdog; the terminal belongs to the script.")] = False,
    orphan_timeout_secs: Annotated[
        float, typer.Option("--orphan-timeout-secs", help="How long the state is kept without an agent.")
    ] = Deadlines.orphan_timeout,
    body_timeout_secs: Annotated[
        float,
        typer.Option(
            "--body-timeout-secs", help="Limit for a loop body outside of a section; at most 30 s count where other ranks wait for it."
        ),
    ] = Deadlines.body,
    hang_floor_secs: Annotated[
        float, typer.Option("--hang-floor-secs", help="A step is never called hung before this.")
    ] = Deadlines.hang_floor,
    init_timeout_secs: Annotated[
        float,
        typer.Option("--init-timeout-secs", help="Limit until a trainer is in its loop for the first time: imports, compiling, filling."),
    ] = Deadlines.init,
) -> None:
    """Trains SCRIPT protected: retained state, parity, and a prewarmed shadow."""
    from leto_jax.agent.agent import Agent, Settings
    from leto_jax.agent.policy import Limits
    from leto_jax.manager import runtime

    if nproc_per_node < 1:
        raise errors.UsageError(f"--nproc-per-node: expected 1 or more, found {nproc_per_node}")
    if nnodes != 1 or rdzv_endpoint is not None:
        _later("--nnodes, --rdzv-endpoint", "one machine; several nodes come in a later issue")
    if shadow_level not in SHADOW_LEVELS:
        raise errors.UsageError(f"--shadow-level: expected one of {', '.join(SHADOW_LEVELS)}, found {shadow_level!r}")
    if shadow_level == PARKED and nproc_per_node > 1:
        raise errors.UsageError(
            f"--shadow-level {PARKED}: expected one rank with it, found --nproc-per-node {nproc_per_node}: CUDA cannot move processes aside that "
            "are connected; take auto, 3, 2, 1 or 0"
        )
    if spares < 0:
        raise errors.UsageError(f"--spares: expected 0 or more, found {spares}")
    if spares and not (checkpoint_every or copy_every):
        raise errors.UsageError("--spares: expected --checkpoint-every or --copy-every with it, since a spare begins from a copy")
    if max_restarts_without_progress < 1 or (max_restarts is not None and max_restarts < 0):
        raise errors.UsageError("--max-restarts: expected 0 or more, --max-restarts-without-progress: expected 1 or more")
    for name, value in [
        ("--orphan-timeout-secs", orphan_timeout_secs),
        ("--body-timeout-secs", body_timeout_secs),
        ("--hang-floor-secs", hang_floor_secs),
        ("--init-timeout-secs", init_timeout_secs),
        ("--mttf-secs", mttf_secs),
    ]:
        if not value > 0:
            raise errors.UsageError(f"{name}: expected a positive number of seconds, found {value}")
    path = Path(script)
    if not path.is_file():
        raise errors.UsageError(f"script: expected a Python file, found nothing at {script!r}")
    name = runtime.check_job_name(job or f"{path.stem[:40]}-{uuid.uuid4().hex[:6]}")
    if resume is not None and not resume.is_dir():
        raise errors.UsageError(
            f"--resume: expected a directory of checkpoints, found {'a file' if resume.exists() else 'nothing'} at {resume}"
        )
    tiers = Tiers(
        str(checkpoint_dir.absolute()) if checkpoint_dir else "", checkpoint_every, keep, not synchronous, copy_every, copies, mttf_secs
    )
    _check_tiers(recovery, tiers, resume)
    if not 1 <= copies <= nproc_per_node:
        raise errors.UsageError(f"--copies: expected 1 to the number of ranks, {nproc_per_node}, found {copies}")
    if nproc_per_node > 1:
        _check_ranks(nproc_per_node, debug)
    environ = repeatable(os.environ) if deterministic else dict(os.environ)
    deadlines = Deadlines(orphan_timeout=orphan_timeout_secs, body=body_timeout_secs, hang_floor=hang_floor_secs, init=init_timeout_secs)
    if plan:
        from leto_jax.agent.plan import plan as show_plan

        sys.exit(show_plan([str(path), *context.args], name, nproc_per_node, environ, deadlines))
    settings = Settings(
        job=name,
        script=str(path.absolute()),
        arguments=tuple(context.args),
        job_dir=state_root() / name,
        ranks=nproc_per_node,
        shadow=shadow_level != "0" and not debug,
        shadow_level=shadow_level,
        limits=Limits(max_restarts, max_restarts_without_progress),
        deadlines=deadlines,
        debug=debug,
        resume=str(resume.absolute()) if resume else "",
        recovery=recovery,
        tiers=tiers,
        spares=spares,
        wait_for_parity=wait_for_parity,
        metrics_port=metrics_port,
        tensorboard=tensorboard,
    )
    print(f"leto: job {name}, journal {settings.job_dir / 'journal.jsonl'}", file=sys.stderr, flush=True)
    sys.exit(Agent(settings, environ).run())


def _check_tiers(recovery: str, tiers: Tiers, resume: Path | None) -> None:
    """Raises UsageError for a way to go on that cannot work, or a directory that is not for this job."""
    if recovery not in RECOVERY:
        raise errors.UsageError(f"--recovery: expected one of {', '.join(RECOVERY)}, found {recovery!r}")
    if tiers.keep < 1:
        raise errors.UsageError(f"--keep: expected 1 or more, found {tiers.keep}")
    for option, value in (("--checkpoint-every", tiers.every), ("--copy-every", tiers.copies_every)):
        if value:
            Interval.parse(value, option)
    if tiers.every and not tiers.directory:
        raise errors.UsageError("--checkpoint-every: expected --checkpoint-dir with it, found none")
    if recovery == "persistent" and not tiers.every:
        raise errors.UsageError("--recovery persistent: expected --checkpoint-dir and --checkpoint-every with it")
    if recovery.startswith("host-memory") and not tiers.copies_every:
        raise errors.UsageError(f"--recovery {recovery}: expected --copy-every with it")
    if recovery == "none" and (tiers.every or tiers.copies_every):
        raise errors.UsageError(
            "--recovery none: expected neither --checkpoint-every nor --copy-every, since nothing would read the copies"
        )
    directory = Path(tiers.directory)
    found = sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal()) if tiers.every and directory.is_dir() else []
    if found and (resume is None or resume.absolute() != directory):
        raise errors.UsageError(
            f"--checkpoint-dir: {directory} holds checkpoints already, up to step {found[-1]}; go on from them with --resume {directory}, or name another"
        )


def _check_ranks(ranks: int, debug: bool) -> None:
    """Raises UsageError for what is for one rank only. Warns of more ranks than CPUs."""
    if debug:
        raise errors.UsageError(f"--debug: expected one rank with it, found --nproc-per-node {ranks}; leave one of the two out")
    if ranks > (cpus := len(os.sched_getaffinity(0))):
        print(f"leto: --nproc-per-node {ranks}: only {cpus} CPUs are there, ranks will wait for each other", file=sys.stderr, flush=True)


@app.command()
def ls(
    everything: Annotated[bool, typer.Option("--all", help="Also jobs that have ended.")] = False,
    json: AsJson = False,
) -> None:
    """Lists jobs."""
    from leto_jax.manager import runtime

    live = runtime.live_jobs()
    rows = []
    for name in sorted({*live, *(_ended_jobs() if everything else ())}):
        state: dict[str, Any] = {"job": name, "state": "ended"}
        if name in live:
            state = _status_or_kept(name)
        rows.append({key: state.get(key) for key in ("job", "state", "step", "restarts")})
    if json:
        print(jsonlib.dumps({"jobs": rows}))
        return
    _table("jobs", ["job", "state", "step", "restarts"], rows)


def _ended_jobs() -> list[str]:
    root = state_root()
    return [path.parent.name for path in root.glob("*/journal.jsonl")] if root.is_dir() else []


def _status_or_kept(name: str) -> dict[str, Any]:
    """Status from the agent; where there is none, the state is kept by the manager alone."""
    from leto_jax.agent import client
    from leto_jax.manager import runtime

    try:
        return client.ask(name, {"op": "status"})
    except errors.JobError:
        state = "kept"
    except (errors.DeadlineError, errors.ProtocolError):  # stopped, or very busy
        state = "unreachable"
    step = client.read_run_file(runtime.job_dir(name)).get("step")
    return {"job": name, "state": state, "step": step, "ranks": [], "restarts": None}


@app.command()
def status(job: Job = None, json: AsJson = False) -> None:
    """Shows a running job."""
    from leto_jax.agent import client

    found = _status_or_kept(client.find_job(job))
    if json:
        print(jsonlib.dumps(found))
        return
    limit = found.get("hang_deadline_secs")
    title = f"{found['job']}: {found['state']}, step {found['step']}"
    if found["restarts"] is not None:
        title += f" of {found['steps']}, {found['restarts']} restarts"
    _table(
        title + (f", a step is hung after {limit:.1f} s" if limit else ""),
        ["rank", "pid", "role", "phase", "level", "step"],
        found["ranks"],
    )


@app.command()
def inject(
    kind: Annotated[
        str,
        typer.Option(
            "--kind",
            help="sigkill, sigstop, exception, spin, oom, exit, page_loss, page_corruption, inoperable; on a GPU also illegal_address, trap.",
        ),
    ] = "sigkill",
    phase: Annotated[str, typer.Option("--phase", help="compute, decide, update, commit, drain, takeover or body.")] = "compute",
    step: Annotated[int | None, typer.Option("--step", help="At this step; by default the next one.")] = None,
    chunk: Annotated[int | None, typer.Option("--chunk", help="Phase update: when so many chunks carry their mark.")] = None,
    times: Annotated[int, typer.Option("--times", help="Kind oom: so often at the same place; the first one at a step is survived.")] = 1,
    when_ready: Annotated[bool, typer.Option("--when-ready", help="Wait until a shadow is ready.")] = False,
    timeout_secs: Annotated[float, typer.Option("--timeout-secs", help="How long to wait for the moment.")] = Deadlines.inject_wait,
    rank: Annotated[int, typer.Option("--rank", help="The rank that fails.")] = 0,
    job: Job = None,
    json: AsJson = False,
) -> None:
    """Causes a failure in a running job, at a named place."""
    from leto_jax.agent import client
    from leto_jax.shadow.inject import KINDS

    phases = ("compute", "decide", "update", "commit", "drain", "takeover", "body")
    if kind not in KINDS:
        raise errors.UsageError(f"--kind: expected one of {', '.join(KINDS)}, found {kind!r}")
    if phase not in phases:
        raise errors.UsageError(f"--phase: expected one of {', '.join(phases)}, found {phase!r}")
    if chunk is not None and phase != "update":
        raise errors.UsageError(f"--chunk: goes with --phase update, found --phase {phase}")
    for option, value, least in (("--step", step, 1), ("--chunk", chunk, 0), ("--rank", rank, 0), ("--times", times, 1)):
        if value is not None and value < least:
            raise errors.UsageError(f"{option}: expected {least} or more, found {value}")
    name = client.find_job(job)
    message = {
        "op": "inject",
        "rank": rank,
        "kind": kind,
        "phase": phase,
        "step": -1 if step is None else step,
        "chunk": -1 if chunk is None else chunk,
        "times": times,
    }
    reply = client.ask(name, {**message, "when_ready": when_ready, "deadline_secs": timeout_secs}, timeout_secs + 5)
    print(jsonlib.dumps({"job": name, **reply}) if json else f"{kind} fired in job {name} at step {reply['fired_step']}")


@app.command()
def checkpoint(
    directory: Annotated[Path, typer.Argument(help="Where the checkpoint goes; made if it is not there.")],
    job: Job = None,
    timeout_secs: Annotated[float, typer.Option("--timeout-secs", help="How long to wait until it is written.")] = 600.0,
    json: AsJson = False,
) -> None:
    """Writes the retained state as an Orbax checkpoint: of a running job between two steps, of one whose processes are dead after rolling
    it forward. The state stays where it is."""
    from leto_jax.agent import checkpoint as checkpoints
    from leto_jax.agent import client

    found = checkpoints.checkpoint(client.find_job(job), str(directory.absolute()), timeout_secs)
    print(jsonlib.dumps(found) if json else f"step {found['step']} of job {found['job']} is in {found['path']}")


@app.command()
def stop(job: Job = None) -> None:
    """Ends a job and frees its memory, also one whose state is kept after it gave up."""
    from leto_jax.agent import client
    from leto_jax.manager import runtime
    from leto_jax.manager.client import ManagerClient

    name = client.find_job(job)
    try:
        client.ask(name, {"op": "stop"})
        client.wait_for_end(name, STOP_SECS)
    except errors.JobError:
        with ManagerClient(runtime.job_dir(name) / runtime.SOCKET_NAME, "tool") as manager:
            manager.free()
        client.wait_for_end(name, STOP_SECS)
        client.remove_job_dir(runtime.job_dir(name))
    print(f"stopped {name}")


@app.command()
def report(
    job: Annotated[str | None, typer.Argument(help="Job; by default the one whose journal is newest.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Directory for figures (PNG) and one page with all of it.")] = None,
    json: AsJson = False,
) -> None:
    """Goodput and takeovers of a job, from its journal."""
    from leto_jax.goodput import journal, page
    from leto_jax.goodput import report as reports

    path = reports.journal_of(job)
    events = journal.read(path)
    found = reports.summarise(events)
    print(jsonlib.dumps(found)) if json else reports.show(found)
    if html is not None:
        written = page.write(found, reports.newest_events(events), page.read_rows(path.with_name(METRICS_FILE)), html)
        print(f"wrote {written[-1]}", file=sys.stderr)


@app.command()
def doctor(json: AsJson = False) -> None:
    """Says what this machine can do for leto_jax, and what is missing."""
    from leto_jax.agent import doctor as doctors

    checks = doctors.examine()
    if json:
        print(jsonlib.dumps({"ok": all(check["ok"] for check in checks), "checks": checks}))
    else:
        _table("doctor", ["check", "ok", "found", "advice"], [{**check, "ok": "yes" if check["ok"] else "NO"} for check in checks])
    if not all(check["ok"] for check in checks):
        sys.exit(4)


@app.command()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Three failures, under 75 s.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
    self_check: Annotated[
        bool, typer.Option("--self-check", help="Flip one bit of the result before the verdict: must end with exit code 4.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or gpu.")] = "cpu",
) -> None:
    """Trains a language model twice, once without failures and once with, and compares every bit."""
    from leto_jax import demo as demos

    if device not in ("cpu", "gpu"):
        raise errors.UsageError(f"--device: expected cpu or gpu, found {device!r}")
    sys.exit(demos.main(quick=quick, json_file=json, self_check=self_check, device=device))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def simulate(context: typer.Context) -> None:
    """Simulates training under failures: ETTR and where the time goes, for Leto and the systems beside it."""
    from leto_jax.sim import cli as simulator  # brings half of the scientific Python stack: not for `leto status`

    study = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    study.command("simulate")(simulator.simulate)
    study(context.args, prog_name="leto simulate")


def _table(title: str, columns: list[str], rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*("-" if row.get(column) is None else str(row[column]) for column in columns))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    main()

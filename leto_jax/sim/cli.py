"""`leto simulate`: reads flags, runs the study, prints a table or one JSON object. No arithmetic of its own."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from leto_jax.errors import UsageError
from leto_jax.sim.costs import Costs
from leto_jax.sim.failures import DEVICE_MTTF_SECS, Failure, FailureModel
from leto_jax.sim.measured import MeasuredRun, read_report
from leto_jax.sim.plot import save_badput
from leto_jax.sim.predict import with_iteration_time
from leto_jax.sim.show import Shown
from leto_jax.sim.study import draw_runs, study
from leto_jax.sim.system import Setting, plan
from leto_jax.sim.systems import SYSTEMS, find_system
from leto_jax.sim.trace import read_trace, trace_statistics
from leto_jax.sim.tuner import recommend
from leto_jax.sim.units import not_negative, parse_duration, positive
from leto_jax.sim.workload import Workload, known_workloads, load_workload, scaled

SECS_PER_DAY = 86_400.0
DEFAULT_DAYS = 30.0
WORKLOADS = ", ".join(known_workloads())


def simulate(
    workload: Annotated[str | None, typer.Argument(help=f"A workload: {WORKLOADS}; or a .yaml file.")] = None,
    system: Annotated[str, typer.Option(help=f"Systems, separated by commas: {', '.join(SYSTEMS)}.")] = "leto,gemini+",
    mttf: Annotated[str | None, typer.Option(help="Mean time between failures of the whole job, such as 10m.")] = None,
    device_mttf: Annotated[str | None, typer.Option(help="The same of one GPU, such as 30000h; used where --mttf is absent.")] = None,
    hof: Annotated[float, typer.Option(help="Share of failures after which the same hardware can go on at once.")] = 0.5,
    gpus: Annotated[int | None, typer.Option(help="GPUs of the job; must be dp x tp x pp.")] = None,
    dp: Annotated[int | None, typer.Option(help="Replicas, instead of the workload's; each keeps its batch.")] = None,
    days: Annotated[float | None, typer.Option(help="Simulated time; 30, or up to the end of a trace.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs; confidence intervals are over these.")] = 20,
    seed: Annotated[int, typer.Option(help="First seed: equal seeds give equal numbers.")] = 0,
    arrivals: Annotated[str, typer.Option(help="exponential, regular, or weibull:SHAPE for each GPU.")] = "exponential",
    correlated: Annotated[str | None, typer.Option(help="SHARExNODES, such as 0.05x4: node failures that take several.")] = None,
    trace: Annotated[Path | None, typer.Option(help="CSV with time,node,kind in place of drawn failures.")] = None,
    spares: Annotated[int | None, typer.Option(help="Spare nodes; without it one is always there.")] = None,
    repair: Annotated[str, typer.Option(help="Mean repair time of a node.")] = "4h",
    interval: Annotated[int | None, typer.Option(help="Iterations between checkpoints, instead of the tuned interval.")] = None,
    takeover: Annotated[str | None, typer.Option(help="What an HOF costs Leto, such as 500ms, instead of the paper's.")] = None,
    init_growth: Annotated[str, typer.Option(help="Growth of each recovery for each doubling beyond 64 GPUs.")] = "0s",
    from_report: Annotated[Path | None, typer.Option(help="`leto report --json`: its takeovers are Leto's cost of an HOF.")] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Also recommend intervals and spares.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture of the time lost, such as out.png.")] = None,
) -> None:
    """Simulate training under failures: ETTR and where the time goes, for Leto and the systems beside it."""
    try:
        report = None if from_report is None else read_report(from_report)
        job = _workload(workload, report, gpus, dp)
        repair_secs = not_negative(parse_duration(repair, "--repair"), "--repair")
        if spares is not None and spares < 0:
            raise UsageError(f"--spares: expected 0 or more, found {spares}")
        share, group = _correlated(correlated)
        model = FailureModel(_mttf(mttf, device_mttf, job, report), hof, arrivals, share, group, repair_secs)
        wanted_secs = None if days is None else positive(days, "--days") * SECS_PER_DAY
        horizon_secs = wanted_secs or DEFAULT_DAYS * SECS_PER_DAY
        recorded: list[Failure] = []
        if trace is not None:
            recorded = read_trace(trace, repair_secs)
            horizon_secs, trace_mttf, trace_hof = trace_statistics(recorded, wanted_secs)
            model = replace(model, mttf_secs=trace_mttf, hof_ratio=trace_hof)
        setting = Setting(job, _costs(report, takeover, init_growth), model.mttf_secs, model.hof_ratio, interval)
        systems = [find_system(name.strip()) for name in system.split(",")]
        plans = [plan(chosen, setting) for chosen in systems]
        runs = draw_runs(model, job.gpus, horizon_secs, seeds, seed) if trace is None else [recorded]
        with _progress() as progress:
            task = progress.add_task("simulating", total=len(plans) * len(runs))
            outcomes = [study(numbers, runs, horizon_secs, spares, partial(progress.advance, task)) for numbers in plans]
        tuned = [recommend(chosen, setting, repair_secs) for chosen in systems] if tune else []
        shown = Shown(systems, setting, model, outcomes, tuned, spares, None if trace is None else str(trace), report)
        if plot is not None:
            shares = [{cause: secs / outcome.wall_secs for cause, secs in outcome.secs_by_cause.items()} for outcome in outcomes]
            save_badput(plot, shown.headline(), [chosen.title for chosen in systems], shares)
    except UsageError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(shown.as_dict(), indent=1))
    else:
        shown.print(Console())


def _workload(name: str | None, report: MeasuredRun | None, gpus: int | None, dp: int | None) -> Workload:
    """The named workload, or the measured job itself; its iteration time is known afterwards."""
    if name is not None:
        return with_iteration_time(scaled(load_workload(name), gpus=gpus, dp=dp))
    if report is None:
        raise UsageError(f"WORKLOAD: expected one of {WORKLOADS}, a .yaml file, or --from-report, found none")
    if dp is not None:
        raise UsageError(f"--dp: expected a WORKLOAD whose parallelism is known, found --dp {dp} with --from-report alone; name a workload")
    return report.workload(gpus or 1)


def _costs(report: MeasuredRun | None, takeover: str | None, init_growth: str) -> Costs:
    growth = not_negative(parse_duration(init_growth, "--init-growth"), "--init-growth")
    costs = replace(Costs(), init_growth_secs=growth)
    if report is not None:
        costs = report.costs(costs)
    if takeover is not None:
        secs = not_negative(parse_duration(takeover, "--takeover"), "--takeover")
        costs = replace(costs, in_place_detect_secs=0.0, in_place_secs=secs)
    return costs


def _mttf(mttf: str | None, device_mttf: str | None, workload: Workload, report: MeasuredRun | None) -> float:
    """MTTF of the job in seconds: given, that of one GPU divided by their number, or that of a report without a workload."""
    if mttf is not None and device_mttf is not None:
        raise UsageError(f"--mttf {mttf} and --device-mttf {device_mttf}: expected one of the two, found both; leave one out")
    if mttf is not None:
        return positive(parse_duration(mttf, "--mttf"), "--mttf")
    if device_mttf is not None:
        return positive(parse_duration(device_mttf, "--device-mttf"), "--device-mttf") / workload.gpus
    if report is not None and workload.name == report.job:
        return report.mttf_secs
    return DEVICE_MTTF_SECS / workload.gpus


def _correlated(text: str | None) -> tuple[float, int]:
    """(share, nodes) of '0.05x4'."""
    if text is None:
        return 0.0, 1
    share, _, nodes = text.partition("x")
    try:
        return float(share), int(nodes)
    except ValueError as error:
        raise UsageError(f"--correlated: expected SHARExNODES such as 0.05x4, found {text!r}") from error


def _progress() -> Progress:
    """A bar on stderr that goes away; stdout stays clean for --json."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)

"""Memory pressure on a GPU: with a shadow that keeps what it has the trainer dies of it, with levels it trains on; and what each level costs.

    python experiments/memory_pressure.py [--json FILE] [--size 0.1] [--kills 2]

A ballast first takes most of what is free beside a trainer and its ready shadow. Then the training script's own memory grows, 64 MiB at a time:

    fixed    `--shadow-level 3`: until an allocation of the trainer fails, and with it the job
    levels   `--shadow-level auto`: half a shadow's memory further than that; the trainer must go on. Then the ballast goes, and the level rises

Memory in use is asked of NVML ten times a second. Beside it, in jobs without pressure, takeovers at each level. With `--device cpu --size 0` only
these, without parking.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import _runs
import _takeovers
import typer
from _result import JsonOption, cpu_device, git_commit, write_result
from memory_gpu import MIB, Meter
from takeover_gpu import SIZES

from leto_jax.agent import client
from leto_jax.arena import cuda
from leto_jax.config import AUTO, PARKED
from leto_jax.errors import LetoError

LEVELS = ("3", PARKED, "2", "1", "0")
FEW_KILLS = {"2": 1, "1": 1, "0": 1}  # where a takeover is the start of most of a process, one tells it all
LEFT_MIB = 3 << 10  # free beside the ballast: more than the margin at which the level is lowered
STEP_MIB, STEP_SECS = 64, 0.25  # slower than the agent looks and parks
GROWN_STEPS = 20  # training steps after the last growth
READY_SECS, GROW_SECS, RISE_SECS, END_SECS = 180.0, 90.0, 90.0, 60.0
COLOURS = {"loading": "#f0f0f0", "3": "#c6e0b4", PARKED: "#bdd7ee", "2": "#ffe699", "1": "#f8cbad", "none": "#ffffff"}


class Pressed(NamedTuple):
    """What one run under pressure has come to. held_mib: at its death, or in the end. died: '' if it did not. footprint: of the shadow."""

    meter: Meter
    levels: list[tuple[float, str]]
    held_mib: int
    died: str
    footprint_mib: float


# One run under pressure -------------------------------------------------------------------------------------------------------------


def press(size: str, ordinal: int, level: str, directory: str, goal_mib: int | None) -> Pressed:
    """A job whose script holds more and more memory: up to `goal_mib`, or until it dies."""
    job, meter = f"pressure-{uuid.uuid4().hex[:8]}", Meter(ordinal)
    hold = Path(directory) / f"hold-{job}"
    options = {**SIZES[size], "device": "gpu", "log_every": 1000, "scan": True, "steps": 1_000_000, "hold": str(hold)}
    leto = [sys.executable, "-m", "leto_jax.cli", "run", "--job", job, "--shadow-level", level, "--max-restarts", "0"]
    ballast: int | None = None
    with subprocess.Popen([*leto, *_runs.script(options)], stdout=subprocess.DEVNULL) as process:
        try:
            _takeovers.wait_for(job, process, "first_step", secs=READY_SECS)
            meter.mark("first step")
            alone = meter.used()
            _takeovers.wait_for_level(job, process, 3)
            meter.mark("shadow ready")
            ready = meter.steady()
            ballast = take(ordinal, int(meter.total - ready) - (LEFT_MIB << 20))
            meter.mark("ballast")
            held, died = grow(job, process, hold, goal_mib)
            meter.mark(died or "grown")
            if not died:
                os.close(ballast)
                ballast = None
                meter.mark("ballast gone")
                _takeovers.wait_for_level(job, process, 3)
                meter.mark("shadow ready")
        finally:
            if ballast is not None:
                os.close(ballast)
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.wait(END_SECS)
    levels = levels_over_time(_takeovers.events(job), meter.now, time.monotonic_ns())
    subprocess.run([sys.executable, "-m", "leto_jax.cli", "stop", "--job", job], timeout=END_SECS, capture_output=True, check=False)
    meter.close()
    return Pressed(meter, levels, held, died, (ready - alone) / MIB)


def take(ordinal: int, nbytes: int) -> int:
    """Device memory that nobody else has, as a descriptor; without a context. The device has it back when that is closed."""
    unit = cuda.granularity(ordinal)
    return cuda.allocate(ordinal, max(unit, nbytes // unit * unit))


def grow(job: str, process: subprocess.Popen, hold: Path, goal_mib: int | None) -> tuple[int, str]:
    """Lets the script take more until it dies or has come to the goal and trained on: (MiB that it was told to hold, how it died)."""
    held, end = 0, time.monotonic() + GROW_SECS
    while goal_mib is None or held < goal_mib:
        held += STEP_MIB
        hold.with_suffix(".new").write_text(str(held))
        hold.with_suffix(".new").replace(hold)
        time.sleep(STEP_SECS)
        if died := dead(job, process):
            return held, died
        if time.monotonic() > end:
            raise TimeoutError(f"the job lives on with {held} MiB more than it needs: was there a ballast?")
    until = step_of(job) + GROWN_STEPS
    while step_of(job) < until:
        time.sleep(STEP_SECS)
        if died := dead(job, process):
            return held, died
        if time.monotonic() > end + READY_SECS:
            raise TimeoutError(f"the job does not come to step {until}")
    return held, ""


def dead(job: str, process: subprocess.Popen) -> str:
    """How the trainer died, '' while it lives."""
    failures = [event for event in _takeovers.events(job) if event["event"] == "failure"]
    if failures:
        return f"trainer dead ({failures[0]['reason']})"
    return "" if process.poll() is None else f"job ended ({process.returncode})"


def step_of(job: str) -> int:
    try:
        return int(client.ask(job, {"op": "status"})["step"])
    except LetoError:
        return 0


def levels_over_time(events: Sequence[dict[str, Any]], now_secs: float, now_ns: int) -> list[tuple[float, str]]:
    """(seconds, where the shadow was from then on), from a journal. now_secs: what a meter's clock shows at `now_ns`."""
    found: list[tuple[float, str]] = []
    for event in events:
        at = now_secs - (now_ns - event["ns"]) / 1e9
        if event["event"] == "spawn" and event["role"] == "shadow":
            found.append((at, "loading"))
        elif event["event"] == "ready":
            found.append((at, str(event["level"])))
        elif event["event"] == "level" and event["level"] == PARKED:
            found.append((at, PARKED))
        elif event["event"] == "level" and found and found[-1][1] == "1":
            found.append((at, "loading"))  # it rises, or is ended in a moment
        elif event["event"] == "level" and found and found[-1][1] == PARKED:
            found.append((at, str(event["level"])))
        elif event["event"] in ("released", "failure"):
            found.append((at, "none"))
    return found


# Takeovers --------------------------------------------------------------------------------------------------------------------------


def takeovers(levels: Sequence[str], kills: int, size: str, device: str, seed: int) -> dict[str, list[dict[str, Any]]]:
    """By level. One job each."""
    found = {}
    options = {**SIZES[size], "device": device, "seed": seed, "log_every": 1000, "scan": True}
    for level in levels:
        begin = time.monotonic()
        found[level] = _takeovers.collect(min(kills, FEW_KILLS.get(level, kills)), options, level=level)
        secs = ", ".join(f"{item['takeover_secs']:.3f}" for item in found[level])
        print(f"level {level}: {secs} s; {time.monotonic() - begin:.0f} s", flush=True)
    return found


# The result -------------------------------------------------------------------------------------------------------------------------


def rows_of(runs: dict[str, Pressed], taken: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, run in runs.items():
        rows += [{"part": "series", "run": name, "secs": round(at, 2), "used_mib": used / MIB} for at, used in run.meter.samples]
        rows += [{"part": "mark", "run": name, "secs": round(at, 2), "what": what} for at, what in run.meter.marks]
        rows += [{"part": "level", "run": name, "secs": round(at, 2), "level": level} for at, level in run.levels]
        rows.append({"part": "pressure", "run": name, "held_mib": run.held_mib, "died": run.died, "footprint_mib": run.footprint_mib})
    for level, items in taken.items():
        rows += _takeovers.rows(items, shadow_level=level)
    return rows


def draw(runs: dict[str, Pressed], taken: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Memory over time, the shadow's level behind it; below, the seconds of a takeover at each level."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(runs) + 1, 1, figsize=(9, 3 * len(runs) + 2.4), layout="constrained", squeeze=False)
    for axis, (name, run) in zip(axes[:, 0], runs.items()):
        end = run.meter.samples[-1][0]
        for (at, level), until in zip(run.levels, [*(at for at, _ in run.levels[1:]), end], strict=True):
            axis.axvspan(at, until, color=COLOURS[level], linewidth=0)
            if until - at > end / 30:
                axis.text((at + until) / 2, 0.96, level, ha="center", va="top", fontsize=8, transform=axis.get_xaxis_transform())
        axis.plot([at for at, _ in run.meter.samples], [used / 2**30 for _, used in run.meter.samples], color="#4c72b0", linewidth=1.2)
        axis.axhline(run.meter.total / 2**30, color="#c44e52", linewidth=0.8)
        for at, what in run.meter.marks:
            axis.axvline(at, color="#8c8c8c", linewidth=0.8)
            axis.text(at, 0.02, f" {what}", rotation=90, fontsize=7, va="bottom", transform=axis.get_xaxis_transform())
        axis.set_title(f"{name}: {run.died or 'trained on'}", loc="left", fontsize=10)
        axis.set_ylabel("GiB in use")
        axis.set_xlabel("seconds")
    axis = axes[-1, 0]
    medians = {level: statistics.median(item["takeover_secs"] for item in items) for level, items in taken.items()}
    axis.barh([f"level {level}" for level in medians], list(medians.values()), color="#4c72b0")
    for number, secs in enumerate(medians.values()):
        axis.text(secs, number, f" {secs:.2f} s", va="center", fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("seconds from SIGKILL to the end of the first step after it, minus one plain step")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def main(
    size: Annotated[str, typer.Option(help="Billions of parameters, out of 0.1, 1, 4; 0 with --device cpu.")] = "0.1",
    kills: Annotated[int, typer.Option(min=1, help="Takeovers at levels 3 and parked.")] = 2,
    ordinal: Annotated[int, typer.Option(help="NVML's number of the GPU.")] = 0,
    device: Annotated[str, typer.Option(help="gpu, or cpu to try the takeovers with size 0.")] = "gpu",
    device_name: Annotated[str, typer.Option("--device-name")] = "NVIDIA H200",
    seed: int = 0,
    commit: Annotated[str | None, typer.Option(help="Commit to note, where there is no repository.")] = None,
    json_path: JsonOption = None,
) -> None:
    commit = commit or git_commit()
    runs: dict[str, Pressed] = {}
    values: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="leto-bench-") as directory:
        os.environ["XDG_STATE_HOME"] = directory
        if device == "gpu":
            runs["fixed"] = fixed = press(size, ordinal, "3", directory, None)
            goal = fixed.held_mib + int(fixed.footprint_mib / 2)
            runs["levels"] = press(size, ordinal, AUTO, directory, goal)
            values["trained_through_pressure"] = float(bool(fixed.died) and not runs["levels"].died)
        taken = takeovers([level for level in LEVELS if device == "gpu" or level != PARKED], kills, size, device, seed)
    if device == "gpu":
        for level in ("3", PARKED):
            name = "takeover_secs_L3" if level == "3" else "takeover_secs_parked"
            values[name] = statistics.median(item["takeover_secs"] for item in taken[level])
    settings = {"size": size, **SIZES[size], "kills": kills, "left_mib": LEFT_MIB, "step_mib": STEP_MIB, "step_secs": STEP_SECS}
    on, variant = (device_name, None) if device == "gpu" else (cpu_device(), "cpu")
    path = write_result("memory_pressure", variant, rows_of(runs, taken), settings, seed, values, json_path, on, commit)
    draw(runs, taken, path.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)

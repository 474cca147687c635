"""One training script, one failure schedule, every way to go on: what each costs while nothing fails, and when something does.

    python experiments/compare_orbax.py [--json FILE] [--steps 120] [--every-secs 20]

Each row is a real `leto run` of `train_lm.py`, whose trainer gets a real SIGKILL every `--every-secs` seconds, give or take half of that (seeded,
the same for all rows; counted from the first step; one that falls into a recovery comes when it is over). All but the row in-place train with
plain programs: one donated jit of value_and_grad, tx.update and apply_updates, no retained memory, no parity.

    orbax sync, orbax async    Orbax checkpoints, training waits for one or goes on beside it; a new process restores the newest
    host memory                whole copies in another process's memory (Gemini); a new process takes the newest
    host memory + spare        the same, taken by a process that waits with everything compiled (Gemini+)
    in-place                   ours

Every baseline at its best: intervals tuned (Daly 2006) from the measured stall and the schedule's mean time between failures, and for Orbax a
second, fixed one; a warm compile cache; checkpoints on a tmpfs where there is one. `recovery_secs`: from the failure to the end of the step that
was running, minus one plain step; recomputed steps included.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import uuid
from pathlib import Path
from typing import Annotated, Any

import _runs
import typer
from _result import JsonOption, cpu_device, git_commit, write_result
from _takeovers import SHAPE_10M, STAGES

FIXED_STEPS = 25
ROWS: dict[str, tuple[str, ...]] = {
    "orbax sync, tuned": ("--recovery", "persistent", "--checkpoint-every", "auto", "--synchronous"),
    f"orbax sync, {FIXED_STEPS} steps": ("--recovery", "persistent", "--checkpoint-every", str(FIXED_STEPS), "--synchronous"),
    "orbax async, tuned": ("--recovery", "persistent", "--checkpoint-every", "auto"),
    f"orbax async, {FIXED_STEPS} steps": ("--recovery", "persistent", "--checkpoint-every", str(FIXED_STEPS)),
    "host memory": ("--recovery", "host-memory", "--copy-every", "auto"),
    "host memory + spare": ("--recovery", "host-memory+spare", "--copy-every", "auto"),
    "in-place": (),
}


def row_of(name: str, quiet: dict[str, Any], found: dict[str, Any], events: list[dict], plain: dict[str, Any]) -> dict[str, Any]:
    """Flat: how the way to go on did. quiet: the same without failures; plain: without copies, too."""
    takeovers, spent = found["takeovers"], found["badput_secs"]
    saved = [event["stall_secs"] for event in events if event["event"] == "saved"]
    median = lambda values: statistics.median(values) if values else float("nan")
    stages = {f"{stage}_secs": median([item["stages"].get(stage, 0.0) for item in takeovers]) for stage in STAGES}
    total = median([item["takeover_secs"] for item in takeovers])
    return {
        "part": "row",
        "way": name,
        "failures": len(takeovers),
        "recovery_secs": total,
        "lost_steps": statistics.fmean([item["lost_steps"] for item in takeovers]) if takeovers else 0.0,
        **stages,
        "start_secs": max(0.0, total - sum(stages.values())),
        "overhead_pct": 100 * (_runs.step_secs(quiet) / _runs.step_secs(plain) - 1),
        "step_secs": _runs.step_secs(quiet),
        "ettr": found["ettr"],
        "goodput": found["goodput"],
        "wall_secs": found["wall_secs"],
        "copies": len(saved),
        "stall_secs": median(saved) if saved else 0.0,
        "causes_sum_to_wall": float(abs(sum(spent.values()) - found["wall_secs"]) < 1e-6),
        **{f"badput_{cause}_secs": secs for cause, secs in spent.items()},
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(13, 0.45 * len(rows) + 2), layout="constrained", sharey=True, width_ratios=(3, 1)
    )
    detect, fence, *rest = STAGES.items()
    bars = (detect, fence, ("start", "#4d4d4d"), *rest)
    for number, row in enumerate(rows):
        at = 0.0
        for stage, colour in bars:
            secs = row[f"{stage}_secs"]
            left.barh(number, secs, left=at, color=colour, label=stage.replace("_", " ") if number == 0 else None)
            at += secs
        left.text(at, number, f" {row['recovery_secs']:.2f} s", va="center", fontsize=8)
        right.barh(number, 100 * row["ettr"], color="#4c72b0" if row["way"] == "in-place" else "#8c8c8c")
        right.text(100 * row["ettr"], number, f" {100 * row['ettr']:.1f} %", va="center", fontsize=8)
    left.set_yticks(range(len(rows)), [row["way"] for row in rows])
    left.invert_yaxis()
    left.set_xlabel("seconds from SIGKILL to the end of the step that was running (medians, a plain step included)")
    right.set_xlabel("ETTR, %")
    right.set_xlim(0, 115)
    left.legend(ncols=6, loc="upper center", bbox_to_anchor=(0.45, -0.18), frameon=False, fontsize=8)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def main(
    steps: Annotated[int, typer.Option(min=10)] = 120,
    every_secs: Annotated[float, typer.Option(help="Mean time between failures.")] = 20.0,
    device: Annotated[str, typer.Option(help="cpu or gpu.")] = "cpu",
    small: Annotated[bool, typer.Option("--small", help="Try the script with a tiny model: its figures mean nothing.")] = False,
    only: Annotated[str, typer.Option(help="Rows whose name has this in it.")] = "",
    device_name: Annotated[str | None, typer.Option("--device-name")] = None,
    seed: int = 0,
    commit: Annotated[str | None, typer.Option(help="Commit to note, where there is no repository.")] = None,
    json_path: JsonOption = None,
) -> None:
    noted, kills = commit or git_commit(), [_runs.Failure(at) for at in _runs.failure_times(every_secs, seed)]
    shape = {"width": 64, "depth": 2, "heads": 2, "context": 64, "batch": 4} if small else SHAPE_10M
    options = {"steps": steps, **shape, "device": device, "seed": seed, "log_every": 1000}
    script = _runs.script(options)
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() and shutil.disk_usage(memory).free > 8 << 30 else None
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="leto-compare-", dir=base) as directory:
        environ = _runs.warm_environ(directory)
        plain, _ = _runs.train(("--recovery", "none"), script, [], environ)
        plain, _ = _runs.train(("--recovery", "none"), script, [], environ)  # the first has filled the compile cache
        print(f"plain: {_runs.step_secs(plain):.3f} s a step", flush=True)
        for name, way in ROWS.items():
            if only not in name:
                continue
            results = []
            for failures in ([], kills):
                saved = Path(directory) / f"saved-{uuid.uuid4().hex[:8]}"
                more = ("--checkpoint-dir", str(saved)) if "persistent" in way else ()
                results.append(_runs.train((*way, *more, "--mttf-secs", str(every_secs)), script, failures, environ))
                shutil.rmtree(saved, ignore_errors=True)
            (quiet, _), (found, events) = results
            rows.append(row_of(name, quiet, found, events, plain))
            shown = ("failures", "recovery_secs", "lost_steps", "overhead_pct", "ettr", "copies", "stall_secs", "wall_secs")
            print(f"{name:<24}" + "  ".join(f"{key} {rows[-1][key]:.4g}" for key in shown), flush=True)
    values: dict[str, float] = {}
    by_name = {row["way"]: row for row in rows}
    ours = by_name.get("in-place")
    if ours is not None and len(rows) == len(ROWS):
        values["best_orbax_over_leto"] = (
            min(row["recovery_secs"] for name, row in by_name.items() if "orbax" in name) / ours["recovery_secs"]
        )
        values["gemini_plus_over_leto"] = by_name["host memory + spare"]["recovery_secs"] / ours["recovery_secs"]
        values["leto_ettr_rank"] = 1.0 + sum(row["ettr"] > ours["ettr"] for row in rows)
        values["causes_sum_to_wall"] = min(row["causes_sum_to_wall"] for row in rows)
    settings = {
        **options,
        "every_secs": every_secs,
        "plain_step_secs": _runs.step_secs(plain),
        "checkpoints_on": "tmpfs" if base else "disk",
        "compile_cache": "warm",
        **{f"row {name}": " ".join(way) for name, way in ROWS.items()},
    }
    path = write_result("compare_orbax", None, rows, settings, seed, values, json_path, device_name or cpu_device(), noted)
    draw(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)

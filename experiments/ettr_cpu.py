"""The paper's ETTR experiments at the scale of one machine: real runs, real failures, ETTR as `leto report` gives it.

    python experiments/ettr_cpu.py [--json FILE] [--part interval|hof|trace|all]

    interval   against the checkpoint interval, half of the failures hurting hardware: Orbax and ours, which needs its checkpoints only for those
    hof        against the share of failures that hurt no hardware (0 to 100 %): Gemini+ (host memory and a spare) and ours
    trace      throughput on a trace of failures with bursts, half of them hardware's: gaps are drawn from a Weibull distribution of shape 0.7,
               as published failure logs of large clusters have them (Schroeder and Gibson, DSN '06; shape 0.7 to 0.8), scaled to this machine

A failure that hurts no hardware is a SIGKILL of the trainer. One that does is a device declared inoperable: what is retained there is given up, and
a spare goes on from the newest copy. Plain modes lose their state either way.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Annotated, Any

import _runs
import _takeovers
import numpy as np
import typer
from _result import JsonOption, cpu_device, git_commit, write_result
from _runs import Failure

INTERVALS = (2, 5, 10, 20, 40)
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
SPARES = ("--spares", "1000")
WEIBULL_SHAPE = 0.7
WAYS: dict[str, tuple[str, ...]] = {
    "orbax": ("--recovery", "persistent", *SPARES),
    "gemini+": ("--recovery", "host-memory+spare", "--copy-every", "auto", *SPARES),
    "leto": ("--copy-every", "auto", *SPARES),
    "leto, orbax": SPARES,  # its copies are checkpoints
}


def schedule(every_secs: float, share: float, seed: int, shape: float = 1.0) -> list[Failure]:
    """Gaps of Weibull's distribution with mean `every_secs`; the first `share` of each ten hurt no hardware, in an order of their own."""
    rng = np.random.default_rng(seed)
    gaps = rng.weibull(shape, 1000)
    at = np.cumsum(np.maximum(every_secs * gaps / gaps.mean(), _runs.LEAST_SECS))
    kinds = np.concatenate([rng.permutation(np.arange(8) >= round(8 * share)) for _ in range(125)])
    return [Failure(float(t), bool(hardware)) for t, hardware in zip(at, kinds, strict=True)]


def row(part: str, way: str, found: dict[str, Any], **more: Any) -> dict[str, Any]:
    takeovers, spent = found["takeovers"], found["badput_secs"]
    result = {
        "part": part,
        "way": way,
        **more,
        "ettr": found["ettr"],
        "goodput": found["goodput"],
        "wall_secs": found["wall_secs"],
        "failures": len(takeovers),
        "on_spare": sum(item["path"] == "spare" for item in takeovers),
        "recomputed_secs": spent["recomputed_steps"],
        "stall_secs": spent["checkpoint_stall"],
    }
    print({key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()}, flush=True)
    return result


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(15, 3.8), layout="constrained")
    colours = {"orbax": "#8c8c8c", "gemini+": "#dd8452", "leto": "#4c72b0", "leto, orbax": "#4c72b0"}
    for axis, part, key, label in (
        (left, "interval", "interval_steps", "steps between checkpoints"),
        (middle, "hof", "hof_share", "share of failures that hurt no hardware"),
    ):
        for way in dict.fromkeys(r["way"] for r in rows if r["part"] == part):
            chosen = [r for r in rows if (r["part"], r["way"]) == (part, way)]
            axis.plot([r[key] for r in chosen], [100 * r["ettr"] for r in chosen], marker="o", color=colours[way], label=way)
        axis.set_xlabel(label)
        axis.set_ylabel("ETTR, %")
        axis.legend(frameon=False, fontsize=8)
    left.set_xscale("log")
    for way in dict.fromkeys(r["way"] for r in rows if r["part"] == "trace step"):
        chosen = [r for r in rows if (r["part"], r["way"]) == ("trace step", way)]
        right.plot([r["secs"] for r in chosen], [r["step"] for r in chosen], color=colours[way], label=way)
    right.set_xlabel("seconds (trace: Weibull gaps, half of the failures hardware's)")
    right.set_ylabel("steps done")
    right.legend(frameon=False, fontsize=8)
    for axis in (left, middle, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def main(
    part: Annotated[str, typer.Option(help="interval, hof, trace or all.")] = "all",
    steps: Annotated[int, typer.Option(min=10)] = 100,
    every_secs: Annotated[float, typer.Option(help="Mean time between failures.")] = 30.0,
    small: Annotated[bool, typer.Option("--small", help="Try the script with a tiny model: its figures mean nothing.")] = False,
    seed: int = 0,
    json_path: JsonOption = None,
) -> None:
    noted, rows = git_commit(), []
    shape = {"width": 64, "depth": 2, "heads": 2, "context": 64, "batch": 4} if small else _takeovers.SHAPE_10M
    words = _runs.script({"steps": steps, **shape, "seed": seed, "log_every": 1000})
    with tempfile.TemporaryDirectory(prefix="leto-ettr-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        environ = _runs.warm_environ(directory)
        run = lambda way, failures, *more: _runs.train((*WAYS[way], *more, "--mttf-secs", str(every_secs)), words, failures, environ)
        if part in ("interval", "all"):
            failures = schedule(every_secs, 0.5, seed)
            for way in ("orbax", "leto, orbax"):
                for interval in INTERVALS:
                    saved = Path(directory) / f"saved-{uuid.uuid4().hex[:8]}"
                    found, _ = run(way, failures, "--checkpoint-dir", str(saved), "--checkpoint-every", str(interval))
                    rows.append(row("interval", way, found, interval_steps=interval))
                    shutil.rmtree(saved, ignore_errors=True)
        if part in ("hof", "all"):
            for way in ("gemini+", "leto"):
                for share in SHARES:
                    found, _ = run(way, schedule(every_secs, share, seed))
                    rows.append(row("hof", way, found, hof_share=share))
        if part in ("trace", "all"):
            for way in ("gemini+", "leto"):
                found, events = run(way, schedule(every_secs, 0.5, seed, WEIBULL_SHAPE))
                rows.append(row("trace", way, found))
                rows += progress(way, events)
    settings = {"steps": steps, "every_secs": every_secs, **shape, **{f"way {name}": " ".join(way) for name, way in WAYS.items()}}
    path = write_result("ettr_cpu", None, rows, settings, seed, {}, json_path, cpu_device(), noted)
    draw(rows, path.with_suffix(".png"))


def progress(way: str, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Steps done against seconds, at the events that say so."""
    known = [
        (event["time"], event["commit"]) for event in events if event["event"] in ("attached", "first_step", "takeover", "progress", "done")
    ]
    known += [(event["time"], event["step"]) for event in events if event["event"] == "failure"]
    begin = events[0]["time"]
    return [{"part": "trace step", "way": way, "secs": round(at - begin, 2), "step": step} for at, step in sorted(known)]


if __name__ == "__main__":
    typer.run(main)

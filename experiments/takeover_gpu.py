"""SIGKILL to the first finished step on a GPU, at several sizes, beside the same job restarted from an Orbax checkpoint.

    python experiments/takeover_gpu.py [--json FILE] [--sizes 0.1,1,4] [--kills 10] [--restarts 3] [--append FILE]

A takeover is counted as in `leto report`: from the signal to the end of the first step after it, minus one plain step. Kills go through all
phases in turn. The anchor is `orbax_restart.py`, best case for it: checkpoint in memory (a tmpfs), warm compile cache, no lost steps, no
detection. --append: takes the rows of an earlier call in, so that the sizes can be measured one by one.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import _runs
import _takeovers
import typer
from _result import JsonOption, git_commit, write_result

from leto_jax.config import compile_cache

SIZES = {
    "0": {"width": 64, "depth": 2, "heads": 2, "context": 64, "batch": 4},  # to try the script with --device cpu
    "0.1": {"width": 768, "depth": 14, "heads": 12, "context": 512, "batch": 16},
    "1": {"width": 2048, "depth": 21, "heads": 32, "context": 512, "batch": 8},
    "4": {"width": 4096, "depth": 20, "heads": 64, "context": 512, "batch": 2},
}
RESTART_SECS = 300.0


def restarts(size: str, count: int, cache: str, device: str) -> list[dict[str, Any]]:
    """The anchor: saves once, then starts a fresh process `count` times. Returns what each printed."""
    script = str(Path(__file__).with_name("orbax_restart.py"))
    options = _runs.command_line({**SIZES[size], "scan": True, "device": device})
    environ = {**os.environ, **compile_cache(Path(cache))}
    shared_memory = Path("/dev/shm")
    fits = shared_memory.is_dir() and shutil.disk_usage(shared_memory).free > 1.3 * 12e9 * float(size)
    directory = tempfile.mkdtemp(prefix="orbax-", dir=shared_memory if fits else None)
    try:
        command = [sys.executable, script, "--directory", directory, *options]
        subprocess.run([*command, "--save"], check=True, timeout=RESTART_SECS, env=environ, stdout=subprocess.DEVNULL)
        found = []
        for number in range(count + 1):
            started = {**environ, "STARTED_NS": str(time.monotonic_ns())}
            done = subprocess.run(command, check=True, timeout=RESTART_SECS, env=started, capture_output=True, text=True)
            if number:  # the first one warms what the save has not
                found.append(json.loads(done.stdout.strip().splitlines()[-1]))
        return found
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main(
    sizes: Annotated[str, typer.Option(help="Billions of parameters, out of 0.1, 1, 4.")] = "0.1,1,4",
    kills: Annotated[int, typer.Option(min=1)] = 10,
    restart_count: Annotated[int, typer.Option("--restarts", min=0)] = 3,
    append: Annotated[Path | None, typer.Option(help="Result of an earlier call whose rows are kept.")] = None,
    device: Annotated[str, typer.Option(help="gpu, or cpu to try the script with size 0.")] = "gpu",
    device_name: Annotated[str, typer.Option("--device-name")] = "NVIDIA H200",
    seed: int = 0,
    commit: Annotated[str | None, typer.Option(help="Commit to note, where there is no repository.")] = None,
    json_path: JsonOption = None,
) -> None:
    rows: list[dict[str, Any]] = json.loads(append.read_text())["rows"] if append else []
    found: list[dict[str, Any]] = []
    plain = 0.0
    with tempfile.TemporaryDirectory(prefix="leto-bench-") as directory:
        for size in sizes.split(","):
            begin = time.monotonic()
            environ = {"XDG_STATE_HOME": directory}
            os.environ.update(environ)
            taken = _takeovers.collect(kills, {**SIZES[size], "device": device, "seed": seed, "log_every": 1000, "scan": True}, environ)
            found += [item | {"phase": f"{item['phase']}, {size}B"} for item in taken]
            plain = statistics.median(item["plain_step_secs"] for item in taken)
            rows += _takeovers.rows(taken, billions=float(size), plain_step_secs=plain)
            median = statistics.median(item["takeover_secs"] for item in taken)
            print(f"{size}B: takeover {median:.3f} s, plain step {plain:.3f} s; {time.monotonic() - begin:.0f} s", flush=True)
            write(rows, found, plain, sizes, kills, restart_count, seed, commit, json_path, device_name)
            try:
                anchors = restarts(size, restart_count, directory, device) if restart_count else []
            except (subprocess.SubprocessError, OSError, ValueError) as exception:
                print(
                    f"{size}B: no Orbax restart was measured: {exception}; {getattr(exception, 'stderr', '')}", file=sys.stderr, flush=True
                )
                anchors = []
            for item in anchors:
                stages = {f"{name}_secs": value for name, value in item["stages"].items()}
                rows.append({"part": "orbax", "billions": float(size), "restart_secs": item["restart_secs"], **stages})
                print({key: round(value, 3) if isinstance(value, float) else value for key, value in rows[-1].items()}, flush=True)
            write(rows, found, plain, sizes, kills, restart_count, seed, commit, json_path, device_name)  # what is measured is not lost


def write(
    rows: list[dict[str, Any]],
    found: list[dict[str, Any]],
    plain: float,
    sizes: str,
    kills: int,
    restart_count: int,
    seed: int,
    commit: str | None,
    json_path: Path | None,
    device_name: str,
) -> None:
    """Writes the result of the sizes that are measured so far, and their figure."""
    values = {}
    of = lambda part, key, size: [row[key] for row in rows if row["part"] == part and row["billions"] == size]
    takeover = {size: statistics.median(secs) for size in (0.1, 1.0, 4.0) if (secs := of("takeover", "takeover_secs", size))}
    if 1.0 in takeover:
        values["takeover_secs_1b"] = takeover[1.0]
        if restarted := of("orbax", "restart_secs", 1.0):
            values["orbax_over_leto_1b"] = statistics.median(restarted) / takeover[1.0]
    if 0.1 in takeover and 4.0 in takeover:
        values["takeover_4b_over_0.1b"] = takeover[4.0] / takeover[0.1]
    settings = {"sizes": sizes, "kills": kills, "restarts": restart_count, **{f"size {name}": str(value) for name, value in SIZES.items()}}
    path = write_result("takeover_gpu", None, rows, settings, seed, values, json_path, device_name, commit or git_commit())
    _takeovers.draw(found, plain, path.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)

"""SIGKILL of one of several ranks to the first finished step of the shadow job, data parallel and fully sharded.

    python experiments/takeover_multi.py [--json FILE] [--size 1] [--ranks 2] [--kills 20] [--cuts dp,fsdp]

A rank is killed from outside, at a random moment once every shadow rank is ready, ranks in turn; counted from the signal to the end of the
first step after it on the last rank, minus one plain step. Beside it in the same run

    orbax        the same job, plain JAX on as many ranks, started anew from an Orbax checkpoint (`orbax_restart.py`: best case for it)
    plain_hang   how long a rank of plain JAX stays when its peer is killed: until it ends by itself, or until nobody waits any longer
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Annotated, Any

import _runs
import _takeovers
import typer
from _result import JsonOption, cpu_device, git_commit, write_result
from takeover_gpu import RESTART_SECS, SIZES

from leto_jax.agent import client
from leto_jax.agent.coordinator import HOST, free_port
from leto_jax.config import compile_cache, state_root
from leto_jax.errors import LetoError
from leto_jax.goodput import journal

READY_SECS, TAKEOVER_SECS, END_SECS = 240.0, 90.0, 30.0
HANG_SECS = 60.0
OTHER = ("detect", "fence", "attach", "verify", "roll_forward", "data", "body", "first_step")


def protected(options: dict[str, Any], ranks: int, kills: int, rng: random.Random) -> list[dict[str, Any]]:
    """One job, a rank of which is killed again and again: the takeovers of its journal, counted from the signals."""
    job = f"multi-{uuid.uuid4().hex[:8]}"
    command = [sys.executable, "-m", "leto_jax.cli", "run", "--job", job, "--nproc-per-node", str(ranks), *_runs.script(options)]
    killed: list[tuple[int, int]] = []
    begin = time.monotonic()
    with subprocess.Popen([*command, "--steps", "1000000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for number in range(kills):
                pids = _ready(job, process, ranks)
                time.sleep(rng.uniform(0.0, 1.0))
                rank = number % ranks
                killed.append((rank, time.monotonic_ns()))
                os.kill(pids[rank], signal.SIGKILL)
                _takeovers.wait_for(job, process, "takeover", number + 1, TAKEOVER_SECS)
                print(f"{time.monotonic() - begin:6.1f} s: rank {rank} killed ({number + 1} of {kills})", file=sys.stderr, flush=True)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(END_SECS)
            except subprocess.TimeoutExpired:
                process.kill()
    events = journal.read(state_root() / job / "journal.jsonl")
    failures = [event for event in events if event["event"] == "failure"]
    takeovers = [event for event in events if event["event"] == "takeover"]
    found = []
    for (rank, signalled_ns), failure, takeover in zip(killed, failures, takeovers, strict=True):
        late = (failure["failed_ns"] - signalled_ns) / 1e9  # until the agent's pidfd was readable
        stages = {**takeover["stages"], "detect": takeover["stages"]["detect"] + late}
        found.append({**takeover, "takeover_secs": takeover["takeover_secs"] + late, "stages": stages, "killed": rank})
    return found


def _ready(job: str, process: subprocess.Popen, ranks: int) -> dict[int, int]:
    """Waits until all shadow ranks are ready: process numbers of the trainers, by rank."""
    end = time.monotonic() + READY_SECS
    while time.monotonic() < end and process.poll() is None:
        try:
            status = client.ask(job, {"op": "status"})
        except LetoError:
            status = {"state": "", "ranks": []}
        ready = [item for item in status["ranks"] if item["role"] == "shadow" and item["phase"] == "ready"]
        trainers = {item["rank"]: item["pid"] for item in status["ranks"] if item["role"] == "trainer"}
        if status["state"] == "running" and len(ready) == ranks == len(trainers):
            return trainers
        time.sleep(0.05)
    raise TimeoutError(f"{job}: {ranks} shadow ranks were not ready within {READY_SECS:.0f} s (exit code {process.poll()})")


def _plain(words: list[str], ranks: int, environ: dict[str, str], **how: Any) -> list[subprocess.Popen]:
    """The ranks of a job of plain JAX."""
    address = f"{HOST}:{free_port()}"
    script = str(Path(__file__).with_name("orbax_restart.py"))
    group = ["--coordinator", address, "--ranks", str(ranks)]
    return [subprocess.Popen([sys.executable, script, *words, *group, "--rank", str(rank)], env=environ, **how) for rank in range(ranks)]


def restarts(options: dict[str, Any], ranks: int, count: int, environ: dict[str, str]) -> list[dict[str, Any]]:
    """The anchor: saves once, then starts all ranks anew `count` times; of each the figures of the slowest rank."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="orbax-", dir=memory) as directory:
        words = ["--directory", directory, *_runs.command_line(options)]
        if any(process.wait(RESTART_SECS) for process in _plain([*words, "--save"], ranks, environ)):
            raise RuntimeError("the anchor could not save")
        found = []
        for number in range(count + 1):
            started = {**environ, "STARTED_NS": str(time.monotonic_ns())}
            said = [
                process.communicate(timeout=RESTART_SECS)[0] for process in _plain(words, ranks, started, stdout=subprocess.PIPE, text=True)
            ]
            if number:  # the first one warms what the save has not
                found.append(max((json.loads(text.strip().splitlines()[-1]) for text in said), key=lambda item: item["restart_secs"]))
        return found


def hang(options: dict[str, Any], ranks: int, victim: int, environ: dict[str, str]) -> dict[str, Any]:
    """Plain JAX in its loop, one rank killed: what becomes of the others."""
    with tempfile.TemporaryDirectory() as directory:
        words = ["--directory", directory, *_runs.command_line(options), "--forever"]
        started = _plain(words, ranks, environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            for process in started:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith("step 5"):
                        break
            started[victim].kill()
            begin, survivor = time.monotonic(), started[(victim + 1) % ranks]
            try:
                code: int | None = survivor.wait(HANG_SECS)
            except subprocess.TimeoutExpired:
                code = None
            return {"killed": victim, "survivor_secs": time.monotonic() - begin, "exit_code": code, "watched_secs": HANG_SECS}
        finally:
            for process in started:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()


def main(
    size: Annotated[str, typer.Option(help="Billions of parameters, out of 0 (to try the script), 0.1, 1, 4.")] = "1",
    ranks: Annotated[int, typer.Option(min=2)] = 2,
    kills: Annotated[int, typer.Option(min=1, help="Of each cut, ranks in turn.")] = 20,
    restart_count: Annotated[int, typer.Option("--restarts", min=0)] = 3,
    cuts: Annotated[str, typer.Option(help="dp, fsdp")] = "dp,fsdp",
    device: Annotated[str, typer.Option(help="gpu, or cpu to try the script.")] = "gpu",
    device_name: Annotated[str, typer.Option("--device-name")] = "NVIDIA H200",
    seed: int = 0,
    commit: Annotated[str | None, typer.Option(help="Commit to note, where there is no repository.")] = None,
    json_path: JsonOption = None,
) -> None:
    rng, rows, values = random.Random(seed), [], {}
    drawn: list[dict[str, Any]] = []
    plain = 0.0
    shape = {**SIZES[size], "scan": True, "device": device, "seed": seed}
    with tempfile.TemporaryDirectory(prefix="leto-bench-") as directory:
        os.environ["XDG_STATE_HOME"] = directory
        environ = {**os.environ, **compile_cache(Path(directory) / "cache"), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        for cut in cuts.split(","):
            found = protected({**shape, "cut": cut, "log_every": 1000}, ranks, kills, rng)
            plain = statistics.median(item["plain_step_secs"] for item in found)
            drawn += [item | {"phase": f"rank {item['killed']}, {item['phase']}, {cut}"} for item in found]
            for item in found:
                stages = {f"{name}_secs": item["stages"].get(name, 0.0) for name in OTHER}
                kept = {name: item[name] for name in ("killed", "phase", "step", "takeover_secs", "lost_steps", "compiles", "path")}
                rows.append({"part": "takeover", "cut": cut, **kept, **stages, "plain_step_secs": item["plain_step_secs"]})
            values[f"takeover_secs_{cut}"] = statistics.median(item["takeover_secs"] for item in found)
            print(f"{cut}: takeover {values[f'takeover_secs_{cut}']:.3f} s, plain step {plain:.3f} s", flush=True)
            for item in restarts({**shape, "cut": cut}, ranks, restart_count, environ) if restart_count else []:
                stages = {f"{name}_secs": value for name, value in item["stages"].items()}
                rows.append({"part": "orbax", "cut": cut, "restart_secs": item["restart_secs"], **stages})
                print(f"{cut}: Orbax restart {item['restart_secs']:.2f} s", flush=True)
        for victim in range(min(ranks, 2)):
            rows.append({"part": "plain_hang", **hang({**shape, "cut": "dp"}, ranks, victim, environ)})
            print(rows[-1], flush=True)
        settings = {"size": size, **SIZES[size], "ranks": ranks, "kills": kills, "restarts": restart_count, "cuts": cuts}
        name = cpu_device() if device == "cpu" else device_name
        path = write_result("takeover_multi", None, rows, settings, seed, values, json_path, name, commit or git_commit())
        _takeovers.draw(drawn, plain, path.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)

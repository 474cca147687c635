"""What of a GPU's memory is taken, over time and by whom: without a shadow, and with one, through a takeover.

    python experiments/memory_gpu.py [--json FILE] [--size 1]

NVML is asked ten times a second what is in use on the device. From the steady stretches follow the footprints:

    manager    what stays when every trainer and shadow is dead, less the arenas that it keeps
    trainer    a training without shadow, less the arenas: context, programs, and what XLA takes for activations and gradients of a layer
    shadow     what a ready shadow adds
    rehearsal  the most that a shadow that gets ready adds, beyond what it keeps
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Annotated, Any

import _runs
import _takeovers
import typer
from _result import JsonOption, git_commit, write_result
from _takeovers import wait_for
from takeover_gpu import SIZES

from leto_jax.manager import runtime
from leto_jax.manager.client import ManagerClient
from leto_jax.manager.store import gpu_of

MIB = 1 << 20
PERIOD_SECS, STEADY_SECS, DEADLINE_SECS = 0.1, 3.0, 180.0


class Meter:
    """Samples the memory in use on GPU `ordinal`, in a thread, from its making to `close`."""

    def __init__(self, ordinal: int):
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(ordinal)
        self.used = lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        self.total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        self.samples: list[tuple[float, int]] = []
        self.marks: list[tuple[float, str]] = []
        self._began, self._ended = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(PERIOD_SECS):
            self.samples.append((time.monotonic() - self._began, self.used()))

    def mark(self, what: str) -> None:
        self.marks.append((time.monotonic() - self._began, what))
        print(f"{self.marks[-1][0]:6.1f} s  {self.used() / MIB:8.0f} MiB  {what}", file=sys.stderr, flush=True)

    def steady(self) -> float:
        """Median of the next few seconds, bytes."""
        begin = time.monotonic() - self._began
        time.sleep(STEADY_SECS)
        return statistics.median(used for at, used in self.samples if at >= begin)

    def most(self, since: float) -> int:
        return max(used for at, used in self.samples if at >= since)

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


def arenas_of(job: str) -> int:
    """Bytes of device memory that the job's manager keeps."""
    with ManagerClient(runtime.job_dir(job) / runtime.SOCKET_NAME, "tool") as manager:
        return sum(item.nbytes for item in manager.list() if gpu_of(item.kind) is not None)


def watch(size: str, device: str, ordinal: int, shadow: bool) -> tuple[Meter, dict[str, float]]:
    """One run, from start to end: what was used when, and the steady figures, in bytes."""
    job = f"memory-{uuid.uuid4().hex[:8]}"
    script = _runs.script({**SIZES[size], "device": device, "log_every": 1000, "scan": True, "steps": 1_000_000})
    command = [sys.executable, "-m", "leto_jax.cli", "run", "--job", job, "--shadow-level", "3" if shadow else "0", *script]
    meter, found = Meter(ordinal), {}
    found["before"] = meter.steady()
    meter.mark("start")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait_for(job, process, "first_step", secs=DEADLINE_SECS)
            meter.mark("first step")
            begin = meter.now
            if shadow:
                wait_for(job, process, "ready", secs=DEADLINE_SECS)
                meter.mark("shadow ready")
                found["rehearsal"] = meter.most(begin)
            found["training"] = meter.steady()
            if shadow:
                _takeovers.ask_when_up(
                    job, {"op": "inject", "kind": "sigkill", "phase": "compute", "when_ready": True, "deadline_secs": 60.0}, process
                )
                wait_for(job, process, "takeover", secs=DEADLINE_SECS)
                meter.mark("takeover")
                wait_for(job, process, "ready", 2, secs=DEADLINE_SECS)
                meter.mark("next shadow ready")
                found["after_takeover"] = meter.steady()
            found["arenas"] = arenas_of(job)
            process.kill()
            process.wait()
            meter.mark("agent killed")
            time.sleep(STEADY_SECS)
            found["kept"] = meter.steady()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
    subprocess.run(
        [sys.executable, "-m", "leto_jax.cli", "stop", "--job", job], check=True, timeout=DEADLINE_SECS, stdout=subprocess.DEVNULL
    )
    meter.mark("stopped")
    time.sleep(STEADY_SECS)
    found["end"] = meter.steady()
    meter.close()
    return meter, found


def draw(meters: dict[str, Meter], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(meters), 1, figsize=(9, 3.2 * len(meters)), sharex=True, sharey=True, layout="constrained")
    for axis, (name, meter) in zip(axes, meters.items(), strict=True):
        axis.fill_between(
            [at for at, _ in meter.samples], [used / 2**30 for _, used in meter.samples], color="#4c72b0", alpha=0.5, linewidth=0
        )
        for at, what in meter.marks:
            axis.axvline(at, color="#8c8c8c", linewidth=0.8)
            axis.text(at, 0.02, f" {what}", rotation=90, fontsize=7, va="bottom", transform=axis.get_xaxis_transform())
        axis.set_title(name, loc="left", fontsize=10)
        axis.set_ylabel("GiB in use")
    axes[-1].set_xlabel("seconds")
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def main(
    size: Annotated[str, typer.Option(help="Billions of parameters, out of 0.1, 1, 4.")] = "1",
    ordinal: Annotated[int, typer.Option(help="NVML's number of the GPU.")] = 0,
    device_name: Annotated[str, typer.Option("--device-name")] = "NVIDIA H200",
    commit: Annotated[str | None, typer.Option(help="Commit to note, where there is no repository.")] = None,
    json_path: JsonOption = None,
) -> None:
    rows: list[dict[str, Any]] = []
    meters: dict[str, Meter] = {}
    steady: dict[bool, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="leto-bench-") as directory:
        os.environ["XDG_STATE_HOME"] = directory
        for shadow in (False, True):
            name = "with a shadow, one takeover" if shadow else "without a shadow"
            meters[name], steady[shadow] = watch(size, "gpu", ordinal, shadow)
            rows += [{"part": "series", "run": name, "secs": round(at, 2), "used_mib": used / MIB} for at, used in meters[name].samples]
            rows += [{"part": "mark", "run": name, "secs": round(at, 2), "what": what} for at, what in meters[name].marks]
    without, shadowed = steady[False], steady[True]
    used = lambda run, what: run[what] - run["before"]
    footprints = {
        "arenas": without["arenas"],
        "manager": used(without, "kept") - without["arenas"],
        "trainer": used(without, "training") - without["arenas"],
        "shadow": used(shadowed, "training") - used(without, "training"),
        "rehearsal": used(shadowed, "rehearsal") - used(shadowed, "training"),
        "growth over a takeover": used(shadowed, "after_takeover") - used(shadowed, "training"),
        "left after the end": used(shadowed, "end"),
    }
    for what, nbytes in footprints.items():
        rows.append({"part": "footprint", "what": what, "mib": nbytes / MIB})
        print(f"{what:<24}{nbytes / MIB:10.0f} MiB")
    settings = {"size": size, **SIZES[size], "period_secs": PERIOD_SECS, "total_mib": meters["without a shadow"].total / MIB}
    path = write_result("memory_gpu", None, rows, settings, 0, {}, json_path, device_name, commit or git_commit())
    draw(meters, path.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)

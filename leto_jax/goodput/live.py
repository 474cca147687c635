"""What a running job tells others: a Prometheus endpoint, and TensorBoard scalars. Fed by the agent, from the journal and the control words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leto_jax import errors

ADDRESS = "127.0.0.1"
TAKEOVER_BUCKETS = (0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class Prometheus:
    """`http://127.0.0.1:PORT/metrics` for as long as it is open.

    Raises UsageError if the port is taken, or prometheus-client is not installed.
    """

    def __init__(self, port: int, job: str):
        try:
            import prometheus_client as prometheus
        except ImportError as exception:
            raise errors.UsageError("--metrics-port: needs the package prometheus-client: uv sync --extra metrics") from exception
        registry = prometheus.CollectorRegistry()

        def made(kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
            found = kind(f"leto_{name}", text, ("job", *labels), registry=registry, **more)
            return found.labels(job) if not labels else found

        self._job = job
        self._steps = made(prometheus.Counter, "steps", "Committed steps.")
        self._failures = made(prometheus.Counter, "failures", "Failures of a trainer.", "kind")
        self._takeovers = made(prometheus.Counter, "takeovers", "Failures after which training went on.", "path")
        self._takeover = made(prometheus.Histogram, "takeover_seconds", "From a failure to the next step.", buckets=TAKEOVER_BUCKETS)
        self._copies = made(prometheus.Counter, "copies", "Whole copies of the state that were taken.", "tier")
        self._stalls = made(prometheus.Counter, "copy_stall_seconds", "Time in which training waited for a copy.", "tier")
        self._commit = made(prometheus.Gauge, "commit", "Number of the last committed step.")
        self._step = made(prometheus.Gauge, "step_seconds", "Median of the last steps.")
        self._ready = made(prometheus.Gauge, "shadow_ready", "1 while a process is ready to take over.")
        self._seen: int | None = None
        try:
            self._server, self._thread = prometheus.start_http_server(port, ADDRESS, registry)
        except (OSError, OverflowError) as exception:
            raise errors.UsageError(f"--metrics-port {port}: cannot listen on {ADDRESS}: {exception}; name another port") from exception

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def observe(self, event: Mapping[str, Any]) -> None:
        """An event of the journal."""
        if event["event"] == "failure":
            self._failures.labels(self._job, event["kind"]).inc()
        elif event["event"] == "takeover":
            self._takeovers.labels(self._job, event["path"]).inc()
            self._takeover.observe(max(0.0, event["takeover_secs"]))
        elif event["event"] == "saved" and not event["error"] and event["rank"] == 0:  # for all ranks, that take theirs together
            self._copies.labels(self._job, event["tier"]).inc()
            self._stalls.labels(self._job, event["tier"]).inc(event["stall_secs"])

    def sample(self, commit: int, step_secs: float | None, ready: bool) -> None:
        """Where the job is. A commit that is smaller than before is one that is reached again."""
        self._steps.inc(max(0, commit - (commit if self._seen is None else self._seen)))
        self._seen = commit if self._seen is None else max(commit, self._seen)
        self._commit.set(commit)
        self._ready.set(ready)
        if step_secs is not None:
            self._step.set(step_secs)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


class TensorBoard:
    """Scalars of each step, from the job's metrics file, and how long takeovers took, in `directory`.

    Raises UsageError if the directory cannot be written to, or tensorboardX is not installed.
    """

    def __init__(self, directory: Path, metrics: Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as exception:
            raise errors.UsageError("--tensorboard: needs the package tensorboardX: uv sync --extra metrics") from exception
        try:
            self._writer = SummaryWriter(str(directory))
        except OSError as exception:
            raise errors.UsageError(f"--tensorboard: {directory} cannot be written to: {exception.strerror or exception}") from exception
        self._metrics, self._last = metrics, -1
        self._at = metrics.stat().st_size if metrics.exists() else 0  # what earlier runs of this job have trained is there already

    def observe(self, event: Mapping[str, Any]) -> None:
        """An event of the journal."""
        if event["event"] == "takeover":
            self._writer.add_scalar("leto/takeover_seconds", event["takeover_secs"], event["step"], event["time"])

    def poll(self) -> None:
        """Takes in the rows that have been added. A row that is written again, since its step was trained again, counts once."""
        if not self._metrics.exists():
            return
        if self._metrics.stat().st_size < self._at:
            self._at = 0  # it was cut back to the step that training goes on from
        with open(self._metrics, "rb") as file:
            file.seek(self._at)
            found = file.read()
        whole = found.rfind(b"\n") + 1
        self._at += whole
        for line in found[:whole].splitlines():
            row = json.loads(line)
            if row["step"] <= self._last:
                continue
            self._last = row["step"]
            for name, value in row.items():
                if name not in ("step", "time"):
                    self._writer.add_scalar(name, value, row["step"], row.get("time"))

    def close(self) -> None:
        self.poll()
        self._writer.close()

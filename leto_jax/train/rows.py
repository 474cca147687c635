"""The metrics file of a job: one JSON line for each step, also across takeovers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class MetricsFile:
    """One JSON line per step, also across takeovers: a torn or missing last row is completed from the retained metrics."""

    def __init__(self, path: Path | None, commit: int):
        self._file, self._last = None, -1
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (lives as long as the session)
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        rows = content[:whole].splitlines(keepends=True)
        keep = len(rows)
        while keep and json.loads(rows[keep - 1])["step"] > commit:
            keep -= 1
        self._file.truncate(sum(len(row) for row in rows[:keep]))
        self._last = json.loads(rows[keep - 1])["step"] if keep else -1

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._file is None or step <= self._last:
            return
        scalars = {
            name: float(value)
            for name, value in metrics.items()
            if np.ndim(value) == 0 and np.issubdtype(np.asarray(value).dtype, np.number)
        }
        try:
            self._file.write(json.dumps({"step": step, "time": time.time(), **scalars}).encode() + b"\n")
        except OSError as exception:  # a full disk must not end the training; the rows from here on are missing
            print(f"leto: metrics are no longer written: {exception}", file=sys.stderr, flush=True)
            self._file = None
        self._last = step

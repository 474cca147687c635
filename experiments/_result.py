"""The one way in which experiments write results: the schema of docs/design.md, section 10.

Experiments are scripts (`uv run python experiments/NAME.py`), so this module and `targets` are imported by their plain names. JAX is not
imported here: versions come from package metadata.
"""

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from targets import TARGETS

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "experiments" / "results"
PACKAGES = ("leto_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

JsonOption = Annotated[Path | None, typer.Option("--json", help="Where to write the result, instead of experiments/results/.")]
"""Type of an experiment's `json_path` parameter: `def main(json_path: JsonOption = None)`."""


def result_path(name: str, variant: str | None = None, json_path: Path | None = None) -> Path:
    """`json_path` if given, else `experiments/results/<name>[_<variant>].json`. A figure has the same name with `.png`."""
    return json_path or RESULTS / (f"{name}_{variant}.json" if variant else f"{name}.json")


def git_commit() -> str:
    """HEAD, with '-dirty' if anything but earlier results differs from it, or 'unknown' outside a repository."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--", ".", ":(exclude)experiments/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}-dirty" if changed else head


def versions() -> dict[str, str]:
    """Python and the packages that results depend on; those that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def cpu_device() -> str:
    """A device string for experiments on the host: model and the cores that this process may use."""
    model = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"CPU: {model}, {len(os.sched_getaffinity(0))} cores"


def write_result(
    name: str,
    variant: str | None,
    rows: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    seed: int,
    values: Mapping[str, float],
    json_path: Path | None,
    device: str,
    commit: str | None = None,
) -> Path:
    """Write one result and print each target with its verdict.

    Args:
        name: the experiment, a key of `targets.TARGETS`.
        variant: distinguishes results of one experiment, such as 'cpu'; None for the only one.
        rows: flat objects, one for each line of a table.
        values: measured value of each target that this run decides; a name without a target is an error, so that no limit is forgotten.
        device: what it ran on, in words: `cpu_device()` or the accelerator's name and count.
        commit: `git_commit()` as it was when a long run began; asked now if None.

    Returns:
        The file written. It appears whole or not at all.
    """
    unknown = sorted(set(values) - set(TARGETS.get(name, {})))
    if unknown:
        raise KeyError(
            f"{name}: expected values for {', '.join(TARGETS.get(name, {}))}, found {', '.join(unknown)}; add a limit to targets.py"
        )
    nested = [key for row in rows for key, value in row.items() if isinstance(value, dict | list | tuple)]
    if nested:
        raise TypeError(f"{name}: expected flat rows, found nested values under {', '.join(sorted(set(nested)))}")
    decided = {key: target for key, target in TARGETS.get(name, {}).items() if key in values}
    result = {
        "name": f"{name}_{variant}" if variant else name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or git_commit(),
        "versions": versions(),
        "device": device,
        "seed": seed,
        "settings": dict(settings),
        "rows": [dict(row) for row in rows],
        "targets": [
            {
                "name": key,
                "value": values[key],
                "target": target.limit,
                "unit": target.unit,
                "better": target.better,
                "met": target.met(values[key]),
            }
            for key, target in decided.items()
        ],
    }
    path = result_path(name, variant, json_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".tmp")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(path)
    for key, target in decided.items():
        verdict = "met" if target.met(values[key]) else "MISSED"
        print(f"{verdict:6} {key} = {values[key]:.4g} {target.unit} ({'<=' if target.better == 'lower' else '>='} {target.limit:g})")
    print(f"wrote {path}")
    return path


def _git(*args: str) -> str:
    done = subprocess.run(["git", *args], cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()

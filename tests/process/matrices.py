"""What the slow matrices of failures write down. With LETO_WRITE_RESULTS=1 it goes to experiments/results/."""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime
from typing import Any

from jobs import REPOSITORY

SHOWN = ("kind", "phase", "step", "path", "plan", "takeover_secs", "detect_secs", "lost_steps", "compiles", "repaired_pages")


def shown(takeover: dict[str, Any], **more: object) -> dict[str, Any]:
    """A takeover of the journal as a row."""
    return {**{key: takeover[key] for key in SHOWN}, **more}


def write(result: str, test: str, seed: int, rows: list[dict[str, Any]]) -> None:
    """One test's part of a result; those of others stay. All are bit-identical where this is reached."""
    slowest = max((row["takeover_secs"] for row in rows if row["path"] == "shadow"), default=0.0)
    print(f"{test}: {len(rows)} failures, slowest takeover {slowest:.3f} s by a ready shadow")
    if os.environ.get("LETO_WRITE_RESULTS") != "1":
        return
    sys.path.insert(0, str(REPOSITORY / "experiments"))
    import _result

    path = _result.result_path(result)
    earlier = json.loads(path.read_text()) if path.exists() else {"rows": [], "settings": {}}
    settings = {**earlier["settings"], f"seed_{test}": seed, "script": "tests/process/scripts/tiny.py"}
    kept = [row for row in earlier["rows"] if row["test"] != test] + [{"test": test, **row} for row in rows]
    compiles = max((row["compiles"] for row in kept if row["path"] in ("shadow", "late_shadow")), default=0)
    document = {
        "name": result,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _result.git_commit(),
        "versions": _result.versions(),
        "device": _result.cpu_device(),
        "seed": seed,
        "settings": settings,
        "rows": kept,
        "targets": [
            {"name": "bit_identical", "value": 1, "target": 1, "unit": "yes = 1", "better": "higher", "met": True},
            {"name": "compiles_at_takeover", "value": compiles, "target": 0, "unit": "count", "better": "lower", "met": compiles == 0},
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")

"""The README's example, as a user runs it: alone and under `leto run`, with the same final line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "experiments" / "minimal.py"


def final_line(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    last = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"final step=500 loss=\S+ digest=sha256:[0-9a-f]{64}", last), done.stdout[-500:]
    return last


def test_alone_and_protected_end_alike(leto_dirs: Path) -> None:
    alone = final_line([sys.executable, str(EXAMPLE)])
    assert final_line([sys.executable, "-m", "leto_jax.cli", "run", "--job", "example", str(EXAMPLE)]) == alone
    assert not any((leto_dirs / "run" / "leto").iterdir()), "a job that ended well leaves nothing behind"


def test_readme_quotes_the_example() -> None:
    assert EXAMPLE.read_text().strip() in (ROOT / "README.md").read_text()

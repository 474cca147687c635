"""The training scripts, stand-alone and small: the form of their last line, the same digest twice, and what they refuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FINAL = re.compile(r"final step=(\d+) loss=(-?\d[\d.e+-]*) digest=sha256:([0-9a-f]{64})")
TINY_LM = ("--steps", "3", "--width", "16", "--depth", "1", "--heads", "2", "--context", "16", "--batch", "2")


def run(script: str, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, f"experiments/{script}.py", *options], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr
    return done


def final(done: subprocess.CompletedProcess[str]) -> tuple[int, str, str]:
    """(step, loss, digest) of the last line on stdout, which is the only one of its form."""
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.startswith("final ")]) == 1, done.stdout
    match = FINAL.fullmatch(lines[-1])
    assert match, lines[-1]
    return int(match[1]), match[2], match[3]


def assert_same(first: subprocess.CompletedProcess[str], second: subprocess.CompletedProcess[str], steps: int) -> None:
    assert final(first)[0] == steps
    assert first.stdout == second.stdout
    assert "leto: not started by `leto run`: training unprotected" in first.stderr


def test_minimal():
    done = run("minimal")
    assert_same(done, run("minimal"), 500)
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < 0.005


def test_digits_from_grain():
    pytest.importorskip("grain")
    options = ("--steps", "8", "--data", "grain")
    assert_same(run("train_digits", *options), run("train_digits", *options), 8)


def test_digits_accuracy():
    """A function of the step as data; the accuracy that the script promises."""
    done = run("train_digits", "--steps", "200", "--data", "function")
    accuracy = re.search(r"^test accuracy (\S+)$", done.stdout, re.MULTILINE)
    assert accuracy
    assert float(accuracy[1]) > 0.95
    assert final(done)[0] == 200


def test_lm(tmp_path: Path):
    path = tmp_path / "made" / "result.json"
    options = (*TINY_LM, "--seed", "1", "--eval-every", "2")
    done = run("train_lm", *options, "--json", str(path))
    assert_same(done, run("train_lm", *options), 3)
    assert re.findall(r"^step (\d+) loss \d\.\d+$", done.stdout, re.MULTILINE) == ["1", "2", "3"]
    assert re.findall(r"^step (\d+) held-out loss \d\.\d+$", done.stdout, re.MULTILINE) == ["2"]
    found = json.loads(path.read_text())
    assert set(found) == {"name", "created", "commit", "versions", "device", "seed", "settings", "parameters", "corpus", "rows", "targets"}
    assert (found["name"], found["seed"], found["settings"]["width"]) == ("train_lm", 1, 16)
    assert [row["step"] for row in found["rows"]] == [1, 2, 3]
    assert found["rows"][-1]["loss"] == float(final(done)[1])
    assert f"corpus sha256:{found['corpus']['sha256']} ({found['corpus']['bytes']} bytes)" in done.stderr


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("train_lm", ("--device", "tpu"), "Invalid value for --device: expected cpu or gpu, found 'tpu'"),
        ("train_lm", ("--width", "10", "--heads", "3"), "Invalid value for --width: expected a multiple of --heads 3, found 10"),
        ("train_digits", ("--data", "files"), "Invalid value for --data: expected grain or function, found 'files'"),
    ],
)
def test_refused(script: str, options: tuple[str, ...], message: str):
    done = run(script, *options, code=2)
    words = re.sub(r"[│╭╮╰╯─\s]+", " ", done.stderr)
    assert message in words
    assert "Traceback" not in done.stderr

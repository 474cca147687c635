"""Programs over several ranks, in real processes that meet at a coordinator: where XLA talks to other ranks, and where it must not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from leto_jax.agent.coordinator import free_port

SCRIPTS = Path(__file__).resolve().parent / "scripts"
SECS = 120.0
SERVE = """
import sys, time
from leto_jax import distributed
service = distributed.serve(sys.argv[1], int(sys.argv[2]))
assert "jax" not in sys.modules
time.sleep(float(sys.argv[3]))
"""
RUN = """
import runpy, sys
from leto_jax import distributed
distributed.join(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), 60)
sys.path.insert(0, sys.argv[4].rpartition("/")[0])
sys.argv = sys.argv[4:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def together(script: str, *arguments: object, ranks: int = 2) -> list[subprocess.CompletedProcess[str]]:
    """The same script in `ranks` processes of one group, to the end of all; no agent, no job."""
    address = f"127.0.0.1:{free_port()}"
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    begin = [sys.executable, "-c"]
    service = subprocess.Popen([*begin, SERVE, address, str(ranks), str(SECS)], env=environ)
    words = [str(SCRIPTS / script), *map(str, arguments)]
    started = [
        subprocess.Popen(
            [*begin, RUN, address, str(rank), str(ranks), *words], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(ranks)
    ]
    try:
        found = []
        for process in started:
            out, err = process.communicate(timeout=SECS)
            found.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
        return found
    finally:
        for process in (*started, service):
            process.kill()
            process.wait()


@pytest.mark.parametrize("cut", ["same", "rows", "tensor", "mixed"])
def test_decide_gathers_and_nothing_in_an_update_does(cut):
    done = together("collectives.py", cut)
    assert [item.returncode for item in done] == [0, 0], done[0].stderr + done[1].stderr
    found = [json.loads(item.stdout.splitlines()[-1]) for item in done]
    assert [item["rank"] for item in found] == [0, 1]
    assert found[0]["collectives"] == found[1]["collectives"]
    for name, collectives in found[0]["collectives"].items():
        if name == "decide":
            assert "all-gather" in collectives  # the records of all ranks
        elif name == "compute":
            assert collectives
        elif name != "init":  # a rank may have to do it again when the others have gone on
            assert collectives == [], name
    halves = {"same": [], "rows": ["w0", "w1", "w2", "b"], "tensor": ["w0", "w1", "b"], "mixed": ["w1", "w2"]}[cut]
    whole = {"w0": 64 * 256, "w1": 256 * 256, "w2": 256 * 10, "b": 256}
    sizes = {path.strip("[']"): shape for path, shape in found[0]["shards"].items()}
    for name, size in whole.items():
        count = 1
        for n in sizes[name]:
            count *= n
        assert count == size // (2 if name in halves else 1), name


def test_ranks_that_are_not_equal_are_refused_with_rank_and_leaf():
    done = together("tiny.py", "--steps", 2, "--other-width-on", 1)
    for item in done:
        assert item.returncode == 1
        assert "rank 1 differs from rank 0, all ranks must run the same script with the same arguments" in item.stderr
        assert re.search(r"LayoutError: .*\['b'\]", item.stderr), item.stderr


def test_a_leaf_that_cannot_be_cut_is_refused_by_name():
    done = together("tiny.py", "--steps", 2, "--cut", "rows", "--width", 255)
    for item in done:
        assert item.returncode == 1
        assert re.search(r"UsageError: \['b'\]: expected a shape that .*'data'.* cuts evenly, found \[255\]", item.stderr), item.stderr


def test_two_ranks_train_to_the_same_result_twice():
    first, again = (together("tiny.py", "--steps", 3, "--cut", "rows") for _ in range(2))
    assert [item.returncode for item in (*first, *again)] == [0] * 4, first[0].stderr
    said = [[line for line in item.stdout.splitlines() if line.startswith(("step", "final"))] for item in (*first, *again)]
    assert [len(lines) for lines in said] == [4] * 4
    assert said[:2] == said[2:]
    assert said[0][:3] == said[1][:3]  # the loss is that of all
    assert said[0][3] != said[1][3]  # each has its own shards


def test_a_rank_that_never_comes_is_a_deadline():
    address = f"127.0.0.1:{free_port()}"
    begin = [sys.executable, "-c"]
    service = subprocess.Popen([*begin, SERVE, address, "2", "60"])
    try:
        code = f"from leto_jax import distributed; distributed.join({address!r}, 0, 2, 3)"
        done = subprocess.run([*begin, code], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode != 0
        assert f"DeadlineError: rank 0: expected all 2 ranks at the coordinator {address} within 3 s" in done.stderr
    finally:
        service.kill()
        service.wait()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--own-key",), r"IdentityError: rank 1 differs from rank 0, .*: session key: "),
        (
            ("--more-steps-on", 1),
            r"IdentityError: rank 1 differs from rank 0, .*: session steps: the job runs with '2', this process with '3'",
        ),
        (("--own-weight",), r"UsageError: batch of step 1: ranks 0 and 1 feed the same part of \['weight'\] and have drawn different ones"),
    ],
    ids=["key", "steps", "batch"],
)
def test_what_ranks_must_have_alike_is_compared(arguments, text):
    for item in together("tiny.py", "--steps", 2, *arguments):
        assert item.returncode == 1
        assert re.search(text, item.stderr), item.stderr

"""A generation says of all its ranks what can be said of one, and what it is worth when they say different things."""

from __future__ import annotations

import selectors
from pathlib import Path
from types import SimpleNamespace

import pytest

from leto_jax.agent.books import longest
from leto_jax.agent.generation import Generation, Program
from leto_jax.agent.output import Terminal
from leto_jax.agent.policy import Kind
from leto_jax.config import Process


def generation(*children: dict[str, object]) -> Generation:
    """Ranks in a state of their own; none of them is a process."""
    usual = {"ready": False, "greeted": True, "refused": "", "lost": False, "returncode": None, "pid": 1}
    process = Process("job", "shadow", 0, Path("/nonexistent"), 3, Path("/nonexistent"), ranks=max(1, len(children)))
    nobody = lambda *_: None
    made = Generation(process, (), Program([], {}, None), selectors.DefaultSelector(), Terminal(), nobody, nobody, nobody)
    made.children = tuple(SimpleNamespace(rank=rank, **{**usual, **child}) for rank, child in enumerate(children))
    return made


def test_it_is_ready_when_all_are():
    assert not generation().ready
    assert not generation({"ready": True}, {}).ready
    assert generation({"ready": True}, {"ready": True}).ready


def test_the_first_refusal_is_named_where_there_are_several():
    assert generation({}, {}).refused == ""
    assert generation({"refused": "params differ"}).refused == "params differ"
    assert generation({}, {"refused": "params differ"}, {"refused": "too"}).refused == "rank 1: params differ"
    assert generation({"refused": "rank 1: params differ"}, {}).refused == "rank 1: params differ"  # they have agreed on it
    assert generation({}, {"lost": True}).lost


def test_absent_and_running():
    found = generation({"greeted": False}, {"returncode": 0}, {"returncode": -9})
    assert found.absent == [0]
    assert [child.rank for child in found.running] == [0]


@pytest.mark.parametrize(
    ("codes", "first", "injected", "cause"),
    [
        ([17], 0, None, (0, Kind.EXIT, "exit code 17")),
        ([0], 0, None, (0, Kind.EXIT, "exit code 0")),
        ([1, -9], 0, None, (1, Kind.SIGNAL, "SIGKILL")),
        ([1, 1], 1, 0, (0, Kind.EXIT, "exit code 1")),
        ([0, 1], 1, None, (1, Kind.EXIT, "exit code 1")),  # rank 0 was done
        ([1, 3], 0, None, (1, Kind.EXIT, "exit code 3")),
    ],
)
def test_root_cause(codes, first, injected, cause):
    made = generation(*({"returncode": code} for code in codes))
    child, kind, detail = made.root_cause(made.children[first], injected, 0.0)
    assert (child.rank, kind, detail) == cause


def test_every_process_is_found_by_its_token_before_it_exists():
    made = generation()
    assert made.entries == [(None, made.token)]
    assert made.token.startswith("job-")


def test_of_each_stage_the_longest_counts():
    assert longest([{"attach": 1.0, "verify": 0.5}, {"attach": 2.0, "data": 0.1}]) == {"attach": 2.0, "verify": 0.5, "data": 0.1}

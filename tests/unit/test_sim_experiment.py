"""`experiments/simulate_paper.py` and the result file that every experiment writes."""

import importlib
import json
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


@pytest.fixture
def experiment(monkeypatch):
    """Imports a module of experiments/ by the plain name that the scripts use."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    yield importlib.import_module
    for name in ("_result", "targets", "simulate_paper"):
        sys.modules.pop(name, None)


def test_recovery_table_is_within_one_point(experiment):
    paper = experiment("simulate_paper")
    rows = paper.recovery_rows(paper.Assumptions(), seeds=4)
    deciding = [row for row in rows if row["decides_target"]]
    assert [(row["system"], row["interval"]) for row in deciding] == [("gemini", 11), ("gemini+", 11), ("leto", 11), ("leto", 32)]
    for row in deciding:
        assert row["recovery_secs"] == pytest.approx(row["paper_recovery_secs"], abs=1.5)
        assert abs(row["error_points"]) <= 1
        assert row["assumptions"]


def test_productive_time_at_131072_gpus(experiment):
    paper = experiment("simulate_paper")
    v4 = paper.with_iteration_time(paper.load_workload("deepseek-v4"))
    base, *_ = paper.scenarios(0.5)
    row = paper.scale_row(base, paper.scale_outcome(base, v4, days=10, seeds=4), v4, paper.Assumptions())
    assert row["ettr_pct"] >= 95
    assert row["dominant"] == "init after node failures"
    assert sum(row[f"{cause.value}_pct"] for cause in paper.Cause) == pytest.approx(100, abs=0.01)
    ours = next(s for s in paper.scenarios(0.5) if s.label == "takeover 0.5 s")
    assert paper.scale_outcome(ours, v4, days=10, seeds=4).ettr > row["ettr_pct"] / 100


def test_assumptions_are_numbered_once(experiment):
    cited = experiment("simulate_paper").Assumptions()
    assert cited.cite("one", "two") == "A1 A2"
    assert cited.cite("two", "three") == "A2 A3"
    assert cited.listed() == {"A1": "one", "A2": "two", "A3": "three"}


def test_result_file_has_the_schema_of_the_design(experiment, tmp_path):
    result = experiment("_result")
    values = {"table_error_points": 0.5, "ettr_pct_131072": 94.0}
    file = tmp_path / "deep" / "r.json"
    path = result.write_result("simulate_paper", "x", [{"a": 1}], {"days": 3}, 7, values, file, "test", commit="abc")
    found = json.loads(path.read_text())
    assert set(found) == {"name", "created", "commit", "versions", "device", "seed", "settings", "rows", "targets"}
    assert (found["name"], found["commit"], found["seed"], found["rows"]) == ("simulate_paper_x", "abc", 7, [{"a": 1}])
    assert found["targets"] == [
        {"name": "table_error_points", "value": 0.5, "target": 1.0, "unit": "percentage points", "better": "lower", "met": True},
        {"name": "ettr_pct_131072", "value": 94.0, "target": 95, "unit": "%", "better": "higher", "met": False},
    ]
    assert list(path.parent.iterdir()) == [path]
    assert result.result_path("bench_cpu") == EXPERIMENTS / "results" / "bench_cpu.json"
    assert result.result_path("bench_cpu", "small").name == "bench_cpu_small.json"


def test_result_refuses_values_without_a_limit_and_nested_rows(experiment, tmp_path):
    result = experiment("_result")
    with pytest.raises(KeyError, match=r"expected values for table_error_points, .* found made_up; add a limit"):
        result.write_result("simulate_paper", None, [], {}, 0, {"made_up": 1.0}, tmp_path / "r.json", "test")
    with pytest.raises(TypeError, match=r"expected flat rows, found nested values under a"):
        result.write_result("simulate_paper", None, [{"a": [1]}], {}, 0, {}, tmp_path / "r.json", "test")


def test_commit_is_that_of_the_repository(experiment):
    commit = experiment("_result").git_commit()
    assert commit == "unknown" or len(commit.removesuffix("-dirty")) == 40

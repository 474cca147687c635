"""`leto simulate` from the outside: JSON, table, figure, measured reports, bad input."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from leto_jax.errors import UsageError
from leto_jax.sim.cli import simulate
from leto_jax.sim.measured import read_report

app = typer.Typer()
app.command("simulate")(simulate)


def invoke(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def as_json(*args):
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


QUICK = ("--days", 5, "--seeds", 3, "--mttf", "10m")


def test_json_of_the_issues_example():
    found = as_json("deepseek-v4", "--system", "leto,gemini+", "--mttf", "10m", "--hof", 0.5, "--gpus", 131_072, "--days", 5, "--seeds", 3)
    assert found["workload"]["gpus"] == 131_072
    assert [s["system"] for s in found["systems"]] == ["leto", "gemini+"]
    for system in found["systems"]:
        assert 0.85 < system["ettr"] < 0.97
        assert 0 < system["ettr_ci95"] < 0.02
        assert sum(system["badput_secs"].values()) == pytest.approx(system["wall_secs"])
        assert system["badput_secs"]["productive"] / system["wall_secs"] == pytest.approx(system["ettr"])
        assert set(system["lost_secs_by_kind"]) == {"hof", "node"}
        assert any("assumed" in line for line in system["assumptions"])
    assert found["systems"][0]["ettr"] > found["systems"][1]["ettr"]


def test_equal_seeds_give_equal_output():
    assert as_json("kimi-moe", *QUICK) == as_json("kimi-moe", *QUICK)
    assert as_json("kimi-moe", *QUICK) != as_json("kimi-moe", *QUICK, "--seed", 1)


def test_table_names_assumptions():
    result = invoke("kimi-moe", *QUICK, "--system", "leto,gemini,recover", "--tune", "--spares", 2)
    assert result.exit_code == 0, result.output
    for text in ("Kimi-MoE, 64 GPUs", "ETTR %", "ReCoVer-like", "Young", "Assumptions that the paper does not give", "2 spare nodes"):
        assert text in result.stdout


def test_default_mttf_is_that_of_one_gpu_over_their_number():
    found = as_json("kimi-moe", "--days", 5, "--seeds", 2)
    assert found["failures"]["mttf_secs"] == 14 * 60 * 131_072 / 64


def test_device_mttf_weibull_and_groups():
    found = as_json("kimi-moe", "--device-mttf", "64h", "--arrivals", "weibull:0.7", "--correlated", "0.1x3", "--spares", 4, "--days", 5)
    assert found["failures"]["mttf_secs"] == 3600.0
    assert (found["failures"]["group_share"], found["failures"]["group_nodes"]) == (0.1, 3)


def test_trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("time,node,kind\n1h,0,hof\n2h,1,node\n3h,1,hof\n4h,1,hof\n")
    found = as_json("kimi-moe", "--trace", path)
    assert found["failures"]["mttf_secs"] == pytest.approx(4500)
    assert found["failures"]["hof_ratio"] == 0.75
    assert found["systems"][0]["failures_by_kind"] == {"hof": 3.0, "node": 1.0}
    assert found["systems"][0]["ettr_ci95"] is None


def test_figure(tmp_path):
    path = tmp_path / "out.png"
    assert invoke("kimi-moe", *QUICK, "--plot", path).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    bad = invoke("kimi-moe", *QUICK, "--plot", tmp_path / "nowhere" / "out.png")
    assert bad.exit_code == 2
    assert "--plot: expected a file that can be written" in bad.stderr


def test_takeover_time_of_ones_own():
    fast = as_json("deepseek-v4", *QUICK, "--takeover", "500ms")["systems"][0]["ettr"]
    slow = as_json("deepseek-v4", *QUICK)["systems"][0]["ettr"]
    grown = as_json("deepseek-v4", *QUICK, "--init-growth", "2s")["systems"][0]["ettr"]
    assert fast > slow > grown


REPORT = {
    "job": "demo",
    "steps": 1000,
    "wall_secs": 110.0,
    "ettr": 0.9,
    "goodput": 0.9,
    "badput_secs": {},
    "coverage": {},
    "takeovers": [
        {"kind": "sigkill", "takeover_secs": 0.4, "detect_secs": 0.01, "stages": {"fence": 0.1}, "lost_steps": 1},
        {"kind": "sigkill", "takeover_secs": 0.5, "detect_secs": 0.02, "stages": {}, "lost_steps": 1},
        {"kind": "sigstop", "takeover_secs": 0.5, "detect_secs": 2.0, "stages": {}, "lost_steps": 0},
    ],
}


def report_file(tmp_path, **change):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(REPORT | change))
    return path


def test_measured_report_becomes_letos_cost(tmp_path):
    run = read_report(report_file(tmp_path))
    assert run.iteration_secs == pytest.approx(0.099)
    assert run.takeover_secs == 0.5, "median of 0.4, 0.5 and 0.5 + 2.0: a hang's detection stands apart"
    assert run.detect_secs == 0.02
    ours = as_json("deepseek-v4", *QUICK, "--from-report", report_file(tmp_path))
    assert ours["from_report"]["takeovers"] == 3
    leto = ours["systems"][0]
    seconds_lost = sum(leto["lost_secs_by_kind"]["hof"].values()) / leto["failures_by_kind"]["hof"]
    assert seconds_lost == pytest.approx(0.5 + ours["workload"]["iteration_secs"] / 2, rel=0.1)
    assert any("given by the caller" in line for line in leto["assumptions"])


def test_measured_report_alone_is_the_workload(tmp_path):
    found = as_json("--from-report", report_file(tmp_path), "--days", 0.1, "--system", "leto,leto-no-shadow,gemini")
    assert found["workload"]["name"] == "demo"
    assert found["failures"]["mttf_secs"] == pytest.approx(110 / 3)
    bad = invoke("--from-report", report_file(tmp_path), "--system", "sync")
    assert bad.exit_code == 2
    assert "expected a workload with parameters, found demo" in bad.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"takeovers": []}, r"expected at least one takeover, found none; cause one with `leto inject`"),
        ({"takeovers": [{"takeover_secs": 1.0}]}, r"takeovers\[0\]: expected the key 'detect_secs'"),
        ({"takeovers": [{"takeover_secs": -1.0, "detect_secs": 0.0}]}, r"takeover_secs: expected a time of zero or more, found -1 s"),
        ({"steps": 0}, r"steps: expected 1 or more, found 0"),
        ({"steps": "many"}, r"steps: found 'many', which is not what `leto report --json` writes"),
        ({"ettr": 0}, r"iteration time, ettr x wall_secs / steps: expected a time above zero"),
    ],
)
def test_damaged_reports_are_refused(tmp_path, change, message):
    with pytest.raises(UsageError, match=message):
        read_report(report_file(tmp_path, **change))


def test_reports_that_are_no_json_or_absent(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("not json")
    with pytest.raises(UsageError, match=r"expected JSON written by `leto report --json`"):
        read_report(path)
    with pytest.raises(UsageError, match=r"expected a readable file"):
        read_report(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["gpt-9"], "workload: expected one of"),
        ([], "WORKLOAD: expected one of"),
        (["kimi-moe", "--system", "leto,magic"], "--system: expected names from leto"),
        (["kimi-moe", "--mttf", "-5m"], "--mttf: expected a time above zero, found -300 s"),
        (["kimi-moe", "--mttf", "0s"], "--mttf: expected a time above zero, found 0 s"),
        (["kimi-moe", "--mttf", "5 parsecs"], "found the unit 'parsecs' in '5 parsecs'"),
        (["kimi-moe", "--mttf", "5m", "--device-mttf", "1h"], "expected one of the two, found both"),
        (["kimi-moe", "--gpus", "100"], "--gpus: expected dp x tp x pp = 4 x 4 x 4 = 64 GPUs for kimi-moe, found 100"),
        (["kimi-moe", "--hof", "2"], "HOF ratio: expected a fraction from 0 to 1, found 2"),
        (["kimi-moe", "--days", "0"], "--days: expected a time above zero"),
        (["kimi-moe", "--seeds", "0"], "--seeds: expected 1 or more, found 0"),
        (["kimi-moe", "--spares", "-1"], "--spares: expected 0 or more, found -1"),
        (["kimi-moe", "--correlated", "many"], "--correlated: expected SHARExNODES such as 0.05x4, found 'many'"),
        (["kimi-moe", "--interval", "0"], "checkpoint interval: expected 1 iteration or more, found 0"),
        (["kimi-moe", "--trace", "/nowhere.csv"], "--trace: expected a readable CSV file"),
        (["qwen", "--system", "moevement"], "expected a workload with experts, found qwen"),
    ],
)
def test_bad_input_exits_2_and_names_the_value(args, message):
    result = invoke(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_import_leaves_jax_and_matplotlib_out():
    code = "import sys, leto_jax.sim, leto_jax.sim.cli; sys.exit(any(m in sys.modules for m in ('jax', 'jaxlib', 'matplotlib')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0

"""Arrivals, kinds, and traces."""

from itertools import pairwise

import numpy as np
import pytest

from leto_jax.errors import UsageError
from leto_jax.sim.failures import DEVICE_MTTF_SECS, Failure, FailureModel, Kind, draw, find_arrivals, weibull
from leto_jax.sim.study import draw_runs
from leto_jax.sim.trace import read_trace, trace_statistics

DAY = 86_400.0


def gaps(arrivals, mttf=600.0, devices=64, days=200, seed=1):
    times = find_arrivals(arrivals)(np.random.default_rng(seed), mttf, devices, days * DAY)
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0
    assert times[-1] < days * DAY
    return np.diff(times)


@pytest.mark.parametrize("arrivals", ["exponential", "regular", "weibull:0.7", "weibull:1", "weibull:3"])
def test_every_process_has_the_rate_that_was_asked_for(arrivals):
    found = gaps(arrivals)
    assert found.mean() == pytest.approx(600, rel=5 * found.std() / 600 / np.sqrt(found.size) + 0.01)


def test_shape_shows_on_one_device_and_fades_with_many():
    """Coefficient of variation of Weibull gaps: known for one device, 1 (Poisson) for many (Palm-Khintchine)."""
    for shape, known in ((0.7, 1.462), (3.0, 0.363)):
        one = gaps(f"weibull:{shape}", devices=1, days=400)
        assert one.std() / one.mean() == pytest.approx(known, rel=0.03)
        many = gaps(f"weibull:{shape}", devices=20_000, days=60)
        assert many.std() / many.mean() == pytest.approx(1, rel=0.03)


def test_weibull_starts_in_its_stationary_state():
    """No burst of young devices at time 0: the first tenth of the horizon sees a tenth of the failures."""
    times = weibull(np.random.default_rng(3), 10.0, 50_000, 100_000.0, 0.5)
    assert (times < 10_000).mean() == pytest.approx(0.1, abs=0.01)


def test_regular_gaps_stay_within_half_of_the_mean():
    found = gaps("regular")
    assert found.min() >= 300
    assert found.max() <= 900


def test_kinds_nodes_and_repairs():
    model = FailureModel(600.0, hof_ratio=0.25, group_share=0.3, group_nodes=4, repair_secs=3600.0)
    failures = draw(model, 64, 200 * DAY, np.random.default_rng(5))
    nodes = [f for f in failures if f.kind is Kind.NODE]
    assert 1 - len(nodes) / len(failures) == pytest.approx(0.25, abs=0.01)
    assert sum(f.nodes == 4 for f in nodes) / len(nodes) == pytest.approx(0.3, abs=0.02)
    assert {f.nodes for f in nodes} == {1, 4}
    assert np.mean([f.repair_ns for f in nodes]) == pytest.approx(3600e9, rel=0.03)
    assert all(f.nodes == 0 for f in failures if f.kind is Kind.HOF)
    assert all(a.at_ns <= b.at_ns for a, b in pairwise(failures))


def test_equal_seeds_give_equal_failures():
    model = FailureModel(600.0)
    assert draw_runs(model, 64, DAY, seeds=3, seed=7) == draw_runs(model, 64, DAY, seeds=3, seed=7)
    one, two, three = draw_runs(model, 64, DAY, seeds=3, seed=7)
    assert one != two != three


def test_device_mttf_is_the_projection_for_131072_gpus():
    assert DEVICE_MTTF_SECS / 131_072 == 14 * 60


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"mttf_secs": -1.0}, r"MTTF: expected a time above zero, found -1 s"),
        ({"mttf_secs": 0.0}, r"MTTF: expected a time above zero, found 0 s"),
        ({"mttf_secs": 1.0, "hof_ratio": 1.5}, r"HOF ratio: expected a fraction from 0 to 1, found 1\.5"),
        ({"mttf_secs": 1.0, "group_nodes": 0}, r"nodes of a correlated failure: expected 1 or more, found 0"),
        ({"mttf_secs": 1.0, "repair_secs": -2.0}, r"repair time: expected a time of zero or more, found -2 s"),
        ({"mttf_secs": 1.0, "arrivals": "often"}, r"--arrivals: expected exponential, regular or weibull:SHAPE, found 'often'"),
        ({"mttf_secs": 1.0, "arrivals": "weibull:-1"}, r"--arrivals: expected weibull:SHAPE with a shape .* found 'weibull:-1'"),
    ],
)
def test_impossible_models_are_refused(kwargs, message):
    with pytest.raises(UsageError, match=message):
        FailureModel(**kwargs)


def write(tmp_path, *lines, header="time,node,kind"):
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def test_trace(tmp_path):
    path = write(tmp_path, "10,3,hof", "", "5m,1,node", "300,2,node", "1h, 7, HOF")
    second = 10**9
    assert read_trace(path, repair_secs=60) == [
        Failure(10 * second, Kind.HOF),
        Failure(300 * second, Kind.NODE, 2, 60 * second),
        Failure(3600 * second, Kind.HOF),
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["10,3,hof", "9,1,hof"], r"line 3: expected a time of 10 s or later, found 9 s; sort the trace by time"),
        (["10,3"], r"line 2: expected 3 fields .* found 2: 10,3"),
        (["10,3,meteor"], r"line 2: kind: expected one of hof, node, found 'meteor'"),
        (["-1,3,hof"], r"line 2: time: expected a time of zero or more, found -1 s"),
        (["soon,3,hof"], r"line 2: time: expected a number with a unit .* found 'soon'"),
        (["nan,3,hof"], r"line 2: time: expected a time of zero or more, found nan s"),
    ],
)
def test_bad_traces_name_the_line(tmp_path, lines, message):
    with pytest.raises(UsageError, match=message):
        read_trace(write(tmp_path, *lines))


def test_missing_or_foreign_files_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"--trace: expected a readable CSV file, found '/nowhere\.csv'"):
        read_trace("/nowhere.csv")
    with pytest.raises(UsageError, match=r"expected the header time,node,kind, found when,who"):
        read_trace(write(tmp_path, header="when,who"))


def test_trace_statistics(tmp_path):
    trace = read_trace(write(tmp_path, "100,1,hof", "200,1,node", "300,2,hof", "400,2,hof"))
    assert trace_statistics(trace) == (500.0, 125.0, 0.75)
    assert trace_statistics(trace, 250.0) == (250.0, 125.0, 0.5)
    with pytest.raises(UsageError, match=r"expected a failure after time 0"):
        trace_statistics([])

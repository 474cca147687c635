import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_jax.errors import UsageError
from leto_jax.sim.units import SECS_PER_UNIT, duration_text, fraction, not_negative, parse_duration, positive, to_ns, to_secs


@pytest.mark.parametrize(
    ("text", "secs"),
    [("10m", 600), ("1.5h", 5400), ("30s", 30), ("2d", 172_800), ("250ms", 0.25), (" 3 s ", 3), ("-1h", -3600), ("1e3s", 1000)],
)
def test_durations(text, secs):
    assert parse_duration(text) == pytest.approx(secs)


@pytest.mark.parametrize("text", ["10", "10x", "ten minutes", "", "m", "10 m s", "10M"])
def test_bad_durations_name_value_and_units(text):
    with pytest.raises(UsageError, match=r"--mttf: expected a number with .*units?.*ms, s, m, h, d"):
        parse_duration(text, "--mttf")


@pytest.mark.parametrize("secs", [0.0, -1.0, float("nan"), float("inf")])
def test_positive_refuses(secs):
    with pytest.raises(UsageError, match=r"MTTF: expected a time above zero, found"):
        positive(secs, "MTTF")


def test_not_negative_and_fraction_refuse():
    with pytest.raises(UsageError, match=r"repair: expected a time of zero or more, found -1 s"):
        not_negative(-1.0, "repair")
    with pytest.raises(UsageError, match=r"HOF ratio: expected a fraction from 0 to 1, found 50; 50 % is 0\.5"):
        fraction(50.0, "HOF ratio")


@given(st.integers(min_value=0, max_value=10**16))
def test_nanoseconds_round_trip(ns):
    assert abs(to_ns(to_secs(ns)) - ns) <= 2


@given(st.sampled_from(sorted(SECS_PER_UNIT)), st.floats(min_value=0.01, max_value=900))
def test_duration_text_can_be_parsed(unit, number):
    secs = number * SECS_PER_UNIT[unit]
    if secs >= 1e-3:
        assert parse_duration(duration_text(secs)) == pytest.approx(secs, rel=1e-3)

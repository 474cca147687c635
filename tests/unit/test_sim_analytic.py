"""Simulation against formulas: where a formula exists, the simulated ETTR must meet it within its own confidence interval.

Of 20 seeds, at 99.9 % (`SURE`): at 95 % one correct comparison in twenty would fail.
"""

import pytest

from leto_jax.sim.closed_form import first_order_ettr, poisson_ettr, renewal_ettr
from leto_jax.sim.failures import FailureModel, Kind
from leto_jax.sim.plan import Cause, Cycle, Plan, Recovery, Resume
from leto_jax.sim.study import draw_runs, study
from leto_jax.sim.units import to_ns

SURE = 3.883 / 2.093  # Student's t with 19 degrees of freedom, 99.95 % over 97.5 %
DAYS_15 = 15 * 86_400.0


def plan_of(iteration, interval, cost, init, resume, overhead=0.0):
    recovery = Recovery(((Cause.INIT, to_ns(init)),), resume)
    cycle = Cycle(to_ns(iteration), to_ns(iteration * overhead), interval, to_ns(cost))
    return Plan("one", cycle, {Kind.HOF: recovery, Kind.NODE: recovery})


def simulated(plan, mttf, arrivals, seeds=20, hof=1.0):
    runs = draw_runs(FailureModel(mttf, hof, arrivals), gpus=64, horizon_secs=DAYS_15, seeds=seeds)
    return study(plan, runs, DAYS_15)


# Gemini and Gemini+ as in the recovery table; a mean time between failures far below, and one far above, what checkpoints are tuned for.
CASES = [(9.097, 11, 6.2, 59, 600, 0.0), (9.097, 11, 6.2, 35, 600, 0.006), (3.5, 22, 5.1, 59, 150, 0.0), (1.0, 30, 0.2, 13, 3600, 0.01)]


@pytest.mark.parametrize(("iteration", "interval", "cost", "init", "mttf", "overhead"), CASES)
def test_poisson_failures_meet_the_exact_formula(iteration, interval, cost, init, mttf, overhead):
    plan = plan_of(iteration, interval, cost, init, Resume.CHECKPOINT, overhead)
    outcome = simulated(plan, mttf, "exponential")
    exact = poisson_ettr(init, mttf, iteration * interval, cost, overhead)
    assert outcome.ettr == pytest.approx(exact, abs=SURE * outcome.ettr_ci95), f"formula {exact:.5f}"
    assert renewal_ettr(plan, mttf, 1.0) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(("iteration", "interval", "cost", "init", "mttf", "overhead"), [CASES[0], CASES[1], CASES[3]])
def test_regular_failures_meet_the_first_order_formula(iteration, interval, cost, init, mttf, overhead):
    """With a failure every MTTF and none during a recovery, first order is exact; half a period is lost, its checkpoint included."""
    outcome = simulated(plan_of(iteration, interval, cost, init, Resume.CHECKPOINT, overhead), mttf, "regular")
    training = iteration * interval
    lost = (training * (1 + overhead) + cost) / 2
    formula = first_order_ettr(init + lost, mttf, cost / training + overhead)
    assert outcome.ettr == pytest.approx(formula, abs=max(SURE * outcome.ettr_ci95, 5e-5)), f"formula {formula:.5f}"


def test_regular_failures_in_place_lose_half_an_iteration():
    outcome = simulated(plan_of(9.097, 32, 0.0, 13.0, Resume.ITERATION, 0.006), 600, "regular")
    formula = first_order_ettr(13.0 + 9.097 * 1.006 / 2, 600, 0.006)
    assert outcome.ettr == pytest.approx(formula, abs=max(SURE * outcome.ettr_ci95, 5e-5))


def test_two_kinds_are_close_to_the_paper_model_when_failures_are_rare():
    """R = p R_hof + (1 - p) R_ckpt, first order in 1 / MTTF; at one failure in 6 h the next order is below 0.01 points."""
    cycle = Cycle(to_ns(9.097), to_ns(9.097 * 0.006), 20, to_ns(6.2))
    recovery = {
        Kind.HOF: Recovery(((Cause.INIT, to_ns(13)),), Resume.ITERATION),
        Kind.NODE: Recovery(((Cause.INIT, to_ns(35)),), Resume.CHECKPOINT),
    }
    plan = Plan("leto", cycle, recovery)
    outcome = simulated(plan, 6 * 3600, "exponential", hof=0.5)
    recovery_secs = 0.5 * (13 + 9.097 / 2) + 0.5 * (35 + 20 * 9.097 / 2)
    formula = first_order_ettr(recovery_secs, 6 * 3600, 6.2 / (20 * 9.097) + 0.006)
    assert outcome.ettr == pytest.approx(formula, abs=SURE * outcome.ettr_ci95 + 1e-4)
    assert renewal_ettr(plan, 6 * 3600, 0.5) == pytest.approx(formula, abs=2e-4)


def test_no_failure_leaves_only_overhead():
    plan = plan_of(10.0, 10, 1.0, 59, Resume.CHECKPOINT, 0.006)
    assert study(plan, [[]], 10 * 101.6).ettr == pytest.approx(100 / 101.6)

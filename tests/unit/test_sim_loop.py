"""The event loop: exact accounting, small stories told in full, and order: nothing that makes matters worse may raise ETTR."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leto_jax.sim.failures import Failure, Kind
from leto_jax.sim.loop import run
from leto_jax.sim.plan import Cause, Cycle, Plan, Recovery, Resume
from leto_jax.sim.spares import SparePool

# One cycle of the stories: 4 iterations of 10, then a checkpoint of 5 that counts at once.
CYCLE = Cycle(iteration_ns=10, overhead_ns=0, interval=4, stall_ns=5)


def story_plan(hof=Resume.CHECKPOINT, node=Resume.CHECKPOINT, cycle=CYCLE, **kwargs):
    return Plan(
        "story",
        cycle,
        {
            Kind.HOF: Recovery(((Cause.DETECT, 1), (Cause.INIT, 2)), hof),
            Kind.NODE: Recovery(((Cause.INIT, 20), (Cause.RESTORE, 5)), node, spare=True),
        },
        **kwargs,
    )


def hof(at):
    return Failure(at, Kind.HOF)


def node(at, nodes=1, repair=0):
    return Failure(at, Kind.NODE, nodes, repair)


def spent(ledger):
    return {cause.value: ns for cause, ns in ledger.by_cause.items() if ns}


STORIES = [
    # name, plan, failures, horizon, spares, what the ledger says
    ("nothing fails", story_plan(), [], 90, None, {"productive": 80, "checkpoint": 10}),
    (
        "restart from the beginning",
        story_plan(),
        [hof(7)],
        100,
        None,
        {"productive": 80, "checkpoint": 10, "recompute": 7, "detect": 1, "init": 2},
    ),
    (
        "restart from a checkpoint",
        story_plan(),
        [hof(58)],
        106,
        None,
        {"productive": 80, "checkpoint": 10, "recompute": 13, "detect": 1, "init": 2},
    ),
    (
        "failure during a checkpoint",
        story_plan(),
        [hof(43)],
        91,
        None,
        {"productive": 40, "checkpoint": 5, "recompute": 43, "detect": 1, "init": 2},
    ),
    (
        "in place",
        story_plan(hof=Resume.ITERATION),
        [hof(28)],
        101,
        None,
        {"productive": 80, "checkpoint": 10, "recompute": 8, "detect": 1, "init": 2},
    ),
    (
        "in place, during a checkpoint: it is begun again",
        story_plan(hof=Resume.ITERATION),
        [hof(43)],
        96,
        None,
        {"productive": 80, "checkpoint": 10, "recompute": 3, "detect": 1, "init": 2},
    ),
    (
        "in place, during the update: rolled forward",
        story_plan(hof=Resume.ITERATION, cycle=replace(CYCLE, update_ns=2)),
        [hof(28)],
        93,
        None,
        {"productive": 80, "checkpoint": 10, "detect": 1, "init": 2},
    ),
    ("nothing is lost", story_plan(hof=Resume.POSITION), [hof(27)], 93, None, {"productive": 80, "checkpoint": 10, "detect": 1, "init": 2}),
    (
        "second failure during a recovery begins it again",
        story_plan(),
        [hof(7), hof(9)],
        102,
        None,
        {"productive": 80, "checkpoint": 10, "recompute": 7, "detect": 2, "init": 3},
    ),
    (
        "an HOF during the recovery of a node begins that again",
        story_plan(),
        [node(7), hof(17)],
        132,
        None,
        {"productive": 80, "checkpoint": 10, "recompute": 7, "init": 30, "restore": 5},
    ),
    (
        "a node lost during the takeover of an HOF: state goes back to the checkpoint",
        story_plan(hof=Resume.ITERATION),
        [hof(28), node(29)],
        144,
        None,
        {"productive": 80, "checkpoint": 10, "recompute": 28, "detect": 1, "init": 20, "restore": 5},
    ),
    (
        "spares run out: wait for the repair",
        story_plan(),
        [node(0, repair=1000), node(30, repair=100)],
        30 + 100 + 25 + 45,
        1,
        {"productive": 40, "checkpoint": 5, "recompute": 5, "init": 40, "restore": 10, "spare_wait": 100},
    ),
    (
        "two nodes at once, one spare",
        story_plan(),
        [node(0, nodes=2, repair=100)],
        100 + 25 + 45,
        1,
        {"productive": 40, "checkpoint": 5, "init": 20, "restore": 5, "spare_wait": 100},
    ),
    (
        "an asynchronous copy that a failure interrupts does not count",
        story_plan(cycle=replace(CYCLE, lag_ns=10)),
        [hof(54)],
        54 + 3 + 45,
        None,
        {"productive": 40, "checkpoint": 5, "recompute": 54, "detect": 1, "init": 2},
    ),
    (
        "once copied it counts",
        story_plan(cycle=replace(CYCLE, lag_ns=10)),
        [hof(55)],
        55 + 3 + 45,
        None,
        {"productive": 80, "checkpoint": 10, "recompute": 10, "detect": 1, "init": 2},
    ),
    (
        "replay at twice the speed of training",
        story_plan(replay_speedup=2.0),
        [hof(65)],
        65 + 3 + 10 + 25,
        None,
        {"productive": 80, "checkpoint": 10, "recompute": 10, "detect": 1, "init": 2},
    ),
    ("the horizon ends a recovery", story_plan(), [hof(7)], 9, None, {"recompute": 7, "detect": 1, "init": 1}),
    ("failures beyond the horizon do not strike", story_plan(), [hof(90), hof(200)], 90, None, {"productive": 80, "checkpoint": 10}),
]


@pytest.mark.parametrize(("plan", "failures", "horizon", "spares", "expected"), [s[1:] for s in STORIES], ids=[s[0] for s in STORIES])
def test_story(plan, failures, horizon, spares, expected):
    ledger = run(plan, failures, horizon, spares)
    assert spent(ledger) == expected
    assert sum(expected.values()) == ledger.wall_ns == horizon


def test_shrinking_job_slows_down_until_the_replica_is_back():
    shrink = Recovery(((Cause.INIT, 4),), Resume.POSITION, outage_ns=24)
    ledger = run(Plan("shrink", CYCLE, {Kind.HOF: shrink, Kind.NODE: shrink}, replicas=4), [hof(10)], 104)
    assert spent(ledger) == {"productive": 85, "checkpoint": 10, "init": 4, "degraded": 5}
    assert {cause.value: ns for cause, ns in ledger.lost_ns[Kind.HOF].items() if ns} == {"init": 4, "degraded": 5}
    assert not any(ledger.lost_ns[Kind.NODE].values())


def test_last_replica_lost_stops_the_job():
    shrink = Recovery(((Cause.INIT, 4),), Resume.POSITION, outage_ns=24)
    ledger = run(Plan("shrink", CYCLE, {Kind.HOF: shrink, Kind.NODE: shrink}, replicas=1), [hof(10)], 64)
    assert spent(ledger) == {"productive": 40, "init": 4, "spare_wait": 20}


def test_node_larger_than_a_replica_takes_several():
    assert Plan("p", CYCLE, {}, replicas=4, replica_nodes=0.5).replicas_lost(1) == 2
    assert Plan("p", CYCLE, {}, replicas=4, replica_nodes=16).replicas_lost(1) == 1
    assert Plan("p", CYCLE, {}, replicas=4, replica_nodes=16).replicas_lost(17) == 2
    assert Plan("p", CYCLE, {}, replicas=4).replicas_lost(0) == 1


def test_spares_are_first_come_first_served():
    pool = SparePool(1)
    assert pool.replace(1, now=0, repair_ns=100) == 0
    assert pool.replace(1, now=10, repair_ns=20) == 30
    assert pool.replace(1, now=40, repair_ns=5) == 45
    assert pool.replace(1, now=200, repair_ns=5) == 200
    assert SparePool(None).replace(3, now=7, repair_ns=9) == 7


# --- properties --------------------------------------------------------------------------------------------------------------------

times = st.integers(min_value=1_000, max_value=200_000)
small = st.integers(min_value=0, max_value=50_000)


@st.composite
def cycles(draw):
    iteration = draw(times)
    return Cycle(
        iteration_ns=iteration,
        overhead_ns=draw(small),
        interval=draw(st.integers(1, 12)),
        stall_ns=draw(small),
        lag_ns=draw(st.integers(0, 400_000)),
        update_ns=draw(st.integers(0, iteration)),
    )


@st.composite
def plans(draw):
    def recovery(kind):
        stages = tuple((cause, draw(small)) for cause in (Cause.DETECT, Cause.INIT, Cause.RESTORE))
        return Recovery(
            stages,
            draw(st.sampled_from(Resume)),
            spare=draw(st.booleans()),
            return_ns=draw(small) if kind is Kind.HOF else 0,
            outage_ns=draw(small),
        )

    return Plan(
        "any",
        draw(cycles()),
        {kind: recovery(kind) for kind in Kind},
        replay_speedup=draw(st.sampled_from([1.0, 1.0, 1.5, 3.0])),
        replicas=draw(st.sampled_from([0, 0, 1, 3, 16])),
        replica_nodes=draw(st.sampled_from([0.5, 1.0, 4.0])),
    )


@st.composite
def failure_lists(draw):
    failures = []
    for at in sorted(draw(st.lists(st.integers(0, 5_000_000), max_size=25))):
        if draw(st.booleans()):
            failures.append(hof(at))
        else:
            failures.append(node(at, draw(st.integers(1, 3)), draw(st.integers(0, 500_000))))
    return failures


spare_counts = st.none() | st.integers(0, 3)
HORIZON = 5_000_000


def productive(plan, failures, spares):
    return run(plan, failures, HORIZON, spares).by_cause[Cause.PRODUCTIVE]


def slack(failures):
    """Whole nanoseconds that rounding may move: shares of replicas and replay speeds are rounded once for each stretch of operation."""
    return 8 * (len(failures) + 2)


@given(plans(), failure_lists(), spare_counts)
def test_causes_add_up_to_wall_time_exactly(plan, failures, spares):
    ledger = run(plan, failures, HORIZON, spares)
    assert sum(ledger.by_cause.values()) == ledger.wall_ns == HORIZON
    assert all(ns >= 0 for ns in ledger.by_cause.values())
    fault_free = sum(ledger.by_cause[cause] for cause in (Cause.PRODUCTIVE, Cause.OVERHEAD, Cause.CHECKPOINT))
    assert fault_free + sum(sum(lost.values()) for lost in ledger.lost_ns.values()) == HORIZON
    assert sum(ledger.failures.values()) == sum(f.at_ns < HORIZON for f in failures)


@given(cycles(), st.integers(0, 10**9))
def test_split_adds_up_and_no_map_goes_forward(cycle, position):
    assert sum(cycle.split(position)) == position
    assert 0 <= cycle.durable(position) <= cycle.iteration_start(position) <= position


@settings(max_examples=200)
@given(plans(), failure_lists(), failure_lists(), spare_counts)
def test_more_failures_never_raise_ettr(plan, failures, more, spares):
    both = sorted([*failures, *more], key=lambda f: f.at_ns)
    assert productive(plan, both, spares) <= productive(plan, failures, spares) + slack(both)


@settings(max_examples=200)
@given(plans(), failure_lists(), spare_counts, st.integers(0, 100_000))
def test_longer_recovery_never_raises_ettr(plan, failures, spares, extra):
    longer = {kind: replace(r, stages=(*r.stages, (Cause.INIT, extra))) for kind, r in plan.recovery.items()}
    assert productive(replace(plan, recovery=longer), failures, spares) <= productive(plan, failures, spares) + slack(failures)


@settings(max_examples=200)
@given(plans(), failure_lists(), spare_counts, small, small)
def test_larger_overhead_never_raises_ettr(plan, failures, spares, overhead, stall):
    cycle = replace(plan.cycle, overhead_ns=plan.cycle.overhead_ns + overhead, stall_ns=plan.cycle.stall_ns + stall)
    assert productive(replace(plan, cycle=cycle), failures, spares) <= productive(plan, failures, spares) + slack(failures)


@given(plans(), failure_lists(), st.integers(0, 3), st.integers(0, 3))
def test_more_spares_never_lower_ettr(plan, failures, spares, more):
    assert productive(plan, failures, spares) <= productive(plan, failures, spares + more) + slack(failures)

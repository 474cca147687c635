"""ETTR by formula: what the simulator must agree with where a formula exists, and what the tuner maximises.

Names: x = I T, training between checkpoints; c = exposed cost of one; M = mean time between failures; p = share of HOFs;
r = fault-free overhead.
"""

from math import exp, expm1

from leto_jax.sim.failures import Kind
from leto_jax.sim.plan import Plan, Resume
from leto_jax.sim.units import to_secs


def first_order_ettr(recovery_secs: float, mttf_secs: float, overhead: float) -> float:
    """(1 - R / M) / (1 + o): one failure every M seconds of wall time, none during a recovery.

    Args:
        recovery_secs: mean time from a failure until lost work is done again, p R_hof + (1 - p) R_ckpt.
        overhead: o = c / (I T) + r.
    """
    return (1 - recovery_secs / mttf_secs) / (1 + overhead)


def poisson_ettr(init_secs: float, mttf_secs: float, interval_secs: float, cost_secs: float, overhead: float = 0.0) -> float:
    """exp(-a/M) x / (M (exp((x (1 + r) + c) / M) - 1)): exact when every failure falls back to a synchronous checkpoint and failures are
    Poisson.

    The first factor is the share of time in operation when a recovery of a seconds begins again at each failure; the second is the share of
    operation that is kept and productive (Daly 2006).
    """
    period = interval_secs * (1 + overhead) + cost_secs
    return exp(-init_secs / mttf_secs) * interval_secs / mttf_secs / expm1(period / mttf_secs)


def renewal_ettr(plan: Plan, mttf_secs: float, hof_ratio: float) -> float:
    """ETTR of a plan under Poisson failures: `poisson_ettr` for what falls back to a checkpoint, first order for what loses an iteration.

    Exact for one kind of failure that falls back to a synchronous checkpoint. Spares that run out, shrunk operation, a second failure of
    another kind during a recovery are left to the simulator.
    """
    cycle = plan.cycle
    shares = {Kind.HOF: hof_ratio, Kind.NODE: 1 - hof_ratio}
    down = sum(share * to_secs(plan.recovery[kind].total_ns) for kind, share in shares.items())
    fallback = sum(share for kind, share in shares.items() if plan.recovery[kind].resume is Resume.CHECKPOINT)
    iteration = sum(share for kind, share in shares.items() if plan.recovery[kind].resume is Resume.ITERATION)
    period = to_secs(cycle.length_ns) / mttf_secs * fallback / plan.replay_speedup
    kept = period / expm1(period) if period else 1.0
    late = to_secs(cycle.lag_ns) / mttf_secs * fallback / plan.replay_speedup
    redo = iteration * to_secs(cycle.step_ns) / 2 / mttf_secs
    productive = cycle.interval * cycle.iteration_ns / cycle.length_ns
    return max(0.0, exp(-down / mttf_secs) * productive * kept * exp(-late) * (1 - redo))

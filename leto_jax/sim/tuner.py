"""What to set for a cluster: the checkpoint interval of any system, and Leto's spares."""

from dataclasses import dataclass, replace
from math import ceil, exp, sqrt

from leto_jax.checkpoint.interval import best_interval, daly_interval_secs, iterations, young_interval_secs
from leto_jax.sim.closed_form import renewal_ettr
from leto_jax.sim.system import LONGEST_INTERVAL_SECS, Setting, System, at_risk, plan


@dataclass(frozen=True)
class Recommendation:
    """What to set. Intervals in iterations; ETTR by the renewal formula; `spare_nodes` with which one failing node in 1000 has to wait."""

    system: str
    young_interval: int
    daly_interval: int
    best_interval: int
    ettr_at_young: float
    ettr_at_best: float
    spare_nodes: int


def recommend(system: System, setting: Setting, repair_secs: float) -> Recommendation:
    """Best checkpoint interval, numerically and by formula, and the number of spares, for `system` in `setting`."""
    iteration_secs = setting.iteration_secs
    checkpoint = system.checkpoint(setting)
    risk = at_risk(system, setting)
    longest = iterations(LONGEST_INTERVAL_SECS, iteration_secs)
    shortest = max(1, ceil(checkpoint.lag_secs / iteration_secs))

    def ettr(interval: int) -> float:
        chosen = plan(system, replace(setting, interval=interval))
        return renewal_ettr(chosen, setting.mttf_secs, setting.hof_ratio)

    def in_iterations(secs: float) -> int:
        return max(shortest, iterations(secs, iteration_secs, LONGEST_INTERVAL_SECS))

    young = in_iterations(young_interval_secs(checkpoint.cost_secs, setting.mttf_secs, risk))
    best = checkpoint.every or max(shortest, best_interval(ettr, longest))
    return Recommendation(
        system=system.name,
        young_interval=checkpoint.every or young,
        daly_interval=checkpoint.every or in_iterations(daly_interval_secs(checkpoint.cost_secs, setting.mttf_secs, risk)),
        best_interval=best,
        ettr_at_young=ettr(checkpoint.every or young),
        ettr_at_best=ettr(best),
        spare_nodes=spares_needed((1 - setting.hof_ratio) / setting.mttf_secs, repair_secs),
    )


def spares_needed(node_failures_per_sec: float, repair_secs: float, chance_of_wait: float = 0.001) -> int:
    """Spare nodes with which a failing node finds one with probability 1 - `chance_of_wait`.

    Nodes under repair are Poisson distributed around failures x repair time for any distribution of repairs (Palm's theorem).
    """
    mean = node_failures_per_sec * repair_secs
    if mean > 500:  # normal approximation: exp(-mean) is on its way to zero
        return int(mean + 3.1 * sqrt(mean)) + 1
    term = total = exp(-mean)
    count = 0
    while total < 1 - chance_of_wait:
        count += 1
        term *= mean / count
        total += term
    return count + 1

"""How many iterations to train between checkpoints: two formulas and a search."""

from collections.abc import Callable
from math import inf, sqrt


def young_interval_secs(cost_secs: float, mttf_secs: float, at_risk: float = 1.0) -> float:
    """Training time between checkpoints that loses least, to first order: sqrt(2 c M) (Young 1974).

    `at_risk` is the share of failures that fall back to a checkpoint (1 - HOF ratio for Leto): only these wear out the interval, so M is
    divided by it. Infinite when nothing is at risk.
    """
    return sqrt(2 * cost_secs * mttf_secs / at_risk) if at_risk else inf


def daly_interval_secs(cost_secs: float, mttf_secs: float, at_risk: float = 1.0) -> float:
    """The same to higher order (Daly 2006, equation 37): shorter than Young's when failures come about as often as checkpoints."""
    mean = mttf_secs / at_risk if at_risk else inf
    if cost_secs >= 2 * mean:
        return mean
    if mean == inf:
        return inf
    ratio = cost_secs / (2 * mean)
    return sqrt(2 * cost_secs * mean) * (1 + sqrt(ratio) / 3 + ratio / 9) - cost_secs


def iterations(interval_secs: float, iteration_secs: float, longest_secs: float = inf) -> int:
    """The interval in whole iterations: at least one, and no longer than `longest_secs`."""
    return max(1, round(min(interval_secs, longest_secs) / iteration_secs))


def best_interval(ettr: Callable[[int], float], longest: int) -> int:
    """The interval in 1..longest iterations with the highest ETTR, for an `ettr` that rises and then falls (golden-section on integers)."""
    low, high = 1, max(1, longest)
    while high - low > 2:
        left, right = low + (high - low) // 3, high - (high - low) // 3
        if ettr(left) < ettr(right):
            low = left + 1
        else:
            high = right
    return max(range(low, high + 1), key=ettr)

"""Every limit that an experiment is held to, written once: those of docs/design.md, sections 9 and 10.

A missed target is reported as missed, with the reason in the README; the limit stays.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Target:
    """A value is met when it is at most (`better` 'lower') or at least (`better` 'higher') `limit`, in `unit`."""

    limit: float
    better: Literal["lower", "higher"]
    unit: str

    def met(self, value: float) -> bool:
        return value <= self.limit if self.better == "lower" else value >= self.limit


def at_most(limit: float, unit: str) -> Target:
    return Target(limit, "lower", unit)


def at_least(limit: float, unit: str) -> Target:
    return Target(limit, "higher", unit)


TARGETS: dict[str, dict[str, Target]] = {
    "bench_cpu": {
        "takeover_secs": at_most(0.6, "s"),
        "protected_over_plain": at_most(1.15, "ratio"),
        "compiles_at_takeover": at_most(0, "count"),
    },
    "update_overhead": {
        "update_ratio_fused": at_most(1.15, "ratio"),
        "iteration_overhead_pct": at_most(0.3, "%"),
    },
    "parity_bandwidth": {
        "encode_copy_fraction": at_least(0.90, "fraction"),
    },
    "takeover_gpu": {
        "takeover_secs_1b": at_most(0.3, "s"),
        "takeover_4b_over_0.1b": at_most(1.5, "ratio"),
        "orbax_over_leto_1b": at_least(25, "ratio"),
    },
    "loss_curve_gpu": {
        "bit_identical": at_least(1, "yes = 1"),
    },
    "takeover_multi": {
        "takeover_secs_dp": at_most(0.4, "s"),
        "takeover_secs_fsdp": at_most(0.4, "s"),
    },
    "memory_pressure": {
        "trained_through_pressure": at_least(1, "yes = 1"),
        "takeover_secs_L3": at_most(0.3, "s"),
        "takeover_secs_parked": at_most(1.0, "s"),
    },
    "compare_orbax": {
        "best_orbax_over_leto": at_least(10, "ratio"),
        "gemini_plus_over_leto": at_least(5, "ratio"),
        "leto_ettr_rank": at_most(1, "rank"),
        "causes_sum_to_wall": at_least(1, "yes = 1"),
    },
    "simulate_paper": {
        "table_error_points": at_most(1.0, "percentage points"),
        "interval_error_pct": at_most(15, "%"),
        "ettr_pct_131072": at_least(95, "%"),
        "seconds_131072": at_most(60, "s"),
    },
}

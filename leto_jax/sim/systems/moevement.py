"""MoEvement (NSDI'26): in each iteration a snapshot of some experts, a whole checkpoint every W iterations, replay by those who lost state.

A failure falls back to the beginning of the newest complete window, so between W and 2 W iterations are replayed.
"""

from math import log2, sqrt

from leto_jax.sim.failures import Kind
from leto_jax.sim.system import Checkpoint, Setting, System
from leto_jax.sim.systems.parts import cold_restart, cold_spare, no_overhead, peer_memory_checkpoint, warm_spare, warm_spare_for_operable

NOTE = (
    "W is the power of two next to sqrt(2 e M) / T, e the exposed cost of a whole sparse checkpoint; a failure replays W to 2 W iterations"
)


def sparse_window(setting: Setting) -> int:
    """W in iterations: Young's rule for the exposed cost of a sparse checkpoint, rounded to a power of two as in the paper's table."""
    cost = setting.costs.sparse_share * peer_memory_checkpoint(setting).cost_secs
    return int(2 ** max(0, round(log2(max(1.0, sqrt(2 * cost * setting.mttf_secs) / setting.iteration_secs)))))


def sparse_checkpoint(setting: Setting) -> Checkpoint:
    """The exposed cost of one window of snapshots."""
    return Checkpoint(setting.costs.sparse_share * peer_memory_checkpoint(setting).cost_secs, every=sparse_window(setting))


MOEVEMENT = System(
    name="moevement",
    title="MoEvement",
    source="MoEvement (NSDI'26, arXiv 2412.15411)",
    overhead=no_overhead,
    checkpoint=sparse_checkpoint,
    recoveries={Kind.HOF: cold_restart, Kind.NODE: cold_spare},
    uses=("cold_init_secs", "init_growth_secs", "peer_bytes_per_sec", "sparse_share", "replay_speedup"),
    notes=(NOTE,),
    lag_cycles=1,
    replays=True,
    needs_experts=True,
)

MOEVEMENT_PLUS = System(
    name="moevement+",
    title="MoEvement+",
    source="MoEvement (NSDI'26, arXiv 2412.15411) with spare-based preinitialisation",
    overhead=no_overhead,
    checkpoint=sparse_checkpoint,
    recoveries={Kind.HOF: warm_spare_for_operable, Kind.NODE: warm_spare},
    uses=("spare_init_secs", "init_growth_secs", "peer_bytes_per_sec", "sparse_share", "replay_speedup", "requalify_secs"),
    notes=(NOTE,),
    lag_cycles=1,
    replays=True,
    needs_experts=True,
)

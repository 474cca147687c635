"""ReCoVer (arXiv 2605.11215): survivors go on in the same step, with the lost replica's microbatches spread over them."""

from leto_jax.sim.failures import Kind
from leto_jax.sim.plan import Cause, Recovery, Resume
from leto_jax.sim.system import Checkpoint, Setting, System
from leto_jax.sim.systems.parts import grown_ns, no_overhead
from leto_jax.sim.units import to_ns


def nothing_to_restore(setting: Setting) -> Checkpoint:
    """Every other replica holds the state; checkpoints are for the loss of all of them, which is not modelled."""
    return Checkpoint(0.0, every=1)


def shrink(setting: Setting) -> Recovery:
    """In-step recovery, the lost microbatches again (on average half of one replica's), then fewer replicas until it is back."""
    lost_secs = setting.iteration_secs / 2 / setting.workload.parallelism.dp
    return Recovery(
        ((Cause.INIT, grown_ns(setting, setting.costs.in_step_secs)), (Cause.RECOMPUTE, to_ns(lost_secs))),
        Resume.POSITION,
        outage_ns=grown_ns(setting, setting.costs.cold_init_secs),
    )


RECOVER = System(
    name="recover",
    title="ReCoVer-like shrink",
    source="ReCoVer (arXiv 2605.11215), abstract",
    overhead=no_overhead,
    checkpoint=nothing_to_restore,
    recoveries={Kind.HOF: shrink, Kind.NODE: shrink},
    uses=("in_step_secs", "cold_init_secs", "init_growth_secs"),
    notes=(
        "the number of microbatches is constant, so an iteration slows down by the share of replicas that are missing",
        "a replica comes back after a cold init (on a spare if its node is lost) and joins without a pause",
        "fault-tolerant collectives cost nothing while nothing fails",
    ),
    shrinks=True,
)

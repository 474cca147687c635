"""PHOENIX (also DeadPool, arXiv 2607.01646): a failed node is swapped for a spare while the job lives.

State is copied to peers in every step, off the critical path.
"""

from dataclasses import replace

from leto_jax.sim.failures import Kind
from leto_jax.sim.plan import Cause, Recovery, Resume
from leto_jax.sim.system import Checkpoint, Setting, System
from leto_jax.sim.systems.parts import grown_ns, no_overhead
from leto_jax.sim.units import to_ns


def copy_every_step(setting: Setting) -> Checkpoint:
    """Off the critical path, so free; a step's copy counts one step later."""
    return Checkpoint(0.0, lag_secs=setting.iteration_secs, every=1)


def swap(setting: Setting) -> Recovery:
    """A spare takes the lost node's place; the others wait."""
    return Recovery(((Cause.INIT, grown_ns(setting, setting.costs.swap_secs)),), Resume.CHECKPOINT, spare=True)


def swap_operable(setting: Setting) -> Recovery:
    """The same after an HOF; the node proves operable and is a spare again after a while."""
    return replace(swap(setting), return_ns=to_ns(setting.costs.requalify_secs))


PHOENIX = System(
    name="phoenix",
    title="PHOENIX-like hot swap",
    source="PHOENIX / DeadPool (arXiv 2607.01646), abstract",
    overhead=no_overhead,
    checkpoint=copy_every_step,
    recoveries={Kind.HOF: swap_operable, Kind.NODE: swap},
    uses=("swap_secs", "requalify_secs", "init_growth_secs"),
    notes=("an HOF is treated as the loss of its node", "no steady overhead, as claimed; its published runs end at 512 GPUs"),
)

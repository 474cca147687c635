"""Pieces that several systems share: pure functions from a setting to what something costs."""

from dataclasses import replace

from leto_jax.errors import UsageError
from leto_jax.sim.plan import Cause, Recovery, Resume
from leto_jax.sim.system import Checkpoint, Setting
from leto_jax.sim.units import to_ns
from leto_jax.sim.workload import OPTIMIZER_BYTES_PER_PARAM


def no_overhead(setting: Setting) -> float:
    """Iterations are as long as without the system."""
    return 0.0


def grown_ns(setting: Setting, secs: float) -> int:
    """A recovery time measured on 64 GPUs, on this cluster."""
    return to_ns(setting.costs.grown(secs, setting.workload.gpus))


def cold_restart(setting: Setting) -> Recovery:
    """A new process on the same node initialises everything, then loads the newest checkpoint from memory (within init)."""
    return Recovery(((Cause.INIT, grown_ns(setting, setting.costs.cold_init_secs)),), Resume.CHECKPOINT)


def cold_spare(setting: Setting) -> Recovery:
    """The same on a spare node."""
    return Recovery(((Cause.INIT, grown_ns(setting, setting.costs.cold_init_secs)),), Resume.CHECKPOINT, spare=True)


def warm_spare(setting: Setting) -> Recovery:
    """A spare node that is initialised as far as can be before it is needed."""
    return Recovery(((Cause.INIT, grown_ns(setting, setting.costs.spare_init_secs)),), Resume.CHECKPOINT, spare=True)


def warm_spare_for_operable(setting: Setting) -> Recovery:
    """The same in place of a node that could have gone on; it becomes a spare itself after a while."""
    return replace(warm_spare(setting), return_ns=to_ns(setting.costs.requalify_secs))


def peer_memory_checkpoint(setting: Setting) -> Checkpoint:
    """Each rank's state copied to its own and a peer's host memory; what idle network time does not cover delays training.

    The workload's own cost if somebody measured or fitted one, else its bytes at the rate at which a node of the paper's cluster copied.
    """
    workload = setting.workload
    if workload.checkpoint_cost_secs is not None:
        return Checkpoint(workload.checkpoint_cost_secs)
    node_bytes = workload.checkpoint_bytes_per_gpu * min(workload.gpus, workload.gpus_per_node)
    return Checkpoint(node_bytes / setting.costs.peer_bytes_per_sec)


def storage_secs(setting: Setting) -> float:
    """Time to write or read the whole state in persistent storage: each node's share at once, or all against the storage's limit."""
    if not setting.workload.model.params:
        raise UsageError(
            f"persistent checkpoints: expected a workload with parameters, found {setting.workload.name} without; name a WORKLOAD"
        )
    total = OPTIMIZER_BYTES_PER_PARAM * setting.workload.model.params
    rate = min(setting.workload.nodes * setting.costs.storage_bytes_per_sec, setting.costs.storage_total_bytes_per_sec)
    return total / rate

"""Checkpoints in persistent storage, as with Orbax: every failure restarts the job and reads the newest one."""

from leto_jax.sim.failures import Kind
from leto_jax.sim.plan import Cause, Recovery, Resume
from leto_jax.sim.system import Checkpoint, Setting, System
from leto_jax.sim.systems.parts import grown_ns, no_overhead, storage_secs
from leto_jax.sim.units import to_ns

STORAGE = ("cold_init_secs", "init_growth_secs", "storage_bytes_per_sec", "storage_total_bytes_per_sec")


def synchronous(setting: Setting) -> Checkpoint:
    """Training waits until everything is written."""
    return Checkpoint(storage_secs(setting))


def asynchronous(setting: Setting) -> Checkpoint:
    """Training waits for the copy to host memory over PCIe; the checkpoint counts once it is written."""
    workload = setting.workload
    return Checkpoint(workload.checkpoint_bytes_per_gpu / workload.hardware.pcie_bytes_per_sec, lag_secs=storage_secs(setting))


def restart(setting: Setting) -> Recovery:
    """Initialise, then read the state from storage."""
    stages = ((Cause.INIT, grown_ns(setting, setting.costs.cold_init_secs)), (Cause.RESTORE, to_ns(storage_secs(setting))))
    return Recovery(stages, Resume.CHECKPOINT)


def restart_on_spare(setting: Setting) -> Recovery:
    """The same once a spare is there."""
    return Recovery(restart(setting).stages, Resume.CHECKPOINT, spare=True)


SYNC = System(
    name="sync",
    title="Synchronous checkpoints",
    source="Orbax-like: save blocks until durable",
    overhead=no_overhead,
    checkpoint=synchronous,
    recoveries={Kind.HOF: restart, Kind.NODE: restart_on_spare},
    uses=STORAGE,
)

ASYNC = System(
    name="async",
    title="Asynchronous checkpoints",
    source="Orbax-like: save blocks for the copy to host memory",
    overhead=no_overhead,
    checkpoint=asynchronous,
    recoveries={Kind.HOF: restart, Kind.NODE: restart_on_spare},
    uses=STORAGE,
    notes=("writing in the background costs training nothing but the copy to the host",),
)

"""Leto: retained state and a shadow for failures of the process, a spare and a checkpoint for failures of the node."""

from leto_jax.sim.failures import Kind
from leto_jax.sim.plan import Cause, Recovery, Resume
from leto_jax.sim.system import Setting, System
from leto_jax.sim.systems.parts import grown_ns, peer_memory_checkpoint, warm_spare
from leto_jax.sim.units import to_ns

SOURCE = "Leto (arXiv 2610.00687)"
COMMON = ("spare_init_secs", "updater_overhead", "update_share", "init_growth_secs", "peer_bytes_per_sec")
CHECKPOINT_NOTE = "checkpoints cost Leto what they cost Gemini: the paper's ETTR column fits one cost for all three"


def updater_overhead(setting: Setting) -> float:
    """The transactional updater lengthens each iteration."""
    return setting.costs.updater_overhead


def shadow_takes_over(setting: Setting) -> Recovery:
    """The shadow attaches the retained state: detect, initialise what could not be preinitialised, redo the iteration in progress."""
    costs = setting.costs
    stages = ((Cause.DETECT, to_ns(costs.in_place_detect_secs)), (Cause.INIT, grown_ns(setting, costs.in_place_secs)))
    return Recovery(stages, Resume.ITERATION)


def new_process_attaches(setting: Setting) -> Recovery:
    """Without a shadow a new process initialises everything, but the state is where it was."""
    return Recovery(((Cause.INIT, grown_ns(setting, setting.costs.cold_init_secs)),), Resume.ITERATION)


LETO = System(
    name="leto",
    title="Leto",
    source=SOURCE,
    overhead=updater_overhead,
    checkpoint=peer_memory_checkpoint,
    recoveries={Kind.HOF: shadow_takes_over, Kind.NODE: warm_spare},
    uses=("in_place_detect_secs", "in_place_secs", *COMMON),
    notes=(CHECKPOINT_NOTE,),
    rolls_forward=True,
)

LETO_WITHOUT_SHADOW = System(
    name="leto-no-shadow",
    title="Leto without shadow",
    source=SOURCE,
    overhead=updater_overhead,
    checkpoint=peer_memory_checkpoint,
    recoveries={Kind.HOF: new_process_attaches, Kind.NODE: warm_spare},
    uses=("cold_init_secs", *COMMON),
    notes=(CHECKPOINT_NOTE, "without a shadow an HOF costs Gemini's whole init, though nothing is loaded"),
    rolls_forward=True,
)

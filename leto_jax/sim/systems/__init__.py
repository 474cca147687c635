"""The systems that `leto simulate` knows, by name."""

from leto_jax.errors import UsageError
from leto_jax.sim.system import System
from leto_jax.sim.systems.gemini import GEMINI, GEMINI_PLUS
from leto_jax.sim.systems.leto import LETO, LETO_WITHOUT_SHADOW
from leto_jax.sim.systems.moevement import MOEVEMENT, MOEVEMENT_PLUS
from leto_jax.sim.systems.persistent import ASYNC, SYNC
from leto_jax.sim.systems.phoenix import PHOENIX
from leto_jax.sim.systems.recover import RECOVER

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (LETO, LETO_WITHOUT_SHADOW, GEMINI, GEMINI_PLUS, MOEVEMENT, MOEVEMENT_PLUS, SYNC, ASYNC, PHOENIX, RECOVER)
}


def find_system(name: str) -> System:
    """The system called `name`; a UsageError lists the known ones."""
    if name not in SYSTEMS:
        raise UsageError(f"--system: expected names from {', '.join(SYSTEMS)}, separated by commas, found {name!r}")
    return SYSTEMS[name]

"""Gemini (SOSP'23): checkpoints in the host memory of peers. Gemini+ adds spares that are initialised in advance."""

from leto_jax.sim.failures import Kind
from leto_jax.sim.system import System
from leto_jax.sim.systems.parts import cold_restart, cold_spare, no_overhead, peer_memory_checkpoint, warm_spare, warm_spare_for_operable

NOTE = "the remote tier behind the peers' memory is never needed: both copies of a shard are never lost at once"

GEMINI = System(
    name="gemini",
    title="Gemini",
    source="Gemini (SOSP'23), as measured in Leto's recovery table",
    overhead=no_overhead,
    checkpoint=peer_memory_checkpoint,
    recoveries={Kind.HOF: cold_restart, Kind.NODE: cold_spare},
    uses=("cold_init_secs", "init_growth_secs", "peer_bytes_per_sec"),
    notes=(NOTE,),
)

GEMINI_PLUS = System(
    name="gemini+",
    title="Gemini+",
    source="Gemini (SOSP'23) with spare-based preinitialisation, as measured in Leto's recovery table",
    overhead=no_overhead,
    checkpoint=peer_memory_checkpoint,
    recoveries={Kind.HOF: warm_spare_for_operable, Kind.NODE: warm_spare},
    uses=("spare_init_secs", "init_growth_secs", "peer_bytes_per_sec", "requalify_secs"),
    notes=(NOTE,),
)

"""What recovery and checkpoints cost: one number a field, each with the place that it comes from.

A source that begins with 'assumed' is ours and is listed beside every result that uses the field.
"""

from dataclasses import dataclass, field, fields
from math import log2

BASE_GPUS = 64
"""GPUs of the Kimi-MoE runs to which the recovery times belong."""

_KIMI = "paper, Kimi-MoE on 64 A100"


def _cost(value: float, source: str) -> float:
    cost: float = field(default=value, metadata={"source": source})
    return cost


@dataclass(frozen=True)
class Costs:
    """Seconds, fractions and bytes per second, as the suffix says."""

    in_place_detect_secs: float = _cost(0.0, f"{_KIMI}: Leto's init is taken to include detection")
    cold_init_secs: float = _cost(59.0, f"{_KIMI}: Gemini's init")
    spare_init_secs: float = _cost(35.0, f"{_KIMI}: Gemini+'s init; Leto on a spare is taken to need the same")
    in_place_secs: float = _cost(13.0, f"{_KIMI}: Leto's init at its tuned interval (15 s at Gemini's)")
    updater_overhead: float = _cost(0.006, "paper, OLMoE: RMU lengthens a fault-free iteration by 0.6 %")
    update_share: float = _cost(
        111 / 12_683, "paper, OLMoE with RMU: share of an iteration in which an interrupted update is rolled forward"
    )
    init_growth_secs: float = _cost(0.0, "assumed: no recovery time grows with the cluster; else seconds for each doubling beyond 64 GPUs")
    peer_bytes_per_sec: float = _cost(
        9e9,
        "assumed: exposed rate of copies to peers' memory per node, fitted to the tuned intervals of GPT-MoE (9.1e9) and Kimi-MoE (8.8e9)",
    )
    storage_bytes_per_sec: float = _cost(2e9, "assumed: persistent storage, per node")
    storage_total_bytes_per_sec: float = _cost(
        2e12, "assumed: persistent storage, all nodes together; Llama 3 (arXiv 2407.21783) sustains 2 TB/s"
    )
    sparse_share: float = _cost(
        1 / 7, "assumed: exposed cost of a whole sparse checkpoint / of a dense one, fitted to the paper's table of windows W"
    )
    replay_speedup: float = _cost(1.5, "assumed: localized replay with upstream logs is 1.5 x as fast as training")
    swap_secs: float = _cost(40.0, "PHOENIX's headline: swap below 40 s, at most 512 A100; detection is taken to be included")
    requalify_secs: float = _cost(60.0, "assumed: an operable node that was swapped out is a warm spare again after its own cold init")
    in_step_secs: float = _cost(5.0, "assumed: survivors detect, rebuild their communicators and reduce again in 5 s (ReCoVer gives none)")

    def grown(self, secs: float, gpus: int) -> float:
        """`secs` measured on 64 GPUs, on a cluster of `gpus`."""
        return secs + self.init_growth_secs * max(0.0, log2(gpus / BASE_GPUS))

    def source(self, name: str) -> str:
        """Where the field's value comes from; a value other than the default is the caller's own."""
        spec = next(f for f in fields(self) if f.name == name)
        given = getattr(self, name) != spec.default
        return f"given by the caller (default {spec.default:g}: {spec.metadata['source']})" if given else str(spec.metadata["source"])

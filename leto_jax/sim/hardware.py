"""Rates of the accelerators that workload files name.

Data sheets (A100 80GB SXM, H100 SXM, H200 SXM): dense bf16 peak, HBM bandwidth, NVLink per direction, PCIe generation 4 and 5 with 16
lanes. The rate of an all-to-all that leaves the node is no data-sheet number. H100/H200: DeepEP's README measures 43 GB/s per GPU on 400
Gb/s adapters (EP16, normal kernels). A100: fitted to the paper's multi-node rows (`predict.fit`), since the paper's network is not known
to us.
"""

from dataclasses import dataclass

from leto_jax.errors import UsageError


@dataclass(frozen=True)
class Hardware:
    """Rates of one GPU and its links. FLOP/s are dense bf16 with float32 accumulation; bytes per second are per direction."""

    name: str
    peak_flops: float
    hbm_bytes_per_sec: float
    nvlink_bytes_per_sec: float
    all_to_all_bytes_per_sec: float
    pcie_bytes_per_sec: float


HARDWARE = {
    h.name: h
    for h in (
        Hardware("a100", 312e12, 2.039e12, 300e9, 6.0e9, 32e9),
        Hardware("h100", 989.4e12, 3.35e12, 450e9, 43e9, 64e9),
        Hardware("h200", 989.4e12, 4.8e12, 450e9, 43e9, 64e9),
    )
}


def find_hardware(name: str) -> Hardware:
    """The entry called `name`; a UsageError lists the known ones."""
    if name not in HARDWARE:
        raise UsageError(f"hardware: expected one of {', '.join(HARDWARE)}, found {name!r}; add it to leto_jax/sim/hardware.py")
    return HARDWARE[name]

"""How long an iteration takes that nobody ran: computation, memory and communication from hardware rates.

A model, not a measurement. Two numbers are fitted to the five rows that the paper measured (`fit`): the share of peak FLOP/s that
computation reaches, and the all-to-all rate of the paper's A100 network. Everything else comes from data sheets and published
architectures. Batches are mostly our guess, so an error here mixes the model's with the guess's. `experiments/simulate_paper.py` reports
the error on each row, fitted and left out, and on DeepSeek-V3's published speed, which no number here was fitted to.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np

from leto_jax.sim.workload import Workload

COMPUTE_EFFICIENCY = 0.45
"""Share of the bf16 peak reached by matrix products: fitted (`fit`); Megatron-LM reports 0.44 to 0.52 on A100 (arXiv 2104.04473)."""

NVLINK_EFFICIENCY = 0.8
"""Share of NVLink's data-sheet rate that large collectives reach (nccl-tests on DGX systems)."""

UPDATE_BYTES_PER_PARAM = 28
"""AdamW's traffic for one parameter in float32: read gradient, parameter and two moments, write three (measured by this project)."""

BF16_BYTES = 2


@dataclass(frozen=True)
class IterationTime:
    """Seconds of one iteration by what is exposed. `total_secs` is their sum."""

    compute_secs: float
    bubble_secs: float
    tensor_secs: float
    expert_secs: float
    data_secs: float
    update_secs: float

    @property
    def total_secs(self) -> float:
        return float(sum(getattr(self, f.name) for f in fields(self)))


def iteration_time(workload: Workload, compute_efficiency: float = COMPUTE_EFFICIENCY) -> IterationTime:
    """Predicted exposed times of one iteration.

    compute: 6 FLOP for each active parameter and token, plus causal attention (6 x layers x hidden x length for each token).
    bubble:  1F1B pipelines idle (pp - 1) / m of the busy time, m microbatches of one sequence each.
    tensor:  four all-reduces a layer over NVLink, none hidden.
    expert:  four all-to-alls a layer; a token's copies to other nodes at the all-to-all rate, the others over NVLink; what `expert_overlap`
             times the computation covers is hidden.
    data:    gradients reduced and parameters gathered in bf16; hidden behind the backward pass (two thirds of computation).
    update:  the optimizer's memory traffic for the parameters that one GPU updates.
    """
    model, par, hw = workload.model, workload.parallelism, workload.hardware
    tokens = workload.tokens_per_iteration
    replica_tokens = tokens / par.dp
    flops = tokens * (6 * model.active + 6 * model.layers * model.hidden * workload.sequence_length)
    compute = flops / (par.gpus * hw.peak_flops * compute_efficiency)
    layers = model.layers / par.pp
    nvlink = NVLINK_EFFICIENCY * hw.nvlink_bytes_per_sec

    tensor = 4 * layers * replica_tokens * model.hidden * BF16_BYTES * 2 * (par.tp - 1) / par.tp / nvlink
    expert = max(0.0, _expert_secs(workload, nvlink) - workload.expert_overlap * compute)
    params_per_gpu = model.params / min(par.gpus, par.replica_gpus * max(1, par.ep // par.tp))
    gradient_bytes = 2 * BF16_BYTES * params_per_gpu if par.dp > 1 else 0.0
    data = max(0.0, gradient_bytes / (hw.all_to_all_bytes_per_sec if workload.nodes > 1 else nvlink) - 2 / 3 * compute)
    updated = model.params / par.gpus if workload.optimizer_sharded else params_per_gpu
    return IterationTime(
        compute_secs=compute,
        bubble_secs=compute * (par.pp - 1) / workload.sequences_per_replica,
        tensor_secs=tensor,
        expert_secs=expert,
        data_secs=data,
        update_secs=updated * UPDATE_BYTES_PER_PARAM / hw.hbm_bytes_per_sec,
    )


def _expert_secs(workload: Workload, nvlink: float) -> float:
    """Seconds of all-to-all traffic, before any of it is hidden."""
    model, par = workload.model, workload.parallelism
    if par.ep == 1 or not model.moe_layers:
        return 0.0
    nodes = max(1, par.ep // workload.gpus_per_node)
    copies = min(model.experts_per_token, model.node_limit or model.experts_per_token)
    token_bytes = workload.tokens_per_iteration / par.dp / par.tp * model.hidden * BF16_BYTES
    crossings = 4 * model.moe_layers / par.pp
    away = 1 - 1 / nodes
    rate = workload.hardware.all_to_all_bytes_per_sec
    return crossings * token_bytes * (copies * away / rate + model.experts_per_token * (1 - away) / nvlink)


def with_iteration_time(workload: Workload) -> Workload:
    """The workload with a measured iteration time if it has one, else with the predicted one and a note that says so."""
    if workload.iteration_secs is not None:
        return workload
    secs = iteration_time(workload).total_secs
    note = f"iteration of {secs:.2f} s predicted by leto_jax.sim.predict, not measured"
    return replace(workload, iteration_secs=secs, assumptions=(*workload.assumptions, note))


def fit(measured: Iterable[Workload]) -> tuple[float, float]:
    """(compute efficiency, all-to-all bytes per second) with the least squared log error over measured workloads, by grid search."""
    rows = tuple(measured)
    grid = [(float(e), float(b)) for e in np.arange(0.20, 0.805, 0.01) for b in np.arange(1e9, 30e9, 0.25e9)]

    def log_error(candidate: tuple[float, float]) -> float:
        return sum(float(np.log(relative_time(row, *candidate))) ** 2 for row in rows)

    return min(grid, key=log_error)


def relative_time(workload: Workload, compute_efficiency: float, all_to_all_bytes_per_sec: float) -> float:
    """Predicted over measured iteration time, with the two fitted numbers given."""
    assert workload.iteration_secs is not None, f"{workload.name} has no measured iteration"
    hardware = replace(workload.hardware, all_to_all_bytes_per_sec=all_to_all_bytes_per_sec)
    return iteration_time(replace(workload, hardware=hardware), compute_efficiency).total_secs / workload.iteration_secs

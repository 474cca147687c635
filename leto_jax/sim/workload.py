"""What is trained, and on what: model, parallelism, batch, and the times that somebody measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from leto_jax.errors import UsageError
from leto_jax.sim.hardware import Hardware, find_hardware
from leto_jax.sim.units import positive

WORKLOAD_DIR = Path(__file__).parent / "workloads"

OPTIMIZER_BYTES_PER_PARAM = 12
"""float32 master copy and Adam's two moments: what a checkpoint must hold, since bf16 parameters follow from the master copy."""


@dataclass(frozen=True)
class Model:
    """The sizes that cost time. `params` and `active` are counts; `experts_per_token` is 0 for a dense model.

    `node_limit` bounds the nodes that one token's experts may lie on (DeepSeek-V3: 4); None is no bound.
    """

    params: float
    active: float
    layers: int
    hidden: int
    moe_layers: int = 0
    experts_per_token: int = 0
    node_limit: int | None = None


@dataclass(frozen=True)
class Parallelism:
    """Degrees of data, tensor, pipeline and expert parallelism. Experts are spread over the data and tensor dimensions."""

    dp: int
    tp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def gpus(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def replica_gpus(self) -> int:
        """GPUs that hold one copy of the model: what a shrinking system loses with one node."""
        return self.tp * self.pp


@dataclass(frozen=True)
class Workload:
    """One training job. `iteration_secs` is None where nobody measured it: `predict.iteration_time` fills it in."""

    name: str
    title: str
    source: str
    model: Model
    parallelism: Parallelism
    hardware: Hardware
    gpus_per_node: int
    sequences_per_replica: int
    sequence_length: int
    optimizer_sharded: bool
    expert_overlap: float = 0.0
    iteration_secs: float | None = None
    checkpoint_cost_secs: float | None = None
    paper: Mapping[str, Any] = field(default_factory=dict)
    assumptions: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        return self.parallelism.gpus

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def tokens_per_iteration(self) -> int:
        return self.parallelism.dp * self.sequences_per_replica * self.sequence_length

    @property
    def checkpoint_bytes_per_gpu(self) -> float:
        """Bytes that one GPU adds to a checkpoint.

        A sharded optimizer is spread over all GPUs. Otherwise every GPU holds what tensor, pipeline and expert parallelism leave to it
        (experts spread over `ep` GPUs, of which `tp` are counted already).
        """
        p = self.parallelism
        holders = p.gpus if self.optimizer_sharded else min(p.gpus, p.replica_gpus * max(1, p.ep // p.tp))
        return OPTIMIZER_BYTES_PER_PARAM * self.model.params / holders


def known_workloads() -> tuple[str, ...]:
    """Names of the workload files of this package."""
    return tuple(sorted(path.stem for path in WORKLOAD_DIR.glob("*.yaml")))


def load_workload(name_or_path: str) -> Workload:
    """A workload of this package by name, or any YAML file of the same form by path.

    Raises:
        UsageError: no such name or file, a file that is not YAML, a missing, unknown or impossible entry.
    """
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        path = WORKLOAD_DIR / f"{name_or_path.lower()}.yaml"
        if path.stem not in known_workloads():
            known = ", ".join(known_workloads())
            raise UsageError(f"workload: expected one of {known}, or the path of a .yaml file, found {name_or_path!r}")
    try:
        raw = yaml.safe_load(path.read_text())
    except OSError as error:
        raise UsageError(f"workload: expected a readable YAML file, found {str(path)!r} ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise UsageError(f"workload {path}: expected YAML, found: {error}") from error
    return workload_from_dict(raw, str(path))


def workload_from_dict(raw: Any, where: str) -> Workload:
    """The workload that a parsed YAML file describes; `where` names the file in errors."""
    top = _Entries(raw, where)
    model, par, batch = (_Entries(top.take(key, dict), f"{where}: {key}") for key in ("model", "parallelism", "batch"))
    workload = Workload(
        name=top.take("name", str),
        title=top.take("title", str),
        source=top.take("source", str),
        hardware=find_hardware(top.take("hardware", str)),
        gpus_per_node=top.count("gpus_per_node"),
        optimizer_sharded=top.take("optimizer_sharded", bool),
        expert_overlap=float(top.take("expert_overlap", (int, float), 0.0)),
        iteration_secs=top.secs("iteration_secs"),
        checkpoint_cost_secs=top.secs("checkpoint_cost_secs"),
        paper=top.take("paper", dict, {}),
        assumptions=tuple(str(line) for line in top.take("assumptions", list, [])),
        model=Model(
            params=1e9 * positive(float(model.take("params_billions", (int, float))), f"{where}: model: params_billions"),
            active=1e9 * positive(float(model.take("active_billions", (int, float))), f"{where}: model: active_billions"),
            layers=model.count("layers"),
            hidden=model.count("hidden"),
            moe_layers=model.count("moe_layers", 0),
            experts_per_token=model.count("experts_per_token", 0),
            node_limit=model.count("node_limit", 0) or None,
        ),
        parallelism=Parallelism(dp=par.count("dp"), tp=par.count("tp", 1), pp=par.count("pp", 1), ep=par.count("ep", 1)),
        sequences_per_replica=batch.count("sequences_per_replica"),
        sequence_length=batch.count("sequence_length"),
    )
    for entries in (top, model, par, batch):
        entries.done()
    p = workload.parallelism
    if p.ep > p.dp * p.tp or (p.dp * p.tp) % p.ep:
        raise UsageError(f"{where}: parallelism: expected ep to divide dp x tp = {p.dp} x {p.tp} = {p.dp * p.tp}, found ep = {p.ep}")
    return workload


def scaled(workload: Workload, *, gpus: int | None = None, dp: int | None = None) -> Workload:
    """The workload with `dp` replicas (weak scaling: each replica keeps its batch), checked against `gpus`.

    A new `dp` voids what was measured or fitted at the old size: iteration time and checkpoint cost are then predicted.

    Raises:
        UsageError: dp x tp x pp is not `gpus`, or experts cannot be spread over dp x tp.
    """
    p = workload.parallelism
    if dp is not None and dp != p.dp:
        if dp < 1 or (dp * p.tp) % p.ep:
            raise UsageError(f"--dp: expected a count whose product with tp = {p.tp} is a multiple of ep = {p.ep}, found {dp}")
        note = f"dp {p.dp} -> {dp} by weak scaling: {workload.sequences_per_replica} sequences for each replica"
        workload = replace(
            workload,
            parallelism=replace(p, dp=dp),
            iteration_secs=None,
            checkpoint_cost_secs=None,
            assumptions=(*workload.assumptions, note),
        )
        p = workload.parallelism
    if gpus is not None and gpus != p.gpus:
        fits, rest = divmod(gpus, p.replica_gpus)
        hint = f"--dp {fits}" if not rest and fits else f"a GPU count that is a multiple of tp x pp = {p.replica_gpus}"
        product = f"dp x tp x pp = {p.dp} x {p.tp} x {p.pp} = {p.gpus} GPUs"
        raise UsageError(f"--gpus: expected {product} for {workload.name}, found {gpus}; leave --gpus out or use {hint}")
    return workload


class _Entries:
    """A YAML mapping that is taken apart key by key; keys that nobody took are errors, so a typo never passes."""

    def __init__(self, raw: Any, where: str):
        if not isinstance(raw, dict):
            raise UsageError(f"{where}: expected a mapping of names to values, found {type(raw).__name__}")
        self._left = dict(raw)
        self._where = where

    def take(self, key: str, kind: Any, default: Any = None) -> Any:
        if key not in self._left:
            if default is None:
                raise UsageError(f"{self._where}: expected an entry {key!r}, found none; see leto_jax/sim/workloads/ for examples")
            return default
        value = self._left.pop(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise UsageError(f"{self._where}: {key}: expected {names}, found {value!r}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = int(self.take(key, int, default))
        if value < (1 if default is None else min(1, default)):
            raise UsageError(f"{self._where}: {key}: expected a whole number above zero, found {value}")
        return value

    def secs(self, key: str) -> float | None:
        if key not in self._left:
            return None
        return positive(float(self.take(key, (int, float))), f"{self._where}: {key}")

    def done(self) -> None:
        if self._left:
            raise UsageError(f"{self._where}: unknown entry {', '.join(map(repr, self._left))}; remove it or correct its name")

"""Compiling the programs once, and loading them everywhere else.

The first incarnation compiles and publishes; shadows trace the same functions, compare the hashes of what they would have compiled, and
load. So nothing compiles at a takeover, and all incarnations run the same machine code, hence produce the same bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from leto_jax import errors
from leto_jax import layout as layouts
from leto_jax.distributed import Ranks
from leto_jax.rmu.programs import Job, Program
from leto_jax.rmu.spread import Spread

MAGIC = b"LETOPROG"
VERSION = 1
MAX_COMPILERS = 8
_HEAD = struct.Struct("<8sIIQ")


@dataclasses.dataclass(frozen=True)
class Identity:
    """What must be equal for two processes to be incarnations of one job: plan, programs, and what they are compiled with.

    layout: as `layout.to_bytes` writes it, so that a difference has the name of its leaf. programs: name and hash of the StableHLO.
    """

    layout: str
    programs: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    def of_rank(self, rank: str) -> Identity:
        """The identity that an equal process of another rank has."""
        return dataclasses.replace(self, environment=tuple((name, rank if name == "rank" else value) for name, value in self.environment))

    @staticmethod
    def from_bytes(data: bytes) -> Identity:
        try:
            raw = json.loads(data)
            pairs = lambda items: tuple((str(a), str(b)) for a, b in items)
            return Identity(str(raw["layout"]), pairs(raw["programs"]), pairs(raw["environment"]))
        except (KeyError, TypeError, ValueError) as exception:
            raise errors.RecordError(
                f"identity: expected what the first incarnation published, found {data[:60]!r}; stop the job with `leto stop`"
            ) from exception

    def require_equal(self, mine: Identity) -> None:
        """Raises IdentityError or LayoutError naming the first thing in which this process differs from the job."""
        advice = "the running job keeps its own programs; undo the change, or stop the job and start anew"
        for (name, theirs), (_, ours) in zip(self.environment, mine.environment, strict=False):
            if theirs != ours:
                raise errors.IdentityError(f"{name}: the job runs with {theirs!r}, this process with {ours!r}; {advice}")
        layouts.require_equal(layouts.from_bytes(self.layout.encode()), layouts.from_bytes(mine.layout.encode()))
        job, here = dict(self.programs), dict(mine.programs)
        for name in [*job, *(name for name in here if name not in job)]:
            if job.get(name) != here.get(name):
                raise errors.IdentityError(
                    f"program {name!r}: the job compiled {job.get(name, 'nothing')[:12]}, this process would compile {here.get(name, 'nothing')[:12]}; "
                    f"the script or what it imports was edited while the job runs: {advice}"
                )


def lower(job: Job) -> dict[str, jax.stages.Lowered]:
    """Every program of the job, traced to StableHLO. Cost: seconds for a large model; nothing is compiled."""
    return {name: _lower(program, job.spread) for name, program in job.programs.items()}


def _lower(program: Program, spread: Spread | None) -> jax.stages.Lowered:
    # Unused arguments are kept where there are places, which are only written to, and where ranks must agree on what is passed.
    settings: dict[str, Any] = {"donate_argnums": program.places, "keep_unused": True} if program.places is not None else {}
    if program.parts is None or spread is None:
        return jax.jit(program.function, **settings).lower(*program.arguments)
    settings |= {"out_shardings": spread.named(program.out_parts), "keep_unused": True}
    with jax.set_mesh(spread.mesh):  # what the user's functions constrain, they do by axes of the mesh
        return jax.jit(program.function, **settings).lower(*spread.structs(program.arguments, program.parts))


def over_ranks(job: Job, run: Mapping[str, Callable]) -> Mapping[str, Callable]:
    """The programs as one rank calls them, with its shards: those over all ranks joined and cut."""
    spread = job.spread
    if spread is None:
        return run
    parts = {name: program.parts for name, program in job.programs.items()}
    return {name: call if parts[name] is None else spread.call(call, parts[name]) for name, call in run.items()}


def identify(job: Job, lowered: Mapping[str, jax.stages.Lowered]) -> Identity:
    device = jax.local_devices()[0]
    environment = {
        "jax": jax.__version__,
        "platform": f"{device.platform} {device.device_kind}",
        "platform_version": str(getattr(device.client, "platform_version", "")),
        "rank": f"{jax.process_index()} of {jax.process_count()}",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "jax_enable_x64": str(jax.config.jax_enable_x64),
        "jax_default_matmul_precision": str(jax.config.jax_default_matmul_precision),
    }
    hashes = {name: hashlib.sha256(item.as_text().encode()).hexdigest() for name, item in lowered.items()}
    return Identity(layouts.to_bytes(job.layout).decode(), tuple(hashes.items()), tuple(environment.items()))


def require_equal_ranks(mine: Identity, arguments: Mapping[str, str], ranks: Ranks, secs: float) -> None:
    """Raises IdentityError or LayoutError, on every rank, if one of them has traced something else than rank 0, or has other arguments of its
    session; DeadlineError."""
    shown = dataclasses.replace(mine.of_rank(""), environment=(*mine.of_rank("").environment, *arguments.items()))
    found = [Identity.from_bytes(data) for data in ranks.gather("identities", shown.to_bytes(), secs)]
    for rank, other in enumerate(found[1:], 1):
        try:
            found[0].require_equal(other)
        except (errors.IdentityError, errors.LayoutError) as exception:
            raise type(exception)(
                f"rank {rank} differs from rank 0, all ranks must run the same script with the same arguments: {exception}"
            ) from exception


def compile_all(lowered: Mapping[str, jax.stages.Lowered], to_pack: bool = False) -> dict[str, jax.stages.Compiled]:
    """Compiles every program. to_pack: on the CPU past JAX's persistent cache, since what XLA for the CPU has loaded from there it cannot
    serialize again (the bytes load elsewhere, and then lack their functions)."""
    if not to_pack or jax.default_backend() != "cpu":
        with ThreadPoolExecutor(min(MAX_COMPILERS, os.cpu_count() or 1)) as pool:  # XLA compiles without the interpreter's lock
            return dict(zip(lowered, pool.map(lambda item: item.compile(), lowered.values()), strict=True))
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it is used
    try:
        return compile_all(lowered)
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def check_in_place(job: Job, compiled: Mapping[str, jax.stages.Compiled]) -> None:
    """Raises LayoutError if XLA has not aliased every place of a program with an output: then it would keep a second copy, or abort."""
    for name, program in job.programs.items():
        if program.places is None:
            continue
        wanted = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree_util.tree_leaves(program.arguments[program.places]))
        analysis = compiled[name].memory_analysis()
        if analysis is not None and analysis.alias_size_in_bytes < wanted:
            raise errors.LayoutError(
                f"program {name!r}: expected {wanted} bytes of its outputs at their places, XLA has aliased {analysis.alias_size_in_bytes}; "
                "please report this with the versions of jax and of the driver"
            )


def pack(compiled: Mapping[str, jax.stages.Compiled]) -> bytes:
    """Executables as one blob: header, JSON index with a SHA-256 each, payloads. The payloads are XLA's own serialized form."""
    index, payloads, offset = {}, [], 0
    for name, item in compiled.items():
        payload = serialize_executable.serialize(item)[0]
        index[name] = (offset, len(payload), hashlib.sha256(payload).hexdigest())
        payloads.append(payload)
        offset += len(payload)
    table = json.dumps(index).encode()
    return b"".join([_HEAD.pack(MAGIC, VERSION, len(table), offset), table, *payloads])


def unpack(data: memoryview, lowered: Mapping[str, jax.stages.Lowered]) -> dict[str, Callable]:
    """Loads what `pack` wrote. The tree structures come from this process' own trace, whose hashes were compared before.

    Raises RecordError for a damaged blob, IdentityError when a program is missing.
    """
    if len(data) < _HEAD.size:
        raise errors.RecordError(f"executables: expected at least {_HEAD.size} bytes, found {len(data)}")
    magic, version, table_bytes, total = _HEAD.unpack(data[: _HEAD.size])
    if (magic, version) != (MAGIC, VERSION) or len(data) < _HEAD.size + table_bytes + total:
        raise errors.RecordError(
            f"executables: expected magic {MAGIC!r} version {VERSION} and {total} bytes, found {magic!r} version {version} and {len(data)} bytes"
        )
    body = _HEAD.size + table_bytes
    index = json.loads(bytes(data[_HEAD.size : body]))
    loaded: dict[str, Callable] = {}
    for name, item in lowered.items():
        if name not in index:
            raise errors.IdentityError(f"program {name!r} is not among the job's executables ({', '.join(index)})")
        offset, size, digest = index[name]
        payload = bytes(data[body + offset : body + offset + size])
        if hashlib.sha256(payload).hexdigest() != digest:
            raise errors.RecordError(
                f"executables: {name!r} does not have its checksum; the blob is damaged, stop the job with `leto stop`"
            )
        loaded[name] = serialize_executable.deserialize_and_load(payload, item.in_tree, item.out_tree)
    return loaded

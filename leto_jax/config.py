"""Settings: what a user can choose, and what a process learns from its environment. Values only; nothing here opens or starts anything."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from leto_jax import errors

MIB = 1 << 20
METRICS_FILE = "metrics.jsonl"  # in a job's state directory: one row for each step


@dataclasses.dataclass(frozen=True)
class Protection:
    """How the state is cut and guarded.

    data_rows: D, rows of a protection group. local_parity: H1, parity rows in this node's host memory.
    peer_parity: H2, rows that live with a peer (several ranks only), two versions of each.
    page_bytes: unit in which memory can be lost and replaced; a row is a multiple of it in every lane.
    chunk_bytes: size of the largest lane piece of one chunk; also the size of the gap of each lane.
    align_elements: leaves start at multiples of this many elements in all lanes of a signature.
    align_bytes: everything else that a program may write starts at a multiple of this: what XLA asks of memory that it takes as it is, 64 on
    the CPU, 256 on a GPU.
    scrub_bytes_per_step: bytes whose page checksums are verified between commit t and update t+1.
    """

    data_rows: int = 32
    local_parity: int = 2
    peer_parity: int = 0
    page_bytes: int = 4096
    chunk_bytes: int = 8 * MIB
    align_elements: int = 64
    align_bytes: int = 64
    scrub_bytes_per_step: int = 1 * MIB

    @property
    def parity_rows(self) -> int:
        return self.local_parity + self.peer_parity

    def __post_init__(self):
        for name, low, high in [("data_rows", 2, 128), ("parity_rows", 1, 4)]:
            value = getattr(self, name)
            if not low <= value <= high:
                raise errors.UsageError(f"{name}: expected {low}..{high}, found {value}")
        if self.page_bytes < 512 or self.page_bytes & (self.page_bytes - 1):
            raise errors.UsageError(f"page_bytes: expected a power of two of at least 512, found {self.page_bytes}")
        for name in ("align_elements", "align_bytes"):
            value = getattr(self, name)
            if value < 64 or value & (value - 1):
                raise errors.UsageError(f"{name}: expected a power of two of at least 64, found {value}")


GPU_PROTECTION = Protection(page_bytes=2 * MIB, chunk_bytes=512 * MIB, align_elements=256, align_bytes=256)
"""The default on a GPU: pages as device memory is made and replaced; chunks so large that a mark costs nothing beside them. Scrub takes whole
pieces there, one in each step."""


def for_gpu(protection: Protection | None, page_bytes: int) -> Protection:
    """`protection` as a GPU can have it, whose memory is replaced in pages of `page_bytes` and written at multiples of 256; the default if None."""
    chosen = protection or GPU_PROTECTION
    return dataclasses.replace(
        chosen,
        page_bytes=max(chosen.page_bytes, page_bytes),
        align_elements=max(chosen.align_elements, GPU_PROTECTION.align_elements),
        align_bytes=max(chosen.align_bytes, GPU_PROTECTION.align_bytes),
    )


def deterministic(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with the XLA flag that makes GPU programs give the same bits each time; CPU programs do without."""
    return {**environ, "XLA_FLAGS": f"{environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()}


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """Published limits, in seconds. The watchdog for a running step learns its own from step times, never below `hang_floor`."""

    init: float = 600.0
    first_step: float = 600.0
    takeover: float = 60.0
    body: float = 300.0
    peer_body: float = 30.0  # of a body that other ranks wait for, where `body` is not shorter
    hang_floor: float = 3.0
    hang_factor: float = 5.0
    stopped: float = 1.0
    coordinator: float = 60.0  # until one listens
    reap: float = 10.0
    inject_wait: float = 60.0
    orphan_timeout: float = 3600.0
    preempt: float = 600.0


IN_PLACE = "in-place"
RECOVERY = (IN_PLACE, "persistent", "host-memory", "host-memory+spare", "none")
"""Ways to go on after a failure (`leto run --recovery`). In all but the first the state is the trainer's own, as without leto_jax: plain programs, and
a new process goes on from the newest copy that there is."""
SPARES = (IN_PLACE, "host-memory+spare")
"""Those with a process that waits."""


class Level(enum.IntEnum):
    """How far a shadow has got when it waits to be promoted; what is left is done after the promotion."""

    NONE = 0
    PROCESS = 1  # libraries are imported; the script has not begun, no device is open
    DEVICE = 2  # the script has come to its session, the device is open, the programs are traced, and are the job's
    LOADED = 3  # the programs are loaded and have run once: nothing is left


AUTO, PARKED = "auto", "parked"
SHADOW_LEVELS = (AUTO, "3", PARKED, "2", "1", "0")
"""What `leto run --shadow-level` takes. Parked: loaded, and its GPU state moved to host memory while it waits. Auto: what the device has room for."""


class Interval(NamedTuple):
    """How often: every `steps` steps, every `secs` seconds, or, if both are None, as often as costs least (Daly 2006)."""

    steps: int | None = None
    secs: float | None = None

    @staticmethod
    def parse(text: str, option: str) -> Interval:
        """'100' (steps), '30s' or 'auto'. Raises UsageError naming the option."""
        with contextlib.suppress(ValueError):
            if text == "auto":
                return Interval()
            if text.endswith("s") and (secs := float(text[:-1])) > 0:
                return Interval(secs=secs)
            if (steps := int(text)) > 0:
                return Interval(steps=steps)
        raise errors.UsageError(f"{option}: expected a number of steps such as 100, seconds such as 30s, or auto, found {text!r}")


TIERS = HOST_TIER, PERSISTENT_TIER = "host memory", "persistent"


@dataclasses.dataclass(frozen=True)
class Tiers:
    """Where copies of the state go while a job trains, and how often; '' for never (`Interval.parse`).

    directory, every, keep, asynchronous: the persistent tier, versions that stay, whether training goes on while one is written. copies_every:
    of the tier in the host memory of the state manager; copies: how many ranks keep each rank's, itself one of them. mttf_secs: mean time
    between failures, for what is tuned.
    """

    directory: str = ""
    every: str = ""
    keep: int = 2
    asynchronous: bool = True
    copies_every: str = ""
    copies: int = 1
    mttf_secs: float = 3600.0


@dataclasses.dataclass(frozen=True)
class Process:
    """What a trainer or shadow learns from the agent that started it. The one place where `LETO_*` variables are read.

    role: 'trainer', 'shadow', or 'plan' (prints the memory plan at its session and ends). resume: directory of checkpoints to start from, ''
    for none. shadow_level: of a trainer, the one of SHADOW_LEVELS that the job was started with; of a shadow, the `Level` at which it waits, as a
    number. recovery: one of RECOVERY. ranks: of the job; all processes of one incarnation are its generation. coordinator: 'host:port' where they
    meet, '' if there is one rank. gpu: the one to drive if there are GPUs, of those that CUDA shows; None for the only one.
    """

    job: str
    role: str
    rank: int
    socket: Path
    incarnation: int
    job_dir: Path
    resume: str = ""
    shadow_level: str = AUTO
    recovery: str = IN_PLACE
    tiers: Tiers = dataclasses.field(default_factory=Tiers)
    ranks: int = 1
    coordinator: str = ""
    wait_for_parity: bool = False
    gpu: int | None = None

    @staticmethod
    def from_environ(environ: Mapping[str, str] = os.environ) -> Process | None:
        """The process' place in a job, or None when it was not started by `leto run`.

        Raises UsageError when only a part of the variables is set.
        """
        names = ("LETO_JOB", "LETO_ROLE", "LETO_RANK", "LETO_SOCKET", "LETO_INCARNATION", "LETO_JOB_DIR")
        found = {name: environ[name] for name in names if name in environ}
        if not found:
            return None
        if len(found) != len(names):
            missing = ", ".join(sorted(set(names) - set(found)))
            raise errors.UsageError(
                f"expected all of {', '.join(names)} (set by `leto run`), found none for {missing}; unset them or use `leto run`"
            )
        if found["LETO_ROLE"] not in ("trainer", "shadow", "plan"):
            raise errors.UsageError(f"LETO_ROLE: expected 'trainer', 'shadow' or 'plan', found {found['LETO_ROLE']!r}")
        return Process(
            job=found["LETO_JOB"],
            role=found["LETO_ROLE"],
            rank=int(found["LETO_RANK"]),
            socket=Path(found["LETO_SOCKET"]),
            incarnation=int(found["LETO_INCARNATION"]),
            job_dir=Path(found["LETO_JOB_DIR"]),
            resume=environ.get("LETO_RESUME", ""),
            shadow_level=environ.get("LETO_SHADOW_LEVEL", AUTO),
            recovery=environ.get("LETO_RECOVERY", IN_PLACE),
            tiers=Tiers(**json.loads(environ.get("LETO_TIERS", "{}"))),
            ranks=int(environ.get("LETO_RANKS", "1")),
            coordinator=environ.get("LETO_COORDINATOR", ""),
            wait_for_parity=environ.get("LETO_WAIT_FOR_PARITY", "0") == "1",
            gpu=int(environ["LETO_GPU"]) if environ.get("LETO_GPU") else None,
        )

    def environ(self) -> dict[str, str]:
        """The variables that `from_environ` reads, for a child."""
        return {
            "LETO_JOB": self.job,
            "LETO_ROLE": self.role,
            "LETO_RANK": str(self.rank),
            "LETO_SOCKET": str(self.socket),
            "LETO_INCARNATION": str(self.incarnation),
            "LETO_JOB_DIR": str(self.job_dir),
            "LETO_RESUME": self.resume,
            "LETO_SHADOW_LEVEL": self.shadow_level,
            "LETO_RECOVERY": self.recovery,
            "LETO_TIERS": json.dumps(dataclasses.asdict(self.tiers)),
            "LETO_RANKS": str(self.ranks),
            "LETO_COORDINATOR": self.coordinator,
            "LETO_WAIT_FOR_PARITY": str(int(self.wait_for_parity)),
            "LETO_GPU": "" if self.gpu is None else str(self.gpu),
        }


def compile_cache(directory: Path) -> dict[str, str]:
    """The variables that make JAX keep what it compiles in `directory`, small programs too."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(directory),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def state_root(environ: Mapping[str, str] = os.environ) -> Path:
    """Where journals and metrics of jobs are kept after the jobs are gone: `$XDG_STATE_HOME/leto`, else `~/.local/state/leto`."""
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "leto"

"""`leto doctor`: what this machine can do for leto_jax, tried rather than looked up wherever that is possible.

Each probe is a small function that returns what it found, or raises; `examine` turns both into one row. A row that is not ok names
something without which a job cannot run or recover here. What only makes it slower or less tidy is ok, with an advice.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.metadata
import json
import mmap
import os
import platform
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from leto_jax import errors
from leto_jax.agent import operability
from leto_jax.agent.processes import state_letter
from leto_jax.config import state_root
from leto_jax.manager import limits, memory, protocol, runtime

CHILD_SECS = 20.0
GPU_SECS = 120.0  # CUDA and XLA take their time
REAP_SECS = 3.0
MIN_FILES = 256
TYPICAL_JOB = "x" * 47  # as long as the names that `leto run` invents can be
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_TO_CHILD, _TO_PARENT = b"from the parent", b"from the child."
_RELEASE = re.compile(r"\d+(?:\.\d+)*")
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:>=\s*([0-9.]+))?")


class Found(NamedTuple):
    """What a probe found. advice: what to do about it; also where all is well but could be better. facts: the same for programs, as JSON."""

    text: str
    ok: bool = True
    advice: str = ""
    facts: Any = None


class Probe(NamedTuple):
    """One row of the table. advice: what to do if `run` raises."""

    check: str
    run: Callable[[], Found]
    advice: str


def examine(probes: Sequence[Probe] | None = None) -> list[dict[str, Any]]:
    """All checks, as rows of `check`, `ok`, `found`, `advice` (empty if there is nothing to do); some have `facts`. Never raises, leaves nothing behind.

    Cost: a second, up to `REAP_SECS` more where nobody reaps orphans; eight short child processes.
    """
    return [_row(probe) for probe in (PROBES if probes is None else probes)]


def _row(probe: Probe) -> dict[str, Any]:
    try:
        found = probe.run()
    except Exception as exception:  # whatever a strange machine comes up with is a finding, not a crash
        kind = "" if isinstance(exception, errors.LetoError) else f"{type(exception).__name__}: "
        found = Found(f"{kind}{exception}", False, probe.advice)
    row = {"check": probe.check, "ok": found.ok, "found": found.text, "advice": found.advice}
    return row if found.facts is None else {**row, "facts": found.facts}


def _module(name: str) -> list[str]:
    return [sys.executable, "-m", name]


def _python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", code, *map(str, arguments)]


def _child(code: str, *fds: int) -> str:
    """Output of a Python process that runs `code` and inherits `fds`, whose numbers are its arguments. Raises JobError if it fails."""
    done = subprocess.run(_python(code, *fds), pass_fds=fds, capture_output=True, text=True, timeout=CHILD_SECS, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise errors.JobError(f"expected a child process to succeed, found {last[0]}")
    return done.stdout.strip()


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


# Memory -----------------------------------------------------------------------------------------------------------------------------


def memfd(
    create: Callable[[str], int] = memory.create,
    allocate: Callable[[int, int, int], None] = os.posix_fallocate,
    truncate: Callable[[int, int], None] = os.ftruncate,
) -> Found:
    """Memory behind a descriptor: made, reserved for real, its size sealed, the seal tried."""
    fd = create("doctor")
    try:
        allocate(fd, 0, mmap.PAGESIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        try:
            truncate(fd, 0)
        except PermissionError:
            return Found("memfd_create, posix_fallocate and seals work")
        return Found("a memfd with a sealed size can be truncated", False, "use a Linux kernel with working file seals")
    finally:
        os.close(fd)


_MAPPER = f"""
import mmap, sys
with mmap.mmap(int(sys.argv[1]), mmap.PAGESIZE) as shared:
    assert shared[:{len(_TO_CHILD)}] == {_TO_CHILD!r}, "the child sees other bytes"
    shared[:{len(_TO_PARENT)}] = {_TO_PARENT!r}
"""


def shared_mapping(child: Callable[..., str] = _child) -> Found:
    """Two processes map the same memfd, and each sees what the other stored."""
    fd = memory.create("doctor")
    try:
        os.posix_fallocate(fd, 0, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as shared:
            shared[: len(_TO_CHILD)] = _TO_CHILD
            child(_MAPPER, fd)
            seen = shared[: len(_TO_PARENT)]
    finally:
        os.close(fd)
    if seen != _TO_PARENT:
        return Found(f"expected the bytes that another process stored, found {seen!r}", False, "use a kernel that maps memfds shared")
    return Found("two processes see each other's stores")


_SENDER = f"""
import os, socket, sys
fd = os.memfd_create("doctor")
os.write(fd, {_TO_PARENT!r})
socket.send_fds(socket.socket(fileno=int(sys.argv[1])), [b"x"], [fd])
"""


def descriptor_passing(child: Callable[..., str] = _child) -> Found:
    """A descriptor that another process sent, read when that process is dead: retained memory in small."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        child(_SENDER, theirs.fileno())
        theirs.close()
        ours.settimeout(CHILD_SECS)
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    try:
        content = os.pread(fds[0], len(_TO_PARENT), 0) if fds else None
    finally:
        protocol.close_fds(fds)
    if content != _TO_PARENT:
        found = "no descriptor" if content is None else repr(content)
        return Found(f"expected memory from a process that is dead, found {found}", False, "allow SCM_RIGHTS between processes of the job")
    return Found("a descriptor arrives by AF_UNIX socket, and its memory outlives the sender")


def memory_available(available: Callable[[], limits.Budget] = limits.available_bytes) -> Found:
    """What may be reserved: the smaller of MemAvailable and the tightest cgroup limit."""
    budget = available()
    text = f"{_gib(budget.available)} may be reserved (bound by {budget.source}); MemAvailable {_gib(budget.mem_available)}"
    if budget.available < operability.MIN_FREE_BYTES:
        return Found(
            text, False, f"free memory until at least {operability.MIN_FREE_BYTES >> 20} MiB are left, or raise the container's limit"
        )
    return Found(text)


def cgroup_limit(available: Callable[[], limits.Budget] = limits.available_bytes) -> Found:
    """The tightest memory limit of the cgroups around this process. Over it the kernel kills, so `leto run` stays below."""
    budget = available()
    if budget.cgroup_limit is None or budget.cgroup_used is None:
        return Found("no memory limit")
    return Found(f"limit {_gib(budget.cgroup_limit)}, used {_gib(budget.cgroup_used)}")


def dev_shm(path: str = "/dev/shm") -> Found:
    """Not used, and people look for it: containers often give it 64 MiB."""
    try:
        size = _gib(shutil.disk_usage(path).total)
    except OSError:
        size = "none"
    return Found(f"{size}; not needed, retained memory is memfd")


# Processes --------------------------------------------------------------------------------------------------------------------------


def pidfd(open_pidfd: Callable[[int], int] = os.pidfd_open) -> Found:
    """A child is killed through its pidfd, which then says that it has ended."""
    with subprocess.Popen(_python("import sys; sys.stdin.read()"), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as popen:
        try:
            fd = open_pidfd(popen.pid)
            try:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
                poller = select.poll()
                poller.register(fd, select.POLLIN)
                if not poller.poll(CHILD_SECS * 1000):
                    return Found("the pidfd of a killed child does not become readable", False, "use Linux 5.3 or newer")
            finally:
                os.close(fd)
        finally:
            popen.kill()
    return Found(f"pidfd_open, pidfd_send_signal and poll work (Linux {platform.release()})")


def subreaper(prctl: Callable[..., int] | None = None) -> Found:
    """PR_SET_CHILD_SUBREAPER, read back and put back."""
    prctl = prctl or ctypes.CDLL(None, use_errno=True).prctl

    def get() -> int:
        value = ctypes.c_int(-1)
        if prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return value.value

    before = get()
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    now = get()
    prctl(_PR_SET_CHILD_SUBREAPER, before, 0, 0, 0)
    if now != 1:
        return Found(
            f"expected to become a subreaper, found {now} after PR_SET_CHILD_SUBREAPER", False, "allow prctl in the sandbox's filter"
        )
    return Found("prctl makes orphans children of the agent")


_PARENT_OF_ORPHAN = """
import os, time
pid = os.fork()
if pid:
    print(pid, flush=True)
else:
    time.sleep(0.05)
os._exit(0)
"""


def pid_1(
    child: Callable[..., str] = _child, state: Callable[[int], str] = state_letter, wait_secs: float = REAP_SECS, root: str = "/"
) -> Found:
    """Who PID 1 is, and whether an orphan that ends is reaped. A living agent reaps its own; after its death somebody else has to."""
    name = (_read(Path(root) / "proc/1/comm") or "unknown").strip()
    orphan = int(child(_PARENT_OF_ORPHAN))
    deadline = time.monotonic() + wait_secs
    while state(orphan) and time.monotonic() < deadline:
        time.sleep(0.01)
    if state(orphan):
        advice = (
            "zombies stay if an agent is killed, which costs entries of the process table only; an init reaps them (`docker run --init`)"
        )
        return Found(f"PID 1 is {name}; a dead orphan is not reaped within {wait_secs:g} s", True, advice)
    return Found(f"PID 1 is {name}; orphans are reaped by it or a process before it")


def proc(root: str = "/") -> Found:
    """What the fence reads of other processes of this user: state, children, and the token in their environment."""
    with subprocess.Popen(_python("import sys; sys.stdin.read()"), stdin=subprocess.PIPE, env={**os.environ, "LETO_DOCTOR": "1"}) as popen:
        directory = Path(root) / "proc" / str(popen.pid)
        try:
            stat = (directory / "stat").read_text()
            until = time.monotonic() + 1.0  # exec closes the pipe that Popen waits for before the environment shows
            while not (token := b"LETO_DOCTOR=1" in (directory / "environ").read_bytes().split(b"\0")) and time.monotonic() < until:
                time.sleep(0.01)
        finally:
            popen.kill()
    if ")" not in stat or not token:
        return Found("/proc shows a child without its state or environment", False, "mount /proc in full")
    if _read(Path(root) / f"proc/self/task/{os.getpid()}/children") is None:
        return Found(
            "state and environment, but no list of children",
            True,
            "zombies of data workers stay until the agent ends (CONFIG_PROC_CHILDREN)",
        )
    return Found("state, environment and children of processes can be read")


_NICER = """
import os
os.setpriority(os.PRIO_PROCESS, 0, 19)
try:
    os.setpriority(os.PRIO_PROCESS, 0, 0)
    print("yes")
except PermissionError:
    print("no")
"""


def priority(child: Callable[..., str] = _child) -> Found:
    """Shadows get ready at low priority. Going back needs a privilege; without it a promoted one stays low."""
    if child(_NICER) == "yes":
        return Found("low priority can be taken back")
    return Found(
        "low priority is for ever",
        True,
        "a promoted shadow competes with the next one that gets ready: allow it (`ulimit -e 20`, CAP_SYS_NICE)",
    )


def files(limit: Callable[[], tuple[int, int]] = lambda: resource.getrlimit(resource.RLIMIT_NOFILE)) -> Found:
    """RLIMIT_NOFILE. A job of one rank keeps a few dozen descriptors open; the rest is the script's."""
    soft, hard = limit()
    shown = ["unlimited" if number == resource.RLIM_INFINITY else str(number) for number in (soft, hard)]
    text = f"RLIMIT_NOFILE {shown[0]} (hard limit {shown[1]})"
    if soft != resource.RLIM_INFINITY and soft < MIN_FILES:
        return Found(text, False, f"raise it to at least {MIN_FILES} (`ulimit -n 1024`)")
    return Found(text)


def cpus(count: Callable[[], int] = lambda: len(os.sched_getaffinity(0)), root: str = "/") -> Found:
    """CPUs that this process may use, and the quota of its cgroup where that is visible (version 2)."""
    number = count()
    text, share = f"{number} CPUs", float(number)
    quota = (_read(Path(root) / "sys/fs/cgroup/cpu.max") or "max").split()
    if len(quota) == 2 and quota[0].isdecimal():
        share = min(share, int(quota[0]) / int(quota[1]))
        text += f", quota {int(quota[0]) / int(quota[1]):g}"
    if share < 2:
        return Found(text, True, "a shadow gets ready beside the trainer: with two CPUs or more it does not slow the steps down")
    return Found(text)


# Files ------------------------------------------------------------------------------------------------------------------------------


def runtime_directory(environ: Mapping[str, str] = os.environ) -> Found:
    """The private directory of sockets: its rules, the length of its paths, and a connection in it."""
    root = runtime.runtime_root(environ)
    runtime.job_dir(TYPICAL_JOB, environ)
    there = os.path.lexists(root)
    if there:
        runtime.ensure_private_dir(root)
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=root if there else root.parent) as directory:
        listener, _ = protocol.listen(Path(directory) / "s", what="doctor")
        with listener, protocol.connect(Path(directory) / "s", deadline=time.monotonic() + CHILD_SECS, what="doctor"):
            accepted, _ = listener.accept()
            with accepted:
                uid = protocol.peer_of(accepted).uid
    if uid != os.geteuid():
        return Found(f"expected SO_PEERCRED to say uid {os.geteuid()}, found {uid}", False, "run the whole job in one user namespace")
    return Found(f"{root} {'is private (0700)' if there else 'can be made'}; a socket in it connects and names its peer")


def state_directory(environ: Mapping[str, str] = os.environ) -> Found:
    """Where journals, metrics and compilation caches go."""
    root = state_root(environ)
    existing = next(path for path in (root, *root.parents) if path.exists())
    with tempfile.TemporaryFile(dir=existing):
        free = shutil.disk_usage(existing).free
    if free < operability.MIN_DISK_BYTES:
        return Found(
            f"{root}: {free >> 20} MiB free", False, f"free {operability.MIN_DISK_BYTES >> 20} MiB, or set XDG_STATE_HOME to another disk"
        )
    return Found(f"{root}: {_gib(free)} free")


# Software ---------------------------------------------------------------------------------------------------------------------------


def _numbers(version: str) -> tuple[int, ...]:
    """The release part of a version, without the zeros at its end."""
    match = _RELEASE.match(version)
    numbers = [int(word) for word in match[0].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def python(version: str = platform.python_version(), wanted: Callable[[], str] | None = None) -> Found:
    """This interpreter against the package's own Requires-Python."""
    minimum = wanted() if wanted else str(importlib.metadata.metadata("leto_jax")["Requires-Python"])
    text = f"{platform.python_implementation()} {version} ({sys.executable})"
    if _numbers(version) < _numbers(minimum.removeprefix(">=")):
        return Found(text, False, f"use Python {minimum}")
    return Found(text)


def packages(
    requirements: Callable[[], Iterable[str] | None] = lambda: importlib.metadata.requires("leto_jax"),
    version: Callable[[str], str] = importlib.metadata.version,
) -> Found:
    """Installed versions against the package's own requirements, without importing any; and Grain, which is optional."""
    shown, wrong = [], []
    for requirement in requirements() or ():
        match = _REQUIREMENT.match(requirement)
        if match is None or "extra ==" in requirement:
            continue
        name, minimum = match[1], match[2] or "0"
        try:
            found = version(name)
        except importlib.metadata.PackageNotFoundError:
            found = "missing"
        shown.append(f"{name} {found}")
        if found == "missing" or _numbers(found) < _numbers(minimum):
            wrong.append(f"{name}>={minimum}")
    try:
        shown.append(f"grain {version('grain')}")
    except importlib.metadata.PackageNotFoundError:
        shown.append("no grain (needed for Grain datasets only)")
    if wrong:
        return Found(", ".join(shown), False, f"install {', '.join(wrong)} (`uv sync`)")
    return Found(", ".join(shown))


def gpu_memory(root: str = "/", command: Sequence[str] = _module("leto_jax.arena.cuda")) -> Found:
    """Whether GPU memory can be retained: made, mapped, written, and mapped again, in a process of its own."""
    text = _nvidia(root)
    if text is None:
        return Found(_NO_GPU)
    release = re.search(r"\b\d{3,}\.\d+(?:\.\d+)*", text)
    shown = f"NVIDIA driver {release[0] if release else 'present'}"
    found = _ask(command)
    if not found["gpus"]:
        return Found(f"{shown}; {found['reason'] or 'no GPU is visible'}", False, "uv sync --extra cuda; or train with --device cpu")
    rows = "; ".join(f"GPU {row['gpu']}: {row['reason']}" for row in found["gpus"])
    wrong = [row for row in found["gpus"] if not row["ok"]]
    return Found(f"{shown}; {rows}", not wrong, "train with --device cpu" if wrong else "")


def gpu_operability(root: str = "/", command: Sequence[str] = _module("leto_jax.agent.operability")) -> Found:
    """What the operability check knows of each GPU before anything has failed."""
    if _nvidia(root) is None:
        return Found(_NO_GPU)
    found = _ask(command)
    rows = [
        f"GPU {row['gpu']} ({row.get('name', 'no name')}): {'ok' if row['ok'] else 'REFUSED'}, {row['reason']}" for row in found["gpus"]
    ]
    peers = [f"GPUs {one} and {other}: {capability}" for one, other, capability in found["peers"]]
    text = "; ".join([*rows, *([f"peer-to-peer: {', '.join(peers)}"] if peers else []), *([found["reason"]] if found["reason"] else [])])
    ok = bool(found["gpus"]) and not found["reason"] and all(row["ok"] for row in found["gpus"])
    advice = "after a failure nobody takes over on such a GPU: leave it out (CUDA_VISIBLE_DEVICES), or train with --device cpu"
    return Found(text or "no GPU is visible", ok, "" if ok else advice, found)


def gpu_kernels(root: str = "/", command: Sequence[str] = _module("leto_jax.pallas.dispatch")) -> Found:
    """Which implementation encodes, decodes and updates on the GPU, and why: each kernel is run once against its reference."""
    if _nvidia(root) is None:
        return Found(_NO_GPU)
    rows = _ask(command, {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    text = "; ".join(f"{row['operation']}: {row['reason']}" for row in rows)
    return Found(text, all(row["ok"] for row in rows), "" if all(row["ok"] for row in rows) else "please report this")


_NO_GPU = "no NVIDIA driver: training on the CPU"


def _nvidia(root: str) -> str | None:
    """What the kernel says about NVIDIA's driver, '' if it only has its device file; None if there is none."""
    text = _read(Path(root) / "proc/driver/nvidia/version")
    return text if text is not None else "" if (Path(root) / "dev/nvidiactl").exists() else None


def _ask(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Any:
    """The JSON that a child prints. Raises DeviceError with its last words if it prints none."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=GPU_SECS, check=False, env={**os.environ, **(environ or {})})
    try:
        return json.loads(done.stdout)
    except ValueError as exception:
        said = done.stderr.strip().splitlines()
        raise errors.DeviceError(
            f"{' '.join(command[1:])} ended with exit code {done.returncode}: {said[-1] if said else 'no word'}"
        ) from exception


_KERNEL = "use Linux 5.3 or newer, outside of a sandbox that filters system calls"
PROBES: tuple[Probe, ...] = (
    Probe("memfd", memfd, _KERNEL),
    Probe("shared mapping", shared_mapping, _KERNEL),
    Probe("descriptor passing", descriptor_passing, _KERNEL),
    Probe("memory", memory_available, "mount /proc"),
    Probe("cgroup", cgroup_limit, "mount /proc"),
    Probe("/dev/shm", dev_shm, ""),
    Probe("pidfd", pidfd, _KERNEL),
    Probe("subreaper", subreaper, _KERNEL),
    Probe("PID 1", pid_1, "let this user start processes (`ulimit -u`)"),
    Probe("/proc", proc, "mount /proc in full"),
    Probe("priority", priority, "let this user start processes (`ulimit -u`)"),
    Probe("open files", files, "allow getrlimit"),
    Probe("CPUs", cpus, "allow sched_getaffinity"),
    Probe("runtime directory", runtime_directory, "set XDG_RUNTIME_DIR to a short, private, local directory of yours"),
    Probe("state directory", state_directory, "set XDG_STATE_HOME to a directory that you can write to"),
    Probe("Python", python, "install leto_jax as a package (`uv sync`)"),
    Probe("packages", packages, "install leto_jax as a package (`uv sync`)"),
    Probe("GPU memory", gpu_memory, "uv sync --extra cuda; or train with --device cpu"),
    Probe("GPU operability", gpu_operability, "uv sync --extra cuda; or train with --device cpu"),
    Probe("GPU kernels", gpu_kernels, "uv sync --extra cuda; or train with --device cpu"),
)

"""How much memory may still be reserved: MemAvailable of the machine, and the tightest memory limit of the cgroups around this process.

Over a cgroup limit the kernel does not raise, it kills: so every reservation is compared with these numbers first.
`root` stands for `/`, so that tests hand in a tree of files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from leto_jax.errors import MemoryBudgetError

HEADROOM_BYTES = 64 * 1024 * 1024
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes 2**63 rounded down to pages for "no limit"


class Budget(NamedTuple):
    """What is left, in bytes. `cgroup_limit` and `cgroup_used` are those of the tightest cgroup, None if none has a limit.

    `source` names where the smaller of the two bounds was read.
    """

    mem_available: int
    cgroup_limit: int | None
    cgroup_used: int | None
    source: str

    @property
    def available(self) -> int:
        if self.cgroup_limit is None or self.cgroup_used is None:
            return self.mem_available
        return max(min(self.mem_available, self.cgroup_limit - self.cgroup_used), 0)


class _Group(NamedTuple):
    limit: int
    used: int
    path: str


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdecimal() else None  # "max" of version 2 is no number, as intended


def _mem_available(root: Path) -> int:
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _read(root / "proc/meminfo") or "", re.MULTILINE))
    value = fields.get("MemAvailable", fields.get("MemFree"))
    if value is None:
        raise MemoryBudgetError(f"{root / 'proc/meminfo'} has no MemAvailable: is /proc mounted?")
    return int(value) * 1024


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _mounts(root: Path) -> list[tuple[int, str, str]]:
    """(version, path of the hierarchy that is mounted, mount point) of every hierarchy that may control memory."""
    mounts = []
    for line in (_read(root / "proc/self/mountinfo") or "").splitlines():
        before, separator, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if not separator or len(left) < 5 or len(right) < 3:
            continue
        if right[0] == "cgroup2":
            mounts.append((2, _unescape(left[3]), _unescape(left[4])))
        elif right[0] == "cgroup" and "memory" in right[2].split(","):
            mounts.append((1, _unescape(left[3]), _unescape(left[4])))
    return mounts


def _own_paths(root: Path) -> dict[int, str]:
    """Path of this process in the version 2 hierarchy and in the version 1 hierarchy of the memory controller."""
    paths = {}
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    return paths


def _reclaimable(directory: Path, prefix: str) -> int:
    """Page cache that the kernel gives up before it kills: all of the inactive, half of the active (as MemAvailable reckons)."""
    fields = dict(line.split(" ", 1) for line in (_read(directory / "memory.stat") or "").splitlines() if " " in line)

    def value(name: str) -> int:
        text = fields.get(prefix + name, "0")
        return int(text) if text.isdecimal() else 0

    return value("inactive_file") + value("active_file") // 2


def _group(directory: Path, version: int) -> _Group | None:
    if version == 2:
        limits = [_number(directory / "memory.max"), _number(directory / "memory.high")]
        used, prefix = _number(directory / "memory.current"), ""
    else:
        limits = [_number(directory / "memory.limit_in_bytes")]
        used, prefix = _number(directory / "memory.usage_in_bytes"), "total_"
    bounded = [limit for limit in limits if limit is not None and limit < _UNLIMITED_BYTES]
    if not bounded or used is None:
        return None
    return _Group(min(bounded), max(used - _reclaimable(directory, prefix), 0), str(directory))


def _groups(root: Path) -> list[_Group]:
    groups = []
    own = _own_paths(root)
    for version, mounted, point in _mounts(root):
        path = own.get(version)
        if path is None:
            continue
        top = root / point.lstrip("/")
        # In a container the mount may show only a part of the hierarchy, or the path may lie outside of what is visible.
        inside = path == mounted or mounted == "/" or path.startswith(mounted.rstrip("/") + "/")
        below = path[len(mounted.rstrip("/")) :].strip("/") if inside else ""
        parts = [part for part in below.split("/") if part]
        if ".." in parts:
            parts = []
        for depth in range(len(parts), -1, -1):  # a limit of any ancestor binds too
            group = _group(top.joinpath(*parts[:depth]), version)
            if group is not None:
                groups.append(group)
    return groups


def available_bytes(root: str | Path = "/") -> Budget:
    """Reads the numbers of now. A memfd is charged to the cgroup of the process that first touches its pages: the one that reserves."""
    root = Path(root)
    machine = _mem_available(root)
    tightest = min(_groups(root), key=lambda group: group.limit - group.used, default=None)
    if tightest is None:
        return Budget(machine, None, None, "MemAvailable")
    source = tightest.path if tightest.limit - tightest.used < machine else "MemAvailable"
    return Budget(machine, tightest.limit, tightest.used, source)


def _amount(nbytes: int) -> str:
    return f"{nbytes} bytes ({nbytes / 2**30:.2f} GiB)"


def check(nbytes: int, what: str, root: str | Path = "/") -> Budget:
    """Refuses `nbytes` more for `what` if they do not fit beside `HEADROOM_BYTES`; returns the budget otherwise.

    Raises:
      MemoryBudgetError: with the request, all limits, and what can be done.
    """
    budget = available_bytes(root)
    if nbytes + HEADROOM_BYTES <= budget.available:
        return budget
    cgroup = "none has a limit"
    if budget.cgroup_limit is not None and budget.cgroup_used is not None:
        cgroup = f"limit {_amount(budget.cgroup_limit)}, used {_amount(budget.cgroup_used)}"
    advice = "raise the container's memory limit" if budget.source != "MemAvailable" else "free memory on this machine"
    raise MemoryBudgetError(
        f"cannot reserve {_amount(nbytes)} for {what}: {_amount(budget.available)} are available, of which {_amount(HEADROOM_BYTES)} "
        f"stay free; MemAvailable {_amount(budget.mem_available)}; cgroups: {cgroup}; the bound comes from {budget.source}. "
        f"Take a smaller model or fewer ranks per node (`leto run --plan` shows what is needed), or {advice}."
    )

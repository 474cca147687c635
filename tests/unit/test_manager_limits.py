"""What may be reserved, read from trees of files as they look in real cgroup hierarchies; and reserving it."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
from pathlib import Path

import pytest

from leto_jax.errors import MemoryBudgetError, RecordError, UsageError
from leto_jax.manager import limits, memory

GIB = 1 << 30
MIB = 1 << 20
UNLIMITED_V1 = 9223372036854771712


def tree(root: Path, files: dict[str, str], mem_available: int = 64 * GIB) -> Path:
    files = {"proc/meminfo": f"MemTotal:  99 kB\nMemFree: 1 kB\nMemAvailable: {mem_available // 1024} kB\nSwapTotal: 0 kB\n", **files}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2_MOUNT = "30 24 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def v2(path: str, limit: str, used: int, inactive: int = 0, active: int = 0, high: str = "max") -> dict[str, str]:
    base = f"sys/fs/cgroup{path}"
    return {
        f"{base}/memory.max": f"{limit}\n",
        f"{base}/memory.high": f"{high}\n",
        f"{base}/memory.current": f"{used}\n",
        f"{base}/memory.stat": f"anon 1\ninactive_file {inactive}\nactive_file {active}\n",
    }


def v1(path: str, limit: int, used: int, inactive: int = 0) -> dict[str, str]:
    base = f"sys/fs/cgroup/memory{path}"
    return {
        f"{base}/memory.limit_in_bytes": f"{limit}\n",
        f"{base}/memory.usage_in_bytes": f"{used}\n",
        f"{base}/memory.stat": f"inactive_file 5\ntotal_inactive_file {inactive}\n",
    }


def test_no_cgroup_at_all(tmp_path):
    budget = limits.available_bytes(tree(tmp_path, {}))
    assert budget == (64 * GIB, None, None, "MemAvailable")
    assert budget.available == 64 * GIB


def test_v2_the_tightest_ancestor_binds(tmp_path):
    files = {
        "proc/self/cgroup": "0::/user.slice/job\n",
        "proc/self/mountinfo": "1 1 0:1 / / rw - ext4 /dev/root rw\n" + V2_MOUNT.format(root="/"),
        **v2("/user.slice/job", "max", 1 * GIB),
        **v2("/user.slice", str(10 * GIB), 8 * GIB, inactive=1 * GIB, active=1 * GIB),
    }
    budget = limits.available_bytes(tree(tmp_path, files))
    assert budget.cgroup_limit == 10 * GIB
    assert budget.cgroup_used == 8 * GIB - GIB - GIB // 2  # page cache that the kernel gives up first
    assert budget.source == str(tmp_path / "sys/fs/cgroup/user.slice")
    assert budget.available == 10 * GIB - 8 * GIB + GIB + GIB // 2


def test_v2_inside_a_container_the_root_of_the_mount_has_the_limit(tmp_path):
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2_MOUNT.format(root="/"),
        **v2("", str(4 * GIB), 1 * GIB),
    }
    assert limits.available_bytes(tree(tmp_path, files)).available == 3 * GIB


@pytest.mark.parametrize("own", ["/../../other", "/docker/abc", "/somewhere/else"])
def test_v2_a_path_that_is_not_visible_falls_back_to_the_mount(tmp_path, own):
    files = {
        "proc/self/cgroup": f"0::{own}\n",
        "proc/self/mountinfo": V2_MOUNT.format(root="/docker/abc"),
        **v2("", str(4 * GIB), 1 * GIB),
    }
    assert limits.available_bytes(tree(tmp_path, files)).available == 3 * GIB


def test_v2_memory_high_counts(tmp_path):
    files = {
        "proc/self/cgroup": "0::/a\n",
        "proc/self/mountinfo": V2_MOUNT.format(root="/"),
        **v2("/a", "max", GIB, high=str(2 * GIB)),
    }
    assert limits.available_bytes(tree(tmp_path, files)).cgroup_limit == 2 * GIB


def test_v1_walks_up_and_knows_its_word_for_unlimited(tmp_path):
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n4:memory:/slice/job\n0::/\n",
        "proc/self/mountinfo": V1_MOUNT.format(root="/"),
        **v1("/slice/job", UNLIMITED_V1, GIB),
        **v1("/slice", 6 * GIB, 5 * GIB, inactive=2 * GIB),
        **v1("", UNLIMITED_V1, 30 * GIB),
    }
    budget = limits.available_bytes(tree(tmp_path, files))
    assert (budget.cgroup_limit, budget.cgroup_used) == (6 * GIB, 3 * GIB)
    assert budget.source.endswith("sys/fs/cgroup/memory/slice")


def test_v1_memory_beside_other_controllers_and_a_mount_of_a_part(tmp_path):
    files = {
        "proc/self/cgroup": "4:cpu,memory:/docker/abc/inner\n",
        "proc/self/mountinfo": "35 31 0:32 /docker/abc /sys/fs/cgroup/mem\\040ory rw - cgroup cgroup rw,cpu,memory\n",
        **{name.replace("memory/", "mem ory/", 1): text for name, text in v1("/inner", 2 * GIB, GIB).items()},
    }
    assert limits.available_bytes(tree(tmp_path, files)).cgroup_limit == 2 * GIB


def test_the_machine_may_be_tighter_than_the_cgroup(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT.format(root="/"), **v2("", str(100 * GIB), 0)}
    budget = limits.available_bytes(tree(tmp_path, files, mem_available=GIB))
    assert budget.source == "MemAvailable"
    assert budget.available == GIB


def test_use_above_the_limit_is_nothing_left(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT.format(root="/"), **v2("", str(GIB), 2 * GIB)}
    assert limits.available_bytes(tree(tmp_path, files)).available == 0


def test_damaged_files_are_not_limits(tmp_path):
    files = {
        "proc/self/cgroup": "garbage\n\n0::/\n",
        "proc/self/mountinfo": "short\n" + V2_MOUNT.format(root="/") + "1 2 3 4 5 6 -\n",
        **v2("", "what", GIB),
    }
    assert limits.available_bytes(tree(tmp_path, files)).cgroup_limit is None
    (tmp_path / "proc/meminfo").write_text("")
    with pytest.raises(MemoryBudgetError, match="has no MemAvailable"):
        limits.available_bytes(tmp_path)


def test_a_refusal_names_all_numbers_and_what_to_do(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT.format(root="/"), **v2("", str(4 * GIB), 1 * GIB)}
    root = tree(tmp_path, files)
    with pytest.raises(MemoryBudgetError) as caught:
        limits.check(3 * GIB, "arena 'device.0'", root)
    text = str(caught.value)
    for part in (
        "cannot reserve 3221225472 bytes (3.00 GiB) for arena 'device.0'",
        "3221225472 bytes (3.00 GiB) are available",
        "67108864 bytes (0.06 GiB) stay free",
        "MemAvailable 68719476736 bytes",
        "limit 4294967296 bytes (4.00 GiB), used 1073741824 bytes (1.00 GiB)",
        str(tmp_path / "sys/fs/cgroup"),
        "leto run --plan",
        "raise the container's memory limit",
    ):
        assert part in text
    assert isinstance(caught.value, MemoryError)
    assert limits.check(2 * GIB, "x", root).available == 3 * GIB


def test_the_limits_of_this_machine_can_be_read():
    budget = limits.available_bytes()
    assert 0 < budget.available <= budget.mem_available


def test_reserve_gives_real_pages_and_a_sealed_size():
    nbytes = memory.PIECE_BYTES + 12345
    fd = memory.reserve("unit/arena", nbytes)
    try:
        found = os.fstat(fd)
        assert found.st_size == nbytes
        assert found.st_blocks * 512 >= nbytes
        assert not os.get_inheritable(fd)
        assert "leto:unit/arena" in os.readlink(f"/proc/self/fd/{fd}")
        assert memory.has_sealed_size(fd)
        assert not memory.is_sealed(fd)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, nbytes + 1)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError):  # nobody can freeze an arena under its writer either
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        with mmap.mmap(fd, nbytes) as mapped:
            assert mapped[:4096] == bytes(4096)
            mapped[nbytes - 1] = 7
        assert os.pread(fd, 1, nbytes - 1) == b"\x07"
    finally:
        os.close(fd)


def test_reserve_on_a_kernel_before_6_3(monkeypatch):
    monkeypatch.setattr(memory, "_MFD_NOEXEC_SEAL", 0x4000)
    fd = memory.reserve("old", 4096)
    assert memory.has_sealed_size(fd)
    os.close(fd)


def test_reserve_refuses_before_it_takes_and_again_on_the_way(tmp_path):
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2_MOUNT.format(root="/"), **v2("", str(GIB), 0)}
    root = tree(tmp_path, files)
    with pytest.raises(MemoryBudgetError, match="cannot reserve 1073741824 bytes"):
        memory.reserve("big", GIB, root)
    before = len(os.listdir("/proc/self/fd"))
    steps = memory.reserve_steps("big", 3 * memory.PIECE_BYTES, root)
    next(steps)
    (root / "sys/fs/cgroup/memory.current").write_text(str(GIB - memory.PIECE_BYTES))
    with pytest.raises(MemoryBudgetError, match="for the rest of arena 'big'"):
        next(steps)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(UsageError, match="at least 1 byte, found 0"):
        memory.reserve("none", 0)


def test_a_refusal_of_the_kernel_is_a_budget_error():
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(MemoryBudgetError, match=r"gave 0 of 2097152 bytes for arena 'x', then refused.*ulimit -f"):
            memory.reserve("x", 2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_blobs_are_frozen():
    data = os.urandom(100_000)
    fd, sha256 = memory.make_blob("unit/blob", data)
    try:
        assert memory.is_sealed(fd)
        assert memory.digest(fd, len(data)) == sha256
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        memory.seal_blob(fd)  # again is harmless
        with pytest.raises(RecordError, match=f"expected {len(data) + 1} bytes .* ends after {len(data)}"):
            memory.digest(fd, len(data) + 1)
    finally:
        os.close(fd)


def test_sealing_what_is_mapped_or_no_memory_is_refused(tmp_path):
    fd = memory.create("mapped")
    os.ftruncate(fd, 4096)
    with mmap.mmap(fd, 4096), pytest.raises(UsageError, match="it is mapped writable somewhere: close the mapping first"):
        memory.seal_blob(fd)
    memory.seal_blob(fd)
    os.close(fd)
    with open(tmp_path / "file", "w+b") as file:
        with pytest.raises(UsageError, match="cannot seal descriptor"):
            memory.seal_blob(file.fileno())
        assert not memory.is_sealed(file.fileno())

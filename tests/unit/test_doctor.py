"""The doctor: all is well on this machine, and every check says so when something is not."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import resource
import socket
import stat
import sys
import tempfile
from pathlib import Path

import pytest
from fake_nvml import FakeNvml, Gpu

from leto_jax.agent import doctor, operability
from leto_jax.agent.doctor import Found, Probe
from leto_jax.arena import cuda
from leto_jax.errors import JobError, MemoryBudgetError, UsageError
from leto_jax.manager import limits

GIB = 1 << 30


@pytest.fixture(scope="module")
def rows():
    return {row["check"]: row for row in doctor.examine()}


@pytest.fixture
def short():
    """A directory whose name leaves room for a job's socket."""
    with tempfile.TemporaryDirectory(prefix="l", dir="/tmp") as directory:
        yield Path(directory)


def test_this_machine_is_well(rows):
    assert [row for row in rows.values() if not row["ok"]] == []
    assert list(rows) == [probe.check for probe in doctor.PROBES]
    for row in rows.values():
        assert set(row) == {"check", "ok", "found", "advice"}
        assert isinstance(row["ok"], bool)
        assert isinstance(row["found"], str)
        assert row["found"]
        assert isinstance(row["advice"], str)
    assert f"jax {importlib.metadata.version('jax')}" in rows["packages"]["found"]
    assert Path("/proc/1/comm").read_text().strip() in rows["PID 1"]["found"]


def test_nothing_is_left_behind(short):
    descriptors = len(os.listdir("/proc/self/fd"))
    root = short / "leto"
    doctor.runtime_directory({"XDG_RUNTIME_DIR": str(short)})
    doctor.state_directory({"XDG_STATE_HOME": str(short)})
    assert list(short.iterdir()) == []
    root.mkdir(0o700)
    doctor.runtime_directory({"XDG_RUNTIME_DIR": str(short)})
    assert list(root.iterdir()) == []
    doctor.memfd()
    doctor.shared_mapping()
    doctor.descriptor_passing()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def fails(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


def test_a_probe_that_raises_becomes_a_row():
    refused = Probe("a", lambda: fails(), "do this")
    ours = Probe("b", lambda: Found(str(next(iter(())))), "")
    told = Probe("c", lambda: (_ for _ in ()).throw(UsageError("expected x, found y")), "set x")
    assert doctor.examine([refused, ours, told]) == [
        {"check": "a", "ok": False, "found": "OSError: [Errno 38] Function not implemented", "advice": "do this"},
        {"check": "b", "ok": False, "found": "StopIteration: ", "advice": ""},
        {"check": "c", "ok": False, "found": "expected x, found y", "advice": "set x"},
    ]


def row(check: str, run) -> tuple[bool, str, str]:
    """(ok, found, advice) of a real check with a fake inside."""
    probe = next(probe for probe in doctor.PROBES if probe.check == check)
    (found,) = doctor.examine([probe._replace(run=run)])
    return found["ok"], found["found"], found["advice"]


def test_memfd():
    assert row("memfd", lambda: doctor.memfd(create=fails)) == (False, "OSError: [Errno 38] Function not implemented", doctor._KERNEL)
    assert row("memfd", lambda: doctor.memfd(allocate=fails))[0] is False
    ok, found, advice = row("memfd", lambda: doctor.memfd(truncate=lambda fd, length: None))
    assert (ok, found) == (False, "a memfd with a sealed size can be truncated")
    assert "file seals" in advice


def test_shared_mapping():
    ok, found, _ = row("shared mapping", lambda: doctor.shared_mapping(child=lambda *_: ""))
    assert not ok
    assert found == "expected the bytes that another process stored, found b'from the parent'"
    ok, found, _ = row(
        "shared mapping", lambda: doctor.shared_mapping(child=lambda code, fd: doctor._child(f"raise SystemExit('no map {fd}')"))
    )
    assert not ok
    assert found.startswith("expected a child process to succeed, found no map ")


def test_descriptor_passing():
    def without_descriptor(_code, fd):
        with socket.socket(fileno=os.dup(fd)) as sock:
            sock.send(b"x")

    def with_other_content(_code, fd):
        other = os.memfd_create("test")
        with socket.socket(fileno=os.dup(fd)) as sock:
            socket.send_fds(sock, [b"x"], [other])
        os.close(other)

    for child, what in [(lambda *_: "", "no descriptor"), (without_descriptor, "no descriptor"), (with_other_content, "b''")]:
        ok, found, advice = row("descriptor passing", lambda child=child: doctor.descriptor_passing(child))
        assert (ok, found) == (False, f"expected memory from a process that is dead, found {what}")
        assert "SCM_RIGHTS" in advice


def budget(mem: int, limit: int | None = None, used: int | None = None):
    return lambda: limits.Budget(mem, limit, used, "MemAvailable" if limit is None else "/sys/fs/cgroup")


def test_memory():
    assert row("memory", lambda: doctor.memory_available(budget(8 * GIB)))[:2] == (
        True,
        "8.0 GiB may be reserved (bound by MemAvailable); MemAvailable 8.0 GiB",
    )
    ok, found, advice = row("memory", lambda: doctor.memory_available(budget(8 * GIB, GIB, GIB - 1)))
    assert not ok
    assert found == "0.0 GiB may be reserved (bound by /sys/fs/cgroup); MemAvailable 8.0 GiB"
    assert "at least 256 MiB" in advice

    def no_proc():
        raise MemoryBudgetError("/proc/meminfo has no MemAvailable: is /proc mounted?")

    assert row("memory", lambda: doctor.memory_available(no_proc)) == (
        False,
        "/proc/meminfo has no MemAvailable: is /proc mounted?",
        "mount /proc",
    )


def test_cgroup():
    assert row("cgroup", lambda: doctor.cgroup_limit(budget(GIB))) == (True, "no memory limit", "")
    assert row("cgroup", lambda: doctor.cgroup_limit(budget(GIB, 4 * GIB, 2 * GIB))) == (True, "limit 4.0 GiB, used 2.0 GiB", "")
    assert row("cgroup", lambda: doctor.cgroup_limit(lambda: fails()))[0] is False


def test_dev_shm(tmp_path):
    assert row("/dev/shm", lambda: doctor.dev_shm(str(tmp_path / "missing"))) == (True, "none; not needed, retained memory is memfd", "")
    assert "GiB; not needed" in row("/dev/shm", lambda: doctor.dev_shm(str(tmp_path)))[1]


def test_pidfd():
    assert row("pidfd", lambda: doctor.pidfd(fails)) == (False, "OSError: [Errno 38] Function not implemented", doctor._KERNEL)


def test_a_pidfd_that_never_becomes_readable(monkeypatch):
    monkeypatch.setattr(doctor, "CHILD_SECS", 0.01)
    monkeypatch.setattr(doctor.signal, "pidfd_send_signal", lambda fd, number: None)
    assert row("pidfd", doctor.pidfd)[:2] == (False, "the pidfd of a killed child does not become readable")


def test_subreaper():
    def ignored(option, argument, *_):
        if option == 37:
            argument._obj.value = 0
        return 0

    assert row("subreaper", lambda: doctor.subreaper(ignored))[:2] == (
        False,
        "expected to become a subreaper, found 0 after PR_SET_CHILD_SUBREAPER",
    )
    ok, found, advice = row("subreaper", lambda: doctor.subreaper(lambda *_: -1))
    assert (ok, advice) == (False, doctor._KERNEL)
    assert found.startswith("OSError: ")


def test_subreaper_is_put_back():
    import ctypes

    def get():
        value = ctypes.c_int(-1)
        ctypes.CDLL(None).prctl(37, ctypes.byref(value), 0, 0, 0)
        return value.value

    before = get()
    doctor.subreaper()
    assert get() == before


def test_pid_1(tmp_path):
    (tmp_path / "proc/1").mkdir(parents=True)
    (tmp_path / "proc/1/comm").write_text("tail\n")
    check = {"child": lambda code: "4711", "wait_secs": 0.02, "root": str(tmp_path)}
    ok, found, advice = row("PID 1", lambda: doctor.pid_1(state=lambda pid: "Z", **check))
    assert (ok, found) == (True, "PID 1 is tail; a dead orphan is not reaped within 0.02 s")
    assert "--init" in advice
    assert row("PID 1", lambda: doctor.pid_1(state=lambda pid: "", **check))[1:] == (
        "PID 1 is tail; orphans are reaped by it or a process before it",
        "",
    )
    assert row("PID 1", lambda: doctor.pid_1(child=lambda code: "", root=str(tmp_path)))[0] is False
    assert "PID 1 is unknown" in doctor.pid_1(child=lambda code: "4711", state=lambda pid: "", root=str(tmp_path / "x")).text


def test_proc(tmp_path):
    ok, found, advice = row("/proc", lambda: doctor.proc(str(tmp_path)))
    assert (ok, advice) == (False, "mount /proc in full")
    assert found.startswith("FileNotFoundError: ")


def test_proc_that_shows_too_little(tmp_path, monkeypatch):
    real, shown = Path.read_bytes, {"environ": True, "children": True}
    monkeypatch.setattr(Path, "read_bytes", lambda self: real(self) if shown["environ"] else b"")
    monkeypatch.setattr(doctor, "_read", lambda path: "" if shown["children"] else None)
    assert row("/proc", doctor.proc)[0] is True
    shown["children"] = False
    ok, _, advice = row("/proc", doctor.proc)
    assert ok
    assert "CONFIG_PROC_CHILDREN" in advice
    shown["environ"] = False
    assert row("/proc", doctor.proc)[:2] == (False, "/proc shows a child without its state or environment")


def test_priority():
    assert row("priority", lambda: doctor.priority(lambda code: "yes"))[2] == ""
    ok, found, advice = row("priority", lambda: doctor.priority(lambda code: "no"))
    assert (ok, found) == (True, "low priority is for ever")
    assert "ulimit -e 20" in advice
    assert row("priority", lambda: doctor.priority(fails))[0] is False


def test_open_files():
    assert row("open files", lambda: doctor.files(lambda: (64, 128))) == (
        False,
        "RLIMIT_NOFILE 64 (hard limit 128)",
        "raise it to at least 256 (`ulimit -n 1024`)",
    )
    infinite = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert row("open files", lambda: doctor.files(lambda: infinite))[:2] == (True, "RLIMIT_NOFILE unlimited (hard limit unlimited)")
    assert row("open files", lambda: doctor.files(fails))[0] is False


def test_cpus(tmp_path):
    assert row("CPUs", lambda: doctor.cpus(lambda: 8, str(tmp_path))) == (True, "8 CPUs", "")
    assert "two CPUs or more" in row("CPUs", lambda: doctor.cpus(lambda: 1, str(tmp_path)))[2]
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("150000 100000\n")
    ok, found, advice = row("CPUs", lambda: doctor.cpus(lambda: 8, str(tmp_path)))
    assert (ok, found) == (True, "8 CPUs, quota 1.5")
    assert advice
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
    assert row("CPUs", lambda: doctor.cpus(lambda: 8, str(tmp_path)))[1:] == ("8 CPUs", "")
    assert row("CPUs", lambda: doctor.cpus(fails, str(tmp_path)))[0] is False


def test_runtime_directory(short):
    environ = {"XDG_RUNTIME_DIR": str(short)}
    root = short / "leto"
    assert row("runtime directory", lambda: doctor.runtime_directory(environ))[:2] == (
        True,
        f"{root} can be made; a socket in it connects and names its peer",
    )
    root.mkdir(0o755)
    ok, found, _ = row("runtime directory", lambda: doctor.runtime_directory(environ))
    assert not ok
    assert found.endswith("found mode 0755: check what is in it, then `chmod 700 " + str(root) + "`")
    assert stat.S_IMODE(root.stat().st_mode) == 0o755
    root.chmod(0o700)
    assert "is private (0700)" in row("runtime directory", lambda: doctor.runtime_directory(environ))[1]
    deep = short / ("d" * 90)
    deep.mkdir()
    ok, found, advice = row("runtime directory", lambda: doctor.runtime_directory({"XDG_RUNTIME_DIR": str(deep)}))
    assert not ok
    assert "the limit of AF_UNIX is 107" in found
    assert advice.startswith("set XDG_RUNTIME_DIR to a short")


def test_a_peer_of_another_user(short, monkeypatch):
    monkeypatch.setattr(doctor.protocol, "peer_of", lambda sock: doctor.protocol.Peer(1, 4711, 4711))
    ok, found, _ = row("runtime directory", lambda: doctor.runtime_directory({"XDG_RUNTIME_DIR": str(short)}))
    assert (ok, found) == (False, f"expected SO_PEERCRED to say uid {os.geteuid()}, found 4711")


def test_state_directory(tmp_path, monkeypatch):
    environ = {"XDG_STATE_HOME": str(tmp_path / "not" / "yet")}
    ok, found, _ = row("state directory", lambda: doctor.state_directory(environ))
    assert ok
    assert found.startswith(str(tmp_path / "not/yet/leto"))
    assert not (tmp_path / "not").exists()
    (tmp_path / "file").write_text("")
    ok, found, advice = row("state directory", lambda: doctor.state_directory({"XDG_STATE_HOME": str(tmp_path / "file")}))
    assert not ok
    assert found.startswith("NotADirectoryError: ")
    assert advice.startswith("set XDG_STATE_HOME")
    usage = doctor.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type(usage)(usage.total, usage.total, 1 << 20))
    assert row("state directory", lambda: doctor.state_directory(environ))[1:] == (
        f"{tmp_path / 'not/yet/leto'}: 1 MiB free",
        "free 64 MiB, or set XDG_STATE_HOME to another disk",
    )


def test_python():
    ok, found, advice = row("Python", lambda: doctor.python("3.11.9"))
    assert (ok, advice) == (False, "use Python >=3.12")
    assert "3.11.9" in found
    assert row("Python", lambda: doctor.python("3.12.0rc1"))[0] is True
    assert row("Python", lambda: doctor.python(wanted=fails))[2] == "install leto_jax as a package (`uv sync`)"


def versions(**known: str):
    def version(name: str) -> str:
        if name not in known:
            raise importlib.metadata.PackageNotFoundError(name)
        return known[name]

    return version


def test_packages():
    needs = ["jax>=0.11.2", "numpy>=2.0", "rich", "nvidia-ml-py>=13; extra == 'cuda'"]
    check = lambda **known: row("packages", lambda: doctor.packages(lambda: needs, versions(**known)))
    assert check(jax="0.11.2", numpy="2", rich="1", grain="0.2.1") == (True, "jax 0.11.2, numpy 2, rich 1, grain 0.2.1", "")
    assert check(jax="0.12.0.dev20260101", numpy="10.1", rich="0")[1].endswith("no grain (needed for Grain datasets only)")
    assert check(jax="0.11.1", numpy="1.26.4", rich="1", grain="1") == (
        False,
        "jax 0.11.1, numpy 1.26.4, rich 1, grain 1",
        "install jax>=0.11.2, numpy>=2.0 (`uv sync`)",
    )
    assert check(jax="0.12.0", numpy="2.1")[:2] == (False, "jax 0.12.0, numpy 2.1, rich missing, no grain (needed for Grain datasets only)")

    def not_installed():
        raise importlib.metadata.PackageNotFoundError("leto_jax")

    ok, found, advice = row("packages", lambda: doctor.packages(not_installed))
    assert (ok, advice) == (False, "install leto_jax as a package (`uv sync`)")
    assert found.startswith("PackageNotFoundError: ")


def test_the_package_demands_the_jax_that_the_doctor_looks_for():
    assert "jax>=0.11.2" in (importlib.metadata.requires("leto_jax") or [])


@pytest.fixture
def driver(tmp_path):
    """A root directory of a machine with an NVIDIA driver."""
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    )
    return str(tmp_path)


def saying(found: object) -> list[str]:
    return [sys.executable, "-c", f"print({json.dumps(json.dumps(found))})"]


def test_no_gpu(tmp_path):
    for probe in (doctor.gpu_memory, doctor.gpu_operability, doctor.gpu_kernels):
        assert row("GPU memory", lambda probe=probe: probe(str(tmp_path))) == (True, "no NVIDIA driver: training on the CPU", "")


def test_gpu_memory(driver):
    good, bad = ({"gpu": n, "ok": n == 0, "reason": f"reason {n}"} for n in (0, 1))
    look = lambda **found: row("GPU memory", lambda: doctor.gpu_memory(driver, saying({"driver": 13000, "reason": "", **found})))
    assert look(gpus=[good]) == (True, "NVIDIA driver 580.95.05; GPU 0: reason 0", "")
    assert look(gpus=[good, bad]) == (False, "NVIDIA driver 580.95.05; GPU 0: reason 0; GPU 1: reason 1", "train with --device cpu")
    assert look(gpus=[], reason="no cuda-bindings")[:2] == (False, "NVIDIA driver 580.95.05; no cuda-bindings")


def test_gpu_memory_as_it_is_asked_here(tmp_path):
    """The real question, on a machine that only looks as if it had a GPU."""
    if cuda.examine()["gpus"]:
        pytest.skip("there is a GPU")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").write_text("")
    ok, found, advice = row("GPU memory", lambda: doctor.gpu_memory(str(tmp_path)))
    assert not ok
    assert found.startswith("NVIDIA driver present; ")
    assert "cuda-bindings" in found or "expected an NVIDIA driver, found none" in found
    assert advice == "uv sync --extra cuda; or train with --device cpu"


def test_gpu_operability(driver, tmp_path):
    fake = FakeNvml(Gpu(), Gpu("GPU-2"))
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    look = lambda: doctor.gpu_operability(driver, saying(operability.examine(environ, fake.library)))
    ok, found, advice = row("GPU operability", look)
    healthy = "uncorrected ECC errors 0, row remapping none, retired pages not supported, MPS none, NVLinks up 18"
    assert (ok, advice) == (True, "")
    assert found == (
        f"GPU 0 (NVIDIA H200): ok, recovery action none, {healthy}; GPU 1 (NVIDIA H200): ok, recovery action none, {healthy}; "
        "peer-to-peer: GPUs 0 and 1: read, GPUs 0 and 1: write, GPUs 0 and 1: nvlink"
    )
    fake.gpus[1].recovery_action = 1
    ok, found, advice = row("GPU operability", look)
    assert not ok
    assert "GPU 1 (NVIDIA H200): REFUSED, the driver asks for a recovery action first: gpu reset" in found
    assert "CUDA_VISIBLE_DEVICES" in advice
    (shown,) = doctor.examine([Probe("x", look, "")])
    assert [(gpu["ok"], gpu["recovery_action"], gpu["ecc_uncorrected"], gpu["uuid"]) for gpu in shown["facts"]["gpus"]] == [
        (True, 0, 0, "GPU-00000000-aaaa"),
        (False, 1, 0, "GPU-2"),
    ]
    (tmp_path / "control").write_text("")
    assert row("GPU operability", look)[1].startswith("expected no MPS")


def test_gpu_operability_as_it_is_asked_here(tmp_path):
    """The real question, on a machine that only looks as if it had a GPU."""
    if cuda.examine()["gpus"]:
        pytest.skip("there is a GPU")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").write_text("")
    ok, found, _ = row("GPU operability", lambda: doctor.gpu_operability(str(tmp_path)))
    assert (ok, found) in [(False, "NVML, nvmlInit: NVML Shared Library Not Found"), (False, "NVML, nvmlInit: Driver Not Loaded")] or (
        "nvidia-ml-py" in found
    )


def test_gpu_kernels(driver):
    rows = [{"operation": "encode", "implementation": "kernel", "ok": True, "reason": "kernel: H200, Mosaic GPU"}]
    assert row("GPU kernels", lambda: doctor.gpu_kernels(driver, saying(rows))) == (True, "encode: kernel: H200, Mosaic GPU", "")
    rows.append({"operation": "decode", "implementation": "kernel", "ok": False, "reason": "other bits"})
    assert row("GPU kernels", lambda: doctor.gpu_kernels(driver, saying(rows)))[::2] == (False, "please report this")
    silent = [sys.executable, "-c", "raise SystemExit('no backend')"]
    ok, found, _ = row("GPU kernels", lambda: doctor.gpu_kernels(driver, silent))
    assert (ok, found.endswith("ended with exit code 1: no backend")) == (False, True)


def test_a_child_that_fails_or_hangs(monkeypatch):
    with pytest.raises(JobError, match=r"expected a child process to succeed, found ValueError: no"):
        doctor._child("raise ValueError('no')")
    with pytest.raises(JobError, match=r"expected a child process to succeed, found exit code 7"):
        doctor._child("raise SystemExit(7)")
    monkeypatch.setattr(doctor, "CHILD_SECS", 0.1)
    assert doctor.examine([Probe("x", lambda: Found(doctor._child("import time; time.sleep(9)")), "wait")])[0]["found"].startswith(
        "TimeoutExpired: "
    )

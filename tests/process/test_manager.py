"""The real state manager: processes that really die, memory that really stays."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest

from leto_jax.arena import cuda
from leto_jax.errors import DeadlineError, DeviceError, JobError, LetoError, MemoryBudgetError, ProtocolError, RecordError, UsageError
from leto_jax.manager import client, fence, limits, memory, protocol, runtime
from leto_jax.manager.client import Descriptor, ManagerClient, spawn_manager

JOB = "job"
MIB = 1 << 20

# A process under test: runs lines of Python from stdin, answers each with one line.
DRIVER = """if True:
    import os, sys, mmap, time, subprocess
    from leto_jax.manager.client import ManagerClient
    path = sys.argv[1]
    for line in sys.stdin:
        try:
            if "=" in line.split("(")[0]:
                exec(line)
                print("ok", flush=True)
            else:
                print(repr(eval(line)), flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}".replace("\\n", " "), flush=True)
"""


class Driver:
    """A process of its own that does what it is told, until it is killed."""

    def __init__(self, path: str, role: str | None = None, rank: int = 0, incarnation: int = 1):
        environ = {**os.environ, "PYTHONPATH": os.getcwd()}
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(path)],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.process.pid
        if role is not None:
            assert self.do(f"client = ManagerClient(path, {role!r}, {rank}, {incarnation})") == "ok"

    def do(self, line: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], 30)[0], f"no answer to {line}"
        return self.process.stdout.readline().rstrip("\n")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def directory(tmp_path):
    return runtime.ensure_private_dir(tmp_path / "d")


class Starter:
    def __init__(self, directory):
        self.directory = directory
        self.managers = []
        self.drivers = []
        self.agents = []

    def manager(self, orphan_timeout_secs=60.0, adopt=()):
        self.managers.append(spawn_manager(JOB, self.directory, orphan_timeout_secs, adopt))
        return self.managers[-1]

    def driver(self, role=None, **kwargs):
        self.drivers.append(Driver(self.directory / runtime.SOCKET_NAME, role, **kwargs))
        return self.drivers[-1]

    def client(self, role="trainer", **kwargs):
        return ManagerClient(self.directory / runtime.SOCKET_NAME, role, **kwargs)

    def log(self):
        return (self.directory / runtime.LOG_NAME).read_text()


@pytest.fixture
def start(directory):
    starter = Starter(directory)
    yield starter
    for driver in starter.drivers:
        driver.close()
    for process in [*starter.agents, *(manager.process for manager in starter.managers)]:
        process.kill()
        process.wait()


def wait_until(condition, secs=10.0):
    until = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.005)


def memfds_of(name: str) -> list[int]:
    """Processes that still have memory with this name open or mapped."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
            if any(f"memfd:leto:{name}" in link for link in links) or f"memfd:leto:{name}" in Path(f"/proc/{pid}/maps").read_text():
                found.append(int(pid))
    return found


def fill(descriptor: Descriptor, byte: int) -> None:
    with mmap.mmap(descriptor.fd, descriptor.nbytes) as mapped:
        mapped[:] = bytes([byte]) * descriptor.nbytes


# Memory.


def test_memory_of_one_process_is_seen_by_another_and_outlives_it(start):
    start.manager()
    writer = start.driver("trainer")
    assert writer.do("arena = client.reserve('device.0', 1 << 20)") == "ok"
    assert writer.do("mapped = mmap.mmap(arena.fd, arena.nbytes)") == "ok"
    assert writer.do("mapped[5:10] = b'hello'") == "ok"
    with start.client("shadow") as reader, reader.open("device.0") as arena:
        assert (arena.name, arena.kind, arena.nbytes, arena.holder) == ("device.0", "arena", MIB, None)
        assert not os.get_inheritable(arena.fd)
        with mmap.mmap(arena.fd, arena.nbytes) as mapped:
            assert mapped[5:10] == b"hello"
            writer.kill()
            assert mapped[5:10] == b"hello"
    with start.client("shadow") as reader, reader.open("device.0") as arena:
        assert os.pread(arena.fd, 5, 5) == b"hello"


def test_reserve_again_gives_the_same_memory_and_another_size_is_refused(start):
    start.manager()
    with start.client() as trainer:
        with trainer.reserve("a", 4096) as first, trainer.reserve("a", 4096) as again:
            assert os.path.samestat(os.fstat(first.fd), os.fstat(again.fd))
        with pytest.raises(UsageError, match=r"arena 'a' exists with 4096 bytes, 8192 are asked for: the plan of this process differs"):
            trainer.reserve("a", 8192)
        with pytest.raises(JobError, match="nothing is kept under the name 'b'; there is: a"):
            trainer.open("b")
        with pytest.raises(UsageError, match="'a' is kept as arena, expected blob"):
            trainer.get_blob("a")
        for name in ("", "x" * 129, "a b", "é"):
            with pytest.raises(UsageError, match="a name of retained memory is 1 to 128 of the characters"):
                trainer.reserve(name, 1)
        for nbytes in (0, -1, 1.5, "7", True, None, 1 << 63):
            with pytest.raises(UsageError, match=r"request 'reserve': expected an integer from 1 to .* as 'bytes', found"):
                trainer.reserve("c", nbytes)
        with pytest.raises(UsageError, match=r"expected a kind out of arena, blob, gpu0, gpu1, \.\.\., found 'device'"):
            trainer.reserve("c", 1, kind="device")
        with pytest.raises(UsageError, match="'c': only memory can be reserved, a blob is put"):
            trainer.reserve("c", 1, kind="blob")
        if not cuda.examine()["gpus"]:
            with pytest.raises(DeviceError, match=r"cuda-bindings, which is not installed|expected an NVIDIA driver, found none"):
                trainer.reserve("c", 2 << 20, kind="gpu0")
        assert [kept.name for kept in trainer.list()] == ["a"]


def test_more_than_the_machine_has_is_refused_with_the_numbers_and_nothing_is_taken(start):
    start.manager()
    budget = limits.available_bytes()
    with start.client() as trainer:
        with pytest.raises(MemoryBudgetError) as caught:
            trainer.reserve("huge", budget.available + (1 << 30))
        assert "for arena 'huge'" in str(caught.value)
        assert "MemAvailable" in str(caught.value)
        assert "leto run --plan" in str(caught.value)
        assert trainer.list() == ()
        with trainer.reserve("small", 4096):
            pass
    assert limits.available_bytes().available > budget.available / 2


def test_others_are_answered_while_memory_is_reserved_and_hashed(start):
    start.manager()
    slowest = 0.0
    with start.client() as trainer, start.client("tool") as tool:
        trainer.reserve("lease", 4096).close()
        trainer.lease("lease")
        blob = bytes(64 * MIB)
        done = threading.Event()

        def work():
            trainer.reserve("big", 256 * MIB).close()
            trainer.put_blob("blob", blob)
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        count = 0
        while not done.is_set():
            begin = time.monotonic()
            tool.status()
            slowest = max(slowest, time.monotonic() - begin)
            count += 1
        thread.join()
        assert count > 3
        assert tool.status()["bytes"] == 4096 + 320 * MIB
    assert slowest < 1.0, f"a status waited {slowest:.3f} s"


def memory_cgroup(limit: int) -> Path:
    """A new cgroup with a memory limit, of whichever version is there; skips the test where that is not allowed."""
    for base, name in ((Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")):
        group = base / f"leto-test-{uuid.uuid4().hex[:8]}"
        with contextlib.suppress(OSError):
            if (base / "cgroup.procs").exists():
                group.mkdir()
                if (group / name).exists():
                    (group / name).write_text(str(limit))
                    return group
                group.rmdir()
    pytest.skip("no cgroup with a memory limit can be made here (not root, or the memory controller is not delegated)")


def test_over_a_real_cgroup_limit_the_manager_refuses_and_is_not_killed(start):
    group = memory_cgroup(512 * MIB)
    try:
        manager = start.manager()
        (group / "cgroup.procs").write_text(str(manager.pid))
        with start.client() as trainer:
            with pytest.raises(MemoryBudgetError) as caught:
                trainer.reserve("large", 1024 * MIB)
            assert f"limit {512 * MIB} bytes" in str(caught.value)
            assert f"the bound comes from {group}" in str(caught.value)
            assert "raise the container's memory limit" in str(caught.value)
            trainer.reserve("fits", 256 * MIB).close()
            with pytest.raises(MemoryBudgetError, match="for arena 'second'"):
                trainer.reserve("second", 256 * MIB)
            trainer.free()
        assert manager.process.wait(10) == 0
    finally:
        with contextlib.suppress(ProcessLookupError, IndexError):
            start.managers[0].process.kill()
            start.managers[0].process.wait()
        wait_until(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


# Leases.


def test_a_lease_ends_with_the_death_of_its_process_and_not_with_its_socket(start):
    start.manager()
    holder = start.driver("trainer", rank=3, incarnation=7)
    assert holder.do("client.reserve('a', 4096).detach()").isdigit()
    assert holder.do("client.lease('a')") == "None"
    assert holder.do("client.lease('a')") == "None"  # again is harmless
    with start.client("trainer") as other:
        text = rf"arena 'a' is leased by process {holder.pid} \(trainer of rank 3, incarnation 7\), which lives"
        with pytest.raises(JobError, match=text):
            other.lease("a")
        assert holder.do("client.close()") == "None"
        with pytest.raises(JobError, match=text):
            other.lease("a")
        os.kill(holder.pid, signal.SIGSTOP)  # a hang is not a death
        with pytest.raises(JobError, match=text):
            other.lease("a")
        (kept,) = other.list()
        assert kept.holder.pid == holder.pid
        assert kept.orphaned_by is None
        holder.kill()
        wait_until(lambda: other.list()[0].holder is None)
        assert other.list()[0].orphaned_by == holder.pid
        assert other.lease("a") == holder.pid  # the next writer learns whose state it is
        assert other.lease("a") is None
        other.put_blob("b", b"x")
        with pytest.raises(UsageError, match="'b' is kept as blob, expected arena"):
            other.lease("b")
    assert f"process {holder.pid} (trainer of rank 3, incarnation 7) is dead; kept without a writer: a" in start.log()


def test_the_next_writer_need_not_wait_for_the_manager_to_notice_the_death(start):
    start.manager()
    with start.client("trainer") as other:
        for _ in range(2):
            holder = start.driver("trainer")
            assert holder.do("client.reserve('a', 4096).detach()").isdigit()
            assert "Error" not in holder.do("client.lease('a')")
            holder.process.kill()
            os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, a zombie: at once
            driver = start.driver("trainer")
            assert driver.do("client.lease('a')") == str(holder.pid)
            driver.kill()
        wait_until(lambda: other.list()[0].holder is None)


def test_a_forked_process_may_not_use_the_connection_of_its_parent(start):
    start.manager()
    code = """if True:
        import os, sys
        from leto_jax.errors import ProtocolError
        from leto_jax.manager.client import ManagerClient
        client = ManagerClient(sys.argv[1], "trainer")
        if os.fork() == 0:
            try:
                client.list()
            except ProtocolError as error:
                print(error, flush=True)
            os._exit(0)
        os.wait()
        assert client.list() == ()
    """
    result = subprocess.run([sys.executable, "-c", code, str(start.directory / runtime.SOCKET_NAME)], stdout=subprocess.PIPE, text=True)
    assert result.returncode == 0
    assert "is a fork of it: open a new one" in result.stdout


# Blobs.


def test_blobs(start):
    start.manager()
    with start.client("trainer", rank=0, incarnation=2) as trainer:
        with pytest.raises(JobError, match=rf"only a process with a lease may put a blob, process {os.getpid()} \(trainer of rank 0"):
            trainer.put_blob("programs", b"x")
        trainer.reserve("a", 4096).close()
        trainer.lease("a")
        data = os.urandom(9 * MIB)
        sha256 = trainer.put_blob("programs", data)
        assert sha256 == hashlib.sha256(data).hexdigest()
        with trainer.get_blob("programs") as blob:
            assert (blob.sha256, blob.nbytes, blob.kind) == (sha256, len(data), "blob")
            assert blob.read() == data
            assert memory.is_sealed(blob.fd)
            assert trainer.put_blob("programs", b"second") != sha256  # replaced at once, the old one stays for who has it
            assert blob.read() == data
        with trainer.get_blob("programs") as blob:
            assert blob.read() == b"second"
            blob.sha256 = sha256
            with pytest.raises(RecordError, match=rf"blob 'programs': expected sha256 {sha256}, found .*: put it again"):
                blob.read()
        trainer.put_blob("empty", b"")
        with trainer.get_blob("empty") as blob:
            assert blob.read() == b""
        with pytest.raises(UsageError, match="'a' is kept as arena, expected blob"):
            trainer.put_blob("a", b"x")
        with pytest.raises(UsageError, match="'programs' is kept as blob, expected arena"):
            trainer.reserve("programs", 6)


def test_damaged_blobs_are_refused_and_the_old_one_stays(start, tmp_path):
    start.manager()
    with start.client("trainer") as trainer:
        trainer.reserve("a", 4096).close()
        trainer.lease("a")
        trainer.put_blob("b", b"good")
        fd, sha256 = memory.make_blob("b", b"evil")
        wrong = "0" * 64
        with pytest.raises(UsageError, match=rf"blob 'b': expected sha256 {wrong}, found {sha256}: refused"):
            trainer.put_blob_fd("b", fd, 4, wrong)
        with pytest.raises(UsageError, match="blob 'b': expected 5 bytes, found 4"):
            trainer.put_blob_fd("b", fd, 5, sha256)
        with pytest.raises(UsageError, match="a digest is 64 lower-case hexadecimal digits"):
            trainer.put_blob_fd("b", fd, 4, sha256.upper() + "Z")
        os.close(fd)
        unsealed = memory.create("b")
        os.pwrite(unsealed, b"evil", 0)
        with pytest.raises(UsageError, match=r"expected a memfd sealed against writing and resizing .*, found seals 0x"):
            trainer.put_blob_fd("b", unsealed, 4, sha256)
        os.close(unsealed)
        with open(tmp_path / "file", "w+b") as file:
            file.write(b"evil")
            file.flush()
            with pytest.raises(UsageError, match="expected a memfd sealed"):
                trainer.put_blob_fd("b", file.fileno(), 4, sha256)
        with pytest.raises(UsageError, match="request 'put_blob': expected one descriptor, found 0"):
            trainer._request({"op": "put_blob", "name": "b", "bytes": 4, "sha256": sha256})
        with trainer.get_blob("b") as blob:
            assert blob.read() == b"good"


# The agent's duplicates, and the death of the manager.


def test_memory_that_takes_the_place_of_another(start):
    start.manager()
    with start.client("agent") as agent, agent.subscribe() as subscription, start.client() as trainer, start.client() as other:
        for name, nbytes in (("a", 8192), ("a.spare", 8192), ("b", 4096)):
            trainer.reserve(name, nbytes).close()
        with pytest.raises(JobError, match=r"only the writer of 'a' may replace its memory, .* is not: lease it first"):
            trainer.replace("a", "a.spare")
        trainer.lease("a")
        with pytest.raises(UsageError, match="'a' is arena of 8192 bytes, 'b' is arena of 4096: expected two arenas of one kind and size"):
            trainer.replace("a", "b")
        with pytest.raises(UsageError, match="expected two arenas of one kind and size"):
            trainer.replace("a", "a")
        with pytest.raises(JobError, match="nothing is kept under the name 'c'"):
            trainer.replace("a", "c")
        with trainer.open("a.spare") as spare:
            trainer.replace("a", "a.spare")
            subscription.poll()
            assert sorted(subscription.descriptors) == ["a", "b"]
            for found in (other.open("a"), subscription.descriptors["a"].duplicate()):
                with found:
                    assert os.path.samestat(os.fstat(found.fd), os.fstat(spare.fd))
                    assert found.holder is not None
                    assert found.holder.pid == os.getpid()
        assert [kept.name for kept in trainer.list()] == ["a", "b"]


def test_a_duplicate_is_with_the_agent_before_the_asker_has_its_answer(start):
    manager = start.manager()
    with start.client("agent") as agent, agent.subscribe() as subscription:
        trainer = start.driver("trainer")
        assert trainer.do("client.reserve('a', 4096).detach()").isdigit()
        assert trainer.do("client.lease('a')") == "None"
        assert len(trainer.do("client.put_blob('b', b'blob')")) == 66
        os.kill(manager.pid, signal.SIGKILL)  # nothing more can come
        manager.process.wait()
        events = subscription.poll()
        assert [(event.kind, event.name) for event in events] == [("descriptor", "a"), ("lease", "a"), ("descriptor", "b")]
        assert events[1].pid == trainer.pid
        assert subscription.lost
        assert subscription.poll() == []
        assert subscription.descriptors["b"].read() == b"blob"
        assert subscription.descriptors["a"].holder.pid == trainer.pid


def test_kill_9_of_the_manager_and_a_new_one_takes_everything_back(start):
    manager = start.manager()
    holder, dead_holder = start.driver("trainer", rank=0), start.driver("trainer", rank=1)
    agent = start.client("agent")
    subscription = agent.subscribe()
    for driver, name in ((holder, "a0"), (dead_holder, "a1")):
        assert driver.do(f"arena = client.reserve({name!r}, {4 * MIB})") == "ok"
        assert driver.do(f"client.lease({name!r})") == "None"
        assert driver.do("mapped = mmap.mmap(arena.fd, arena.nbytes)") == "ok"
    assert holder.do("mapped[:] = b'\\x5a' * len(mapped)") == "ok"
    assert len(holder.do("client.put_blob('programs', b'p' * 100000)")) == 66
    agent.children([(holder.pid, uuid.uuid4().hex)])

    os.kill(manager.pid, signal.SIGKILL)
    manager.process.wait()
    with pytest.raises(ProtocolError, match=r"lost the state manager at .* during 'status'"):
        agent.status()
    with pytest.raises(ProtocolError, match=r"the connection to the state manager at .* is closed: `reconnect` first"):
        agent.status()
    with pytest.raises(JobError, match="the state manager is gone: nobody answers at the dead socket"):
        start.client("tool")
    assert runtime.probe(manager.path) is None
    dead_holder.kill()  # while no manager sees it
    assert holder.do("mapped[0]") == "90"  # training goes on
    assert holder.do("mapped[1] = 7") is not None

    subscription.poll()
    assert subscription.lost
    replacement = start.manager(adopt=subscription.descriptors.values())
    assert replacement.pid != manager.pid
    assert "replaced the dead socket" in start.log()
    assert "took back 3 pieces of memory" in start.log()
    agent.reconnect()
    subscription.close()
    subscription = agent.subscribe()
    assert sorted(subscription.descriptors) == ["a0", "a1", "programs"]
    with agent.open("a0") as arena, mmap.mmap(arena.fd, arena.nbytes) as mapped:
        assert mapped[0] == 0x5A
        assert mapped[1] == 7
        assert mapped[2:] == b"\x5a" * (len(mapped) - 2)
    kept = {item.name: item for item in agent.list()}
    assert kept["a0"].holder.pid == holder.pid  # the living writer keeps its lease
    assert (kept["a1"].holder, kept["a1"].orphaned_by) == (None, dead_holder.pid)
    with start.client("trainer") as other:
        with pytest.raises(JobError, match=rf"leased by process {holder.pid} \(leased from the last manager\), which lives"):
            other.lease("a0")
        assert other.lease("a1") == dead_holder.pid
    assert holder.do("client.reconnect()") == "None"
    assert holder.do("client.lease('a0')") == "None"
    holder.kill()
    wait_until(lambda: agent.list()[0].holder is None)
    with start.client("shadow") as shadow, shadow.get_blob("programs") as blob:
        assert blob.read() == b"p" * 100000
    subscription.close()
    agent.close()


def test_reconnect_waits_for_the_next_manager(start):
    manager = start.manager()
    trainer = start.client("trainer")
    with start.client("agent") as agent, agent.subscribe() as subscription:
        trainer.reserve("a", 4096).close()
        subscription.poll()
        os.kill(manager.pid, signal.SIGKILL)
        manager.process.wait()
        with pytest.raises(JobError, match="is gone"):
            trainer.reconnect(0.05)
        thread = threading.Thread(target=lambda: start.manager(adopt=subscription.descriptors.values()))
        thread.start()
        trainer.reconnect(20)
        assert [kept.name for kept in trainer.list()] == ["a"]  # never a manager that has not taken back everything yet
        thread.join()
        trainer.close()


def test_adopt_over_the_socket_and_what_it_refuses(start):
    start.manager()
    with start.client("agent") as agent:
        fd = memory.reserve("x", 8192)
        arena = Descriptor("x", "arena", 8192, fd)
        fill(arena, 9)
        agent.adopt(arena)
        agent.adopt(arena)  # again is harmless
        with agent.open("x") as opened:
            assert os.path.samestat(os.fstat(opened.fd), os.fstat(fd))
        with Descriptor("x", "arena", 8192, memory.reserve("x", 8192)) as other:
            with pytest.raises(JobError, match="'x' is kept already, as arena of 8192 bytes, and is not the same memory"):
                agent.adopt(other)
            other.name, other.nbytes = "y", 4096
            with pytest.raises(UsageError, match="arena 'y': expected memory of 4096 bytes with a sealed size, found 8192 bytes"):
                agent.adopt(other)
            other.kind = "tape"
            with pytest.raises(UsageError, match=r"expected a kind out of arena, blob, gpu0, gpu1, \.\.\., found 'tape'"):
                agent.adopt(other)
        blob_fd, sha256 = memory.make_blob("b", b"abc")
        with Descriptor("b", "blob", 3, blob_fd, sha256) as blob:
            agent.adopt(blob)
            blob.name, blob.sha256 = "c", "0" * 64
            with pytest.raises(UsageError, match=r"blob 'c': expected sha256 0{64}, found"):
                agent.adopt(blob)
        assert [kept.name for kept in agent.list()] == ["b", "x"]
        arena.close()


def test_a_hand_over_that_fails_starts_no_manager(start):
    with Descriptor("c", "blob", 3, *memory.make_blob("b", b"abc")) as blob:
        blob.sha256 = "0" * 64
        with pytest.raises(UsageError, match=r"blob 'c': expected sha256 0{64}"):
            start.manager(adopt=[blob])
    assert runtime.probe(start.directory / runtime.SOCKET_NAME) is None


# Roles.


def test_what_each_role_may_do(start):
    start.manager()
    with start.client("tool") as tool, start.client("trainer") as trainer:
        for call in (lambda: tool.reserve("a", 1), lambda: tool.lease("a")):
            with pytest.raises(JobError, match="a tool may only read"):
                call()
        for call in (lambda: trainer.children([]), trainer.subscribe, lambda: trainer.adopt(Descriptor("a", "arena", 1, 0))):
            with pytest.raises(JobError, match=rf"only the agent of job 'job' may ask for .*, this is process {os.getpid()} \(trainer\)"):
                call()
        with pytest.raises(UsageError, match="a role is one of agent, trainer, shadow, tool, found 'boss'"):
            start.client("boss")
        with pytest.raises(UsageError, match=r"request 'hello': expected an integer .* as 'rank', found -1"):
            start.client("trainer", rank=-1)
        with pytest.raises(UsageError, match=r"expected one of the requests hello, .*, found 'explode'"):
            trainer._request({"op": "explode"})
        shadow = start.client("shadow", rank=0, incarnation=4)
        shadow.become("trainer", 0, 4)
        assert shadow.reserve("a", 4096).nbytes == 4096
        shadow.close()


def test_a_second_agent_is_refused_while_the_first_lives(start):
    start.manager()
    first = start.driver("agent")
    with pytest.raises(JobError, match=rf"job 'job' already has an agent, process {first.pid}: choose another name with --job"):
        start.client("agent")
    first.kill()
    with start.client("agent") as agent:
        assert agent.status()["agent"] == os.getpid()


def test_status_and_long_lists(start):
    manager = start.manager(orphan_timeout_secs=123)
    with start.client("trainer") as trainer:
        for n in range(700):
            trainer.reserve(f"some/rather/long/name/that/takes/room/in/a/message/{n:04}", 1).close()
        kept = trainer.list()
        assert [item.name[-4:] for item in kept] == [f"{n:04}" for n in range(700)]
        status = trainer.status()
        assert status["pid"] == manager.pid
        assert (status["job"], status["arenas"], status["blobs"], status["bytes"]) == ("job", 700, 0, 700)
        assert status["agent"] is None
        assert 0 < status["free_in_secs"] <= 123
        assert status["memory"]["mem_available"] > 0
    assert not [line for line in Path(f"/proc/{manager.pid}/maps").read_text().splitlines() if "jax" in line or "numpy" in line]
    assert os.getsid(manager.pid) == manager.pid
    assert Path(f"/proc/{manager.pid}/comm").read_text() == "leto-manager\n"


# The death of the agent.

AGENT = """if True:
    import os, subprocess, sys, time, uuid
    from leto_jax.manager import fence
    from leto_jax.manager.client import ManagerClient
    client = ManagerClient(sys.argv[1], "agent")
    tokens = [uuid.uuid4().hex, uuid.uuid4().hex]
    client.children([(None, token) for token in tokens])
    worker = '''if True:
        import os, sys, time
        os.write(1, f"{os.getpid()} ".encode())
        if os.fork() == 0:                       # a data worker that leaves session and parent behind
            os.setsid()
            if os.fork() == 0:
                os.write(1, f"{os.getpid()} ".encode())
                time.sleep(60)
            os._exit(0)
        os.wait()
        if os.fork() == 0:                       # one that stays in the group
            os.write(1, f"{os.getpid()} ".encode())
            time.sleep(60)
        time.sleep(60)
    '''
    processes = []
    for token in tokens:
        environ = {**os.environ, fence.TOKEN_VARIABLE: token}
        processes.append(subprocess.Popen([sys.executable, "-S", "-c", worker], env=environ, start_new_session=True))
    client.children([(process.pid, token) for process, token in zip(processes, tokens)])
    client.reserve("device.0", 1 << 20).detach()
    os.write(1, b"ready ")
    time.sleep(60)
"""


def start_agent(start):
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(start.directory / runtime.SOCKET_NAME)], env=environ, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    start.agents.append(process)
    text = b""
    while sum(word.isdigit() for word in text.split(b" ")[:-1]) < 6 or b"ready" not in text:
        assert select.select([process.stdout], [], [], 30)[0]
        piece = os.read(process.stdout.fileno(), 4096)
        assert piece
        text += piece
    process.stdout.close()
    pids = [int(word) for word in text.split() if word.isdigit()]
    identities = [fence.process_id(pid) for pid in pids]
    assert None not in identities
    return process, identities


def test_kill_9_of_the_agent_leaves_no_process_behind_and_keeps_the_memory(start):
    start.manager()
    process, identities = start_agent(start)
    bystander = start.driver("trainer")
    with start.client("trainer") as trainer, trainer.open("device.0") as arena:
        fill(arena, 0x42)
    process.kill()
    process.wait()
    begin = time.monotonic()
    with start.client("agent") as agent:  # is greeted only when all of them are dead
        assert all(fence.is_dead(identity) for identity in identities)
        report = agent.last_fence
        assert set(report.killed) == {identity.pid for identity in identities}
        assert report.remaining == ()
        with agent.open("device.0") as arena, mmap.mmap(arena.fd, arena.nbytes) as mapped:
            assert mapped[:] == b"\x42" * MIB
        assert agent.status()["free_in_secs"] is None
    assert time.monotonic() - begin < 5
    assert bystander.process.poll() is None
    assert f"the agent, process {process.pid}, is dead: killing its children, keeping 1 pieces of memory" in start.log()
    assert "killed 6 processes of the dead agent" in start.log()


def test_without_an_agent_everything_is_freed_after_the_timeout(start):
    agent = start.driver()
    assert agent.do("1") == "1"  # it is up before the time runs
    manager = start.manager(orphan_timeout_secs=0.6)
    name = f"timeout.{uuid.uuid4().hex}"
    assert agent.do("client = ManagerClient(path, 'agent')") == "ok"
    assert agent.do(f"client.reserve({name!r}, 1 << 20).detach()").isdigit()
    time.sleep(0.7)
    assert manager.process.poll() is None  # an agent lives: no timeout
    assert set(memfds_of(name)) == {manager.pid, agent.pid}
    agent.kill()
    assert manager.process.wait(10) == 0
    assert memfds_of(name) == []
    assert not (start.directory / runtime.SOCKET_NAME).exists()
    assert not (start.directory / runtime.LOCK_NAME).exists()
    assert "frees 1 pieces of memory of job 'job' and ends: no agent for 0.6 s" in start.log()


def test_an_agent_that_never_comes_frees_too(start):
    manager = start.manager(orphan_timeout_secs=1.0)
    assert manager.process.wait(10) == 0


def test_a_fence_does_not_find_the_manager(start, monkeypatch):
    token = uuid.uuid4().hex
    monkeypatch.setenv(fence.TOKEN_VARIABLE, token)
    manager = start.manager()
    holder = start.driver("trainer")
    assert holder.do("client.lease('a')").startswith("JobError: nothing is kept under the name 'a'; there is: nothing")
    assert fence.fence(token, []).killed == (holder.pid,)
    assert manager.process.poll() is None


# The end.


def test_free(start):
    manager = start.manager()
    name = f"free.{uuid.uuid4().hex}"
    trainer = start.driver("trainer", rank=1)
    assert trainer.do(f"client.reserve({name!r}, 4096).close()") == "None"
    assert trainer.do(f"client.lease({name!r})") == "None"
    agent = start.driver("agent")
    with start.client("tool") as tool:
        with pytest.raises(JobError, match=rf"job 'job' has an agent, process {agent.pid}: end it with `leto stop`"):
            tool.free()
        text = rf"cannot free the memory of job 'job': process {trainer.pid} \(trainer of rank 1, incarnation 1\) still write to it"
        assert "still write to it" in agent.do("client.free()")
        agent.kill()
        wait_until(lambda: tool.status()["agent"] is None)
        with pytest.raises(JobError, match=text):
            tool.free()
        trainer.kill()
        tool.free()
    assert manager.process.wait(10) == 0
    assert memfds_of(name) == []
    assert sorted(os.listdir(start.directory)) == [runtime.LOG_NAME]
    with pytest.raises(JobError, match=r"the state manager is not running: there is no socket at .*; `leto ls` lists"):
        start.client("tool")


def test_free_by_force(start):
    manager = start.manager()
    with start.client("agent") as agent:
        trainer = start.driver("trainer")
        assert trainer.do("client.reserve('a', 4096).close()") == "None"
        assert trainer.do("client.lease('a')") == "None"
        agent.free(force=True)
    assert manager.process.wait(10) == 0


def test_signals(start):
    manager = start.manager()
    holder = start.driver("trainer")
    assert holder.do("client.reserve('a', 4096).detach()").isdigit()
    assert holder.do("client.lease('a')") == "None"
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(manager.pid, number)
    wait_until(lambda: "SIGTERM refused" in start.log())
    assert f"SIGTERM refused: process {holder.pid} (trainer of rank 0, incarnation 1) write to the memory" in start.log()
    agent = start.driver("agent")
    holder.kill()
    os.kill(manager.pid, signal.SIGTERM)
    wait_until(lambda: f"SIGTERM refused: the agent, process {agent.pid}, lives" in start.log())
    assert manager.process.poll() is None
    agent.kill()
    wait_until(lambda: "killed 0 processes" in start.log())
    os.kill(manager.pid, signal.SIGTERM)
    assert manager.process.wait(10) == 0


# Bad neighbours.


def test_garbage_oversized_and_cut_off_messages_harm_nobody(start):
    start.manager()
    path = start.directory / runtime.SOCKET_NAME
    with start.client("trainer") as trainer:
        trainer.reserve("a", 4096).close()
        for data, text in [
            (os.urandom(3) + b"\xff" * 5000, "not a message of leto_jax"),
            (protocol.HEADER.pack(b"LETO", 1, 0, 1 << 31), "oversized message: a body of 2147483648 bytes"),
            (protocol.HEADER.pack(b"LETO", 9, 0, 2) + b"{}", "protocol version 9, this process speaks 1"),
            (protocol.HEADER.pack(b"LETO", 1, 0, 4) + b"nope", "is not JSON"),
            (protocol.encode({"op": "status"}), "expected a hello first, found 'status'"),
            (protocol.encode({"op": ["list"]}), "expected one of the requests"),
            (protocol.encode({"op": "hello", "role": 7}), "expected a string as 'role', found 7"),
        ]:
            with protocol.connect(path, deadline=time.monotonic() + 5) as sock:
                sock.send(data)
                reply, _ = protocol.receive(sock, deadline=time.monotonic() + 5)
                with pytest.raises(LetoError, match=text):
                    protocol.raise_error(reply)
        with protocol.connect(path, deadline=time.monotonic() + 5) as sock:
            sock.send(protocol.encode({"op": "hello", "role": "tool", "rank": None, "incarnation": 0})[:-3])
        with protocol.connect(path, deadline=time.monotonic() + 5) as sock:
            fds = [os.memfd_create("many", os.MFD_CLOEXEC) for _ in range(9)]
            socket.send_fds(sock, [protocol.encode({"op": "hello"}, 8)], fds)
            protocol.close_fds(fds)
            with pytest.raises(ProtocolError, match="descriptors were cut off: more than 8"):
                protocol.raise_error(protocol.receive(sock, deadline=time.monotonic() + 5)[0])
        assert [kept.name for kept in trainer.list()] == ["a"]
    assert "closes the connection of" in start.log()


def test_a_manager_that_is_stopped_ends_at_the_deadline(start):
    manager = start.manager()
    os.kill(manager.pid, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineError, match=r"the state manager at .* did not answer 'hello' in time"):
            start.client("tool", connect_timeout_secs=0.1)
        assert runtime.probe(manager.path, 0.1) is None
        with pytest.raises(JobError, match=rf"did not start: .*already has a state manager \(process {manager.pid}\)"):
            start.manager()
    finally:
        os.kill(manager.pid, signal.SIGCONT)
    assert runtime.probe(manager.path)["pid"] == manager.pid


def test_a_second_manager_is_refused(start):
    manager = start.manager()
    with start.client("trainer") as trainer:
        trainer.reserve("a", 4096).close()
        text = rf"did not start: leto manager: job 'job' already has a state manager \(process {manager.pid}\) in .*leto run --job job"
        with pytest.raises(JobError, match=text):
            spawn_manager(JOB, start.directory, 1.0)
        assert [kept.name for kept in trainer.list()] == ["a"]


def test_two_managers_at_once_are_one(start):
    command = [sys.executable, "-m", "leto_jax.manager.server", "--job", JOB, "--dir", str(start.directory), "--orphan-timeout-secs", "0.5"]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    codes, errors = [], []
    for process in processes:
        _, error = process.communicate(timeout=30)
        codes.append(process.returncode)
        errors.append(error)
    assert 0 in codes
    assert all(code == 0 or "already has a state manager" in error for code, error in zip(codes, errors, strict=True))


def test_a_dead_socket_is_replaced_and_something_else_is_not(start):
    path = start.directory / runtime.SOCKET_NAME
    dead, _ = protocol.listen(path)
    dead.close()
    assert runtime.probe(path) is None
    manager = start.manager()
    assert start.log().count("replaced the dead socket") == 1
    manager.process.kill()
    manager.process.wait()
    path.unlink()
    path.write_text("precious")
    with pytest.raises(JobError, match=r"did not start: leto manager: expected a socket or nothing at .*, found -rw"):
        start.manager()
    assert path.read_text() == "precious"


def test_a_socket_that_vanished_is_made_again(start):
    manager = start.manager()
    with start.client("trainer") as trainer:
        trainer.reserve("a", 4096).close()
    shutil.rmtree(start.directory)  # a cleaner of /tmp
    wait_until(lambda: runtime.probe(manager.path) is not None)
    with start.client("tool") as tool:
        assert [kept.name for kept in tool.list()] == ["a"]
    with pytest.raises(JobError, match="already has a state manager"):
        start.manager()


def test_a_directory_that_is_not_private_is_refused(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(JobError, match="found mode 0755"):
        spawn_manager(JOB, tmp_path / "open", 1.0)
    result = subprocess.run(
        [sys.executable, "-m", "leto_jax.manager.server", "--job", "a/b", "--dir", str(tmp_path), "--orphan-timeout-secs", "1"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 2
    assert "leto manager: a job name is 1 to 64 of the characters" in result.stderr


def test_live_jobs(tmp_path):
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    managers = [spawn_manager(job, runtime.ensure_job_dir(job, environ), 30.0) for job in ("b", "a")]
    try:
        assert runtime.live_jobs(environ) == ["a", "b"]
        os.kill(managers[0].pid, signal.SIGKILL)
        managers[0].process.wait()
        assert runtime.live_jobs(environ) == ["a"]
    finally:
        for manager in managers:
            manager.process.kill()
            manager.process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("reachable", [False, True])
def test_another_user_is_refused(reachable):
    base = Path(tempfile.mkdtemp(prefix="leto-test-", dir="/tmp"))
    base.chmod(0o755)
    manager = spawn_manager(JOB, runtime.ensure_private_dir(base / "d"), 30.0)
    try:
        if reachable:  # even if somebody opened directory and socket, the manager itself looks who it is
            (base / "d").chmod(0o711)
            os.chmod(manager.path, 0o666)
        code = f"""if True:
            import os
            from leto_jax.errors import JobError, ProtocolError
            from leto_jax.manager import client, runtime
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            try:
                client.ManagerClient({manager.path!r}, "trainer")
            except JobError as error:
                print(error)
            assert runtime.probe({manager.path!r}) is None
        """
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
        assert result.returncode == 0, result.stderr
        if reachable:
            assert "job 'job' belongs to uid 0; process" in result.stdout
            assert "has uid 65534" in result.stdout
            assert "refused a connection: job 'job' belongs to uid 0" in (base / "d" / runtime.LOG_NAME).read_text()
        else:
            assert f"the state manager at {manager.path} belongs to another user" in result.stdout
            assert "this process is uid 65534" in result.stdout
        assert runtime.probe(manager.path) is not None
    finally:
        manager.process.kill()
        manager.process.wait()
        shutil.rmtree(base)


def test_the_clients_errors_before_any_manager(tmp_path):
    with pytest.raises(JobError, match="the state manager is not running: there is no socket at"):
        ManagerClient(tmp_path / "none", "tool")
    with pytest.raises(UsageError, match="limit of AF_UNIX is 107"):
        ManagerClient("/" + "x" * 200, "tool")
    assert client.Descriptor("a", "arena", 1, -1).detach() == -1

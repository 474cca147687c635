"""Fence: everything of an incarnation dies, and nothing else."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
import uuid

import pytest

from leto_jax.errors import UsageError
from leto_jax.manager import fence
from leto_jax.manager.fence import Fence, ProcessId

# A tree: `child` forks `orphan` (own session, parent gone) and `grandchild`; each prints its pid, then sleeps.
TREE = """if True:
    import os, sys, time
    def say(name):
        os.write(1, f"{name} {os.getpid()}\\n".encode())
    say("child")
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            say("orphan")
            time.sleep(60)
        os._exit(0)
    os.wait()
    if os.fork() == 0:
        say("grandchild")
        if "leave" in sys.argv:
            os.setpgid(0, 0)
        time.sleep(60)
    if "exit" in sys.argv:
        os._exit(0)
    time.sleep(60)
"""


@pytest.fixture
def token():
    return uuid.uuid4().hex


@pytest.fixture
def started():
    processes = []
    yield processes
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def start(started, *args, token=None, own_session=True, code=TREE):
    environ = {name: value for name, value in os.environ.items() if name != fence.TOKEN_VARIABLE}
    if token is not None:
        environ[fence.TOKEN_VARIABLE] = token
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code, *args], env=environ, stdout=subprocess.PIPE, text=True, start_new_session=own_session
    )
    started.append(process)
    return process


def tree_of(process):
    pids = {}
    for _ in range(3):
        name, pid = process.stdout.readline().split()
        pids[name] = fence.process_id(int(pid))
    assert set(pids) == {"child", "orphan", "grandchild"}
    assert None not in pids.values()
    return pids


def test_a_tree_dies_with_the_worker_that_left_session_and_parent(started, token):
    bystander = start(started, token=uuid.uuid4().hex, code="import time; time.sleep(60)")
    pids = tree_of(start(started, token=token))
    report = fence.fence(token, [pids["child"].pid])
    assert report.remaining == ()
    assert set(report.killed) == {identity.pid for identity in pids.values()}
    assert all(fence.is_dead(identity) for identity in pids.values())
    assert report.elapsed_secs < 5
    assert bystander.poll() is None


def test_the_token_alone_finds_everybody(started, token):
    pids = tree_of(start(started, token=token))
    report = fence.fence(token, [])
    assert set(report.killed) == {identity.pid for identity in pids.values()}


def test_without_a_token_in_the_environment_the_tree_below_a_pid_is_found(started, token):
    pids = tree_of(start(started, "leave"))
    report = fence.fence(token, [pids["child"]])
    assert set(report.killed) == {pids["child"].pid, pids["grandchild"].pid}
    assert not fence.is_dead(pids["orphan"])  # nothing leads to it: that is what the token is for
    os.kill(pids["orphan"].pid, signal.SIGKILL)


def test_a_group_outlives_its_leader_and_is_found_by_number(started, token):
    process = start(started, "exit")
    pids = tree_of(process)
    leader = pids["child"]
    process.wait()  # reaped: only the group still carries the number
    assert fence.process_id(leader.pid) is None
    report = fence.fence(token, [leader])
    assert report.killed == (pids["grandchild"].pid,)
    os.kill(pids["orphan"].pid, signal.SIGKILL)


def test_a_later_process_with_the_number_is_safe(started, token):
    bystander = start(started, code="import time; time.sleep(60)")
    identity = fence.process_id(bystander.pid)
    report = fence.fence(token, [ProcessId(identity.pid, identity.start - 1)])
    assert report.killed == ()
    assert bystander.poll() is None


def test_a_group_that_a_member_merely_sits_in_is_left_alone(started, token):
    member = start(started, own_session=False, code="import time; time.sleep(60)")
    neighbour = start(started, own_session=False, code="import time; time.sleep(60)")
    report = fence.fence(token, [member.pid])
    assert report.killed == (member.pid,)
    assert neighbour.poll() is None


def test_never_itself_nor_its_ancestors(started, token):
    code = f"""if True:
        import os, subprocess, sys
        from leto_jax.manager import fence
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        report = fence.fence({token!r}, [os.getpid(), os.getppid(), 1, child.pid])
        assert report.killed == (child.pid,), report
        assert report.remaining == ()
    """
    parent = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {code!r}]).returncode)"
    environ = {**os.environ, fence.TOKEN_VARIABLE: token}
    subprocess.run([sys.executable, "-c", parent], env=environ, check=True, timeout=60)


def test_stopped_processes_and_zombies(started, token):
    stopped = start(started, token=token, code="import os; os.write(1, b'x'); import time; time.sleep(60)")
    zombie = start(started, token=token, code="pass")
    assert stopped.stdout.read(1) == "x"
    os.kill(stopped.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert fence.is_dead(fence.process_id(zombie.pid))
    report = fence.fence(token, [stopped.pid, zombie.pid])
    assert report.killed == (stopped.pid,)
    assert report.remaining == ()


def test_a_dead_first_thread_with_others_alive_is_not_dead(started, token):
    code = """if True:
        import ctypes, os, threading, time
        def work():
            time.sleep(0.05)
            os.write(1, b"x")
            time.sleep(60)
        threading.Thread(target=work).start()
        ctypes.CDLL(None).pthread_exit(None)
    """
    process = start(started, token=token, code=code)
    assert process.stdout.read(1) == "x"
    identity = fence.process_id(process.pid)
    assert fence._read_process(process.pid).state == "Z"
    assert not fence.is_dead(identity)
    assert fence.fence(token, []).remaining == ()
    assert fence.is_dead(identity)


def test_one_that_is_dying_already_is_waited_for(started, token):
    # Its address space is being torn down: the kernel no longer shows its environment, and its other resources are not released yet.
    code = """if True:
        import mmap, os, time
        memory = mmap.mmap(-1, 512 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        os.write(1, b"x")
        time.sleep(60)
    """
    for _ in range(8):  # on a busy machine it may be dead before this test looks
        process = start(started, token=token, code=code)
        assert process.stdout.read(1) == "x"
        identity = fence.process_id(process.pid)
        process.kill()
        while fence._carries_token(fence._read_process(process.pid), frozenset([f"LETO_TOKEN={token}".encode()]), os.geteuid()):
            pass
        if not fence.is_dead(identity):
            break
    else:
        pytest.fail("died before the test could look, each time: the fault did not fire")
    fence.fence(token, [])
    assert fence.is_dead(identity)


def test_a_storm_of_forks_is_stopped(started, token):
    code = """if True:
        import os, time
        os.write(1, b"x")
        end = time.monotonic() + 60
        while time.monotonic() < end:     # each child replaces its parent, without the token, in a session of its own
            if os.fork():
                os._exit(0)
            os.setsid()
            time.sleep(0.001)
    """
    process = start(started, token=token, code=code)
    assert process.stdout.read(1) == "x"
    time.sleep(0.05)
    report = fence.fence(token, [process.pid])
    assert report.remaining == ()
    assert fence.fence(token, []).killed == ()
    assert select.select([process.stdout], [], [], 0)[0]
    assert process.stdout.read() == ""  # the last writer of the pipe is gone


def test_what_cannot_be_killed_is_reported_at_the_deadline(started, token, monkeypatch):
    process = start(started, token=token, code="import os; os.write(1, b'x'); import time; time.sleep(60)")
    assert process.stdout.read(1) == "x"
    monkeypatch.setattr(fence, "_signal", lambda identity, number: None)
    report = fence.fence(token, [], deadline_secs=0.1)
    (remaining,) = report.remaining
    assert remaining.pid == process.pid
    assert remaining.state in "SR"
    assert remaining.command.startswith("python")
    assert remaining.wchan
    assert report.killed == ()
    assert 0.1 <= report.elapsed_secs < 2


def test_nothing_to_do_is_quick(token):
    begin = time.monotonic()
    assert fence.fence(token, [])[:2] == ((), ())
    assert time.monotonic() - begin < 1


def test_steps_do_not_wait(started, token):
    pids = tree_of(start(started, token=token))
    work = Fence([token, uuid.uuid4().hex], [pids["child"]], deadline_secs=5)
    reports = []
    while not reports or reports[-1] is None:
        reports.append(work.step())
        work.wait(0.5)
    assert len(reports[-1].killed) == 3
    assert len(reports) < 10


@pytest.mark.parametrize("bad", ["", "short", "line\nbreak1", None])
def test_a_token_must_identify(bad):
    with pytest.raises(UsageError, match="a token is a printable string of at least 8 characters"):
        fence.fence([bad], [])

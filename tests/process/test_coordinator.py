"""The coordinator as a process of its own: ranks meet there, and do without it from then on."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from jobs import END_SECS, REPOSITORY

from leto_jax.agent import coordinator
from leto_jax.agent.coordinator import HOST, TAKEN, Coordinator, free_port

COMMAND = [sys.executable, "-m", "leto_jax.agent.coordinator"]
CLIENT = """if True:
    import sys
    from leto_jax import distributed
    ranks = distributed.connect(sys.argv[1], int(sys.argv[2]), 2, 60)
    print(ranks.gather("pictures", b"of %d" % ranks.rank, 60), flush=True)
    sys.stdin.readline()
    print("still here", flush=True)
"""


@contextlib.contextmanager
def process(*command: str, **options: object) -> Iterator[subprocess.Popen]:
    with subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options) as started:
        try:
            yield started
        finally:
            started.kill()


@contextlib.contextmanager
def meeting() -> Iterator[tuple[subprocess.Popen, list[subprocess.Popen]]]:
    """A coordinator, and two ranks that have met there and wait for a line."""
    address = f"{HOST}:{free_port()}"
    with contextlib.ExitStack() as stack:
        quiet = {"env": {**os.environ, **coordinator.QUIET}, "stderr": subprocess.PIPE}
        host = stack.enter_context(process(*COMMAND, address, "2", **quiet))
        assert host.stdout.read(1) == "."
        clients = [stack.enter_context(process(sys.executable, "-c", CLIENT, address, str(rank), **quiet)) for rank in range(2)]
        for client in clients:
            assert client.stdout.readline() == "[b'of 0', b'of 1']\n"
        yield host, clients


def test_two_ranks_meet_and_one_outlives_the_other():
    with meeting() as (host, (first, second)):
        second.kill()
        second.wait(END_SECS)
        time.sleep(0.5)
        assert first.communicate("\n", END_SECS)[0] == "still here\n"
        assert first.returncode == 0
        host.stdin.close()
        assert host.wait(END_SECS) == 0
        assert host.stderr.read() == ""


@pytest.mark.xfail(
    strict=True, reason="jaxlib 0.12.0.1 cannot call `missed_heartbeat_callback` (std::bad_cast), and aborts: see distributed.connect"
)
def test_ranks_that_have_met_outlive_their_coordinator():
    with meeting() as (host, clients):
        os.kill(host.pid, signal.SIGKILL)
        assert host.wait(END_SECS) == -signal.SIGKILL
        time.sleep(0.5)
        for client in clients:
            assert client.communicate("\n", END_SECS)[0] == "still here\n"
            assert client.returncode == 0


def test_it_ends_with_whoever_has_started_it():
    with process(*COMMAND, f"{HOST}:{free_port()}", "2") as host:
        assert host.stdout.read(1) == "."
        host.stdin.close()
        assert host.wait(END_SECS) == 0


def test_a_port_that_is_taken():
    """By anybody, another coordinator of the same user included: gRPC would share it, and ranks would meet at one or the other."""
    with socket.create_server((HOST, 0)) as taken:
        address = f"{HOST}:{taken.getsockname()[1]}"
        done = subprocess.run([*COMMAND, address, "2"], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=END_SECS)
    assert (done.returncode, done.stdout) == (TAKEN, "")
    assert done.stderr == f"leto: coordinator: cannot listen at {address}: Address already in use; name another port\n"
    with process(*COMMAND, address, "2") as host:
        assert host.stdout.read(1) == "."
        done = subprocess.run([*COMMAND, address, "2"], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=END_SECS)
        assert done.returncode == TAKEN


def test_the_agent_tries_another_port(monkeypatch):
    with socket.create_server((HOST, 0)) as taken, selectors.DefaultSelector() as selector:
        ports = [taken.getsockname()[1], free_port()]
        monkeypatch.setattr(coordinator, "free_port", lambda: ports.pop(0) if len(ports) > 1 else ports[0])
        heard: list[str] = []
        host = Coordinator(2, "job-0123456789abcdef", os.environ, selector, heard.append, heard.append)
        until = time.monotonic() + END_SECS
        while not heard and time.monotonic() < until:
            for key, _ in selector.select(0.1):
                key.data()
        assert heard == [f"{HOST}:{ports[0]}"]
        os.kill(host.pid, signal.SIGKILL)
        while len(heard) < 2 and time.monotonic() < until:
            for key, _ in selector.select(0.1):
                key.data()
        assert heard[1:] == ["SIGKILL"]
        # And when there is none to be had, it says so.
        ports[:] = [taken.getsockname()[1]]
        Coordinator(2, "job-0123456789abcdef", os.environ, selector, heard.append, heard.append)
        while len(heard) < 3 and time.monotonic() < until:
            for key, _ in selector.select(0.1):
                key.data()
        assert heard[2:] == [f"it did not listen at {HOST}:{ports[0]}: exit code {TAKEN}"]


def test_it_does_without_jax():
    code = f"""if True:
        import os, sys
        from leto_jax import distributed
        from leto_jax.agent import coordinator
        held = coordinator.claim({f"{HOST}:{free_port()}"!r})
        service = distributed.serve("{HOST}:%d" % held.getsockname()[1], 2)
        os._exit("jax" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=END_SECS)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [(), ("127.0.0.1:1",), ("127.0.0.1:1", "many")])
def test_wrong_arguments(arguments):
    done = subprocess.run([*COMMAND, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=END_SECS)
    assert done.returncode == 1
    assert done.stderr == f"leto: coordinator: expected HOST:PORT RANKS, found {' '.join(arguments)!r}\n"

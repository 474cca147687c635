"""The select loop, in one process: no peer and no handler can stop it."""

from __future__ import annotations

import os
import socket
import time

import pytest

from leto_jax.errors import JobError, LetoError, ProtocolError, UsageError
from leto_jax.manager import hub, protocol


class Echo:
    """A hub whose requests misbehave on demand."""

    def __init__(self, path):
        self.lines = []
        self.hub = hub.Hub(self.handle, self.lines.append, "the test")
        self.path = path
        self.slow_goes_on = True
        self.fds = []
        self.hub.listen(protocol.listen(path)[0])

    def handle(self, connection, request, fds):
        match request.get("op"):
            case "echo":
                return {"ok": True, "n": request.get("n")}, tuple(fds)
            case "raise":
                raise UsageError("expected something else")
            case "bug":
                return 1 // 0
            case "slow":
                return self.slow(request)
            case "slow_bug":
                return self.slow_bug()
            case "too_large":
                return {"x": "y" * 70000}, ()
        raise UsageError("unknown")

    def slow(self, request):
        while self.slow_goes_on:
            yield 0.001
        return {"ok": True, "slow": request.get("n")}, ()

    def slow_bug(self):
        yield 0.0
        raise ZeroDivisionError("late")

    def connect(self):
        return protocol.connect(self.path, deadline=time.monotonic() + 1)

    def turns(self, secs=0.03):
        until = time.monotonic() + secs
        while time.monotonic() < until:
            self.hub.turn(0.002)

    def ask(self, sock, message, fds=()):
        protocol.send(sock, message, fds, deadline=time.monotonic() + 1)
        return self.answer(sock)

    def answer(self, sock):
        for _ in range(300):
            self.hub.turn(0.002)
            try:
                return protocol.receive(sock, deadline=time.monotonic())
            except LetoError as error:
                if isinstance(error, ProtocolError):
                    raise
        raise AssertionError("no answer")


@pytest.fixture
def echo(tmp_path):
    made = Echo(tmp_path / "s")
    yield made
    made.hub.close()


def test_requests_are_answered_in_order_even_behind_a_slow_one(echo):
    with echo.connect() as sock, echo.connect() as other:
        for n, op in enumerate(["echo", "slow", "echo", "echo"]):
            protocol.send(sock, {"op": op, "n": n}, deadline=time.monotonic() + 1)
        assert echo.answer(sock)[0]["n"] == 0
        assert echo.ask(other, {"op": "echo", "n": 9})[0]["n"] == 9  # others are served meanwhile
        echo.slow_goes_on = False
        assert echo.answer(sock)[0] == {"ok": True, "slow": 1}
        assert [echo.answer(sock)[0]["n"] for _ in range(2)] == [2, 3]


def test_errors_become_replies_and_the_loop_goes_on(echo):
    with echo.connect() as sock:
        for op, text in [
            ("raise", "expected something else"),
            ("bug", "internal error: ZeroDivisionError"),
            ("slow_bug", "internal error: ZeroDivisionError: late"),
        ]:
            reply, _ = echo.ask(sock, {"op": op})
            with pytest.raises(LetoError, match=text):
                protocol.raise_error(reply)
        assert any("ZeroDivisionError" in line for line in echo.lines)
        assert echo.ask(sock, {"op": "echo", "n": 1})[0]["n"] == 1
        reply, _ = echo.ask(sock, {"op": "too_large"})
        with pytest.raises(ProtocolError, match="cannot answer: a message body is at most 65536 bytes"):
            protocol.raise_error(reply)


def test_garbage_is_answered_and_ends_only_its_connection(echo):
    with echo.connect() as bad, echo.connect() as good:
        bad.send(b"\x00\x01garbage")
        reply, _ = echo.answer(bad)
        with pytest.raises(ProtocolError, match="not a message of leto_jax"):
            protocol.raise_error(reply)
        with pytest.raises(ProtocolError, match="closed"):
            echo.answer(bad)
        assert echo.ask(good, {"op": "echo", "n": 1})[0]["n"] == 1
        assert len(echo.hub.connections) == 1


def test_half_a_message_does_not_wait_for_ever(echo, monkeypatch):
    monkeypatch.setattr(hub, "PARTIAL_SECS", 0.05)
    with echo.connect() as sock:
        sock.send(protocol.encode({"op": "echo"})[:-1])
        reply, _ = echo.answer(sock)
        with pytest.raises(ProtocolError, match=r"no complete message within 0\.05 s"):
            protocol.raise_error(reply)
        echo.turns()
        assert not echo.hub.connections


def test_descriptors_of_requests_and_replies_do_not_leak(echo):
    with echo.connect() as sock:
        echo.ask(sock, {"op": "echo"})
        before = len(os.listdir("/proc/self/fd"))
        fd = os.memfd_create("x", os.MFD_CLOEXEC)
        for op in ("echo", "raise", "bug", "slow_bug"):
            _, fds = echo.ask(sock, {"op": op}, [fd])
            assert len(fds) == (op == "echo")
            protocol.close_fds(fds)
        os.close(fd)
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_push_waits_until_the_kernel_has_it_and_cuts_off_who_does_not_read(echo, monkeypatch):
    monkeypatch.setattr(hub, "PUSH_SECS", 0.1)
    with echo.connect() as sock:
        echo.turns()
        (connection,) = echo.hub.connections
        assert list(echo.hub.push([connection], {"event": 1})) == []  # at once
        assert protocol.receive(sock, deadline=time.monotonic() + 1)[0] == {"event": 1}
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        begin = time.monotonic()
        waits = 0
        while not connection.closed:
            for secs in echo.hub.push([connection], {"event": "x" * 60000}):
                waits += 1
                time.sleep(secs)
        assert waits > 3
        assert 0.09 < time.monotonic() - begin < 2
        assert any("it did not read for 0.1 s" in line for line in echo.lines)
        assert list(echo.hub.push([connection], {"event": 3})) == []


def test_connections_are_bounded(echo, monkeypatch):
    monkeypatch.setattr(hub, "MAX_CONNECTIONS", 2)
    socks = [echo.connect() for _ in range(3)]
    try:
        echo.turns()
        with pytest.raises(JobError, match="2 connections are open already"):
            protocol.raise_error(protocol.receive(socks[2], deadline=time.monotonic() + 1)[0])
        socks[0].close()
        echo.turns()
        socks.append(echo.connect())
        assert echo.ask(socks[3], {"op": "echo", "n": 4})[0]["n"] == 4
    finally:
        for sock in socks:
            sock.close()


def test_a_log_is_bounded_per_minute(capsys, monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 1234.5)
    log = hub.Log("x")
    for n in range(1000):
        log(f"line {n}")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 200
    assert "silent for the rest of this minute" in lines[-1]

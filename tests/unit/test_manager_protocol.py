"""Framed messages: whatever comes in, it is a message, or one clear error and no descriptor left open."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from leto_jax import errors
from leto_jax.errors import DeadlineError, JobError, LetoError, MemoryBudgetError, ProtocolError, UsageError
from leto_jax.manager import protocol
from leto_jax.manager.hub import exited


def soon(secs: float = 5.0) -> float:
    return time.monotonic() + secs


def open_fds() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}


def memfd(name: str) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.pwrite(fd, name.encode(), 0)
    return fd


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def test_a_message_arrives_with_its_descriptors_close_on_exec(pair):
    left, right = pair
    fds = [memfd(f"payload{i}") for i in range(protocol.MAX_FDS)]
    protocol.send(left, {"op": "x", "text": "grüße", "n": 2**62}, fds, deadline=soon())
    message, received = protocol.receive(right, deadline=soon())
    assert message == {"op": "x", "text": "grüße", "n": 2**62}
    assert [os.pread(fd, 64, 0) for fd in received] == [f"payload{i}".encode() for i in range(protocol.MAX_FDS)]
    assert not any(os.get_inheritable(fd) for fd in received)
    protocol.close_fds([*fds, *received])


def test_the_header_is_little_endian_and_fixed():
    frame = protocol.encode({"a": 1}, 3)
    assert frame == b"LETO" + (1).to_bytes(2, "little") + (3).to_bytes(2, "little") + (7).to_bytes(4, "little") + b'{"a":1}'


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", r"not a message of leto_jax: expected magic b'LETO', found b'GET '"),
        (b"\x00", r"expected magic b'LETO', found b'\\x00'"),
        (b"LETx", r"expected magic b'LETO', found b'LETx'"),
        (struct.pack("<4sHHI", b"LETO", 2, 0, 2) + b"{}", "protocol version 2, this process speaks 1"),
        (struct.pack("<4sHHI", b"LETO", 1, 9, 2) + b"{}", "announces 9 descriptors, at most 8 are allowed"),
        (struct.pack("<4sHHI", b"LETO", 1, 1, 2) + b"{}", "announces 1 descriptors, 0 came"),
        (struct.pack("<4sHHI", b"LETO", 1, 0, 65537), "oversized message: a body of 65537 bytes is announced, at most 65536"),
        (struct.pack("<4sHHI", b"LETO", 1, 0, 2**32 - 1), "oversized message: a body of 4294967295 bytes"),
        (struct.pack("<4sHHI", b"LETO", 1, 0, 4) + b"nope", "message body of 4 bytes is not JSON"),
        (struct.pack("<4sHHI", b"LETO", 1, 0, 0), "message body of 0 bytes is not JSON"),
        (struct.pack("<4sHHI", b"LETO", 1, 0, 2) + b"\xff\xfe", "is not JSON"),
        (struct.pack("<4sHHI", b"LETO", 1, 0, 7) + b'{"a":NaN}'[:7], "is not JSON"),
        (struct.pack("<4sHHI", b"LETO", 1, 0, 9) + b'{"a":NaN}', "NaN is not JSON"),
        (struct.pack("<4sHHI", b"LETO", 1, 0, 2) + b"[]", "must be a JSON object, found list"),
        (struct.pack("<4sHHI", b"LETO", 1, 0, 60000) + b"[" * 60000, "is not JSON"),
        (struct.pack("<4sHHI", b"LETO", 1, 0, 6000) + b"1" * 6000, "is not JSON"),
    ],
)
def test_garbage_is_named(pair, data, text):
    left, right = pair
    left.sendall(data)
    with pytest.raises(ProtocolError, match=text):
        protocol.receive(right, deadline=soon())


@pytest.mark.parametrize(
    ("message", "fd_count", "text"),
    [
        ({"a": "x" * 65536}, 0, "a message body is at most 65536 bytes, found 65544"),
        ({"a": object()}, 0, "must be plain JSON"),
        ({"a": float("nan")}, 0, "must be plain JSON"),
        (["a"], 0, r"a message is a JSON object \(dict\), found list"),
        ({}, 9, "carries at most 8 descriptors, found 9"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_the_sender(message, fd_count, text):
    with pytest.raises(ProtocolError, match=text):
        protocol.encode(message, fd_count)


def test_the_largest_message_fits(pair):
    left, right = pair
    message = {"a": "x" * (protocol.MAX_BODY_BYTES - len('{"a":""}'))}
    protocol.send(left, message, deadline=soon())
    assert protocol.receive(right, deadline=soon())[0] == message


def test_cut_off_at_every_byte():
    frame = protocol.encode({"op": "reserve", "bytes": 12345}, 2)
    before = open_fds()
    for length in range(len(frame)):
        left, right = socket.socketpair()
        fds = [memfd("cut0"), memfd("cut1")]
        with left, right:
            if length:
                socket.send_fds(left, [frame[:length]], fds)
            left.close()
            text = rf"message cut off: .* after {length} bytes" if length else "the peer has closed the connection"
            with pytest.raises(ProtocolError, match=text):
                protocol.receive(right, deadline=soon())
        protocol.close_fds(fds)
    assert open_fds() == before


def test_too_many_descriptors_are_refused_and_closed(pair):
    left, right = pair
    before = open_fds()
    fds = [memfd(f"many{i}") for i in range(protocol.MAX_FDS + 1)]
    frame = protocol.encode({}, 8)
    socket.send_fds(left, [frame], fds)
    protocol.close_fds(fds)
    with pytest.raises(ProtocolError, match="descriptors were cut off: more than 8 in one message"):
        protocol.receive(right, deadline=soon())
    assert open_fds() == before


def test_descriptors_of_a_refused_message_are_closed(pair):
    left, right = pair
    before = open_fds()
    fds = [memfd("refused")]
    socket.send_fds(left, [struct.pack("<4sHHI", b"LETO", 1, 1, 4) + b"nope"], fds)
    protocol.close_fds(fds)
    with pytest.raises(ProtocolError):
        protocol.receive(right, deadline=soon())
    assert open_fds() == before


def test_descriptors_that_dribble_in_are_bounded(pair):
    left, right = pair
    before = open_fds()
    decoder = protocol.Decoder()
    frame = protocol.encode({"a": "b" * 64}, 8)
    with pytest.raises(ProtocolError, match="too many descriptors: 24 are waiting"):  # noqa: PT012
        for byte in frame:
            fds = [memfd("dribble") for _ in range(8)]
            socket.send_fds(left, [bytes([byte])], fds)
            protocol.close_fds(fds)
            decoder.read_from(right)
            decoder.next_message()
    assert open_fds() == before
    with pytest.raises(ProtocolError, match="too many descriptors"):  # a decoder that has failed stays so
        decoder.feed(b"")


def test_descriptors_without_a_message_are_refused():
    decoder = protocol.Decoder()
    decoder.feed(protocol.encode({"a": 1}), [memfd("stray")])
    assert decoder.next_message() == ({"a": 1}, [])
    with pytest.raises(ProtocolError, match="1 descriptors came without a message"):
        decoder.next_message()


def test_blocking_receive_never_reads_into_the_next_message(pair):
    left, right = pair
    fds = [memfd("first"), memfd("third")]
    protocol.send(left, {"n": 1}, fds[:1], deadline=soon())
    protocol.send(left, {"n": 2}, deadline=soon())
    protocol.send(left, {"n": 3}, fds[1:], deadline=soon())
    for n, content in ((1, b"first"), (2, None), (3, b"third")):
        message, received = protocol.receive(right, deadline=soon())
        assert message == {"n": n}
        assert [os.pread(fd, 9, 0) for fd in received] == ([content] if content else [])
        protocol.close_fds(received)
    protocol.close_fds(fds)


def test_decoder_and_outbox_keep_order_and_descriptors_over_a_small_socket(pair):
    seed = int(os.environ.get("LETO_TEST_SEED", random.randrange(2**32)))
    print("seed", seed)
    rng = random.Random(seed)
    left, right = pair
    left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    left.setblocking(False)
    right.setblocking(False)
    outbox, decoder = protocol.Outbox(left), protocol.Decoder()
    before = open_fds()
    sent, received = [], []
    for n in range(120):
        names = [f"m{n}.{i}" for i in range(rng.choice([0, 0, 1, 2, 8]))]
        fds = [memfd(name) for name in names]
        outbox.put({"n": n, "pad": "x" * rng.randrange(0, 6000)}, fds)
        protocol.close_fds(fds)
        sent.append((n, names))
    while len(received) < len(sent):
        outbox.flush()
        while True:
            try:
                decoder.read_from(right, rng.randrange(1, 9000))
            except BlockingIOError:
                break
            while (item := decoder.next_message()) is not None:
                message, fds = item
                received.append((message["n"], [os.pread(fd, 16, 0).decode() for fd in fds]))
                protocol.close_fds(fds)
    assert received == sent
    assert outbox.sent == len(sent)
    assert not outbox.pending
    assert not decoder.partial
    assert open_fds() == before


def test_decoder_takes_any_split_of_the_stream():
    frames = [protocol.encode({"n": n, "text": "é" * n}) for n in range(4)]
    stream = b"".join(frames)
    for cut in range(len(stream) + 1):
        decoder = protocol.Decoder()
        found = []
        for part in (stream[:cut], stream[cut:]):
            decoder.feed(part)
            while (item := decoder.next_message()) is not None:
                found.append(item[0]["n"])
        assert found == [0, 1, 2, 3]
        decoder.end()


def test_a_slow_peer_is_waited_for_until_the_deadline(pair):
    left, right = pair
    frame = protocol.encode({"slow": True})

    def dribble():
        for byte in frame:
            left.sendall(bytes([byte]))
            time.sleep(0.002)

    thread = threading.Thread(target=dribble)
    thread.start()
    assert protocol.receive(right, deadline=soon()) == ({"slow": True}, [])
    thread.join()
    left.sendall(frame[:-1])
    begin = time.monotonic()
    with pytest.raises(DeadlineError, match="receiving a message did not end before its deadline"):
        protocol.receive(right, deadline=soon(0.05))
    assert 0.04 < time.monotonic() - begin < 2.0


def test_a_peer_that_does_not_read_ends_a_send_at_the_deadline(pair):
    left, _ = pair
    with pytest.raises(DeadlineError, match="sending a message did not end"):  # noqa: PT012
        for _ in range(1000):
            protocol.send(left, {"a": "x" * 60000}, deadline=soon(0.05))


def test_a_peer_that_is_gone_is_an_error_of_ours(pair):
    left, right = pair
    right.close()
    with pytest.raises(ProtocolError, match="the peer has closed the connection"):
        protocol.send(left, {}, deadline=soon())
    with pytest.raises(ProtocolError, match="the peer has closed the connection"):
        protocol.receive(left, deadline=soon())


def test_a_descriptor_that_is_not_open_is_named(pair):
    left, _ = pair
    with pytest.raises(ProtocolError, match=r"one of the descriptors \[999999\] is not open"):
        protocol.send(left, {}, [999999], deadline=soon())


def test_an_outbox_is_bounded(pair):
    left, _ = pair
    left.setblocking(False)
    outbox = protocol.Outbox(left)
    with pytest.raises(ProtocolError, match=r"the peer does not read: [0-9]+ bytes are waiting"):  # noqa: PT012
        for _ in range(1000):
            outbox.put({"a": "x" * 60000})
            outbox.flush()
    outbox.close()


def test_peer_identity(pair):
    left, _ = pair
    assert protocol.peer_of(left) == (os.getpid(), os.geteuid(), os.getegid())
    fd = protocol.peer_pidfd(left)
    assert f"Pid:\t{os.getpid()}\n" in Path(f"/proc/self/fdinfo/{fd}").read_text()
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_peer_identity_on_a_kernel_before_6_5(pair, monkeypatch):
    monkeypatch.setattr(protocol, "_SO_PEERPIDFD", 9999)
    fd = protocol.peer_pidfd(pair[0])
    assert f"Pid:\t{os.getpid()}\n" in Path(f"/proc/self/fdinfo/{fd}").read_text()
    os.close(fd)


def test_a_peer_that_is_dead_is_told(tmp_path):
    sock, _ = protocol.listen(tmp_path / "s")
    code = f"import socket; socket.socket(socket.AF_UNIX).connect({str(tmp_path / 's')!r})"
    subprocess.run([sys.executable, "-S", "-c", code], check=True)
    accepted, _ = sock.accept()
    with sock, accepted:
        try:  # newer kernels give the pidfd of a dead process, which is readable at once
            fd = protocol.peer_pidfd(accepted)
        except ProtocolError as error:
            found = str(error)
        else:
            found = "is dead" if exited(fd) else "lives"
            os.close(fd)
    assert "is dead" in found


def test_listen_and_connect(tmp_path):
    path = tmp_path / "s"
    with pytest.raises(JobError, match="the manager is not running: there is no socket at"):
        protocol.connect(path, deadline=soon(), what="the manager")
    sock, replaced = protocol.listen(path)
    assert not replaced
    assert os.stat(path).st_mode & 0o777 == 0o600
    with protocol.connect(path, deadline=soon()) as client:
        assert not client.getblocking()
    with pytest.raises(JobError, match=rf"a thing already answers at .* \(process {os.getpid()}\)"):
        protocol.listen(path, what="a thing")
    sock.close()
    with pytest.raises(JobError, match="is gone: nobody answers at the dead socket"):
        protocol.connect(path, deadline=soon())
    sock, replaced = protocol.listen(path)
    assert replaced
    sock.close()
    path.unlink()
    path.write_text("x")
    with pytest.raises(JobError, match=r"expected a socket or nothing at .*, found -rw"):
        protocol.listen(path)


def test_a_full_queue_ends_at_the_deadline(tmp_path):
    path = tmp_path / "s"
    sock, _ = protocol.listen(path, backlog=0)
    with sock, protocol.connect(path, deadline=soon()), pytest.raises(DeadlineError, match="takes no connection: it is stopped or stuck"):
        protocol.connect(path, deadline=soon(0.05))


def test_an_address_that_is_too_long_is_named(tmp_path):
    path = tmp_path / ("x" * 120)
    for call in (lambda: protocol.connect(path, deadline=soon()), lambda: protocol.listen(path)):
        with pytest.raises(UsageError, match=rf"is {len(str(path))} bytes long, the limit of AF_UNIX is 107.*XDG_RUNTIME_DIR"):
            call()
    assert protocol.check_address("/" + "x" * 106) == "/" + "x" * 106
    with pytest.raises(UsageError):
        protocol.check_address("/" + "x" * 107)


def test_errors_travel_as_their_class():
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, LetoError):
            reply = json.loads(json.dumps(protocol.error_reply(kind(f"text of {name}"))))
            with pytest.raises(kind, match=f"text of {name}") as caught:
                protocol.raise_error(reply)
            assert type(caught.value) is kind
    with pytest.raises(LetoError, match="internal error: ZeroDivisionError: x"):
        protocol.raise_error(protocol.error_reply(ZeroDivisionError("x")))
    with pytest.raises(LetoError):  # of a newer version
        protocol.raise_error({"error": {"type": "os", "message": "m"}})
    with pytest.raises(ProtocolError, match="must name type and message"):
        protocol.raise_error({"error": "boom"})
    protocol.raise_error({"ok": True})
    assert len(protocol.encode(protocol.error_reply(MemoryBudgetError("\U0001f600" * 10**6)))) < protocol.MAX_BODY_BYTES


def test_nothing_here_imports_jax_or_numpy():
    code = """if True:
        import sys
        from leto_jax.manager import client, fence, hub, limits, memory, protocol, runtime, server, store
        heavy = {"jax", "jaxlib", "numpy", "psutil", "pickle", "multiprocessing"}
        found = sorted(name for name in sys.modules if name.split(".")[0] in heavy)
        assert not found, found
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

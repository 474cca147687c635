"""What ranks write comes out whole, line by line, with its rank before it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from leto_jax.agent.output import MAX_LINE_BYTES, Lines, Terminal


@pytest.mark.parametrize(
    ("pieces", "out"),
    [
        ([], b""),
        ([b"one\ntwo\n"], b"[3] one\n[3] two\n"),
        ([b"o", b"ne\nt", b"wo"], b"[3] one\n[3] two\n"),
        ([b"\n\n"], b"[3] \n[3] \n"),
        ([b"no end"], b"[3] no end\n"),
        ([b"\xff\r10%\r20%\n"], b"[3] \xff\r10%\r20%\n"),
    ],
)
def test_lines(pieces, out):
    lines = Lines(b"[3] ")
    assert b"".join(map(lines.feed, pieces)) + lines.end() == out


def test_a_line_without_an_end_is_broken_and_not_kept():
    lines = Lines(b"[0] ")
    found = lines.feed(b"x" * (2 * MAX_LINE_BYTES + 5)).splitlines()
    assert [len(line) for line in found] == [MAX_LINE_BYTES + 4] * 2
    assert lines.end() == b"[0] xxxxx\n"


TALKS = """
import os, sys
for number in range(2000):
    os.write(1, b"line %d of %s\\n" % (number, sys.argv[1].encode()))
os.write(2, b"last words")
os.kill(os.getpid(), 9)
"""


@pytest.fixture
def pipes():
    ends = [os.pipe() for _ in range(2)]
    yield ends
    for end in (end for pair in ends for end in pair):
        os.close(end)


def test_nothing_of_a_process_that_was_killed_is_lost(tmp_path):
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        terminal = Terminal(out.fileno(), err.fileno())
        relay = terminal.relay(2)
        command = [sys.executable, "-S", "-c", TALKS]
        children = [subprocess.Popen([*command, str(rank)], stdout=ends[0], stderr=ends[1]) for rank, ends in enumerate(relay.ends)]
        relay.start()
        assert [child.wait() for child in children] == [-9, -9]
        terminal.drain()
        assert not relay.is_alive()
    lines = (tmp_path / "out").read_text().splitlines()
    for rank in range(2):
        assert [line for line in lines if line.startswith(f"[{rank}] ")] == [f"[{rank}] line {number} of {rank}" for number in range(2000)]
    assert len(lines) == 4000
    assert sorted((tmp_path / "err").read_text().splitlines()) == ["[0] last words", "[1] last words"]


def test_a_terminal_that_is_stopped_holds_up_nobody_but_the_writers(pipes):
    """And one that is closed loses what is written, and ends nothing."""
    (out_read, out_write), (_, err_write) = pipes
    os.set_blocking(out_write, False)
    while True:
        try:
            os.write(out_write, b"x" * 4096)
        except BlockingIOError:
            break
    terminal = Terminal(out_write, err_write)
    relay = terminal.relay(1)
    copies = [os.dup(end) for end in relay.ends[0]]
    relay.start()
    os.write(copies[0], b"waits\n")
    time.sleep(0.05)
    assert relay.is_alive()
    for copy in copies:
        os.close(copy)
    while relay.is_alive():
        os.read(out_read, 1 << 16)
        relay.join(0.01)
    os.set_blocking(out_read, False)
    closed = Terminal(os.open(os.devnull, os.O_RDONLY), err_write)
    closed.write(0, b"lost\n")

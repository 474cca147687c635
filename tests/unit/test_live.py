"""Metrics of a running job: names and values as Prometheus and TensorBoard see them."""

from __future__ import annotations

import json
import re
import struct
import urllib.request

import pytest
from test_report import failure, log

from leto_jax import errors
from leto_jax.goodput import live


def scrape(port: int) -> dict[str, float]:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    return {name: float(value) for name, value in re.findall(r"^(leto_[^ ]+) (\S+)$", text, re.MULTILINE) if "_created" not in name}


@pytest.fixture
def prometheus():
    made = live.Prometheus(0, "j")
    yield made
    made.close()


def test_counters_and_times(prometheus):
    prometheus.observe(failure(15.2, 1, step=10, detect_secs=0.2, lost_step_secs=0.3, kind="sigkill"))
    prometheus.observe(log(16, "takeover", path="shadow", takeover_secs=0.25, step=10))
    prometheus.observe(log(17, "saved", tier="persistent", stall_secs=0.5, error=""))
    prometheus.observe(log(18, "saved", tier="persistent", stall_secs=9.0, error="disk full"))
    prometheus.observe(log(18, "done", commit=20))
    found = scrape(prometheus.port)
    assert found['leto_failures_total{job="j",kind="sigkill"}'] == 1
    assert found['leto_takeovers_total{job="j",path="shadow"}'] == 1
    assert (found['leto_takeover_seconds_count{job="j"}'], found['leto_takeover_seconds_sum{job="j"}']) == (1, 0.25)
    assert (found['leto_takeover_seconds_bucket{job="j",le="0.2"}'], found['leto_takeover_seconds_bucket{job="j",le="0.3"}']) == (0, 1)
    assert found['leto_copies_total{job="j",tier="persistent"}'] == 1
    assert found['leto_copy_stall_seconds_total{job="j",tier="persistent"}'] == 0.5


def test_steps_are_counted_once_however_often_they_are_trained(prometheus):
    for commit in (3, 5, 9, 6, 8, 10):  # after 9 it went back to 6
        prometheus.sample(commit, 0.5, True)
    found = scrape(prometheus.port)
    assert found['leto_steps_total{job="j"}'] == 7
    assert (found['leto_commit{job="j"}'], found['leto_step_seconds{job="j"}'], found['leto_shadow_ready{job="j"}']) == (10, 0.5, 1)


def test_a_port_that_is_taken(prometheus):
    with pytest.raises(errors.UsageError, match=rf"--metrics-port {prometheus.port}: cannot listen on 127\.0\.0\.1: .*; name another port"):
        live.Prometheus(prometheus.port, "k")


def scalars(directory) -> list[tuple[str, int, float]]:
    """(tag, step, value) of all scalars in TensorBoard's files: records of length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted(directory.glob("events*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + size])
            found += [(value.tag, event.step, round(value.simple_value, 6)) for value in event.summary.value]
            at += 16 + size
    return found


def add(path, *steps: int) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps({"step": n, "time": 1e9 + n, "loss": 1.0 / n}) + "\n" for n in steps)


def test_scalars_of_each_step_once(tmp_path):
    rows, directory = tmp_path / "metrics.jsonl", tmp_path / "board"
    board = live.TensorBoard(directory, rows)
    board.poll()  # there is no file yet
    add(rows, 1, 2)
    board.poll()
    with open(rows, "a") as file:
        file.write('{"step": 3, ')  # torn
    board.poll()
    rows.write_text("")  # cut back to step 1
    add(rows, 1, 2, 4)
    board.observe(log(16, "takeover", path="shadow", takeover_secs=0.25, step=2))
    board.close()
    assert scalars(directory) == [("loss", 1, 1.0), ("loss", 2, 0.5), ("leto/takeover_seconds", 2, 0.25), ("loss", 4, 0.25)]


def test_a_directory_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.UsageError, match=r"--tensorboard: .*file/x cannot be written to"):
        live.TensorBoard(tmp_path / "file" / "x", tmp_path / "rows")

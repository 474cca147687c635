"""The page of a report: what its figures are made of, and that it stands by itself."""

from __future__ import annotations

import json
import re

import pytest
from test_report import begin, end, failure, log

from leto_jax import errors
from leto_jax.goodput import page, report


def journal(restored: bool = False) -> list[dict]:
    """A run of 20 steps whose trainer dies at 15 s; a shadow takes over, or a new process goes on from a copy of step 6."""
    events = [*begin(), log(11, "ready", incarnation=2, level=3), failure(15.2, 1, step=10, detect_secs=0.2, lost_step_secs=0.3)]
    events += [
        log(15.3, "fence", incarnation=1, killed=[1], remaining=[], secs=0.1),
        log(15.31, "decision", action="promote", path="shadow"),
    ]
    stages = {"restore": 0.1} if restored else {"verify": 0.1}
    events += [log(15.6, "attached", incarnation=2, commit=6 if restored else 10, action="restore" if restored else "redo", stages=stages)]
    if restored:
        events += [log(16.2, "first_step", incarnation=2, commit=7, secs=0.5)]
    at = 18.2 if restored else 16.2
    more = {
        "step": 10,
        "commit": 11,
        "takeover_secs": 0.7,
        "detect_secs": 0.2,
        "lost_steps": 4 * restored,
        "plain_step_secs": 0.5,
        "path": "shadow",
    }
    events += [log(at, "takeover", incarnation=2, stages={**stages, "first_step": 0.5}, **more)]
    return events + end(30, 2, steps=13, step_secs=6.0, commit=20)


@pytest.mark.parametrize("restored", [False, True])
def test_recoveries(restored):
    ((failed, back, done),) = page.recoveries(journal(restored))
    start = journal()[0]["time"]
    assert (round(failed - start, 3), round(back - start, 3), round(done - start, 3)) == (15.0, 16.2, 18.2 if restored else 16.2)


def test_a_recovery_that_does_not_end_lasts_to_the_end():
    events = journal()[:8]
    ((failed, back, done),) = page.recoveries(events)
    assert failed < back == done == events[-1]["time"]


def test_lives():
    start = journal()[0]["time"]
    found = [(role, rank, round(first - start, 2), round(last - start, 2)) for role, rank, first, last in page.lives(journal())]
    assert found == [
        ("trainer", 0, 0.0, 15.2),
        ("shadow", 0, 10.01, 11.0),
        ("shadow, ready", 0, 11.0, 15.6),
        ("trainer", 0, 15.6, 30.0),
    ]


def test_a_shadow_that_was_released_is_no_more():
    events = journal()
    events.insert(6, log(13, "released", incarnation=2))
    start = events[0]["time"]
    assert ("shadow, ready", 11.0, 13.0) in [
        (role, round(first - start, 2), round(last - start, 2)) for role, _, first, last in page.lives(events)
    ]


@pytest.mark.parametrize("with_rows", [True, False])
def test_a_page_needs_nothing_else(tmp_path, with_rows):
    events = journal(restored=True)
    events[0]["job"] = "<a&b>"
    rows = [{"step": n, "time": events[0]["time"] + 9 + n, "loss": 3.0 / n} for n in range(1, 21)] if with_rows else []
    written = page.write(report.summarise(events), events, rows, tmp_path / "deep" / "page")
    assert [path.name for path in written] == ["timeline.png", "badput.png", "throughput.png", "loss.png", "report.html"]
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n") for path in written[:-1])
    text = written[-1].read_text()
    assert text.count("data:image/png;base64,") == 4
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)|https?://|@import|url\(""", text)
    assert "job &lt;a&amp;b&gt;" in text
    assert "<a&b>" not in text
    assert "checkpoint stall" in text
    assert "0.700" in text


def test_rows_that_are_torn_or_not_there(tmp_path):
    assert page.read_rows(tmp_path / "none") == []
    (tmp_path / "rows").write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2')
    assert page.read_rows(tmp_path / "rows") == [{"step": 1}]


def test_a_directory_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.UsageError, match=r"--html: .*file/x cannot be written to: Not a directory"):
        page.write(report.summarise(journal()), journal(), [], tmp_path / "file" / "x")

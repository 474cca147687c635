"""Reports of synthetic journals: every second is booked once, and under the right cause."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest

from leto_jax.errors import JobError, RecordError, UsageError
from leto_jax.goodput import report
from leto_jax.goodput.report import Cause

TIME, BOOT_NS = 1_800_000_000.0, 5_000_000_000_000
KEYS = {"job", "steps", "wall_secs", "takeovers", "goodput", "ettr", "badput_secs", "coverage", "peer_coverage"}


def log(at: float, event: str, **fields: Any) -> dict[str, Any]:
    """An event at `at` seconds. It has the fields that the journal demands of it, those not given with a value of no interest."""
    usual = {"rank": 0, "reason": "", "pid": 1, "kind": "sigkill", "phase": "compute", "role": "trainer", "path": "first", "compiles": 0}
    assert set(fields) <= set(report.FIELDS[event])
    filled = {name: fields.get(name, usual.get(name, 0)) for name in report.FIELDS[event]}
    return {"time": TIME + at, "ns": BOOT_NS + round(at * 1e9), "event": event, **filled}


def failure(
    at: float, incarnation: int, step: int, detect_secs: float, lost_step_secs: float, hang: bool = False, **fields: Any
) -> dict[str, Any]:
    failed_ns = BOOT_NS + round((at if hang else at - detect_secs) * 1e9)
    return log(
        at,
        "failure",
        incarnation=incarnation,
        step=step,
        failed_ns=failed_ns,
        detect_secs=detect_secs,
        lost_step_secs=lost_step_secs,
        **fields,
    )


def begin(attached: bool = False, at: float = 0.0) -> list[dict[str, Any]]:
    """Start until the end of the first step at 10 s, which took 1 s. Plain steps take 0.5 s in all these journals."""
    fill = {"verify": 0.1, "fill": 0.2, "data": 0.05}
    return [
        log(at, "start", job="j", attached=attached),
        log(at, "spawn", incarnation=1),
        log(at + 8, "attached", incarnation=1, commit=0, action="fill", stages=fill),
        log(at + 10, "first_step", incarnation=1, commit=1, secs=1.0),
        log(at + 10.01, "spawn", role="shadow", incarnation=2, path="shadow"),
    ]


def end(at: float, incarnation: int, steps: int, step_secs: float, commit: int, stale_secs: float = 0.0) -> list[dict[str, Any]]:
    """The trainer is done at `at`, has ended half a second later, and the agent another half a second later."""
    return [
        log(at, "done", incarnation=incarnation, commit=commit),
        log(at + 0.5, "ended", incarnation=incarnation, steps=steps, step_secs=step_secs, stale_secs=stale_secs, peer_stale_secs=None),
        log(at + 1, "finish", code=0),
    ]


def spent(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by cause, without zeros. Asserts that they add up to the wall time to the nanosecond."""
    ledger = report.book(events)
    assert set(ledger.spent_ns) == set(Cause)
    assert sum(ledger.spent_ns.values()) == ledger.wall_ns
    assert min(ledger.spent_ns.values()) >= 0
    return {cause.value: ns / 1e9 for cause, ns in ledger.spent_ns.items() if ns}


def test_without_a_failure():
    events = begin() + end(20, 1, steps=10, step_secs=5.5, commit=10, stale_secs=2.2)
    assert spent(events) == {"productive": 5.0, "initialisation": 9.0, "first_step_overhead": 0.5, "body_and_data": 5.5, "shutdown": 1.0}
    found = report.summarise(events)
    assert set(found) == KEYS
    assert (found["job"], found["steps"], found["wall_secs"], found["takeovers"]) == ("j", 10, 21.0, [])
    assert found["goodput"] == pytest.approx(5 / 21)
    assert found["ettr"] == pytest.approx(10.5 / 21)
    assert found["coverage"] == pytest.approx(1 - 2.2 / 11)
    assert sum(found["badput_secs"].values()) == pytest.approx(found["wall_secs"], abs=1e-9)
    assert list(found["badput_secs"]) == [cause.value for cause in Cause]
    assert found["goodput"] * found["wall_secs"] == pytest.approx(found["badput_secs"]["productive"])
    assert json.loads(json.dumps(found)) == found


def test_parity_with_a_peer_has_a_coverage_of_its_own():
    events = begin() + end(20, 1, steps=10, step_secs=5.5, commit=10, stale_secs=2.2)
    assert report.summarise(events)["peer_coverage"] is None
    ended = [dict(event, peer_stale_secs=5.5) if event["event"] == "ended" else event for event in events]
    found = report.summarise(ended)
    assert (found["coverage"], found["peer_coverage"]) == (pytest.approx(1 - 2.2 / 11), pytest.approx(0.5))


STAGES = {"detect": 0.03, "fence": 0.07, "attach": 0.02, "verify": 0.01, "roll_forward": 0.04, "data": 0.01, "first_step": 0.6}


def takeover(
    at: float, incarnation: int, commit: int, action: str, stages: dict[str, float] | None = None, **fields: Any
) -> list[dict[str, Any]]:
    """From the end of the fence, at `at`, to the end of the first step at `at` + 1. Attached after 0.2 s, the first step takes 0.6 s."""
    stages = stages or STAGES
    early = {name: secs for name, secs in stages.items() if name != "first_step"}
    details = {"takeover_secs": 0.6, "detect_secs": 0.03, "plain_step_secs": 0.5, "path": "shadow", "level": 3, "plan": action, **fields}
    return [
        log(at, "fence", incarnation=incarnation - 1, secs=0.07),
        log(at + 0.01, "operability", operable=True),
        log(at + 0.02, "decision", action="promote", path="shadow"),
        log(at + 0.2, "attached", incarnation=incarnation, commit=commit, action=action, stages=early),
        log(at + 1, "takeover", incarnation=incarnation, commit=commit + 1, stages=stages, **details),
    ]


def test_two_takeovers_one_recomputes_and_one_rolls_forward():
    events = [
        *begin(),
        # Step 11 had run for 0.2 s when the trainer was killed at 15.97 s; noticed at 16 s, fenced at 16.1 s.
        log(16, "ended", incarnation=1, steps=10, step_secs=5.5, stale_secs=1.0, peer_stale_secs=None),
        failure(16, 1, step=10, detect_secs=0.03, lost_step_secs=0.2, phase="compute"),
        *takeover(16.1, 2, commit=10, action="redo", lost_steps=1, step=10),
        # Step 13 had run for 0.3 s; the next trainer finishes it: commit 13.
        log(20, "ended", incarnation=2, steps=2, step_secs=1.1, stale_secs=0.5, peer_stale_secs=None),
        failure(20, 2, step=12, detect_secs=0.03, lost_step_secs=0.3, phase="update"),
        *takeover(20.1, 3, commit=13, action="roll_forward", kind="page_loss", phase="update", step=12, compiles=2),
        *end(26, 3, steps=4, step_secs=2.1, commit=17),
    ]
    expected = {
        # first trainer 0.5 + 4.5, second 0.5 + 0.5, the step that was rolled forward 0.3, third 0.5 + 1.5
        "productive": 8.3,
        "initialisation": 9.0,
        "first_step_overhead": 0.5 + 0.1 + 0.1,
        "detection": 0.06,
        "fence": 0.2,
        "attach": 2 * (0.4 - 0.05),  # from the fence to the first step, less verify and roll forward
        "roll_forward": 2 * 0.05,
        "recomputed_steps": 0.2,
        # 9 .. 15.97 less 5.5 and 0.2; 16.5 .. 19.97 less 1.1 and 0.3; 20.5 .. 26 less 2.1
        "body_and_data": 1.27 + 2.07 + 3.4,
        "shutdown": 1.0,
    }
    assert spent(events) == pytest.approx(expected, abs=1e-9)
    found = report.summarise(events)
    assert (found["steps"], found["wall_secs"]) == (17, 27.0)
    assert found["coverage"] == pytest.approx(1 - 1.5 / (6.97 + 3.47 + 5.5))
    assert [list(item) for item in found["takeovers"]] == [list(report.TAKEOVER_KEYS)] * 2
    assert found["takeovers"][0] == {
        "rank": 0,
        "kind": "sigkill",
        "phase": "compute",
        "step": 10,
        "takeover_secs": 0.6,
        "detect_secs": 0.03,
        "stages": STAGES,
        "lost_steps": 1,
        "compiles": 0,
        "path": "shadow",
        "level": 3,
        "plain_step_secs": 0.5,
    }
    assert report.takeover_secs(found["takeovers"][0], 0.4) == pytest.approx(0.7)
    assert [found["takeovers"][1][key] for key in ("kind", "phase", "step", "compiles")] == ["page_loss", "update", 12, 2]


def test_a_step_that_ran_out_of_memory_is_booked_up_to_its_second_try():
    events = [
        *begin(),
        log(15, "released", incarnation=2),
        log(15.8, "retried", incarnation=1, step=7, action="redo", secs=0.4),
        *end(20, 1, steps=10, step_secs=5.5, commit=10),
    ]
    expected = {
        "productive": 5.0,
        "initialisation": 9.0,
        "first_step_overhead": 0.5,
        "body_and_data": 5.1,
        "roll_forward": 0.4,
        "shutdown": 1.0,
    }
    assert spent(events) == pytest.approx(expected)
    # In the very first step it is a part of the way there.
    events.insert(3, log(9, "retried", incarnation=1, step=1, action="redo", secs=0.3))
    assert spent(events) == pytest.approx(expected)


def test_a_commit_that_the_control_words_did_not_show_is_kept():
    events = [
        *begin(),
        log(16, "ended", incarnation=1, steps=10, step_secs=5.5),
        failure(16, 1, step=10, detect_secs=0.0, lost_step_secs=0.4, phase="commit"),
        *takeover(16.1, 2, commit=11, action="redo"),
        *end(20, 2, steps=1, step_secs=0.6, commit=12),
    ]
    assert "recomputed_steps" not in spent(events)
    assert report.summarise(events)["steps"] == 12


def test_a_hang_counts_as_detection_from_when_it_began():
    # Stopped at 13 s, 0.2 s into step 8; the watchdog says so at 16 s, and counts the failure from there.
    events = [
        *begin(),
        log(16, "ended", incarnation=1, steps=7, step_secs=3.8),
        failure(16, 1, step=7, detect_secs=3.0, lost_step_secs=3.2, hang=True, kind="sigstop"),
        *takeover(16.1, 2, commit=7, action="redo", kind="sigstop", detect_secs=3.0),
        *end(20, 2, steps=5, step_secs=2.6, commit=12),
    ]
    found = spent(events)
    assert (found["detection"], found["recomputed_steps"]) == (3.0, 0.2)
    # 9 .. 13 is full of steps; 16.5 .. 20 has 0.9 s beside them
    assert found["body_and_data"] == pytest.approx(0.9, abs=1e-9)
    assert report.summarise(events)["takeovers"][0]["detect_secs"] == 3.0


def test_a_hang_whose_begin_is_not_known_loses_no_work():
    events = [
        *begin(),
        log(16, "ended", incarnation=1, steps=7, step_secs=4.0),
        failure(16, 1, step=7, detect_secs=2.0, lost_step_secs=2.0, hang=True, kind="hang"),
        *takeover(16.1, 2, commit=7, action="redo"),
        *end(20, 2, steps=5, step_secs=2.6, commit=12),
    ]
    found = spent(events)
    assert found["detection"] == 2.0
    assert "recomputed_steps" not in found


def cold(at: float, action: str = "redo", commit: int = 10) -> list[dict[str, Any]]:
    """From the end of the fence at `at`: a new process, attached after 4 s, first step done after 5 s."""
    stages = {"verify": 0.1, "roll_forward": 0.2, "data": 0.1}
    return [
        log(at, "fence", incarnation=1),
        log(at + 0.1, "spawn", incarnation=3, path="cold"),
        log(at + 0.1, "decision", action="cold", path="cold"),
        log(at + 4, "attached", incarnation=3, commit=commit, action=action, stages=stages),
        log(
            at + 5,
            "takeover",
            incarnation=3,
            commit=commit + 1,
            stages={"detect": 0.0, "fence": 0.1, **stages, "first_step": 0.7},
            takeover_secs=4.6,
            plain_step_secs=0.5,
            path="cold",
        ),
    ]


def test_a_cold_attach_is_mostly_initialisation():
    events = [
        *begin(),
        log(16, "ended", incarnation=1, steps=10, step_secs=5.5),
        failure(16, 1, step=10, detect_secs=0.0, lost_step_secs=0.0, phase="body"),
        *cold(16.1),
        *end(25, 3, steps=2, step_secs=1.2, commit=12),
    ]
    found = spent(events)
    assert found["initialisation"] == pytest.approx(9 + 3.9 - 0.4, abs=1e-9)
    assert found["roll_forward"] == pytest.approx(0.3, abs=1e-9)
    assert found["attach"] == pytest.approx(0.1 + 0.1 + 0.3, abs=1e-9)  # decision, data, and from there to the first step
    assert found["first_step_overhead"] == pytest.approx(0.5 + 0.2, abs=1e-9)
    assert report.summarise(events)["takeovers"][0]["path"] == "cold"


def test_a_late_shadow_gets_ready_first():
    events = [
        *begin(),
        log(16, "ended", incarnation=1, steps=10, step_secs=5.5),
        failure(16, 1, step=10, detect_secs=0.0, lost_step_secs=0.0),
        log(16.1, "fence", incarnation=1),
        log(16.2, "decision", action="wait", path="late_shadow"),
        log(18, "ready", incarnation=2, level=3),
        log(18.1, "decision", action="promote", path="late_shadow"),
        log(18.2, "attached", incarnation=2, commit=10, action="redo", stages={"attach": 0.02}),
        log(19, "takeover", incarnation=2, commit=11, stages={"first_step": 0.5}, plain_step_secs=0.5, path="late_shadow"),
        *end(20, 2, steps=1, step_secs=0.5, commit=11),
    ]
    found = spent(events)
    assert found["initialisation"] == pytest.approx(9 + 1.9, abs=1e-9)
    assert found["attach"] == pytest.approx(0.1 + 0.4, abs=1e-9)


def test_a_promotion_that_fails_becomes_a_cold_attach():
    events = [
        *begin(),
        log(16, "ended", incarnation=1, steps=10, step_secs=5.5),
        failure(16, 1, step=10, detect_secs=0.0, lost_step_secs=0.0),
        log(16.1, "fence", incarnation=1),
        log(16.2, "spawn", incarnation=3, path="cold"),
        log(16.2, "decision", action="promote", path="shadow"),
        *cold(16.1)[3:],
        *end(25, 3, steps=2, step_secs=1.2, commit=12),
    ]
    assert spent(events)["initialisation"] == pytest.approx(9 + 3.9 - 0.4, abs=1e-9)


def test_a_failure_during_a_takeover():
    # The trainer of commit 10 dies 0.3 s into step 11, the next one while it rolls step 11 forward; the third one finishes that.
    events = [
        *begin(),
        log(16, "ended", incarnation=1, steps=10, step_secs=5.5),
        failure(16, 1, step=10, detect_secs=0.0, lost_step_secs=0.3, phase="update"),
        *takeover(16.1, 2, commit=11, action="roll_forward")[:3],
        log(17, "ended", incarnation=2, steps=0, step_secs=0.0),
        failure(17, 2, step=10, detect_secs=0.1, lost_step_secs=0.0, phase="takeover"),
        *takeover(17.1, 3, commit=11, action="roll_forward", phase="takeover"),
        *end(20, 3, steps=1, step_secs=0.6, commit=12),
    ]
    found = spent(events)
    assert found["attach"] == pytest.approx((16.9 - 16.1) + (0.4 - 0.05), abs=1e-9)
    assert found["detection"] == pytest.approx(0.1, abs=1e-9)
    assert "recomputed_steps" not in found
    assert len(report.summarise(events)["takeovers"]) == 1


def test_death_in_the_first_step_of_a_process_is_work_to_do_again():
    events = [
        *begin()[:3],
        log(10, "ended", incarnation=1, steps=0, step_secs=0.0),
        failure(10, 1, step=0, detect_secs=0.0, lost_step_secs=1.5),
        *cold(10.1, commit=0),
        *end(20, 3, steps=1, step_secs=0.7, commit=1),
    ]
    found = spent(events)
    assert found["recomputed_steps"] == 1.5
    assert report.summarise(events)["steps"] == 1


def test_giving_up_and_going_on_later_is_one_run_with_an_outage():
    again = [
        log(120, "start", job="j", attached=True),
        log(120, "spawn", incarnation=2, path="attach"),
        log(124, "attached", incarnation=2, commit=10, action="redo", stages={"verify": 0.1, "roll_forward": 0.1, "data": 0.1}),
        log(125, "first_step", incarnation=2, commit=11, secs=0.5),
        *end(130, 2, steps=4, step_secs=2.0, commit=14),
    ]
    events = [
        *begin(),
        log(16, "ended", incarnation=1, steps=10, step_secs=5.5),
        failure(16, 1, step=10, detect_secs=0.0, lost_step_secs=0.0),
        log(16.1, "fence", incarnation=1),
        log(16.2, "decision", action="stop", path="stop"),
        log(17, "finish", code=3),
        *again,
    ]
    found = spent(events)
    assert found["outage"] == 103.0
    assert found["productive"] == 5.0 + 2.0
    assert found["shutdown"] == pytest.approx(0.8 + 1.0, abs=1e-9)
    assert found["initialisation"] == pytest.approx(9 + 3.7, abs=1e-9)
    assert (report.summarise(events)["steps"], report.summarise(events)["wall_secs"]) == (14, 131.0)


def test_the_machine_booted_between_two_lifetimes():
    events = begin() + end(20, 1, steps=10, step_secs=5.5, commit=10)[:-1]
    again = [{**event, "ns": event["ns"] - BOOT_NS // 2} for event in begin(attached=False, at=100)]
    ledger = report.book(events + again)
    assert ledger.spent_ns[Cause.OUTAGE] == round(79.5e9)
    assert sum(ledger.spent_ns.values()) == ledger.wall_ns == round(110.01e9)


def test_a_killed_agent_loses_what_it_had_not_written_down():
    killed = begin()
    again = [
        log(60, "start", job="j", attached=True),
        log(64, "attached", incarnation=2, commit=40, action="redo", stages={}),
        log(65, "first_step", incarnation=2, commit=41, secs=0.5),
        *end(70, 2, steps=4, step_secs=2.0, commit=44),
    ]
    blind = spent(killed + again)
    assert blind["outage"] == pytest.approx(49.99, abs=1e-6)
    assert blind["productive"] == pytest.approx(0.5 + 2.0, abs=1e-9)
    assert report.summarise(killed + again)["steps"] == 44
    noted = [*killed, log(50, "progress", incarnation=1, commit=39, steps=39, step_secs=20.0, stale_secs=1.0, peer_stale_secs=None)]
    seen = spent(noted + again)
    assert seen["outage"] == 10.0
    assert seen["productive"] == pytest.approx(0.5 + 19.0 + 2.0, abs=1e-9)
    assert seen["body_and_data"] == pytest.approx((50 - 9 - 20.0) + (70 - 64.5 - 2.0), abs=1e-9)


def test_work_whose_state_was_lost_was_for_nothing():
    killed = [*begin(), log(50, "progress", incarnation=1, commit=40, steps=40, step_secs=20.5, stale_secs=0.0, peer_stale_secs=None)]
    found = spent(killed + begin(attached=False, at=60) + end(80, 1, steps=10, step_secs=5.5, commit=10))
    assert found["recomputed_steps"] == pytest.approx(50 - 9 - 0.5, abs=1e-9)
    assert (found["productive"], found["body_and_data"]) == (5.0, 5.5)
    summary = report.summarise(killed + begin(attached=False, at=60) + end(80, 1, steps=10, step_secs=5.5, commit=10))
    assert summary["steps"] == 10


def test_a_state_that_goes_back_loses_its_share():
    # Another version may attach to an older state, such as a checkpoint: 10 of 40 steps are done again.
    back = [
        log(60, "start", job="j", attached=True),
        log(64, "attached", incarnation=2, commit=30, action="redo", stages={}),
        log(65, "first_step", incarnation=2, commit=31, secs=0.5),
        *end(70, 2, steps=4, step_secs=2.0, commit=34),
    ]
    killed = [*begin(), log(50, "progress", incarnation=1, commit=40, steps=40, step_secs=20.5, stale_secs=0.0, peer_stale_secs=None)]
    found = spent(killed + back)
    assert found["recomputed_steps"] == pytest.approx((20.0 + 20.5) / 4, abs=1e-8)
    assert found["productive"] == pytest.approx(15.0 + 2.0, abs=1e-8)
    assert report.summarise(killed + back)["steps"] == 34


def test_a_name_used_again_reports_the_newer_run():
    first = begin() + end(20, 1, steps=10, step_secs=5.5, commit=10)
    second = begin(at=1000) + end(1014, 1, steps=3, step_secs=2.0, commit=3)
    assert report.summarise(first + second) == report.summarise(second)


def test_a_running_job_ends_with_its_last_event():
    events = begin()
    assert spent(events) == {"initialisation": 9.0, "productive": 1.0, "other": pytest.approx(0.01)}
    found = report.summarise(events)
    assert (found["steps"], found["coverage"]) == (1, None)
    events.append(log(30, "progress", incarnation=1, commit=21, steps=21, step_secs=11.0, stale_secs=2.1, peer_stale_secs=None))
    assert spent(events) == {"initialisation": 9.0, "first_step_overhead": 0.5, "productive": 10.5, "body_and_data": 10.0}
    assert report.summarise(events)["coverage"] == pytest.approx(0.9)
    assert report.summarise(events[:1])["goodput"] == 0.0
    assert report.summarise(events[:1])["wall_secs"] == 0.0


def test_a_stopped_job_says_what_it_does_not_know():
    found = spent([*begin(), log(30, "finish", code=130)])
    assert found["other"] == pytest.approx(20.0, abs=1e-9)
    progress = log(25, "progress", incarnation=1, commit=21, steps=21, step_secs=11.0, stale_secs=2.1, peer_stale_secs=None)
    assert spent([*begin(), progress, log(30, "finish", code=130)])["other"] == 5.0


def test_a_job_stopped_after_a_takeover():
    ended = log(16, "ended", incarnation=1, steps=10, step_secs=5.5)
    events = [*begin(), ended, failure(16, 1, step=10, detect_secs=0.0, lost_step_secs=0.2), *takeover(16.1, 2, commit=10, action="redo")]
    last = log(30, "ended", incarnation=2, steps=20, step_secs=10.1)
    for rest in ([last], [{**last, "event": "progress", "commit": 30}]):
        found = spent([*events, *rest, log(30.5, "finish", code=0)])
        assert found["productive"] == pytest.approx(5.0 + 10.0, abs=1e-9)
        assert found.get("shutdown", 0) + found.get("other", 0) == pytest.approx(0.5, abs=1e-9)


def test_a_script_that_leaves_its_loop_early():
    events = [*begin(), log(20, "ended", incarnation=1, steps=10, step_secs=5.5), log(21, "finish", code=0, reason="the script ended")]
    assert spent(events)["shutdown"] == 1.0


def test_a_failure_of_any_rank_is_a_failure_of_all():
    """The same journal with another rank to blame is the same report, but for that rank."""

    def journal(rank: int) -> list[dict[str, Any]]:
        fenced = failure(15.2, 1, step=10, detect_secs=0.2, lost_step_secs=0.3, rank=rank)
        after = [
            {**event, "rank": rank} if event["event"] in ("fence", "takeover") else event
            for event in takeover(15.3, 2, commit=11, action="redo")
        ]
        return [*begin(), log(15.2, "ended", incarnation=1, steps=10, step_secs=5.5), fenced, *after, *end(20, 2, 5, 2.6, commit=15)]

    zero, one = (report.summarise(journal(rank)) for rank in (0, 1))
    assert [item.pop("rank") for found in (zero, one) for item in found["takeovers"]] == [0, 1]
    assert zero == one
    assert zero["badput_secs"]["fence"] > 0


def test_other_ranks_and_unknown_events_change_nothing():
    events = begin() + end(20, 1, steps=10, step_secs=5.5, commit=10)
    more = list(events)
    more.insert(4, {**log(12, "first_step", incarnation=1, commit=1, secs=2.0), "rank": 1})
    more.insert(5, {"time": TIME + 13, "ns": BOOT_NS + 13_000_000_000, "event": "of a later version"})
    assert report.book(more) == report.book(events)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_the_journal_says_every_nanosecond_is_booked_once(seed):
    print("seed", seed)
    random_ = random.Random(seed)
    events, at = [log(0, "start", job="j")], 0.0
    for _ in range(random_.randrange(1, 60)):
        at += random_.choice([0.0, random_.uniform(0, 10)])
        name = random_.choice([name for name in report.FIELDS if name not in ("inject", "damage")])
        fields: dict[str, Any] = {field: random_.uniform(0, 12) for field in report.FIELDS[name] if field.endswith("secs")}
        fields |= {field: random_.randrange(4) for field in report.FIELDS[name] if field in ("incarnation", "commit", "step", "steps")}
        if "action" in report.FIELDS[name]:
            fields["action"] = random_.choice(["promote", "wait", "cold", "stop", "fill", "redo", "roll_forward"])
        if "stages" in report.FIELDS[name]:
            fields["stages"] = {stage: random_.uniform(0, 3) for stage in random_.sample(list(STAGES), 4)}
        if name == "failure":
            fields["failed_ns"] = BOOT_NS + round(at * 1e9) - random_.randrange(5_000_000_000)
        if name == "start":
            fields |= {"job": "j", "attached": random_.random() < 0.7}
        events.append(log(at, name, **fields))
    spent(events)
    found = report.summarise(events)
    assert 0 <= found["goodput"] <= found["ettr"] <= 1
    assert found["coverage"] is None or 0 <= found["coverage"] <= 1


def test_a_journal_that_says_too_little():
    with pytest.raises(JobError, match=r"expected a journal with a `start` event, found 0 events and none; the job has not begun"):
        report.summarise([])
    broken = begin()
    del broken[3]["secs"]
    with pytest.raises(RecordError, match=r"journal, event 4 \(first_step\): expected the field 'secs', found none"):
        report.summarise(broken)
    with pytest.raises(RecordError, match=r"journal, event 1 \(None\): expected the field 'event', found none"):
        report.summarise([7])


# Files and tables -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "leto"


def write(root, job, events, tail=b"", mtime=0):
    path = root / job / "journal.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"".join(json.dumps(event).encode() + b"\n" for event in events) + tail)
    os.utime(path, (mtime, mtime))


def named(job: str) -> list[dict[str, Any]]:
    events = begin() + end(20, 1, steps=10, step_secs=5.5, commit=10)
    return [{**events[0], "job": job}, *events[1:]]


def test_load_by_name_or_the_newest(state):
    write(state, "a", named("a"), mtime=3)
    write(state, "b", named("b"), mtime=9)
    write(state, "c", named("c"), mtime=6)
    assert report.load("a")["job"] == "a"
    assert report.load(None)["job"] == "b"


def test_load_leaves_a_torn_last_line_out(state):
    write(state, "a", named("a")[:-1], tail=b'{"time": 1, "ns"')
    assert report.load("a")["wall_secs"] == 20.5


def test_load_says_what_is_missing(state):
    with pytest.raises(JobError, match=r"expected the journal of a job under .*/leto, found none; `leto run` writes one"):
        report.load(None)
    with pytest.raises(
        JobError, match=r"journal: expected one at .*/leto/x/journal.jsonl, found No such file or directory; `leto ls --all`"
    ):
        report.load("x")
    with pytest.raises(UsageError, match=r"a job name is 1 to 64 of the characters"):
        report.load("../x")


def test_show_prints_all_of_it():
    from rich.console import Console

    events = [
        *begin(),
        log(16, "ended", incarnation=1, steps=10, step_secs=5.5, stale_secs=1.0, peer_stale_secs=None),
        failure(16, 1, step=10, detect_secs=0.03, lost_step_secs=0.2),
        *takeover(16.1, 2, commit=10, action="redo", lost_steps=1, step=10),
        *end(20, 2, steps=5, step_secs=2.6, commit=15),
    ]
    console = Console(width=160, record=True, file=io.StringIO())
    report.show(report.summarise(events), console)
    text = console.export_text()
    for expected in ("job j", "goodput", "ETTR", "parity coverage", "recomputed_steps", "sigkill", "shadow", "0.600", "D detect", "100.00"):
        assert expected in text
    assert "outage" not in text  # zeros are left out
    report.show(report.summarise(begin()), console)


def test_bars_are_as_long_as_takeovers():
    fast = {
        "path": "shadow",
        "takeover_secs": 0.3,
        "stages": {"detect": 0.04, "fence": 0.1, "attach": 0.02, "verify": 0.001, "first_step": 9.0},
    }
    assert report.bar(fast, 0.01) == "DDDD" + "F" * 10 + "AA" + "V" + "S" * 14
    slow = {
        "path": "cold",
        "takeover_secs": 1.0,
        "stages": {"detect": 0.0, "fence": 0.1, "verify": 0.1, "roll_forward": 0.2, "first_step": 0.6},
    }
    assert report.bar(slow, 0.1) == "F" + "PPPPPP" + "V" + "RR"
    assert report.bar({"path": "shadow", "takeover_secs": -0.1, "stages": {}}, 0.1) == ""


def test_no_jax():
    code = "import sys, leto_jax.goodput.report, leto_jax.agent.doctor; sys.exit('jax' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

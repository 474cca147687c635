"""The decision after a failure, as a table of crash pictures: logs in, plan and reason out.

A picture of one rank is written in one line:

    c4      committed step 4 (epoch 1)                 i5      intent of step 5 (epoch 1)        i5' another intent of step 5 (epoch 2)
    m0 m1   marks of the next step, of intent i        m0'     a mark that names intent i'       r5  step 5 revoked (epoch 2)
    g5      gradients stored for step 5 (epoch 1)      g5'     by epoch 2                        -   gradients not complete
    !g2     gradients of chunk 2 bad                   !s !x !m  scalars, extras, metrics of the next step are not as the intent says
    !S !X !M  those of the commit are not as it says   !L      both log copies lost              F E arenas filling, empty

Update 5 is odd, so its order is chunk 0, 1, 2; update 6 is even: 2, 1, 0.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from leto_jax import errors
from leto_jax.records import Kind, Record
from leto_jax.rmu.log import Contents
from leto_jax.rmu.recovery import Action, Life, Loan, Picture, Plan, plan

CHUNKS = 3
NOW, NEXT, BAD = (11, 12, 13), (21, 22, 23), 99


def order(step: int) -> range:
    return range(CHUNKS) if step % 2 else range(CHUNKS - 1, -1, -1)


def intent(step: int, other: bool = False) -> Record:
    return Record(Kind.INTENT, 1 + other, step, body=(*NEXT, CHUNKS))


def picture(text: str) -> Picture:
    """See the top of the file."""
    words = text.split()
    life = {"F": Life.FILLING, "E": Life.EMPTY}.get(words[0], Life.LIVE)
    words = [word for word in words if word not in ("F", "E")]
    commits, intents, revokes, marks, stored = set(), set(), set(), set(), None
    now, then, bad, lost = list(NOW), list(NEXT), set(), False
    commit = max((int(word[1:]) for word in words if word[0] == "c"), default=None)
    if f"i{commit}" in words:  # the commit's digest is that of its intent
        now = list(NEXT)
    for word in words:
        kind, prime, number = word[0], word.endswith("'"), word.strip("'")[1:]
        if kind == "c":
            commits.add(Record(Kind.COMMIT, 1, int(number), body=(7, *(NEXT if f"i{number}" in words else NOW))))
        elif kind == "i":
            intents.add(intent(int(number), prime))
        elif kind == "r":
            revokes.add(Record(Kind.REVOKE, 2, int(number)))
        elif kind == "m":
            index, _, step = number.partition("@")
            where = int(step) if step else (commit or 0) + 1
            marks.add(Record(Kind.MARK, 1, where, int(index), body=(intent(where, prime).crc,)))
        elif kind == "g":
            stored = (int(number), 1 + prime)
        elif word.startswith("!g"):
            bad.add(int(word[2:]))
        elif word == "!L":
            lost = True
        elif kind == "!":
            values, place = (then if word[1].islower() else now), "sxm".index(word[1].lower())
            values[place] = BAD
        else:
            assert word == "-"
    digests = {} if commit is None else {commit: tuple(now), commit + 1: tuple(then)}
    return Picture(
        life, Contents(frozenset(commits), frozenset(intents), frozenset(revokes), frozenset(marks)), stored, digests, frozenset(bad), lost
    )


# fmt: off
ONE = [
    # picture                      action          target  chunks in place   reason
    ("E",                          "fill",         0,      None,  "the arenas were never completely filled (rank 0 EMPTY)"),
    ("F",                          "fill",         0,      None,  "the arenas were never completely filled (rank 0 FILLING)"),
    ("F c0 -",                     "fill",         0,      None,  "the arenas were never completely filled (rank 0 FILLING)"),
    ("E !L",                       "fill",         0,      None,  "the arenas were never completely filled (rank 0 EMPTY)"),
    ("E c4 -",                     "refuse",       0,      None,  "rank 0: no valid record says what the arenas hold, but the log shows commit 4"),
    ("-",                          "refuse",       0,      None,  "no valid commit record in either log copy of rank 0"),
    ("c4 g4 !L",                   "refuse",       0,      None,  "rank 0: both log copies have lost pages"),
    # before the intent
    ("c0 -",                       "redo",         1,      None,  "commit 0 on all ranks, no intent for step 1"),
    ("c4 g4",                      "redo",         5,      None,  "commit 4 on all ranks, no intent for step 5"),
    ("c3 c4 i4 i3 m0@4 -",         "redo",         5,      None,  "commit 4 on all ranks, no intent for step 5"),
    ("c4 -",                       "redo",         5,      None,  "commit 4 on all ranks, no intent for step 5"),
    ("c4 g5 !s !x !m",             "redo",         5,      None,  "commit 4 on all ranks, no intent for step 5"),
    ("c4 g5 !g0 !g1",              "redo",         5,      None,  "commit 4 on all ranks, no intent for step 5"),
    ("c4 g5 !S",                   "refuse",       0,      None,  "commit 4 on all ranks, no intent for step 5; rank 0: scalars of commit 4 are lost and kept nowhere else"),
    ("c4 - !X !S",                 "refuse",       0,      None,  "commit 4 on all ranks, no intent for step 5; rank 0: scalars and extras of commit 4 are lost and kept nowhere else"),
    # an intent, nothing in place
    ("c4 i5 g5",                   "roll_forward", 5,      0,     "intent for step 5, 0 of 3 chunks marked"),
    ("c4 i5 g5 !S !X !M",          "roll_forward", 5,      0,     "intent for step 5, 0 of 3 chunks marked"),
    ("c4 i5 -",                    "revoke",       5,      None,  "rank 0: gradients are of None, the intent of (5, 1); nothing of update 5 is in place"),
    ("c4 i5 g4",                   "revoke",       5,      None,  "rank 0: gradients are of (4, 1), the intent of (5, 1); nothing of update 5 is in place"),
    ("c4 i5 g5'",                  "revoke",       5,      None,  "rank 0: gradients are of (5, 2), the intent of (5, 1); nothing of update 5 is in place"),
    ("c4 i5 g5 !s",                "revoke",       5,      None,  "rank 0: scalars of step 5 do not match the intent's digest; nothing of update 5 is in place"),
    ("c4 i5 g5 !s !x !m",          "revoke",       5,      None,  "rank 0: scalars and extras of step 5 do not match the intent's digest; nothing of update 5 is in place"),
    ("c4 i5 g5 !m",                "revoke",       5,      None,  "rank 0: metrics of step 5 do not match the intent's digest; nothing of update 5 is in place"),
    ("c4 i5 g5 !g2",               "revoke",       5,      None,  "rank 0: gradients of chunk 2 are lost; nothing of update 5 is in place"),
    ("c4 i5 g5 !g2 !S",            "refuse",       0,      None,  "rank 0: gradients of chunk 2 are lost; nothing of update 5 is in place; rank 0: scalars of commit 4 are lost and kept nowhere else"),
    # between marks
    ("c4 i5 g5 m0",                "roll_forward", 5,      1,     "intent for step 5, 1 of 3 chunks marked"),
    ("c4 i5 g5 m0 m1",             "roll_forward", 5,      2,     "intent for step 5, 2 of 3 chunks marked"),
    ("c5 i6 g6 m2",                "roll_forward", 6,      1,     "intent for step 6, 1 of 3 chunks marked"),
    ("c4 i5 g5 m0 !g0",            "roll_forward", 5,      1,     "intent for step 5, 1 of 3 chunks marked"),
    ("c4 i5 g5 m0 !m",             "roll_forward", 5,      1,     "intent for step 5, 1 of 3 chunks marked"),
    ("c4 i5 g5 m0 !g1",            "refuse",       0,      None,  "rank 0: gradients of chunk 1 are lost, and a part of update 5 is already in place"),
    ("c4 i5 -  m0",                "refuse",       0,      None,  "rank 0: gradients are of None, the intent of (5, 1), and a part of update 5 is already in place"),
    ("c4 i5 g5' m0",               "refuse",       0,      None,  "rank 0: gradients are of (5, 2), the intent of (5, 1), and a part of update 5 is already in place"),
    ("c4 i5 g5 m0 !x",             "refuse",       0,      None,  "rank 0: extras of step 5 do not match the intent's digest, and a part of update 5 is already in place"),
    ("c4 i5 g5 m1",                "refuse",       0,      None,  "rank 0: marks of step 5 have a hole: [1]"),
    ("c4 i5 g5 m0 m2",             "refuse",       0,      None,  "rank 0: marks of step 5 have a hole: [0, 2]"),
    ("c5 i6 g6 m0",                "refuse",       0,      None,  "rank 0: marks of step 6 have a hole: [0]"),
    ("c4 i5 g5 m0'",               "refuse",       0,      None,  "rank 0: the mark of chunk 0, step 5, names another intent"),
    ("c4 g5 m0",                   "refuse",       0,      None,  "rank 0 has begun update 5, but no rank shows its intent"),
    # after the last mark
    ("c4 i5 g5 m0 m1 m2",          "roll_forward", 5,      3,     "intent for step 5, 3 of 3 chunks marked"),
    ("c4 i5 -  m0 m1 m2 !g0 !g2",  "roll_forward", 5,      3,     "intent for step 5, 3 of 3 chunks marked"),
    ("c4 i5 g5 m0 m1 m2 !s",       "refuse",       0,      None,  "rank 0: scalars of step 5 do not match the intent's digest, and a part of update 5 is already in place"),
    # revoked
    ("c4 i5 g5 r5",                "redo",         5,      None,  "commit 4 on all ranks, no intent for step 5"),
    ("c4 i5 i5' g5' r5",           "roll_forward", 5,      0,     "intent for step 5, 0 of 3 chunks marked"),
    ("c4 i5' g5' r5 m0'",          "roll_forward", 5,      1,     "intent for step 5, 1 of 3 chunks marked"),
    ("c4 i5 g5 r3",                "roll_forward", 5,      0,     "intent for step 5, 0 of 3 chunks marked"),
    ("c4 i5 g5 r5 m0",             "refuse",       0,      None,  "rank 0 has begun update 5, but no rank shows its intent"),
    # what no crash of ours leaves
    ("c4 i5 i5' g5",               "refuse",       0,      None,  "2 different intents for step 5"),
    ("c4 i6 g5",                   "refuse",       0,      None,  "rank 0: the log shows INTENT 6, but no more than commit 4 everywhere"),
    ("c4 i5 g5 m0 m1 m2 m2@6",     "refuse",       0,      None,  "rank 0: the log shows MARK 6, but no more than commit 4 everywhere"),
]

SEVERAL = [
    # pictures of the ranks                              action          target  in place      copy to  done   reason
    (["c4 g4",              "c4 -"],                     "redo",         5,      None,         (),      (),    "commit 4 on all ranks, no intent for step 5"),
    (["c4 i5 g5",           "c4 g5"],                    "roll_forward", 5,      (0, 0),       (1,),    (),    "intent for step 5, 0, 0 of 3 chunks marked"),
    (["c4 g5",              "c4 i5 g5 m0 m1", "c4 g5"],  "roll_forward", 5,      (0, 2, 0),    (0, 2),  (),    "intent for step 5, 0, 2, 0 of 3 chunks marked"),
    (["c4 i5 g5 m0",        "c4 i5 g5 m0 m1 m2"],        "roll_forward", 5,      (1, 3),       (),      (),    "intent for step 5, 1, 3 of 3 chunks marked"),
    (["c4 i5 g5 m0",        "c4 c5 i5"],                 "roll_forward", 5,      (1, 3),       (),      (1,),  "intent for step 5, 1, 3 of 3 chunks marked"),
    (["c4 g5",              "c4 c5 i5 -"],               "roll_forward", 5,      (0, 3),       (0,),    (1,),  "intent for step 5, 0, 3 of 3 chunks marked"),
    (["c4 c5 g5",           "c5 i5 -"],                  "redo",         6,      None,         (),      (),    "commit 5 on all ranks, no intent for step 6"),
    (["c5 g6 i6",           "c5 -"],                     "revoke",       6,      None,         (),      (),    "rank 1: gradients are of None, the intent of (6, 1); nothing of update 6 is in place"),
    (["c4 i5 g5",           "c4 i5 g5 !g1"],             "revoke",       5,      None,         (),      (),    "rank 1: gradients of chunk 1 are lost; nothing of update 5 is in place"),
    (["c4 i5 g5",           "c4 g5 r5"],                 "redo",         5,      None,         (),      (),    "commit 4 on all ranks, no intent for step 5"),
    (["c4 i5 g5 r5",        "c4 i5' g5'"],               "revoke",       5,      None,         (),      (),    "rank 0: gradients are of (5, 1), the intent of (5, 2); nothing of update 5 is in place"),
    (["c4 i5 g5 m0",        "c4 i5 g5 !g1"],             "refuse",       0,      None,         (),      (),    "rank 1: gradients of chunk 1 are lost, and a part of update 5 is already in place"),
    (["c4 i5 g5",           "c4 i5' g5'"],               "refuse",       0,      None,         (),      (),    "2 different intents for step 5"),
    (["c4 i5 g5 m1",        "c4 i5 g5"],                 "refuse",       0,      None,         (),      (),    "rank 0: marks of step 5 have a hole: [1]"),
    (["c4 g5",              "c6 -"],                     "refuse",       0,      None,         (),      (),    "ranks are 2 steps apart: commits [4, 6]"),
    (["c4 g5",              "c5 -"],                     "refuse",       0,      None,         (),      (),    "rank 1 has begun update 5, but no rank shows its intent"),
    (["c4 i5 g5",           "c4 c5 i5 i6"],              "refuse",       0,      None,         (),      (),    "rank 1: the log shows INTENT 6, but no more than commit 4 everywhere"),
    (["c4 -",               "F"],                        "fill",         0,      None,         (),      (),    "the arenas were never completely filled (rank 0 LIVE, rank 1 FILLING)"),
    (["F",                  "c3 c4 -"],                  "refuse",       0,      None,         (),      (),    "rank 1 has trained to commit 4, but the arenas of rank 0 are FILLING"),
    (["c4 -",               "E c4"],                     "refuse",       0,      None,         (),      (),    "rank 1: no valid record says what the arenas hold, but the log shows commit 4"),
    (["c4 -",               "-"],                        "refuse",       0,      None,         (),      (),    "no valid commit record in either log copy of rank 1"),
    (["c4 -",               "c4 - !X"],                  "redo",         5,      None,         (),      (),    "commit 4 on all ranks, no intent for step 5"),
    (["c4 - !X",            "c4 - !X"],                  "refuse",       0,      None,         (),      (),    "commit 4 on all ranks, no intent for step 5; rank 0: extras of commit 4 are lost and kept nowhere else"),
]
# fmt: on


@pytest.mark.parametrize(("text", "action", "target", "first", "reason"), ONE, ids=[row[0].replace(" ", "_") for row in ONE])
def test_one_rank(text, action, target, first, reason):
    shown = picture(text)
    found = plan([shown], order)
    assert (found.action, found.target, found.reason) == (action, target, reason)
    assert found.first == (() if first is None else (first,))
    assert found.copy_to == found.done == ()
    assert (found.intent is None) == (action not in ("roll_forward", "revoke"))
    # Only metrics may be unknown afterwards: of the commit for a redo, of the next step once a part of it is in place.
    gone = "!M" in text if action in ("redo", "revoke") else "!m" in text and action == "roll_forward"
    assert found.unknown_metrics == ((0,) if gone else ())


@pytest.mark.parametrize("row", SEVERAL, ids=["|".join(row[0]).replace(" ", "_") for row in SEVERAL])
def test_several_ranks(row):
    texts, action, target, first, copy_to, done, reason = row
    found = plan([picture(text) for text in texts], order)
    assert (found.action, found.target, found.first, found.copy_to, found.done, found.reason) == (
        action,
        target,
        first or (),
        copy_to,
        done,
        reason,
    )


def test_unknown_metrics_are_named_by_rank():
    assert plan([picture("c4 - !M"), picture("c4 - !M"), picture("c4 g5 !M")], order).unknown_metrics == (0, 1, 2)
    assert plan([picture("c4 i5 g5 m0 !m"), picture("c4 i5 g5 !m")], order).unknown_metrics == (0, 1)
    assert plan([picture("c4 i5 g5 !m"), picture("c4 i5 g5 !m")], order).action is Action.REVOKE
    assert plan([picture("c4 i5 - !M")], order) == Plan(
        Action.REVOKE,
        "rank 0: gradients are of None, the intent of (5, 1); nothing of update 5 is in place",
        5,
        intent=intent(5),
        unknown_metrics=(0,),
    )


@pytest.mark.parametrize("begun", ["", " m0"])
def test_scalars_of_the_step_come_from_a_rank_that_has_decided(begun):
    decided, behind = picture("c4 i5 g5" + begun), picture("c4 g5 !s")
    for pictures, lacking in (([decided, behind], [1]), ([behind, decided], [0]), ([behind, decided, behind], [0, 2])):
        found = plan(pictures, order)
        assert found.action is Action.ROLL_FORWARD, found
        assert found.loans == tuple(Loan(rank, "scalars", 5, pictures.index(decided)) for rank in lacking)
        assert found.copy_to == tuple(lacking)


def test_lost_copies_of_the_commit_come_from_a_replica():
    found = plan([picture("c4 g5 !S !X !M"), picture("c4 g5")], order)
    assert (found.action, found.unknown_metrics) == (Action.REDO, ())
    assert found.loans == tuple(Loan(0, name, 4, 1) for name in ("scalars", "extras", "metrics"))
    crossed = plan([picture("c4 g5 !S"), picture("c4 g5 !X")], order)  # each has what the other one lacks
    assert crossed.loans == (Loan(0, "scalars", 4, 1), Loan(1, "extras", 4, 0))
    nowhere = plan([picture("c4 g5 !S"), picture("c4 g5 !S")], order)
    assert nowhere.action is Action.REFUSE
    assert "rank 0: scalars of commit 4 are lost and kept nowhere else" in nowhere.reason


def test_a_picture_is_the_same_at_another_rank():
    for texts in [[row[0]] for row in ONE] + [row[0] for row in SEVERAL]:
        for text in texts:
            assert Picture.from_bytes(picture(text).to_bytes()) == picture(text)
    full = picture("c4 i5 g5 m0 m1 !g2 r4")
    assert Picture.from_bytes(full.to_bytes()) == full
    for damaged in (b"", b"{}", full.to_bytes()[:-1], full.to_bytes().replace(b"4c45544f", b"4c45544e")):
        with pytest.raises(errors.RecordError, match="expected what another rank wrote"):
            Picture.from_bytes(damaged)


def test_a_copied_intent_keeps_its_epoch_and_marks_refer_to_it():
    found = plan([picture("c4 g5"), picture("c4 i5 g5 m0")], order)
    assert found.intent == intent(5)
    assert found.intent is not None
    assert found.intent.epoch == 1


def test_every_plan_gives_its_reason_and_carries_what_its_action_needs():
    """Over all pictures of one rank made of a few facts: no exception, and a plan that rolls forward never has a known hole."""
    facts = ["i5", "i5'", "r5", "m0", "m1", "m2", "!g1", "!s", "!X"]
    met = set()
    for chosen in itertools.product((False, True), repeat=len(facts)):
        for gradients in ("-", "g5", "g5'"):
            words = [fact for fact, use in zip(facts, chosen, strict=True) if use]
            shown = picture(" ".join(["c4", gradients, *words]))
            found = plan([shown], order)
            met.add(found.action)
            assert found.reason
            if found.action is Action.REFUSE:
                assert found == Plan(Action.REFUSE, found.reason)
                continue
            assert found.target == 5
            if found.action is Action.ROLL_FORWARD:
                assert found.intent is not None
                assert not (found.intent.epoch == 1 and "r5" in words), "rolled forward with a revoked intent"
                marked = {mark.index for mark in shown.log.marks}
                assert marked == set(list(order(5))[: found.first[0]])
                assert "!s" not in words
                if found.first[0] < CHUNKS:
                    assert shown.stored == (5, found.intent.epoch)
                if found.first[0] < 2:
                    assert "!g1" not in words
            else:
                assert not shown.log.marks, "computed again over a part of an update"
                assert "!X" not in words, "computed again from damaged extras"
    assert met == {Action.REDO, Action.REVOKE, Action.ROLL_FORWARD, Action.REFUSE}


def test_the_order_of_ranks_does_not_change_what_is_done():
    for texts, *_ in SEVERAL:
        pictures = [picture(text) for text in texts]
        forward, backward = plan(pictures, order), plan(pictures[::-1], order)
        assert (forward.action, forward.target, forward.intent) == (backward.action, backward.target, backward.intent)
        assert forward.first == backward.first[::-1]


def test_what_follows_a_plan_leads_to_a_commit():
    """Each action, carried out on the picture, gives a picture that is redone or rolled forward, not refused: recovery never paints itself into a corner."""
    for text, action, *_ in ONE:
        shown = picture(text)
        found = plan([shown], order)
        log = shown.log
        if action == "revoke":
            revoked = dataclasses.replace(shown, log=dataclasses.replace(log, revokes=log.revokes | {Record(Kind.REVOKE, 9, found.target)}))
            assert plan([revoked], order).action is Action.REDO
        elif action == "roll_forward":
            assert found.intent is not None
            for index in list(order(found.target))[found.first[0] :]:
                mark = Record(Kind.MARK, 9, found.target, index, body=(found.intent.crc,))
                log = dataclasses.replace(log, marks=log.marks | {mark})
                assert plan([dataclasses.replace(shown, log=log)], order).action is Action.ROLL_FORWARD
            commit = Record(Kind.COMMIT, 9, found.target, body=(found.intent.crc, *found.intent.body[:3]))
            log = dataclasses.replace(log, commits=log.commits | {commit})
            digests = {found.target: shown.digests[found.target], found.target + 1: (0, 0, 0)}
            after = plan([dataclasses.replace(shown, log=log, digests=digests)], order)
            assert (after.action, after.target) == (Action.REDO, found.target + 1)

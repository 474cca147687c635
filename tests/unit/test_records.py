"""The 64-byte record and where records lie: every damage is noticed, a torn store leaves the old fact or the new one."""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_jax import faults, records
from leto_jax import layout as layouts
from leto_jax.arena import control, metadata
from leto_jax.arena.control import Control, Word
from leto_jax.arena.memory import HostArena
from leto_jax.arena.metadata import HostMetadata, LostRange, touches
from leto_jax.config import Protection
from leto_jax.errors import LayoutError, RecordError
from leto_jax.faults import Moment, Phase, Point
from leto_jax.layout import JobSpec, LeafSpec, SignatureSpec
from leto_jax.records import BODY_WORDS, BYTES, Kind, Record
from leto_jax.rmu.log import COPIES, Log

SEED = 5
WORD = st.integers(0, 2**32 - 1)
RECORDS = st.builds(Record, st.sampled_from(Kind), WORD, WORD, WORD, st.lists(WORD, max_size=BODY_WORDS).map(tuple), WORD)


class Stop(BaseException):
    pass


def arena(nbytes: int, name: str = "test") -> HostArena:
    fd = os.memfd_create(name)
    os.ftruncate(fd, nbytes)
    made = HostArena(fd, nbytes, name)
    os.close(fd)
    return made


def stop_at(number: int):
    """A hook that ends the world at the `number`-th crossing."""
    seen = itertools.count()

    def hook(point: Point, moment: Moment, nbytes: int) -> bool:
        if next(seen) == number:
            raise Stop
        return True

    return hook


def stopped(act, number: int) -> bool:
    """Whether `act`, ended at crossing `number`, came so far."""
    try:
        with faults.armed(stop_at(number)):
            act()
    except Stop:
        return True
    return False


# One record -----------------------------------------------------------------------------------------------------------------------------


@given(RECORDS)
def test_a_record_reads_back(record):
    data = record.pack()
    assert len(data) == BYTES
    assert records.unpack(data, record.kind) == record
    assert record.crc == int.from_bytes(data[60:], "little")
    assert all(records.unpack(data, kind) is None for kind in Kind if kind is not record.kind)


@pytest.mark.parametrize("kind", Kind)
def test_every_bit_flip_is_noticed(kind):
    record = Record(kind, 3, 1 << 20, 7, (1, 2**32 - 1, 0, 4, 5, 6, 7, 8, 9), 11)
    data = record.pack()
    for bit in range(8 * BYTES):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert records.unpack(bytes(flipped), kind) is None, f"bit {bit}"


def test_random_damage_is_noticed():
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    for _ in range(2000):
        record = Record(
            rng.choice(list(Kind)), rng.randrange(9), rng.randrange(9), rng.randrange(9), (rng.randrange(2**32),), rng.randrange(9)
        )
        data = bytearray(record.pack())
        begin = rng.randrange(BYTES)
        noise = rng.randbytes(rng.randint(1, BYTES - begin))
        data[begin : begin + len(noise)] = noise
        assert records.unpack(bytes(data), record.kind) in (None, record)


@pytest.mark.parametrize("blank", [bytes(BYTES), b"\xff" * BYTES])
def test_what_was_never_written_is_no_record(blank):
    assert all(records.unpack(blank, kind) is None for kind in Kind)


def test_another_version_is_no_record():
    data = bytearray(Record(Kind.COMMIT, step=3).pack())
    data[6:8] = (records.VERSION + 1).to_bytes(2, "little")
    data[60:] = zlib.crc32(bytes(data[:60])).to_bytes(4, "little")
    assert records.unpack(bytes(data), Kind.COMMIT) is None


@given(RECORDS, RECORDS, st.integers(0, BYTES // 8))
def test_words_of_two_records_make_no_third(old, new, cut):
    """Whatever part of eight-byte words has arrived, in either order."""
    a, b = old.pack(), new.pack()
    for mixed in (a[: 8 * cut] + b[8 * cut :], b[: 8 * cut] + a[8 * cut :]):
        for kind in (old.kind, new.kind):
            assert records.unpack(mixed, kind) in (None, old, new)


@given(st.floats(width=32))
def test_floats_keep_their_bits(value):
    word = records.float_bits(value)
    assert 0 <= word < 2**32
    assert records.float_bits(records.bits_float(word)) == word


# Storing --------------------------------------------------------------------------------------------------------------------------------


@given(RECORDS, RECORDS)
def test_a_torn_store_leaves_the_old_record_the_new_one_or_none(old, new):
    memory = arena(2 * BYTES)
    for moment, allowed in [(0, (old,)), (1, (old, new, None)), (2, (new,))]:
        memory.store_record(Point.COMMIT, BYTES, old)
        assert stopped(lambda: memory.store_record(Point.COMMIT, BYTES, new), moment)
        data = memory.view(BYTES, BYTES).tobytes()
        assert any(records.unpack(data, kind) in allowed for kind in (old.kind, new.kind))
        if moment == 1:
            assert data == new.pack()[:56] + old.pack()[56:]
    assert not memory.view(0, BYTES).any()
    memory.close()


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 5)])
def test_a_store_arrives_front_first(shape):
    data = np.arange(1, 1 + int(np.prod(shape)), dtype=np.uint16).reshape(shape)
    for moment, share in [(0, 0.0), (1, 0.5), (2, 1.0)]:
        memory = arena(4096)
        assert stopped(lambda memory=memory: memory.store(Point.PIECE, 128, data), moment)
        arrived = int(data.nbytes * share)
        assert memory.view(128, data.nbytes).tobytes() == data.tobytes()[:arrived] + bytes(data.nbytes - arrived)
        memory.close()


def test_an_arena_that_is_too_small_is_refused():
    fd = os.memfd_create("small")
    os.ftruncate(fd, 100)
    with pytest.raises(LayoutError, match="arena 'small': the plan needs 4096 bytes, the descriptor holds 100; it belongs to another plan"):
        HostArena(fd, 4096, "small")
    os.close(fd)


# Host metadata --------------------------------------------------------------------------------------------------------------------------

ALTERNATING = (Kind.EPOCH, Kind.PROMOTION, Kind.LIFE)


@pytest.mark.parametrize("kind", ALTERNATING)
def test_a_crash_while_a_fact_is_replaced_leaves_one_of_the_two(kind):
    number, allowed = 0, set()
    while True:
        memory = arena(metadata.BYTES)
        facts = HostMetadata(memory)
        for step in (1, 2):
            facts.write(Point.EPOCH, Record(kind, step=step))
        ended = not stopped(lambda facts=facts: facts.write(Point.EPOCH, Record(kind, step=3)), number)
        found = HostMetadata(memory).latest(kind)
        assert found is not None
        allowed.add(found.step)
        if ended:
            assert found.step == 3
            break
        # Whoever comes next writes over it as if nothing had happened, and its own crash is survived too.
        for again in range(6):
            copy = arena(metadata.BYTES)
            copy.store(Point.FILL_LANES, 0, memory.view(0, metadata.BYTES))
            stopped(lambda copy=copy: HostMetadata(copy).write(Point.EPOCH, Record(kind, step=4)), again)
            latest = HostMetadata(copy).latest(kind)
            assert latest is not None
            assert latest.step in (found.step, 4)
            copy.close()
        memory.close()
        number += 1
    assert number == 6
    assert allowed == {2, 3}


@pytest.mark.parametrize("kind", ALTERNATING)
def test_a_damaged_place_never_brings_back_an_older_fact(kind):
    """An epoch that falls back would be handed out twice; a life that falls back would fill over a state."""
    for writes, slot in itertools.product(range(1, 5), (0, 1)):
        memory = arena(metadata.BYTES)
        facts = HostMetadata(memory)
        for step in range(1, writes + 1):
            facts.write(Point.EPOCH, Record(kind, step=step))
        memory.damage(BYTES * (metadata._FIRST[kind] + slot) + 20, np.array([1], np.uint8))
        found = facts.latest(kind)
        assert found is not None
        assert found.step == writes
        # Nor when the next writer dies over the place that is left.
        for moment in range(6):
            copy = arena(metadata.BYTES)
            copy.store(Point.FILL_LANES, 0, memory.view(0, metadata.BYTES))
            later = Record(kind, step=writes + 1)
            stopped(lambda copy=copy, later=later: HostMetadata(copy).write(Point.EPOCH, later), moment)
            latest = HostMetadata(copy).latest(kind)
            assert latest is not None
            assert latest.step in (writes, writes + 1)
            copy.close()
        memory.close()


def test_epochs_only_rise():
    memory = arena(metadata.BYTES)
    facts = HostMetadata(memory)
    assert facts.epoch == 0
    assert [facts.raise_epoch() for _ in range(5)] == [1, 2, 3, 4, 5]
    for number in range(6):
        before = facts.epoch
        stopped(facts.raise_epoch, number)
        assert before <= facts.epoch <= before + 1
    memory.close()


def test_all_ranks_have_one_epoch_wherever_the_last_agent_died():
    memories = [arena(metadata.BYTES) for _ in range(3)]
    first, *others = ranks = [HostMetadata(memory) for memory in memories]
    for number in range(19):  # two places of each rank, three moments of each store
        before = max(rank.epoch for rank in ranks)
        stopped(lambda: first.raise_epoch(*others), number)
        assert {rank.epoch for rank in ranks} <= {before - 1, before, before + 1}
        assert first.raise_epoch(*others) > before
        assert len({rank.epoch for rank in ranks}) == 1
    for memory in memories:
        memory.close()


def test_lost_ranges_are_kept_until_they_are_cleared():
    memory = arena(metadata.BYTES)
    facts = HostMetadata(memory)
    ranges = [LostRange("device", 1 << 40, 4096), LostRange("host", 0, 1 << 33), LostRange("device", 4096, 1)]
    for item in ranges:
        facts.add_lost(item)
    assert facts.lost() == ranges
    # A list that is cut short while it is cleared holds a part of it.
    for number in range(9):
        copy = arena(metadata.BYTES)
        copy.store(Point.FILL_LANES, 0, memory.view(0, metadata.BYTES))
        assert stopped(HostMetadata(copy).clear_lost, number)
        assert set(HostMetadata(copy).lost()) <= set(ranges)
        HostMetadata(copy).clear_lost()
        assert not HostMetadata(copy).lost()
        copy.close()
    assert touches(ranges, "device", 4090, 7)
    assert not touches(ranges, "device", 4090, 6)
    assert not touches(ranges, "device", 4097, 100)
    assert touches(ranges, "host", (1 << 33) - 1, 5)
    memory.close()


# Log ------------------------------------------------------------------------------------------------------------------------------------


def small_layout(chunks: int = 3) -> layouts.Layout:
    size = 512 // 4 * 4 * chunks
    shapes = ((size,),)
    return layouts.plan(
        JobSpec(
            params=(LeafSpec("['w']", (size,), "float32"),),
            read_only=(),
            signatures=(SignatureSpec("s", "f", (("param", "float32"),), "float32", True, (0,), (shapes[0:1],)),),
            constants=(),
            shared=(),
            values=(),
            extras=(),
            metrics=(),
            batch=(),
            protection=Protection(4, 2, 0, 512, 2048),
        )
    )


def fresh_log() -> tuple[HostArena, Log]:
    plan = small_layout()
    assert len(plan.chunks) == 3
    memory = arena(plan.device_bytes)
    return memory, Log(memory, plan)


def test_facts_of_neighbouring_steps_never_share_a_place():
    memory, log = fresh_log()
    offsets = [
        log.offset(copy, kind, step, index)
        for copy in COPIES
        for kind, index in [(Kind.COMMIT, 0), (Kind.INTENT, 0), (Kind.REVOKE, 0), *((Kind.MARK, n) for n in range(3))]
        for step in (6, 7)
    ]
    assert len(set(offsets)) == len(offsets)
    assert all(offset % BYTES == 0 for offset in offsets)
    memory.close()


def test_a_fact_counts_from_the_first_copy_on_and_repair_makes_the_copies_equal():
    kinds = {Kind.COMMIT: "commits", Kind.INTENT: "intents", Kind.REVOKE: "revokes", Kind.MARK: "marks"}
    for kind, name in kinds.items():
        index = 2 if kind is Kind.MARK else 0
        for number in range(6):
            memory, log = fresh_log()
            old, new = Record(kind, 1, 2, index), Record(kind, 1, 4, index)
            log.write(Point.COMMIT, old)
            assert stopped(lambda log=log, new=new: log.write(Point.COMMIT, new), number)
            found = getattr(log.read(), name)
            # Torn in the first copy: the second still has the old fact. Stored in the first: both count.
            assert found == {0: {old}, 1: {old}, 2: {old, new}, 3: {old, new}, 4: {new}, 5: {new}}[number]
            assert log.read().torn == {0: (), 1: (0,), 2: (1,), 3: (1,), 4: (1,), 5: ()}[number]
            want = new if number > 1 else old
            for second in range(3):  # a repair that dies is repeated
                if not stopped(log.repair, second):
                    break
                assert want in getattr(log.read(), name)
            log.repair()
            assert getattr(log.read(), name) == {want}
            assert not log.read().torn
            assert not any(getattr(log.read(), other) for other in kinds.values() if other != name)
            memory.close()


def test_a_lost_copy_is_written_again_from_the_other():
    rng = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    for copy in COPIES:
        memory, log = fresh_log()
        for record in [
            Record(Kind.COMMIT, 1, 4),
            Record(Kind.COMMIT, 1, 5),
            Record(Kind.INTENT, 2, 6),
            *(Record(Kind.MARK, 2, 6, n) for n in (2, 1)),
        ]:
            log.write(Point.COMMIT, record)
        before = log.read()
        region = small_layout().by_name[f"log{copy}"]
        memory.damage(region.offset, rng.integers(0, 256, region.nbytes, np.uint8))
        after = log.read()
        assert dataclasses.replace(after, torn=()) == before
        assert after.torn == (copy,)
        log.repair()
        assert log.read() == before
        memory.close()


def test_a_valid_record_in_a_place_that_is_not_its_own_does_not_count():
    """A copy of a record that went to the wrong place must neither be read nor be spread by a repair."""
    memory, log = fresh_log()
    commit, mark = Record(Kind.COMMIT, 1, 4), Record(Kind.MARK, 1, 4, 1)
    for record in (commit, mark):
        log.write(Point.COMMIT, record)
    memory.store_record(Point.COMMIT, log.offset(0, Kind.COMMIT, 4), Record(Kind.COMMIT, 1, 7))
    memory.store_record(Point.COMMIT, log.offset(0, Kind.MARK, 4, 1), Record(Kind.MARK, 1, 6, 0))
    for _ in range(2):
        assert log.read().commits == {commit}
        assert log.read().marks == {mark}
        log.repair()
    memory.close()


# Control words --------------------------------------------------------------------------------------------------------------------------


def control_block() -> tuple[int, Control]:
    fd = os.memfd_create("control")
    os.ftruncate(fd, control.BYTES)
    return fd, Control(fd)


def test_a_damaged_phase_is_refused_and_the_other_words_stay_hints():
    fd, words = control_block()
    words.claim(pid=os.getpid(), incarnation=3, steps=10)
    assert words.phase is Phase.INIT
    for value in (-1, len(Phase), 2**62):
        os.pwrite(fd, value.to_bytes(8, "little", signed=True), 8 * Word.PHASE)
        with pytest.raises(
            RecordError, match=f"control word PHASE: expected 0..{len(Phase) - 1}, found {value}; the control block is damaged"
        ):
            _ = words.phase
    words.enter(Phase.UPDATE)
    assert words.phase is Phase.UPDATE
    words.close()
    os.close(fd)


def test_write_through_is_a_store():
    """Seen by views, in order, with a crash point before, inside and after."""
    made, seen = arena(4096), []
    data = memoryview(bytes(range(100)))
    made.write_through(Point.DRAIN_PARITY, 256, data)
    assert made.view(256, 100).tobytes() == bytes(data)

    def hook(point, moment, nbytes):
        seen.append((point, moment, nbytes, made.view(256, 100).tobytes().count(7)))
        return True

    with faults.armed(hook):
        made.write_through(Point.DRAIN_PARITY, 256, memoryview(bytes([7] * 100)))
    assert seen == [(Point.DRAIN_PARITY, moment, 100, count) for moment, count in zip(Moment, (1, 50, 100), strict=True)]
    made.close()

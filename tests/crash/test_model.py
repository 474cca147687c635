"""Crash after every store, in recoveries too, and lose pages: the fault-free result or an explicit refusal, never a wrong state."""

import random
import zlib
from collections import Counter

import model
import numpy as np
import pytest
from model import PAGE, Crash, Job, Machine, Refused

MODES = ("torn", "after")  # "before" a store is after the one before it


def start(seed, ranks=1, small=False, steps=4):
    """A job that is LIVE at a step of the parity of `seed`, and the fault-free states of the next `steps` steps."""
    lay = model.random_layout(seed, ranks, small)
    source = model.first_source(lay, seed, step=seed % 2 * 5)
    job = Job(lay, source)
    states = model.trajectory(job, source.step + steps)
    print(f"seed {seed}: {len(lay.chunks)} chunks, D={lay.d} H1={lay.h1} H2={lay.h2}, {ranks} ranks, from step {source.step}")
    return job, states


def check(job, states, drained=False):
    step, state = job.canonical()
    assert all(r.commit() == step for r in job.ranks), "ranks stand at different steps"
    for got, want in zip(state, states[step], strict=True):
        assert got[:-1] == want[:-1], f"wrong state at step {step}"
        assert got[-1] in (want[-1], bytes(16)), f"wrong metrics at step {step}, neither right nor unknown"
    for r in job.ranks:
        for c in range(len(job.layout.chunks)):
            block, base = r.encoded(c, step), job.layout.block(c)[0]
            for tier in r.tiers():
                assert not drained or tier or r.version(c, 0) == step, f"chunk {c} has no current parity at the end"
                if r.version(c, tier) != step:
                    continue
                first, size = r.tier(c, tier)
                same = block[first - base : first - base + size] == r.read("parity", first, size).tobytes()
                assert same, f"parity of chunk {c} says {step} and is not"


def drive(job, states, machines, recover=True, inject=lambda job: None):
    """Recovers and trains to the end of `states` through the crashes of `machines`; returns the plans. Raises Refused."""
    plans, last, machines = [], max(states), iter(machines)
    while True:
        machine = next(machines, None) or Machine(len(plans))
        try:
            if recover:
                plans.append(job.recover(machine))
                check(job, states)
            job.train(machine, last)
            check(job, states, drained=True)
            return plans
        except Crash:
            recover = True
            inject(job)


def live(job):
    job = job.copy()
    job.recover(Machine())
    return job


def stores(job, states):
    machine = Machine(1)
    job.copy().train(machine, max(states))
    return machine.count


def plain(lay, source, last):
    """The same training without slides, chunks, logs or parity: whole arrays in leaf order."""
    ranks, position = [], source.position
    for state in source.states:
        state, lanes = list(state), {}
        for chunk in lay.chunks:
            for j, dtype in enumerate(lay.signatures[chunk.signature].dtypes):
                lanes.setdefault((chunk.signature, j), []).append(np.frombuffer(state.pop(0), dtype).astype(np.int64))
        lanes = {k: np.concatenate(v) for k, v in lanes.items()}
        ranks.append([lanes, np.frombuffer(state[0], "<i8"), np.frombuffer(state[1], "<i4"), state[2]])
    for step in range(source.step + 1, last + 1):
        batch, count = position % 997, range(len(lay.signatures))
        total = sum(int(sum(lanes[i, 0].sum() for i in count)) % 2**20 for lanes, *_ in ranks)
        grads, norm = [], 0
        for index, rank in enumerate(ranks):
            lanes, _, extras, _ = rank
            grads.append([(lanes[i, 0] * 7 + batch + 13 * total % 10007 + extras[0]).astype("<i4") for i in count])
            norm += (index + 1) * (int(sum(g.astype(np.int64).sum() for g in grads[-1])) % 10007)
            rank[3] = np.array([(total + batch + int(extras[1])) % 2**31, step, batch, 0], "<i4").tobytes()
            rank[2] = extras * np.int32(3) + np.int32(batch + (0 if lay.replicated else index))
        for rank, g in zip(ranks, grads, strict=True):
            lanes, scalars = rank[0], rank[1]
            rank[1] = np.array([scalars[0] + 1, (scalars[1] * 5 + norm) % 65521, norm, 0])
            if norm % 4 == 0:
                continue
            for i, s in enumerate(lay.signatures):
                old, gi, scale = [lanes[i, j] for j in range(len(s.dtypes))], g[i].astype(np.int64), int(rank[1][1])
                lanes[i, 0] = old[0] * 3 + gi * scale + sum(old[1:])
                lanes.update({(i, j): m * 5 + gi + scale * (j + 1) for j, m in enumerate(old) if j})
                lanes.update({(i, j): lanes[i, j].astype(d).astype(np.int64) for j, d in enumerate(s.dtypes)})
        position = model.next_position(position)
    out = []
    for lanes, scalars, extras, metrics in ranks:
        parts = [
            lanes[c.signature, j][c.start : c.start + c.length].astype(d).tobytes()
            for c in lay.chunks
            for j, d in enumerate(lay.signatures[c.signature].dtypes)
        ]
        out.append([*parts, scalars.astype("<i8").tobytes(), extras.astype("<i4").tobytes(), metrics])
    return out


@pytest.mark.parametrize("seed", range(12))
def test_fault_free_states_are_those_of_plain_training(seed):
    job, states = start(seed, ranks=1 + seed % 3, steps=6)
    assert states[max(states)] == plain(job.layout, job.source, max(states))
    assert len({str(s) for s in states.values()}) == 7


def every_crash(seed, ranks, modes=MODES, small=False):
    job, states = start(seed, ranks, small, steps=3)
    job, met = live(job), Counter()
    for n in range(1, stores(job, states) + 1):
        for mode, favour in [(mode, None) for mode in modes] + [("torn", rank) for rank in range(ranks) if ranks > 1]:
            machine = Machine(1, n, mode, favour)
            plans = drive(job.copy(), states, [machine], recover=False)
            assert machine.count == n, f"crash {n} did not fire"
            met[plans[0].action] += 1
    print(dict(met))
    assert set(met) == {"redo", "roll"}


@pytest.mark.parametrize(("seed", "ranks"), [(3, 1), (4, 1), (15, 1), (10, 2)])
def test_crash_at_every_store_of_three_steps(seed, ranks):
    every_crash(seed, ranks)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(100, 106))
def test_crash_at_every_store_of_three_steps_of_many_layouts(seed, ranks):
    every_crash(seed, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_crash_at_every_store_of_a_fill(ranks):
    job, states = start(5, ranks, steps=2)
    machine = Machine(1)
    job.copy().recover(machine)
    for n in range(1, machine.count + 1):
        for mode in MODES:
            assert drive(job.copy(), states, [Machine(1, n, mode)])[-1].action in ("fill", "redo")


@pytest.mark.parametrize("ranks", [1, 2])
def test_crash_at_every_store_of_a_fill_over_a_live_arena(ranks):
    job, states = start(5, ranks, steps=6)
    first = min(states)
    job = live(job)
    job.train(Machine(0), first + 4)
    for back in (1, 2, 3):  # the old logs hold intents and marks of the next step, or commits beyond it
        job.source = model.checkpoint(model.first_source(job.layout, 5, first), states, first + back)
        machine = Machine(1)
        job.copy().recover(machine, refill=True)
        for n in range(1, machine.count + 1, ranks):
            for favour in range(ranks):
                late = job.copy()
                with pytest.raises(Crash):
                    late.recover(Machine(1, n, "torn", favour), refill=True)
                drive(late, states, [])


def every_nested_crash(seed, ranks, modes, stride=1):
    job, states = start(seed, ranks, small=True, steps=2)
    job, fired = live(job), 0
    for n in range(1, stores(job, states) + 1, stride):
        for mode in modes:
            outer = job.copy()
            with pytest.raises(Crash):
                outer.train(Machine(1, n, mode, n % (ranks + 1)), max(states))
            machine = Machine(2)
            outer.copy().recover(machine)
            for k in range(1, machine.count + 1):
                inner = Machine(2, k, "torn")
                drive(outer.copy(), states, [inner, Machine(3, 1 + (n + k) % machine.count, "torn")])
                assert inner.count == k
                fired += 1
    print(f"{fired} nested crashes")


@pytest.mark.parametrize(("seed", "ranks"), [(0, 1), (3, 1), (1, 2)])
def test_crash_at_every_store_of_every_recovery(seed, ranks):
    every_nested_crash(seed, ranks, ["torn"], stride=2 * ranks - 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(120, 122))
def test_crash_at_every_store_of_every_recovery_of_many_layouts(seed, ranks):
    every_nested_crash(seed, ranks, MODES)


# --- losses ------------------------------------------------------------------------------------------------------------------------


def pages(job, prefix):
    return [
        (r.index, name, page)
        for r in job.ranks
        for name, size in job.layout.sizes().items()
        if name.startswith(prefix)
        for page in range(-(-size // PAGE))
    ]


def lose(job, losses, rng):
    for index, name, page in losses:
        job.ranks[index].lose(name, page, rng)


# What a lost page of each kind may end in, over all crash points: `never` is never refused; the others only with a mark on some rank,
# or, for what the next compute reads, without an intent.
NEVER, MARKED, ACTIVE = "never", "marked", "active"
LOSSES = {
    "lane": NEVER,
    "staging": NEVER,
    "parity": NEVER,
    "log/0": NEVER,
    "log/1": NEVER,
    "metrics": NEVER,
    "grads": MARKED,
    "extras": ACTIVE,
    "scalars": ACTIVE,
}


def every_loss(seed, ranks, prefix, stride=1, most=10**9, nested=False):
    job, states = start(seed, ranks, small=True, steps=2)
    job, met, rng = live(job), Counter(), random.Random(seed)
    for n in range(1, stores(job, states) + 1, stride):
        crashed = job.copy()
        with pytest.raises(Crash):
            crashed.train(Machine(1, n, "torn", n // 2 % (ranks + 1)), max(states))
        marked = any(
            r.commit() == step + 1 or ((i := r.intent(step + 1)) and r.marks(i))
            for r in crashed.ranks
            for step in [min(r.commit() for r in crashed.ranks)]
        )
        candidates = pages(crashed, prefix)
        for loss in rng.sample(candidates, min(most, len(candidates))):
            hurt = crashed.copy()
            lose(hurt, [loss], rng)
            machines = [Machine(2, rng.randrange(1, 40), "torn") for _ in range(rng.randrange(4))] if nested else []
            try:
                plans = drive(hurt, states, machines)
                met[plans[0].action if plans else "crashed"] += 1
            except Refused as error:
                met["refused: " + str(error)] += 1
                if LOSSES[prefix] == NEVER or (LOSSES[prefix] == MARKED and not marked):
                    pytest.fail(f"refused needlessly: crash {n}, {loss}: {error}")
    print(prefix, dict(met))
    return met


@pytest.mark.parametrize("prefix", LOSSES)
@pytest.mark.parametrize(("seed", "ranks"), [(0, 1), (1, 2)])
def test_one_lost_page_at_any_time(seed, ranks, prefix):
    met = every_loss(seed, ranks, prefix, stride=2, most=4)
    assert met["redo"] + met["roll"] + met["revoke"]
    assert prefix != "grads" or met["revoke"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("prefix", LOSSES)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(130, 132))
def test_one_lost_page_at_any_time_of_many_layouts(seed, ranks, prefix):
    every_loss(seed, ranks, prefix)
    every_loss(seed, ranks, prefix, nested=True)


def scenes(seed, ranks, prefix):
    """Jobs that died with a page of `prefix` lost, one for each thing that recovery may do then; as many crash points as there are."""
    job, states = start(seed, ranks, small=True, steps=2)
    job, rng, found = live(job), random.Random(seed), {}
    for n in range(1, stores(job, states) + 1):
        crashed = job.copy()
        with pytest.raises(Crash):
            crashed.train(Machine(1, n, "torn"), max(states))
        lose(crashed, [rng.choice(pages(crashed, prefix))], rng)
        probe, machine = crashed.copy(), Machine(2)
        try:
            plan = probe.recover(machine)
        except Refused:
            continue
        found.setdefault(plan.action, []).append((crashed, machine.count))
    return states, found, rng


@pytest.mark.parametrize("prefix", LOSSES)
def test_crash_at_every_store_of_a_recovery_from_a_lost_page(prefix):
    states, found, rng = scenes(0, 1, prefix)
    for crashed in found.values():
        for hurt, count in rng.sample(crashed, min(3, len(crashed))):
            for k in range(1, count + 1):
                try:
                    drive(hurt.copy(), states, [Machine(2, k, "torn")])
                except Refused as error:
                    pytest.fail(f"crash {k} in the recovery from a lost page of {prefix}: {error}")


SECONDS = [
    ("grads", ("lane",)),
    ("grads", ("parity",)),
    ("grads", ("lane", "parity")),
    ("staging", ("parity",)),
    ("staging", ("parity", "lane")),
    ("parity", ("staging", "lane")),
    ("log/0", ("log/1",)),
    ("lane", ("lane",)),
]


@pytest.mark.parametrize(("first", "second"), SECONDS)
def test_a_second_loss_soon_after_a_recovery(first, second):
    """The second crash falls into the recovery from the first loss or into the compute after it."""
    states, found, rng = scenes(7, 1, first)
    met = Counter()
    for _ in range(150):
        hurt, count = rng.choice(found[rng.choice(sorted(found))])
        hurt, faults = hurt.copy(), iter([second])

        def inject(job, faults=faults):
            for prefix in next(faults, ()):
                lose(job, [rng.choice(pages(job, prefix))], rng)

        try:
            met[len(drive(hurt, states, [Machine(rng.random(), rng.randrange(1, count + 12), "torn")], inject=inject))] += 1
        except Refused as error:
            met[str(error)] += 1
            if "lane" not in second and "log/1" not in second:
                pytest.fail(f"no data is lost, but: {error}")
    print(dict(met))


def test_more_lost_than_parity_rows_is_refused_and_both_log_copies_too():
    job, states = start(2, 1, steps=2)
    job, rng = live(job), random.Random(0)
    chunk = job.layout.chunks[0]
    name, _, first, size = job.layout.pieces(chunk, min(states))[0]
    group = [(0, name, (first + i * size // job.layout.d) // PAGE) for i in range(job.layout.d)]
    assert job.layout.h1 < job.layout.d
    kept = job.copy()
    lose(kept, group[: job.layout.h1], rng)
    drive(kept, states, [])
    lose(job, group[: job.layout.h + 1], rng)
    with pytest.raises(Refused, match="pages of a group lost"):
        drive(job.copy(), states, [])
    both = job.copy()
    lose(both, [(0, "log/0", 0), (0, "log/1", 1)], rng)
    with pytest.raises(Refused, match="no commit in either log copy"):
        drive(both, states, [])


def random_history(seed):
    """Crashes at random, several in a row, with losses; a refusal goes to a checkpoint of an earlier step, over the old arena."""
    rng = random.Random(seed)
    ranks = rng.choice([1, 1, 2, 3])
    job, states = start(seed, ranks, small=rng.random() < 0.5, steps=8)
    first, met, budget, refill = job.source, Counter(), 12, False

    def inject(job):
        for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
            loss = rng.choice(pages(job, rng.choice([*LOSSES, "grads"])))
            lose(job, [loss], rng)
            met["lost " + loss[1].split("/")[0]] += 1

    while True:
        machines = [
            Machine(
                rng.random(),
                rng.choice([rng.randrange(1, 30), rng.randrange(1, 400)]),
                rng.choice(MODES),
                rng.choice([None, *range(ranks)]),
            )
            for _ in range(budget)
        ]
        budget = 0
        try:
            if refill:
                try:
                    job.recover(machines.pop() if machines else Machine(rng.random()), refill=True)
                    check(job, states)
                except Crash:
                    inject(job)
            for plan in drive(job, states, machines, inject=inject):
                met[plan.action] += 1
            return met
        except Refused:
            met["refused"] += 1
            job.source, refill, budget = model.checkpoint(first, states, rng.choice(range(first.step, max(states)))), True, 3


def test_random_histories_with_losses():
    met = Counter()
    for seed in range(1000, 1090):
        met += random_history(seed)
    print(dict(met))
    assert all(met[action] for action in ("fill", "redo", "roll", "revoke", "refused"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(4))
def test_many_random_histories_with_losses(block):
    for seed in range(10_000 + 500 * block, 10_500 + 500 * block):
        random_history(seed)


def test_a_record_that_is_torn_anywhere_does_not_count():
    old, new = model.record(model.COMMIT, 6, 2), model.record(model.COMMIT, 8, 3)
    assert model.parse(new, model.COMMIT).step == 8
    assert not model.parse(bytes(64), model.COMMIT)
    assert zlib.crc32(bytes(60)), "64 zero bytes must not be a record"
    for cut in range(1, 64):
        assert not model.parse(new[:cut] + old[cut:], model.COMMIT) or new[:cut] + old[cut:] in (old, new)


def test_code_repairs_any_losses_up_to_its_rows():
    rng = np.random.default_rng(3)
    for d in (2, 3, 4):
        rows = rng.integers(0, 256, (d, 32), np.uint8)
        parity = model.encode(rows, 3)
        assert (parity[0] == np.bitwise_xor.reduce(rows)).all()
        for lost in range(1, 2**d):
            gone = [i for i in range(d) if lost >> i & 1]
            for use in ({0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}, {0, 1, 2}):
                if len(gone) <= len(use):
                    hurt = rows.copy()
                    hurt[gone] = 0
                    model.decode(hurt, {k: parity[k] for k in use}, gone)
                    assert (hurt == rows).all()

"""An executable model of the three decisions on top of `design.md`: sliding chunks, the log as token, groups with versioned parity.

It imports nothing from `leto_jax`, so that it can be an independent oracle. One rank is a dict of byte arrays. A program (step, fill,
recovery) is a generator that yields the stores and gathers that it wants; `Machine.run` is the only place that performs a store: it
counts, interleaves the ranks at random, and can end the world before, inside or after the n-th one.

Invariants, each with the fault that it guards against:
  * both log copies agree before anything acts on a record                   (acting on one copy, then losing it)
  * LOST of a page that cannot be decoded is cleared after the revocation    (rolling forward with a fresh, empty gradient page)
  * a host parity row goes before a staged one; a revocation voids staging   (parity of a chunk that was in flight when it was revoked)
  * staging counts with the marks of its step only, lost staging is rewritten (after a fill, or a cleared LOST, it holds nothing)
  * the drain ends before the next intent                                    (staging overwritten while the host has no current row)
  * a fill empties logs and versions between FILLING and LIVE, and has a generation that all ranks compare (records of another life)
"""

import copy
import random
import struct
import zlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

PAGE = 16
HEADER_BYTES = 64
COMMIT, INTENT, MARK, REVOKE, STORED, RING, LIFE, EPOCH = range(1, 9)
EMPTY, FILLING, LIVE = range(3)
IN_FLUX = 2**32 - 1
RINGS = 4


class Crash(Exception):
    """The processes of the job are gone; retained memory is as the stores so far left it."""


class Refused(Exception):
    """Recovery in place is impossible; the state is kept and the checkpoint tier is asked."""


class Store(NamedTuple):
    array: np.ndarray
    offset: int
    data: bytes
    what: str


class Gather(NamedTuple):
    value: object


class Record(NamedTuple):
    kind: int
    step: int
    epoch: int
    a: int
    b: int
    crc: int


def record(kind, step, epoch=0, a=0, b=0) -> bytes:
    body = struct.pack("<15I", kind, step, epoch, a, b, *[0] * 10)
    return body + zlib.crc32(body).to_bytes(4, "little")


def parse(raw, kind) -> Record | None:
    raw = bytes(raw)
    if raw[0] != kind:
        return None
    words = struct.unpack("<16I", raw)
    return Record(*words[:5], words[15]) if words[0] == kind and words[15] == zlib.crc32(raw[:60]) else None


# --- plan of the memory ------------------------------------------------------------------------------------------------------------


class Signature(NamedTuple):
    dtypes: tuple  # lane 0 is the parameter
    elements: int
    gap: int


class Chunk(NamedTuple):
    signature: int
    start: int
    length: int


@dataclass(frozen=True)
class Layout:
    signatures: tuple
    chunks: tuple
    d: int
    h1: int
    h2: int
    ranks: int
    replicated: bool  # extras are byte-equal on all ranks

    @property
    def h(self):
        return self.h1 + self.h2

    def offset(self, chunk: Chunk, step: int) -> int:
        """Element offset of a chunk in its lanes as commit `step` leaves it: even high, odd low."""
        return chunk.start + (self.signatures[chunk.signature].gap if step % 2 == 0 else 0)

    def order(self, step: int) -> list[int]:
        return list(range(len(self.chunks))) if step % 2 else list(range(len(self.chunks)))[::-1]

    def pieces(self, chunk: Chunk, step: int):
        """(lane name, dtype, first byte, bytes) of a chunk's piece in every lane of its signature."""
        return self._pieces[chunk, step % 2]

    @cached_property
    def _pieces(self):
        out = {}
        for chunk in self.chunks:
            for parity in (0, 1):
                lanes = [(lane, dtype, np.dtype(dtype).itemsize) for lane, dtype in enumerate(self.signatures[chunk.signature].dtypes)]
                out[chunk, parity] = [
                    (f"lane/{chunk.signature}/{lane}", dtype, self.offset(chunk, parity) * size, chunk.length * size)
                    for lane, dtype, size in lanes
                ]
        return out

    def block(self, c: int) -> tuple[int, int, int, int]:
        """Of a chunk's block in staging and in host parity: first byte, bytes of one parity row, bytes of checksums, bytes in all.
        Order inside: H1 rows, checksums of the data pages, H2 rows."""
        return self._blocks[c]

    @cached_property
    def _blocks(self):
        out, first = [], 0
        for chunk in self.chunks:
            row = sum(size // self.d for _, _, _, size in self.pieces(chunk, 0))
            sums = -(-4 * self.d * row // PAGE // PAGE) * PAGE
            out.append((first, row, sums, self.h * row + sums))
            first += out[-1][3]
        return out

    def gradient(self, chunk: Chunk) -> tuple[int, int]:
        first = HEADER_BYTES + 4 * sum(s.elements for s in self.signatures[: chunk.signature])
        return first + 4 * chunk.start, 4 * chunk.length

    def sizes(self) -> dict[str, int]:
        sizes = {
            f"lane/{i}/{j}": (s.elements + s.gap) * np.dtype(d).itemsize
            for i, s in enumerate(self.signatures)
            for j, d in enumerate(s.dtypes)
        }
        block = sum(size for *_, size in self._blocks)
        sizes |= {"grads": HEADER_BYTES + 4 * sum(s.elements for s in self.signatures), "staging": block, "parity": block}
        sizes |= {f"{name}/{i}": size for name, size in (("extras", 32), ("scalars", 32), ("metrics", 16)) for i in (0, 1)}
        sizes |= {f"log/{i}": 64 * (6 + 2 * len(self.chunks)) for i in (0, 1)}
        return sizes | {"versions": 8 * len(self.chunks), "ring": 64 * RINGS, "life": 128, "epoch": 128}


def random_layout(seed: int, ranks=1, small=False) -> Layout:
    rng = random.Random(seed)
    d = rng.choice([2, 3]) if small else rng.choice([2, 3, 4])
    unit = d * PAGE // 2  # so that rows are whole pages in every lane, also of two-byte elements
    signatures, chunks = [], []
    for s in range(1 if small else rng.choice([1, 2, 2])):
        most, count = unit * rng.choice([1, 2]), (2 if small else rng.choice([1, 2, 3]))
        lengths = [most] * (count - 1) + [rng.choice(range(unit, most + 1, unit))]
        other = rng.sample(["<i2", "<i8", "<i4"], 1 if small else rng.choice([1, 2]))
        signatures.append(Signature(("<i4", *other), sum(lengths), max(lengths)))
        chunks += [Chunk(s, sum(lengths[:i]), n) for i, n in enumerate(lengths)]
    h1 = rng.choice([1, 2])
    return Layout(tuple(signatures), tuple(chunks), d, h1, rng.choice([0, 1]), ranks, rng.random() < 0.5)


# --- GF(2^8) code ------------------------------------------------------------------------------------------------------------------


def _times(a, b):
    out = 0
    while b:
        out ^= a if b & 1 else 0
        a, b = (a << 1) ^ (0x11D if a & 0x80 else 0), b >> 1
    return out


MUL = np.array([[_times(a, b) for b in range(256)] for a in range(256)], np.uint8)
INVERSE = [0] + [int(np.argmax(MUL[a] == 1)) for a in range(1, 256)]


def coefficient(h, i):
    out = 1
    for _ in range(h * i):
        out = _times(out, 2)
    return out


def encode(rows: np.ndarray, h: int) -> np.ndarray:
    out = np.zeros((h, rows.shape[1]), np.uint8)
    for k in range(h):
        for i, row in enumerate(rows):
            out[k] ^= MUL[coefficient(k, i)][row]
    return out


def decode(rows: np.ndarray, parity: dict[int, np.ndarray], lost: list[int]) -> None:
    """Replaces the `lost` rows of one group by Gauss elimination over the parity rows given (index to bytes)."""
    use = sorted(parity)[: len(lost)]
    matrix = [[coefficient(k, i) for i in lost] for k in use]
    right = []
    for k in use:
        value = parity[k].copy()
        for i in range(len(rows)):
            if i not in lost:
                value ^= MUL[coefficient(k, i)][rows[i]]
        right.append(value)
    for col in range(len(lost)):
        pivot = next(r for r in range(col, len(lost)) if matrix[r][col])
        matrix[col], matrix[pivot], right[col], right[pivot] = matrix[pivot], matrix[col], right[pivot], right[col]
        inverse = INVERSE[matrix[col][col]]
        matrix[col], right[col] = [int(MUL[inverse][v]) for v in matrix[col]], MUL[inverse][right[col]]
        for r in range(len(lost)):
            if r != col and (factor := matrix[r][col]):
                matrix[r] = [a ^ int(MUL[factor][b]) for a, b in zip(matrix[r], matrix[col], strict=True)]
                right[r] = right[r] ^ MUL[factor][right[col]]
    for i, value in zip(lost, right, strict=True):
        rows[i] = value


# --- the machine: the one place that stores ----------------------------------------------------------------------------------------


class Machine:
    """favour: the rank that runs ahead of the others as far as the gathers let it; None: all at random."""

    def __init__(self, seed=0, crash_at=None, mode="torn", favour=None):
        self.rng, self.crash_at, self.mode, self.favour, self.count = random.Random(seed), crash_at, mode, favour, 0

    def store(self, s: Store) -> None:
        """`before`: nothing of the store. `torn`: a random prefix or random aligned words of it, never the last eight bytes. `after`."""
        self.count += 1
        crash = self.count == self.crash_at
        data, size = np.frombuffer(s.data, np.uint8), len(s.data)
        target = s.array[s.offset : s.offset + size]
        assert len(target) == size, f"store of {s.what} leaves its region"
        if not crash or self.mode == "after":
            target[:] = data
        elif self.mode == "torn" and size > 8:
            words = -(-size // 8) - 1
            keep = range(self.rng.randrange(words + 1)) if self.rng.random() < 0.5 else [w for w in range(words) if self.rng.random() < 0.5]
            for w in keep:
                target[8 * w : 8 * w + 8] = data[8 * w : 8 * w + 8]
        if crash:
            raise Crash(f"{self.mode} store {self.count} ({s.what})")

    def run(self, programs) -> list:
        """Runs one program per rank, interleaved at random between stores; a gather waits for all of them."""
        send, waiting, done = [None] * len(programs), {}, {}
        while len(done) < len(programs):
            ready = [i for i in range(len(programs)) if i not in waiting and i not in done]
            if not ready:
                assert not done, "a gather that not all ranks take part in: a hang"
                send, waiting = [[waiting[i] for i in range(len(programs))]] * len(programs), {}
                continue
            i = self.favour if self.favour in ready else ready[0] if len(ready) == 1 else self.rng.choice(ready)
            try:
                want = programs[i].send(send[i])
                send[i] = None
                if isinstance(want, Gather):
                    waiting[i] = want.value
                else:
                    self.store(want)
            except StopIteration as end:
                done[i] = end.value
        return [done[i] for i in range(len(programs))]


def merge(rng, *programs):
    """Two streams of one rank, for example the drain behind the next compute."""
    live, send = list(programs), {id(p): None for p in programs}
    while live:
        p = rng.choice(live)
        try:
            send[id(p)] = yield p.send(send[id(p)])
        except StopIteration:
            live.remove(p)


# --- one rank ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Rank:
    layout: Layout
    index: int
    mem: dict = field(default_factory=dict)
    lost: dict = field(default_factory=dict)  # one LOST byte per page, host metadata
    bad: set = field(default_factory=set)  # (region, page) that are gone and not yet recorded as LOST: what a probe would find

    def __post_init__(self):
        for name, size in () if self.mem else self.layout.sizes().items():
            self.mem[name] = np.zeros(size, np.uint8)
            self.lost[name] = np.zeros(-(-size // PAGE), np.uint8)

    def put(self, name, offset, data) -> Store:
        return Store(self.mem[name], offset, bytes(data), f"{self.index}:{name}+{offset}")

    def flag(self, name, page, value) -> Store:
        return Store(self.lost[name], page, bytes([value]), f"{self.index}:lost {name} {page} {value}")

    def lose(self, name, page, rng) -> None:
        view = self.mem[name][page * PAGE : (page + 1) * PAGE]
        view[:] = np.frombuffer(rng.randbytes(len(view)), np.uint8)
        self.bad.add((name, page))

    def any_lost(self, name, first=0, size=None) -> bool:
        last = len(self.mem[name]) if size is None else first + size
        return b"\1" in self.lost[name][first // PAGE : -(-last // PAGE)].tobytes()

    def read(self, name, first, size) -> np.ndarray:
        return self.mem[name][first : first + size]

    # log places: commit, intent, revoke by two, then marks of even and of odd steps
    def place(self, kind, step, chunk=0) -> int:
        if kind == MARK:
            return 64 * (6 + step % 2 * len(self.layout.chunks) + chunk)
        return 64 * ({COMMIT: 0, INTENT: 2, REVOKE: 4}[kind] + step % 2)

    def log(self, kind, place) -> Record | None:
        """The newer valid one of both copies; a copy with a lost page does not count at all."""
        return parse(self.log_bytes(kind, place), kind)

    def log_bytes(self, kind, place) -> bytes:
        copies = {self.mem[name][place : place + 64].tobytes() for name in ("log/0", "log/1") if not self.any_lost(name)}
        if len(copies) == 1:
            return copies.pop()
        return max(copies, key=lambda raw: (r.step, r.epoch) if (r := parse(raw, kind)) else (-1, -1), default=bytes(64))

    def write_log(self, raw, place):
        for i in (0, 1):
            yield self.put(f"log/{i}", place, raw)

    def newest(self, name, kind) -> Record | None:
        """Of an alternating pair in host metadata."""
        return max((r for i in (0, 1) if (r := parse(self.read(name, 64 * i, 64), kind))), key=lambda r: (r.epoch, r.step), default=None)

    def commit(self) -> int | None:
        return max((r.step for i in (0, 1) if (r := self.log(COMMIT, self.place(COMMIT, i)))), default=None)

    def intent(self, step) -> Record | None:
        r = self.log(INTENT, self.place(INTENT, step))
        return r if r and r.step == step else None

    def marks(self, intent: Record) -> int | None:
        """Length of the prefix of marked chunks in the order of the step; None for a hole."""
        got = [
            bool((r := self.log(MARK, self.place(MARK, intent.step, c))) and (r.step, r.a, r.b) == (intent.step, c, intent.crc))
            for c in self.layout.order(intent.step)
        ]
        count = (*got, False).index(False)
        return None if any(got[count:]) else count

    def staged(self, step) -> bool:
        """Whether commit `step` came from an update, which wrote staging, and not from a fill."""
        intent = self.intent(step)
        return bool(intent) and self.marks(intent) == len(self.layout.chunks)

    def orphan_marks(self, step, intents) -> bool:
        """A mark of `step` that belongs to none of the intents that are known."""
        crcs = {i.crc for i in intents}
        return any(
            (r := self.log(MARK, self.place(MARK, step, c))) and r.step == step and r.b not in crcs for c in range(len(self.layout.chunks))
        )

    def revokes(self) -> list[Record]:
        return [r for i in (0, 1) if (r := self.log(REVOKE, self.place(REVOKE, i)))]

    def stored(self) -> tuple[int, int] | None:
        r = None if self.any_lost("grads", 0, HEADER_BYTES) else parse(self.read("grads", 0, 64), STORED)
        return (r.step, r.epoch) if r else None

    def version(self, c, tier) -> int:
        return int(self.mem["versions"].view("<u4")[2 * c + tier])

    def put_version(self, c, tier, value) -> Store:
        return self.put("versions", 4 * (2 * c + tier), np.array([value], "<u4").tobytes())

    def canonical(self, step) -> list[bytes]:
        """What the digest covers: lanes in leaf order, scalars, extras, metrics of commit `step`."""
        out = [
            self.read(name, first, size).tobytes()
            for chunk in self.layout.chunks
            for name, _, first, size in self.layout.pieces(chunk, step)
        ]
        return out + [self.mem[f"{name}/{step % 2}"].tobytes() for name in ("scalars", "extras", "metrics")]

    def encoded(self, c, step) -> bytes:
        """A chunk's block, encoded from its pieces at the place of `step`."""
        chunk, rows, sums = self.layout.chunks[c], [], []
        for name, _, first, size in self.layout.pieces(chunk, step):
            data = self.read(name, first, size)
            rows.append(encode(data.reshape(self.layout.d, -1), self.layout.h))
            sums += [zlib.crc32(page.tobytes()) for page in data.reshape(-1, PAGE)]
        _, _, sum_bytes, _ = self.layout.block(c)
        parity, sums = np.concatenate(rows, 1), np.array(sums, "<u4").tobytes().ljust(sum_bytes, b"\0")
        return parity[: self.layout.h1].tobytes() + sums + parity[self.layout.h1 :].tobytes()

    def tier(self, c, tier) -> tuple[int, int]:
        """First byte and bytes of what one tier keeps of a chunk's block."""
        first, row, sums, size = self.layout.block(c)
        middle = self.layout.h1 * row + sums
        return (first, middle) if tier == 0 else (first + middle, size - middle)

    def tiers(self):
        return (0, 1) if self.layout.h2 else (0,)

    def ring(self, step) -> int:
        """Iterator state before the batch of `step`: its entry, else one after the entry before, else the fill's."""
        for at, advance in ((step, 0), (step - 1, 1)):
            r = parse(self.read("ring", 64 * (at % RINGS), 64), RING)
            if r and r.step == at:
                return next_position(r.a) if advance else r.a
        life = self.newest("life", LIFE)
        assert life.step + 1 == step, "no ring entry and not at the fill"
        return life.b


def next_position(position):
    return (position * 1103515245 + 12345) % 2**31


# --- one training step -------------------------------------------------------------------------------------------------------------


def compute(r: Rank, step: int, epoch: int):
    lay = r.layout
    position = r.ring(step)
    yield r.put("ring", 64 * (step % RINGS), record(RING, step, epoch, position))
    yield r.put("grads", 0, record(STORED, 0, epoch))
    parameters = [[] for _ in lay.signatures]
    for chunk in lay.chunks:
        name, _, first, size = lay.pieces(chunk, step - 1)[0]
        parameters[chunk.signature].append(r.read(name, first, size).view("<i4"))
    total = sum((yield Gather(int(sum(p.astype(np.int64).sum() for ps in parameters for p in ps)) % 2**20)))
    extras = r.mem[f"extras/{(step - 1) % 2}"].view("<i4")
    batch = position % 997
    for i, ps in enumerate(parameters):
        g = np.concatenate(ps) * np.int32(7) + np.int32(batch + 13 * total % 10007) + extras[0]
        yield r.put("grads", lay.gradient(Chunk(i, 0, 0))[0], g.astype("<i4").tobytes())
    loss = total + batch + int(extras[1])
    yield r.put(f"extras/{step % 2}", 0, (extras * np.int32(3) + np.int32(batch + (0 if lay.replicated else r.index))).tobytes())
    yield r.put(f"metrics/{step % 2}", 0, np.array([loss % 2**31, step, batch, 0], "<i4").tobytes())
    yield r.put("grads", 0, record(STORED, step, epoch))


def decide(r: Rank, step: int, epoch: int):
    norm = int(r.mem["grads"][HEADER_BYTES:].view("<i4").astype(np.int64).sum()) % 10007
    records = yield Gather((r.stored(), norm))
    assert all(stored == (step, epoch) for stored, _ in records), f"bad decide records {records}"
    old = r.mem[f"scalars/{(step - 1) % 2}"].view("<i8")
    norm = sum(n * (i + 1) for i, (_, n) in enumerate(records))
    new = np.array([old[0] + 1, (old[1] * 5 + norm) % 65521, norm, 0], "<i8").tobytes()
    yield r.put(f"scalars/{step % 2}", 0, new)
    yield from r.write_log(record(INTENT, step, epoch, zlib.crc32(new), norm % 4 == 0), r.place(INTENT, step))


def update(r: Rank, intent: Record):
    """All chunks that have no mark, in order, then nothing: the commit is the caller's."""
    lay, step = r.layout, intent.step
    scalars = r.mem[f"scalars/{step % 2}"]
    assert zlib.crc32(scalars.tobytes()) == intent.a, "scalars are not those of the intent"
    scale, skip = int(scalars.view("<i8")[1]), intent.b
    for c in lay.order(step)[r.marks(intent) :]:
        assert r.stored() == (step, intent.epoch), "gradients are not those of the intent"
        chunk = lay.chunks[c]
        g = r.read("grads", *lay.gradient(chunk)).view("<i4").astype(np.int64)
        assert not r.any_lost("grads", *lay.gradient(chunk)), "a lost gradient page is used"
        old = [r.read(name, first, size).view(dtype).astype(np.int64) for name, dtype, first, size in lay.pieces(chunk, step - 1)]
        new = [old[0] * 3 + g * scale + sum(old[1:])] + [m * 5 + g + scale * (i + 2) for i, m in enumerate(old[1:])]
        for (name, dtype, first, _), value in zip(lay.pieces(chunk, step), old if skip else new, strict=True):
            yield r.put(name, first, value.astype(dtype).tobytes())
        yield r.put("staging", lay.block(c)[0], r.encoded(c, step))
        yield from r.write_log(record(MARK, step, intent.epoch, c, intent.crc), r.place(MARK, step, c))


def commit(r: Rank, step: int, epoch: int):
    yield from r.write_log(record(COMMIT, step, epoch), r.place(COMMIT, step))


def drain(r: Rank, step: int, rng):
    """Staging of commit `step` to the host; the far tier (H2) may be left behind, never the near one."""
    for c in range(len(r.layout.chunks)):
        for tier in r.tiers():
            if r.version(c, tier) == step or (tier and rng.random() < 0.5):
                continue
            first, size = r.tier(c, tier)
            yield r.put_version(c, tier, IN_FLUX)
            yield r.put("parity", first, r.read("staging", first, size).tobytes())
            yield r.put_version(c, tier, step)


def train(r: Rank, until: int, epoch: int, rng):
    step = r.commit()
    while step < until:
        yield from merge(rng, drain(r, step, rng), compute(r, step + 1, epoch))
        yield from decide(r, step + 1, epoch)
        yield from update(r, r.intent(step + 1))
        step += 1
        yield from commit(r, step, epoch)
    yield from drain(r, step, rng)


class Source(NamedTuple):
    """What a fill copies in: a step, the canonical state of every rank at it, and the position of the data."""

    step: int
    states: list
    position: int


def fill(r: Rank, source: Source, generation: int, epoch: int):
    """EMPTY or anything -> FILLING -> LIVE. Everything that derives a version or a step from retained bytes is emptied in between."""
    lay, step = r.layout, source.step
    places = [
        r.put("life", 64 * ((2 * generation + i) % 2), record(LIFE, step, 2 * generation + i, a, source.position))
        for i, a in ((0, FILLING), (1, LIVE))
    ]
    yield places[0]
    for name in ("log/0", "log/1", "versions", "ring", "grads"):
        yield r.put(name, 0, bytes(len(r.mem[name])))
    for name, flags in r.lost.items():
        for page in np.flatnonzero(flags):
            yield r.flag(name, int(page), 0)
    state = iter(source.states[r.index])
    for chunk in lay.chunks:
        for name, _, first, _ in lay.pieces(chunk, step):
            yield r.put(name, first, next(state))
    for name in ("scalars", "extras", "metrics"):
        yield r.put(f"{name}/{step % 2}", 0, next(state))
    for c in range(len(lay.chunks)):
        yield from encode_to_host(r, c, step)
    yield from commit(r, step, epoch)
    yield places[1]
    yield Gather(None)


def encode_to_host(r: Rank, c: int, step: int):
    """From the lanes straight to the host copy; staging is left alone, since its version is derived and not stored."""
    block, base = r.encoded(c, step), r.layout.block(c)[0]
    for tier in r.tiers():
        first, size = r.tier(c, tier)
        yield r.put_version(c, tier, IN_FLUX)
        yield r.put("parity", first, block[first - base : first - base + size])
        yield r.put_version(c, tier, step)


# --- recovery: pictures in, plan and reason out ------------------------------------------------------------------------------------


class Picture(NamedTuple):
    """All that the plan may look at of one rank; taken after LOST is recorded."""

    life: Record | None
    commit: int | None
    intents: tuple  # of any step, voided ones too
    revokes: tuple
    marks: tuple  # (crc of intent, prefix or None)
    orphans: tuple  # steps that have a mark whose intent this rank has not
    stored: tuple | None
    lost_gradients: frozenset  # chunks
    lost: frozenset  # names of small regions with a lost page
    digests: tuple  # of the two copies of the scalars


class Plan(NamedTuple):
    action: str  # fill, redo, roll, revoke, refuse
    step: int  # the step that is committed when the plan is done
    reason: str
    intent: Record | None = None
    revoked: int = 0  # epoch of a revocation of step + 1 that is known, else 0


def picture(r: Rank) -> Picture:
    lay = r.layout
    intents = tuple(i for p in (0, 1) if (i := r.log(INTENT, r.place(INTENT, p))))
    steps = {i.step for i in intents}
    commit_step = r.commit()
    return Picture(
        r.newest("life", LIFE),
        commit_step,
        intents,
        tuple(r.revokes()),
        tuple((i.crc, r.marks(i)) for i in intents),
        tuple(s for s in steps | {(commit_step or 0) + 1} if r.orphan_marks(s, intents)),
        r.stored(),
        frozenset(c for c, chunk in enumerate(lay.chunks) if r.any_lost("grads", *lay.gradient(chunk))),
        frozenset(name for name in r.mem if name.split("/")[0] in ("scalars", "extras", "metrics") and r.any_lost(name)),
        tuple(zlib.crc32(r.mem[f"scalars/{i}"].tobytes()) for i in (0, 1)),
    )


def make_plan(lay: Layout, pictures: list[Picture]) -> Plan:
    """The table of section 5. Pure; never guesses."""
    lives = [p.life for p in pictures]
    newest = max((life.epoch // 2 for life in lives if life), default=None)
    if newest is None or any(not life or life.a != LIVE or life.epoch // 2 != newest for life in lives):
        return Plan("fill", 0, "a rank is not LIVE in the newest generation")
    commits = [p.commit for p in pictures]
    if None in commits:
        return Plan("refuse", 0, "no commit in either log copy")
    low, high = min(commits), max(commits)
    if high - low > 1:
        return Plan("refuse", low, "steps apart by more than one")
    revoked = max((v.epoch for p in pictures for v in p.revokes if v.step == low + 1), default=0)
    intents = {i for p in pictures for i in p.intents if i.step == low + 1 and i.epoch >= revoked}
    if any(i.step > low + 1 and (i.step > p.commit + 1 or low < high) for p in pictures for i in p.intents):
        return Plan("refuse", low, "an intent beyond the next step")
    if len(intents) > 1:
        return Plan("refuse", low, "unequal intents")
    behind = [p for p in pictures if p.commit == low]
    if not intents:
        if low < high:
            return Plan("refuse", low, "a rank is behind and no rank has the intent")
        if any(low + 1 in p.orphans or any(i.step == low + 1 and dict(p.marks)[i.crc] != 0 for i in p.intents) for p in pictures):
            return Plan("refuse", low, "mark without intent")
        return need_active(lay, pictures, Plan("redo", low, "no intent", revoked=revoked))
    (intent,) = intents
    done = {id(p): dict(p.marks).get(intent.crc, 0) for p in behind}
    if None in done.values() or any(low + 1 in p.orphans for p in behind):
        return Plan("refuse", low, "a hole in the marks, or marks of another intent")
    order, new, missing = lay.order(intent.step), intent.step % 2, []
    for p in behind:
        rest = order[done[id(p)] :]
        if rest and (p.stored != (intent.step, intent.epoch) or p.lost_gradients & set(rest)):
            missing.append("gradients")
        if f"extras/{new}" in p.lost and not (lay.replicated and any(complete(q, intent) for q in pictures)):
            missing.append("extras")
    if not any(intent.a == q.digests[new] and f"scalars/{new}" not in q.lost for q in pictures):
        missing.append("scalars")
    if any(p.commit > low and f"extras/{new}" in p.lost for p in pictures) and not (
        lay.replicated and any(complete(q, intent) for q in pictures)
    ):
        return Plan("refuse", low, "active extras lost")
    marked = low < high or any(done.values())
    if any(f"metrics/{new}" in p.lost for p in behind) and not marked:
        missing.append("metrics")  # worth a second compute, not worth a refusal: with a mark they become unknown
    if not missing:
        return Plan("roll", intent.step, f"intent {intent.step}", intent)
    if marked:
        return Plan("refuse", low, f"{' and '.join(missing)} lost and a chunk is marked")
    return need_active(lay, pictures, Plan("revoke", low, f"{' and '.join(missing)} lost, no mark on any rank", intent))


def complete(p: Picture, intent: Record) -> bool:
    """Whether a rank holds the whole extras of the step of `intent`."""
    at_it = p.commit == intent.step or p.stored == (intent.step, intent.epoch)
    return at_it and f"extras/{intent.step % 2}" not in p.lost


def need_active(lay: Layout, pictures, plan: Plan) -> Plan:
    """A plan that computes from commit `plan.step` needs its scalars and extras, from a replica if need be; metrics are only told."""
    old = plan.step % 2
    if all(f"scalars/{old}" in p.lost for p in pictures):
        return Plan("refuse", plan.step, "active scalars lost")
    without = [p for p in pictures if f"extras/{old}" in p.lost]
    if without and (not lay.replicated or len(without) == len(pictures)):
        return Plan("refuse", plan.step, "active extras lost")
    return plan


def parity_rows(r: Rank, c: int, version: int, staged: bool) -> dict[int, np.ndarray]:
    """The parity rows of a chunk that count for data of `version`: host copy first, then staging."""
    lay, rows = r.layout, {}
    first, row, sums, _ = lay.block(c)
    for k in range(lay.h):
        at = first + k * row + (sums if k >= lay.h1 else 0)
        if r.version(c, int(k >= lay.h1)) == version and not r.any_lost("parity", at, row):
            rows[k] = r.read("parity", at, row)
        elif staged and not r.any_lost("staging", at, row):
            rows[k] = r.read("staging", at, row)
    return rows


def repair_lanes(r: Rank, plan: Plan, dry=False):
    """Decodes the lost pages of every live piece; raises Refused before the first store if one group has lost too many (`dry`)."""
    lay = r.layout
    here, intent = r.commit(), plan.intent if plan.action == "roll" else None
    marked = lay.order(intent.step)[: r.marks(intent)] if intent and here < plan.step else []
    for c, chunk in enumerate(lay.chunks):
        version = plan.step if c in marked else here
        staged = c in marked or (r.staged(here) and here == plan.step and plan.action in ("roll", "redo") and not plan.revoked)
        rows, at = parity_rows(r, c, version, staged), 0
        for name, _, first, size in lay.pieces(chunk, version):
            row_bytes = size // lay.d
            for page in range(0, row_bytes, PAGE):
                flags = [int(r.lost[name][(first + i * row_bytes + page) // PAGE]) for i in range(lay.d)]
                lost = [i for i in range(lay.d) if flags[i]]
                if len(lost) > len(rows):
                    raise Refused(f"rank {r.index} chunk {c}: {len(lost)} pages of a group lost, {len(rows)} parity rows current")
                if lost and not dry:
                    data = r.read(name, first, size).reshape(lay.d, -1)[:, page : page + PAGE].copy()
                    decode(data, {k: v[at + page : at + page + PAGE] for k, v in rows.items()}, lost)
                    for i in lost:
                        yield r.put(name, first + i * row_bytes + page, data[i].tobytes())
                        yield r.flag(name, (first + i * row_bytes + page) // PAGE, 0)
            at += row_bytes
        if c in marked and r.any_lost("staging", lay.block(c)[0], lay.block(c)[3]) and not dry:
            yield r.put("staging", lay.block(c)[0], r.encoded(c, version))
            yield from clear(r, "staging", lay.block(c)[0], lay.block(c)[3])


def clear(r: Rank, name, first=0, size=None):
    last = len(r.mem[name]) if size is None else first + size
    for page in range(first // PAGE, -(-last // PAGE)):
        if r.lost[name][page]:
            yield r.flag(name, page, 0)


def heal_log(r: Rank):
    """Makes both copies equal before anything acts on a record. A lost copy stays LOST, and does not count, until it is whole."""
    kinds = [COMMIT, COMMIT, INTENT, INTENT, REVOKE, REVOKE] + [MARK] * (2 * len(r.layout.chunks))
    for i in (0, 1):
        for n, kind in enumerate(kinds):
            good = r.log_bytes(kind, 64 * n)
            if r.read(f"log/{i}", 64 * n, 64).tobytes() != good:
                yield r.put(f"log/{i}", 64 * n, good)
        yield from clear(r, f"log/{i}")


def recover(r: Rank, source: Source, refill=False):
    """Records epoch and LOST, makes the plan from all pictures, carries it out. Returns (epoch, plan). Every store may be the last."""
    lay = r.layout
    held = r.newest("epoch", EPOCH)
    epoch = max((yield Gather(held.epoch if held else 0))) + 1
    yield r.put("epoch", 64 * (epoch % 2), record(EPOCH, 0, epoch))
    for name, page in sorted(r.bad):
        yield r.flag(name, page, 1)
        r.bad.discard((name, page))
    pictures = yield Gather(picture(r))
    plan = make_plan(lay, pictures)
    if plan.action == "fill" or refill:
        yield from fill(r, source, 1 + max((p.life.epoch // 2 for p in pictures if p.life), default=0), epoch)
        return epoch, plan
    refusal = ""
    try:
        for _ in repair_lanes(r, plan, dry=True) if plan.action != "refuse" else ():
            pass
    except Refused as error:
        refusal = str(error)
    refusal = plan.reason if plan.action == "refuse" else next((w for w in (yield Gather(refusal)) if w), "")
    if refusal:
        raise Refused(refusal)
    yield from heal_log(r)
    behind = plan.action == "roll" and r.commit() < plan.step
    copies = plan.step % 2  # the copies that will be active when the plan is done
    mates = yield Gather(r)  # reads of peers below go to copies that no rank stores to
    if f"scalars/{copies}" in picture(r).lost or (behind and zlib.crc32(r.mem[f"scalars/{copies}"].tobytes()) != plan.intent.a):
        donor = next(
            q
            for q in pictures
            if f"scalars/{copies}" not in q.lost and (not plan.intent or plan.action == "revoke" or q.digests[copies] == plan.intent.a)
        )
        yield r.put(f"scalars/{copies}", 0, mates[pictures.index(donor)].mem[f"scalars/{copies}"].tobytes())
    if r.any_lost(f"extras/{copies}"):
        donor = next(
            i for i, q in enumerate(pictures) if f"extras/{copies}" not in q.lost and (plan.action != "roll" or complete(q, plan.intent))
        )
        yield r.put(f"extras/{copies}", 0, mates[donor].mem[f"extras/{copies}"].tobytes())
    if r.any_lost(f"metrics/{copies}"):
        yield r.put(f"metrics/{copies}", 0, bytes(16))  # all zero: unknown, and said so
    yield Gather(None)
    if behind and r.intent(plan.step) != plan.intent:
        raw = record(INTENT, plan.step, plan.intent.epoch, plan.intent.a, plan.intent.b)
        yield from r.write_log(raw, r.place(INTENT, plan.step))
    yield from repair_lanes(r, plan)
    if plan.action == "revoke" or plan.revoked:  # stored on all ranks, confirmed, then LOST may go
        raw = record(REVOKE, plan.step + 1, epoch if plan.action == "revoke" else plan.revoked)
        yield from r.write_log(raw, r.place(REVOKE, plan.step + 1))
        yield Gather(None)
    if behind:
        yield from update(r, plan.intent)
        yield from commit(r, plan.step, epoch)
    # what is lost now is either void or can be made again; the host copy is current before its LOST or that of staging goes
    void = plan.action == "revoke" or plan.revoked
    for c in range(len(lay.chunks)):
        first, _, _, size = lay.block(c)
        stale = any(r.version(c, tier) != plan.step for tier in r.tiers())
        if r.any_lost("parity", first, size) or (stale and (void or r.any_lost("staging", first, size))):
            yield from encode_to_host(r, c, plan.step)
        if r.any_lost("staging", first, size):  # else it would be taken for current, by derivation, once LOST is gone
            yield r.put("staging", first, r.encoded(c, plan.step))
    for name in r.mem:
        yield from clear(r, name)
    return epoch, plan


# --- a job -------------------------------------------------------------------------------------------------------------------------


def first_source(lay: Layout, seed: int, step=0) -> Source:
    """A checkpoint at `step` of either parity, the same for all ranks where the design wants it."""
    states = []
    for index in range(lay.ranks):
        rng, shared = random.Random(seed * 100 + index), random.Random(seed)
        state = [rng.randbytes(size) for chunk in lay.chunks for _, _, _, size in lay.pieces(chunk, step)]
        extras = (shared if lay.replicated else rng).randbytes(32)
        states.append([*state, np.array([step, 3, 0, 0], "<i8").tobytes(), extras, bytes(16)])
    return Source(step, states, seed * 7 + 1)


class Job:
    def __init__(self, lay: Layout, source: Source, seed=0):
        self.layout, self.source, self.seed = lay, source, seed
        self.ranks, self.epoch = [Rank(lay, i) for i in range(lay.ranks)], 0

    def copy(self):
        job = copy.copy(self)
        job.ranks = [
            Rank(r.layout, r.index, {k: v.copy() for k, v in r.mem.items()}, {k: v.copy() for k, v in r.lost.items()}, set(r.bad))
            for r in self.ranks
        ]
        return job

    def recover(self, machine: Machine, refill=False) -> Plan:
        results = machine.run([recover(r, self.source, refill) for r in self.ranks])
        self.epoch = results[0][0]
        return results[0][1]

    def train(self, machine: Machine, until: int) -> None:
        rngs = [random.Random(machine.rng.random()) for _ in self.ranks]
        machine.run([train(r, until, self.epoch, g) for r, g in zip(self.ranks, rngs, strict=True)])

    def canonical(self):
        step = self.ranks[0].commit()
        return step, [r.canonical(step) for r in self.ranks]

    def check_parity(self):
        for r in self.ranks:
            step = r.commit()
            for c in range(len(self.layout.chunks)):
                block, base = r.encoded(c, step), self.layout.block(c)[0]
                for tier in r.tiers():
                    first, size = r.tier(c, tier)
                    good = block[first - base : first - base + size] == r.read("parity", first, size).tobytes()
                    assert good or r.version(c, tier) != step, f"rank {r.index} chunk {c} tier {tier}: parity says {step} and is not"
                assert r.version(c, 0) == step, f"rank {r.index} chunk {c}: no current parity at the end"


def trajectory(job: Job, last: int) -> dict:
    """Fault-free states of all ranks by step."""
    job, out = job.copy(), {}
    job.recover(Machine())
    step, state = job.canonical()
    out[step] = state
    while step < last:
        job.train(Machine(step), step + 1)
        step, state = job.canonical()
        out[step] = state
    job.check_parity()
    return out


def checkpoint(first: Source, states: dict, step: int) -> Source:
    position = first.position
    for _ in range(step - first.step):
        position = next_position(position)
    return Source(step, states[step], position)

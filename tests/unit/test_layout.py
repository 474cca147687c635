"""Plans of retained memory: nothing overlaps, nothing that is still needed is overwritten by a slide, and equal specs give equal plans."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import leto_jax as leto
from leto_jax import layout as layouts
from leto_jax.config import Protection
from leto_jax.errors import LayoutError, LetoError, RecordError
from leto_jax.layout import JobSpec, LeafSpec, SignatureSpec
from leto_jax.rmu import programs

# Specs ----------------------------------------------------------------------------------------------------------------------------------

DTYPES = st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "int32", "float64", "complex64", "bool"])
SHAPES = st.lists(st.integers(0, 14), max_size=3).map(tuple)
SIMPLE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], print_blob=True)


def leaf(path: str, shape: tuple[int, ...] = (), dtype: str = "float32", **more) -> LeafSpec:
    return LeafSpec(path, shape, dtype, dtype, **more)


@st.composite
def leaf_lists(draw, name: str, most: int = 3) -> tuple[LeafSpec, ...]:
    return tuple(leaf(f"['{name}'][{n}]", draw(SHAPES), draw(DTYPES)) for n in range(draw(st.integers(0, most))))


@st.composite
def job_specs(draw) -> JobSpec:
    protection = Protection(
        data_rows=draw(st.integers(2, 6)),
        local_parity=draw(st.integers(1, 2)),
        peer_parity=draw(st.integers(0, 1)),
        page_bytes=draw(st.sampled_from([512, 1024])),
        chunk_bytes=draw(st.sampled_from([1024, 4096, 20000])),
        align_elements=draw(st.sampled_from([64, 128])),
    )
    params: list[LeafSpec] = []
    signatures = []
    for number in range(draw(st.integers(1, 3))):
        lanes = (("param", draw(DTYPES)), *((f"state:{n}", draw(DTYPES)) for n in range(draw(st.integers(0, 2)))))
        elementwise = draw(st.booleans())
        shapes = draw(st.lists(SHAPES, min_size=1, max_size=5))
        leaves = tuple(range(len(params), len(params) + len(shapes)))
        params += [leaf(f"['p'][{i}]", shape, lanes[0][1]) for i, shape in zip(leaves, shapes, strict=True)]
        # A whole-leaf update may keep state of another shape than its parameter.
        forms = [tuple(shapes)] + [tuple(shapes) if elementwise else tuple(draw(SHAPES) for _ in shapes) for _ in lanes[1:]]
        signatures.append(
            SignatureSpec(f"s{number}", f"f{number}", lanes, draw(st.one_of(st.none(), DTYPES)), elementwise, leaves, tuple(forms))
        )
    frozen = draw(st.integers(0, 2))
    read_only = tuple(range(len(params), len(params) + frozen))
    params += [leaf(f"['p'][{i}]", draw(SHAPES), draw(DTYPES)) for i in read_only]
    lists = {name: draw(leaf_lists(name)) for name in ("constants", "shared", "values", "extras", "metrics", "batch", "loose_grads")}
    return JobSpec(params=tuple(params), read_only=read_only, signatures=tuple(signatures), protection=protection, **lists)


Range = tuple[int, int]


def disjoint(ranges: list[Range]) -> bool:
    return all(end <= begin for (_, end), (begin, _) in pairwise(sorted(r for r in ranges if r[0] < r[1])))


# Properties -----------------------------------------------------------------------------------------------------------------------------


@SIMPLE
@given(job_specs())
def test_regions_are_disjoint_and_inside_their_arena(spec):
    plan = layouts.plan(spec)
    for arena, nbytes in (("device", plan.device_bytes), ("host", plan.host_bytes)):
        # 'loose_gradients' is the end of 'gradients'.
        ranges = [(r.offset, r.offset + r.nbytes) for r in plan.regions if r.arena == arena and r.name != "loose_gradients"]
        assert disjoint(ranges)
        assert all(0 <= begin <= end <= nbytes for begin, end in ranges)
        assert nbytes % spec.protection.page_bytes == 0
    assert len(plan.by_name) == len(plan.regions)
    assert all(region.offset % spec.protection.page_bytes == 0 for region in plan.regions)


@SIMPLE
@given(job_specs())
def test_live_pieces_never_overlap_and_lie_in_their_lane(spec):
    plan = layouts.plan(spec)
    lanes = plan.by_name["lanes"]
    for commit in (0, 1):
        ranges = [(plan.address(p, commit), plan.address(p, commit) + p.nbytes) for p in plan.pieces]
        assert disjoint(ranges)
        for piece, (begin, end) in zip(plan.pieces, ranges, strict=True):
            region = lanes if piece.chunk is not None else plan.by_name["read_only"]
            assert region.offset <= begin < end <= region.offset + region.nbytes
    spans = [(lane.offset, lane.offset + lane.span_bytes) for s in plan.signatures for lane in s.lanes]
    assert disjoint(spans)


@SIMPLE
@given(job_specs())
def test_a_slide_overwrites_only_what_is_committed(spec):
    """Whatever a chunk writes was read by nobody but itself before, and is not what it reads itself."""
    plan = layouts.plan(spec)
    for step in (1, 2):
        pending = set(range(len(plan.chunks)))
        for index in plan.order(step):
            for piece in plan.pieces_of_chunk[index]:
                begin, end = plan.address(piece, step), plan.address(piece, step) + piece.nbytes
                # Lanes lie apart, which the test before shows.
                for other in (
                    p for chunk in pending for p in plan.pieces_of_chunk[chunk] if (p.signature, p.lane) == (piece.signature, piece.lane)
                ):
                    source = plan.address(other, step - 1)
                    assert end <= source or source + other.nbytes <= begin, (step, index, piece.index, other.index)
            pending.remove(index)
        assert not pending
    for signature in plan.signatures:
        assert all(lane.gap >= max(chunk.length for chunk in signature.chunks) for lane in signature.lanes)


@SIMPLE
@given(job_specs())
def test_chunks_cover_every_lane_once_and_rows_are_whole_pages(spec):
    plan = layouts.plan(spec)
    rows, page = spec.protection.data_rows, spec.protection.page_bytes
    for signature in plan.signatures:
        assert all(chunk.length > 0 for chunk in signature.chunks)
        assert [chunk.start for chunk in signature.chunks] == [0, *np.cumsum([chunk.length for chunk in signature.chunks])[:-1].tolist()]
        assert {lane.elements for lane in signature.lanes} == {sum(chunk.length for chunk in signature.chunks)}
    assert [chunk.index for _, chunk in plan.chunks] == list(range(len(plan.chunks)))
    assert [piece.index for piece in plan.pieces] == list(range(len(plan.pieces)))
    for piece in plan.pieces:
        assert piece.nbytes == rows * piece.row_bytes
        assert piece.row_bytes % page == 0
        assert piece.pages == rows * piece.pages_per_row
        assert plan.address(piece, 0) % page == plan.address(piece, 1) % page == 0
    for name, places in (
        ("staging", [(p.staging, p.staging + p.staged.nbytes) for p in plan.pieces]),
        ("parity", [(p.host, p.host + p.hosted.nbytes) for p in plan.pieces]),
    ):
        assert disjoint(places)
        assert max(end for _, end in places) <= plan.by_name[name].nbytes
        assert all(begin % 64 == 0 for begin, _ in places)


@SIMPLE
@given(job_specs())
def test_every_leaf_lies_whole_and_aligned_in_every_lane(spec):
    """At a multiple of 64 bytes wherever a commit leaves it: else XLA would copy it silently."""
    plan = layouts.plan(spec)
    for signature in plan.signatures:
        for lane, shapes in zip(
            (*signature.lanes, *([signature.grad] if signature.grad else [])),
            (*signature.spec.lane_shapes, signature.spec.lane_shapes[0]),
            strict=False,
        ):
            ends = [(offset, offset + math.prod(shape)) for offset, shape in zip(signature.leaf_offsets, shapes, strict=True)]
            assert disjoint(ends)
            assert all(end <= lane.elements for _, end in ends)
            assert all(lane.at(begin, commit) % 64 == 0 for begin, _ in ends for commit in (0, 1))
        if not signature.spec.elementwise:
            assert sorted(n for chunk in signature.chunks for n in chunk.leaves) == list(range(len(signature.spec.leaves)))
            for chunk in signature.chunks:
                for n in chunk.leaves:
                    size = max(math.prod(shapes[n]) for shapes in signature.spec.lane_shapes)
                    assert chunk.start <= signature.leaf_offsets[n] <= signature.leaf_offsets[n] + size <= chunk.start + chunk.length
    for packed in (plan.read_only, plan.scalars, plan.extras, plan.metrics, plan.loose_grads):
        ranges = [(begin, begin + item.nbytes) for begin, item in zip(packed.offsets, packed.leaves, strict=True)]
        assert disjoint(ranges)
        assert all(begin % 64 == 0 and end <= packed.nbytes for begin, end in ranges)


@SIMPLE
@given(job_specs())
def test_bytes_round_trip(spec):
    plan = layouts.plan(spec)
    again = layouts.from_bytes(layouts.to_bytes(plan))
    assert again == plan
    assert again.fingerprint == plan.fingerprint
    layouts.require_equal(plan, again)


@SIMPLE
@given(job_specs(), job_specs())
def test_other_specs_have_other_fingerprints_and_are_refused(one, other):
    first, second = layouts.plan(one), layouts.plan(other)
    assert (first.fingerprint == second.fingerprint) == (one == other)
    if one != other:
        with pytest.raises(LayoutError, match="start the script with the model, optimizer and settings of the job"):
            layouts.require_equal(first, second)


# One spec -------------------------------------------------------------------------------------------------------------------------------


def spec(**changes) -> JobSpec:
    params = (leaf("['w']", (40, 30)), leaf("['b']", (30,)), leaf("['table']", (16, 8), "bfloat16"))
    shapes = ((40, 30), (30,))
    base = JobSpec(
        params=params,
        read_only=(2,),
        signatures=(
            SignatureSpec("adam", "abc", (("param", "float32"), ("state:0", "float32")), "float32", True, (0, 1), (shapes, shapes)),
        ),
        constants=(),
        shared=(leaf("['count']", (), "int32"),),
        values=(leaf("[0]"),),
        extras=(leaf("['mean']", (30,)),),
        metrics=(leaf("['loss']"),),
        batch=(leaf("['x']", (8, 40)),),
        protection=Protection(4, 2, 0, 512, 2048),
    )
    return dataclasses.replace(base, **changes)


def test_the_fingerprint_is_the_same_in_another_process_and_needs_no_jax():
    plan = layouts.plan(spec())
    program = textwrap.dedent("""
        import sys
        from leto_jax import layout
        plan = layout.from_bytes(sys.stdin.buffer.read())
        assert "jax" not in sys.modules
        print(plan.fingerprint, plan.device_bytes, plan.host_bytes)
    """)
    for seed in ("0", "1"):
        out = subprocess.run(
            [sys.executable, "-c", program],
            input=layouts.to_bytes(plan),
            capture_output=True,
            check=True,
            timeout=60,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert out.stdout.decode().split() == [plan.fingerprint, str(plan.device_bytes), str(plan.host_bytes)]


ADVICE = "start the script with the model, optimizer and settings of the job, or give the new job another --job name"
CHANGED = [
    (
        {"params": (leaf("['w']", (40, 31)), *spec().params[1:])},
        "params: the job holds ['w']: float32[40, 30], this process brings ['w']: float32[40, 31]",
    ),
    (
        {"params": (leaf("['w']", (40, 30), "bfloat16"), *spec().params[1:])},
        "params: the job holds ['w']: float32[40, 30], this process brings ['w']: bfloat16[40, 30]",
    ),
    ({"params": (*spec().params, leaf("['z']"))}, "params: only this process has ['z']: float32[]"),
    ({"params": spec().params[:2], "read_only": ()}, "params: only the job has ['table']: bfloat16[16, 8]"),
    ({"read_only": ()}, "params: ['table']: bfloat16[16, 8] is frozen in the job only"),
    ({"read_only": (1, 2)}, "params: ['b']: float32[30] is frozen in this process only"),
    ({"constants": (leaf("['c']"),)}, "constants: only this process has ['c']: float32[]"),
    ({"shared": ()}, "shared: only the job has ['count']: int32[]"),
    ({"values": (leaf("[0]", (2,)),)}, "values: the job holds [0]: float32[], this process brings [0]: float32[2]"),
    ({"extras": (leaf("['var']", (30,)),)}, "extras: the job holds ['mean']: float32[30], this process brings ['var']: float32[30]"),
    ({"metrics": (*spec().metrics, leaf("['acc']"))}, "metrics: only this process has ['acc']: float32[]"),
    ({"batch": (leaf("['x']", (9, 40)),)}, "batch: the job holds ['x']: float32[8, 40], this process brings ['x']: float32[9, 40]"),
    ({"loose_grads": (leaf("['table']", (16, 8)),)}, "loose_grads: only this process has ['table']: float32[16, 8]"),
    (
        {"signatures": (dataclasses.replace(spec().signatures[0], fingerprint="xyz"),)},
        "optimizer: the update of ['w'] differs: the job has adam abc (('param', 'float32'), ('state:0', 'float32')), this process adam xyz (('param',",
    ),
    (
        {"signatures": (dataclasses.replace(spec().signatures[0], leaves=(0,), lane_shapes=(((40, 30),), ((40, 30),))),)},
        "optimizer: the update of ['b'] differs",
    ),
    (
        {"signatures": (*spec().signatures, dataclasses.replace(spec().signatures[0], name="sgd", leaves=(2,)))},
        "optimizer: only this process has the update 'sgd' of ['table']",
    ),
    (
        {"protection": Protection(4, 1, 0, 512, 2048)},
        "settings: protection: the job was laid out with Protection(data_rows=4, local_parity=2",
    ),
    ({"ring_iterator_bytes": 1 << 10}, "settings: ring_iterator_bytes: the job was laid out with 65536, this process with 1024"),
    ({"ring_batch_limit": 0}, "settings: ring_batch_limit: the job was laid out with 16777216, this process with 0"),
]


@pytest.mark.parametrize(("changes", "text"), CHANGED, ids=[text.split(":")[0] + str(n) for n, (_, text) in enumerate(CHANGED)])
def test_the_first_difference_is_named(changes, text):
    with pytest.raises(LayoutError) as caught:
        layouts.require_equal(layouts.plan(spec()), layouts.plan(spec(**changes)))
    assert str(caught.value).startswith(text), str(caught.value)
    assert str(caught.value).endswith(ADVICE)


def test_leaves_in_host_memory_are_refused_by_name_all_at_once():
    bad = spec(
        params=(leaf("['w']", (40, 30), memory_kind="pinned_host"), *spec().params[1:]),
        extras=(leaf("['mean']", (30,), memory_kind="pinned_host"),),
    )
    with pytest.raises(LayoutError) as caught:
        layouts.plan(bad)
    assert str(caught.value) == (
        "expected leaves in device memory, found leaves in host memory:\n"
        "  ['w']: float32[40, 30] lives in 'pinned_host'\n"
        "  ['mean']: float32[30] lives in 'pinned_host'\n"
        "move them with jax.device_put, or keep them out of the state"
    )


def test_the_memory_kind_of_an_array_is_seen():
    device = jax.devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    if "pinned_host" not in kinds:
        pytest.skip(f"this backend has {kinds} only")
    x = jax.device_put(jnp.ones(3), jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host"))
    assert programs.leaf_specs({"x": x})[0].memory_kind == "pinned_host"
    assert programs.leaf_specs({"x": jnp.ones(3)})[0].memory_kind != "pinned_host"


def test_an_unknown_dtype_is_refused():
    with pytest.raises(LayoutError, match=r"dtype: expected one of .*float32.*, found 'float7'; cast the leaf"):
        layouts.plan(spec(extras=(leaf("['x']", (3,), "float7"),)))


def test_the_table_adds_up():
    plan = layouts.plan(spec())
    rows = {what: nbytes for what, nbytes, _ in plan.table()}
    lane = plan.signatures[0].lanes[0]
    assert rows["parameters"] == rows["optimizer state"] == lane.elements * 4
    assert rows["gap"] == 2 * lane.gap * 4
    assert rows["log"] == 2 * 64 * (6 + 2 * len(plan.chunks))
    assert rows["staging"] == sum(piece.staged.nbytes for piece in plan.pieces)
    assert sum(rows.values()) <= plan.device_bytes + plan.host_bytes


# Garbage --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"7",
        b"null",
        b'"text"',
        b"\xff\xfe\x00",
        b'{"magic": "leto-layout"}',
        b'{"magic": "leto-layout", "version": 1, "spec": 3}',
    ],
)
def test_garbage_is_refused(data):
    with pytest.raises(RecordError, match="layout: expected"):
        layouts.from_bytes(data)


def test_another_version_or_magic_is_refused():
    document = json.loads(layouts.to_bytes(layouts.plan(spec())))
    for name, value in (("version", 99), ("magic", "other")):
        with pytest.raises(RecordError, match=re.escape("layout: expected magic 'leto-layout' version 1, found (")):
            layouts.from_bytes(json.dumps({**document, name: value}).encode())


def test_every_cut_of_the_bytes_is_refused():
    data = layouts.to_bytes(layouts.plan(spec()))
    for end in range(0, len(data), 7):
        with pytest.raises(RecordError):
            layouts.from_bytes(data[:end])


@SIMPLE
@given(st.data())
def test_a_document_with_a_wrong_value_is_refused_or_is_another_plan(draw):
    """Any one value of the document replaced by something else: an error of ours, or a plan whose fingerprint is another."""
    plan = layouts.plan(spec())
    document = json.loads(layouts.to_bytes(plan))
    places: list[tuple] = []

    def walk(node, path):
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, child in items:
            places.append((*path, key))
            walk(child, (*path, key))

    walk(document, ())
    *path, last = draw.draw(st.sampled_from(places))
    node = document
    for key in path:
        node = node[key]
    node[last] = draw.draw(st.sampled_from([None, -1, 3, 2.5, "x", [], {}, [1]]))
    try:
        other = layouts.from_bytes(json.dumps(document).encode())
    except LetoError:
        return
    assert (other.fingerprint == plan.fingerprint) == (other == plan)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data):
    with pytest.raises(RecordError):
        layouts.from_bytes(data)


# Kinds of leaves, end to end ------------------------------------------------------------------------------------------------------------


def test_every_kind_of_leaf_comes_back_as_it_went_in():
    """Typed keys, bfloat16, fp8, int4, bool, 0-d and empty leaves: through a fill, two steps and back into what the user sees."""

    def init(key):
        params = {
            "empty": jnp.zeros((0, 3)),
            "half": jnp.ones(5, jnp.bfloat16),
            "scalar": jnp.float32(2),
            "w": jax.random.normal(key, (4, 4)),
        }
        extras = {
            "bool": jnp.array([True, False]),
            "complex": jnp.array([1 + 2j], jnp.complex64),
            "empty": jnp.zeros((0,), jnp.int8),
            "fp8": jnp.array([1.5, -2.0], jnp.float8_e4m3fn),
            "int4": jnp.array([-8, 7, 3], jnp.int4),
            "key": jax.random.key(3),
            "keys": jax.random.split(jax.random.key(4), 3),
            "rbg": jax.random.key(5, impl="rbg"),
            "uint2": jnp.array([0, 3, 2, 1], jnp.uint2),
        }
        return params, extras

    def turn(extras):
        return {
            "bool": ~extras["bool"],
            "complex": extras["complex"] * 1j,
            "empty": extras["empty"],
            "fp8": -extras["fp8"],
            "int4": extras["int4"][::-1],
            "key": jax.random.split(extras["key"])[0],
            "keys": extras["keys"][::-1],
            "rbg": extras["rbg"],
            "uint2": extras["uint2"][::-1],
        }

    def loss_fn(params, extras, batch, key):
        loss = sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(params)) * batch["x"][0]
        return loss, (turn(extras), {"int4": extras["int4"][0], "key": extras["key"]})

    batch = {"x": np.ones(1, np.float32)}
    with leto.session(init, leto.TrainStep(loss_fn, optax.sgd(0.1)), lambda step: batch, key=jax.random.key(0), steps=2) as s:
        state = s.state
        for _, b in s:
            state, metrics = s.step(state, b)
        params, extras = init(jax.random.key(0))
        want = turn(turn(extras))
        for name, x in state.extras.items():
            assert x.dtype == want[name].dtype, name
            assert x.shape == want[name].shape, name
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                assert jax.random.key_impl(x) == jax.random.key_impl(want[name])
                x, want[name] = jax.random.key_data(x), jax.random.key_data(want[name])
            assert np.array_equal(np.asarray(x), np.asarray(want[name])), name
        assert metrics["int4"].dtype == jnp.int4
        assert jnp.issubdtype(metrics["key"].dtype, jax.dtypes.prng_key)
        assert {name: (x.dtype, x.shape) for name, x in state.params.items()} == {name: (x.dtype, x.shape) for name, x in params.items()}
        assert float(state.params["scalar"]) == pytest.approx(2 * 0.8**2)

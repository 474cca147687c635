"""No store to retained memory bypasses `Arena.store`, `store_record` and `HostArena.write_through`: so none is without a crash point.

A lint over the syntax of leto_jax, a proof that it sees each way around that we know of, and a look at the views that are handed out.
"""

from __future__ import annotations

import ast
import os
import pathlib
import textwrap
from collections.abc import Container

import jax
import numpy as np
import pytest

import leto_jax
from leto_jax.arena.memory import HostArena
from leto_jax.arena.views import host_view
from leto_jax.faults import Point

PACKAGE = pathlib.Path(leto_jax.__file__).parent
# The files that own a mapping. memory.py and device.py hold the stores; the words of control.py are hints, not retained state.
OWNERS = {"arena/memory.py", "arena/device.py", "arena/control.py"}
# Functions that write into memory that they did not make.
WRITERS = {
    "copyto": "numpy.copyto", "memmove": "ctypes.memmove", "memset": "ctypes.memset", "putmask": "numpy.putmask", "place": "numpy.place",
    "put_along_axis": "numpy.put_along_axis", "setflags": "ndarray.setflags", "pack_into": "struct.pack_into", "readinto": "readinto",
    "recv_into": "recv_into", "recvmsg_into": "recvmsg_into", "preadv": "os.preadv", "from_address": "ctypes from_address", "from_buffer": "ctypes from_buffer",
    "pwrite": "os.pwrite", "pwritev": "os.pwritev", "as_array": "numpy.ctypeslib.as_array", "memmap": "numpy.memmap",
}  # fmt: skip
# Calls that may stay where they are, with the reason.
ALLOWED = {
    ("rmp/gf256.py", "writeable"): "tables of its own, made read-only",
    ("rmp/matrix.py", "writeable"): "matrices of its own, made read-only",
    ("rmu/retained.py", "place"): "a method of its own: where a leaf lies",
    ("rmu/transaction.py", "place"): "the same method",
    ("agent/doctor.py", "mmap"): "a page of its own, to see that shared memory works",
    ("agent/agent.py", "damage"): "a method of agent/ranks.py",
    ("agent/ranks.py", "damage"): "the injector of page loss and corruption",
    ("arena/damage.py", "damage"): "the same where the memory is a GPU's",
    ("arena/cuda.py", "from_address"): "pinned buffers of its own",
    ("manager/memory.py", "pwrite"): "a blob, before it is sealed",
    ("manager/server.py", "pwrite"): "a file with its process number",
    ("rmu/device.py", "place"): "the method of rmu/retained.py",
}


def findings(path: str, source: str, allowed: Container[tuple[str, str]] = ALLOWED) -> list[str]:
    """What in `source`, the file `path` of the package, could store to retained memory unseen."""
    found: list[tuple[int, str, str]] = []
    for node in ast.walk(ast.parse(source)):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
            if name in WRITERS:
                found.append((line, name, f"calls {WRITERS[name]}"))
            if name == "mmap":
                found.append((line, name, "maps memory"))
            if name == "frombuffer" and not _is_bytes(node.args[0] if node.args else None):
                found.append((line, name, "numpy.frombuffer of something that may be a mapping"))
            if name == "damage":
                found.append((line, name, "calls Arena.damage"))
            if name == "memoryview" and any(isinstance(part, ast.Attribute) and "map" in part.attr for part in ast.walk(node)):
                found.append((line, name, "a memoryview of a mapping"))
            found += [(line, "out", f"writes the result of {name} with out=") for keyword in node.keywords if keyword.arg == "out"]
            found += [(line, "writeable", "sets writeable=") for keyword in node.keywords if keyword.arg in ("write", "writeable")]
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in ast.walk(target):
                    if isinstance(part, ast.Attribute) and part.attr == "writeable":
                        found.append((line, "writeable", "assigns flags.writeable"))
                if isinstance(target, ast.Subscript) and _from_arena(target.value):
                    found.append((line, "subscript", "assigns into a view of an arena"))
        if isinstance(node, ast.Attribute) and node.attr in ("_bytes", "_map", "_read_only") and path not in OWNERS:
            found.append((line, node.attr, f"reaches for {node.attr} of an arena"))
    kept = [] if path in OWNERS else [item for item in found if (path, item[1]) not in allowed]
    return [f"{path}:{line}: {text}" for line, _, text in sorted(kept)]


def _is_bytes(node: ast.AST | None) -> bool:
    """Whether an expression makes bytes of its own: a call of tobytes, pack or translate, a literal, or a name that says bytes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, bytes):
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in ("tobytes", "pack", "translate", "to_bytes", "encode", "read")
    return isinstance(node, ast.Name) and node.id in ("position",)


def _from_arena(node: ast.AST) -> bool:
    """Whether the value that is assigned into comes straight from a view of an arena."""
    return any(
        isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and part.func.attr in ("view", "array")
        and _arena(part.func.value)
        for part in ast.walk(node)
    )


def _arena(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.strip("_") in ("device", "host", "arena", "metadata_arena")


def test_nothing_stores_to_retained_memory_but_the_stores():
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 40
    found = [text for file in files for text in findings(file.relative_to(PACKAGE).as_posix(), file.read_text())]
    assert not found, "\n".join(found)


def test_every_exception_to_the_lint_is_still_needed():
    for (path, name), reason in ALLOWED.items():
        assert findings(path, (PACKAGE / path).read_text(), ALLOWED.keys() - {(path, name)}), (
            f"{path}, {name}: {reason}: not there any more"
        )
    assert all((PACKAGE / path).exists() for path in OWNERS)


PLANTED = {
    "numpy.copyto": "np.copyto(arena.view(0, 8), data)",
    "memmove": "ctypes.memmove(arena.address, data.ctypes.data, 8)",
    "memset": "ctypes.memset(arena.address, 0, 8)",
    "setflags": "view.setflags(write=True)",
    "writeable": "view.flags.writeable = True",
    "writeable, chained": "a.flags.writeable = b.flags.writeable = True",
    "frombuffer of a mapping": "np.frombuffer(mapping, np.uint8)[0] = 1",
    "a second mapping": "mmap.mmap(fd, 4096)",
    "memmap": "np.memmap(path, np.uint8)",
    "memoryview of a mapping": "memoryview(arena._map)[0:4] = b'abcd'",
    "private bytes": "arena._bytes[0] = 1",
    "private bytes, passed on": "fill(self._device._bytes)",
    "into a view": "self._device.view(0, 8)[:] = 0",
    "into an array": "arena.array(0, (8,), dtype)[3] += 1",
    "out=": "np.add(a, b, out=arena.view(0, 8))",
    "pwrite": "os.pwrite(fd, data, 0)",
    "pack_into": "struct.pack_into('<I', buffer, 0, 1)",
    "readinto": "file.readinto(view)",
    "ctypes array": "(ctypes.c_char * 8).from_address(arena.address)[0] = b'x'",
    "damage": "self._device.damage(0, data)",
}


@pytest.mark.parametrize("title", PLANTED)
def test_a_planted_bypass_is_seen(title):
    source = textwrap.dedent(f"""
        def step(self, arena, data):
            if data is not None:
                {PLANTED[title]}
    """)
    assert findings("rmu/planted.py", source), title
    assert findings("rmu/planted.py", source)[0].startswith("rmu/planted.py:4: ")


@pytest.mark.parametrize(
    "line", ["arena.store(Point.PIECE, 0, data)", "np.frombuffer(record.pack(), np.uint64)", "x = arena.view(0, 8).copy()", "data[3] = 1"]
)
def test_honest_code_is_left_alone(line):
    assert not findings("rmu/planted.py", f"def step(arena, data, record):\n    {line}\n")


def test_every_point_is_stored_somewhere_and_nowhere_is_a_point_made_up():
    used = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "Point":
                used.add(node.attr)
    assert used == {point.name for point in Point}


# What is handed out ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def arena():
    fd = os.memfd_create("lint")
    os.ftruncate(fd, 8192)
    made = HostArena(fd, 8192, "lint")
    os.close(fd)
    yield made
    made.close()


def test_views_are_read_only_and_are_the_memory(arena):
    for view in (
        arena.view(64, 128),
        arena.array(64, (4, 8), np.dtype(np.float32)),
        arena.array(64, (), np.dtype(np.int64)),
        arena.view(0, 0),
    ):
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            view[...] = 1
    view = arena.view(64, 4)
    arena.store(Point.PIECE, 64, np.array([7], np.uint32))
    assert view.tobytes() == b"\x07\0\0\0"


def test_jax_views_are_the_memory_and_give_no_way_to_write(arena):
    device = jax.devices()[0]
    view = host_view(arena, 128, (8,), np.dtype(np.float32), device)
    arena.store(Point.PIECE, 128, np.arange(8, dtype=np.float32))
    assert view.unsafe_buffer_pointer() == arena.address + 128
    assert np.asarray(view).tolist() == list(range(8))
    assert not np.asarray(view).flags.writeable
    with pytest.raises(TypeError):
        view[0] = 1


def test_a_view_that_would_be_a_copy_is_refused(arena):
    with pytest.raises(ValueError, match="arena 'lint', offset 68, float32\\[8\\]: expected a view without a copy"):
        host_view(arena, 68, (8,), np.dtype(np.float32), jax.devices()[0])

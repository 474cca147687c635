"""Executables kept in the user's compile cache."""

from __future__ import annotations

import os

import jax
import pytest

from leto_jax.shadow import cache
from leto_jax.shadow.executables import Identity

MINE = Identity("layout", (("init", "a"),), (("jax", "1"),))
OTHER = Identity("layout", (("init", "b"),), (("jax", "1"),))


@pytest.fixture
def directory(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    jax.config.update("jax_compilation_cache_dir", before)


def test_what_is_stored_is_found_by_its_identity(directory):
    assert cache.load(MINE) is None
    cache.store(MINE, b"programs")
    assert cache.load(MINE) == b"programs"
    assert cache.load(OTHER) is None
    cache.store(MINE, b"newer")
    assert cache.load(MINE) == b"newer"
    assert len(os.listdir(directory)) == 1


def test_on_another_processor_it_is_not_there(directory, monkeypatch):
    cache.store(MINE, b"programs")
    monkeypatch.setattr(cache, "_processor", lambda: "flags: sse")
    assert cache.load(MINE) is None


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: data[:40] + b"x" + data[41:], lambda data: b"", lambda data: data[:16]]
)
def test_what_is_damaged_is_not_there(directory, damage):
    cache.store(MINE, b"programs that are longer")
    (path,) = directory.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert cache.load(MINE) is None


def test_what_others_may_write_is_not_used(directory, capsys):
    cache.store(MINE, b"programs")
    (path,) = directory.iterdir()
    path.chmod(0o666)
    assert cache.load(MINE) is None
    assert "is not used: others may write to it" in capsys.readouterr().err


def test_a_directory_that_is_none(tmp_path, directory, capsys):
    (tmp_path / "cache").write_text("in the way")
    cache.store(MINE, b"programs")
    assert "compiled programs are not kept in" in capsys.readouterr().err
    assert cache.load(MINE) is None


def test_without_a_cache_nothing_is_kept(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        cache.store(MINE, b"programs")
        assert cache.load(MINE) is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)

"""Every test runs on the CPU backend, in directories of its own, with warnings as errors; random seeds are printed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from leto_jax.arena.control import BYTES, Control

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Where Python may not write bytecode, each of the hundreds of processes that tests start would compile JAX and Flax anew, two seconds each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Compiled programs are shared between the processes that tests start; a shadow is still proven to compile nothing at a takeover.
_cache = os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"leto-tests-xla-{os.getuid()}"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    run_slow = "slow" in (config.option.markexpr or "")
    gpu = shutil.which("nvidia-smi") is not None and os.environ.get("JAX_PLATFORMS") != "cpu"
    items.sort(key=lambda item: item.path.parent.name != "process")  # the long ones first: no worker ends up alone with one of them
    for item in items:
        # Not item.keywords: the folders that the clone lies in are among them.
        if item.get_closest_marker("slow") and not run_slow:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
        if item.get_closest_marker("gpu") and not gpu:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU, or JAX_PLATFORMS=cpu"))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A random seed, printed; set LETO_TEST_SEED to repeat a run."""
    value = int(os.environ.get("LETO_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"seed {value} (repeat with LETO_TEST_SEED={value})")
    return value


@pytest.fixture
def leto_dirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Private runtime and state directories for jobs, on a short path (socket paths have a limit)."""
    with tempfile.TemporaryDirectory(prefix="leto-") as directory:
        root = Path(directory)
        for name, variable in (("run", "XDG_RUNTIME_DIR"), ("state", "XDG_STATE_HOME")):
            (root / name).mkdir(mode=0o700)
            monkeypatch.setenv(variable, str(root / name))
        yield root


@pytest.fixture
def control() -> Iterator[Control]:
    """Control words in memory of their own, all zero."""
    fd = os.memfd_create("control")
    os.ftruncate(fd, BYTES)
    words = Control(fd)
    os.close(fd)
    yield words
    words.close()

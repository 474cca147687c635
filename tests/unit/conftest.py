"""What several unit tests stand on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from leto_jax.arena.control import BYTES, Control


@pytest.fixture
def control() -> Iterator[Control]:
    """Control words in memory of their own, all zero."""
    fd = os.memfd_create("control")
    os.ftruncate(fd, BYTES)
    words = Control(fd)
    os.close(fd)
    yield words
    words.close()

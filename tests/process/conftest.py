"""Jobs whose processes, sockets and files are gone when their test ends: that is part of every test here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Jobs


@pytest.fixture
def jobs(leto_dirs: Path) -> Iterator[Jobs]:
    owner = Jobs(leto_dirs)
    try:
        yield owner
    finally:
        owner.close()

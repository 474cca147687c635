"""Jobs whose processes, sockets and files are gone when their test ends: that is part of every test here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import Jobs

_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    return report


@pytest.fixture
def jobs(leto_dirs: Path, request: pytest.FixtureRequest) -> Iterator[Jobs]:
    owner = Jobs(leto_dirs)
    yield owner
    owner.close(check=not request.node.stash.get(_FAILED, True))  # one that failed leaves things behind: its failure is the news

"""The ranks that fleets are tested on end with the session."""

from collections.abc import Iterator

import pytest

from tests.fleet import rank_process


@pytest.fixture(scope="session", autouse=True)
def ranks_end() -> Iterator[None]:
    yield
    rank_process.end()

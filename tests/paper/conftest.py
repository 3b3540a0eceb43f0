from pathlib import Path

import pytest

from semisfl.paper.run_index import RunIndex

RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="session")
def index() -> RunIndex:
    """Return the committed runs, read once."""
    return RunIndex(RESULTS / "none", [RESULTS])

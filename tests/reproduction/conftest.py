from collections.abc import Iterator
from pathlib import Path

import pytest

from reproduction import records
from reproduction.paper.index import RunIndex


@pytest.fixture(scope="session")
def index() -> RunIndex:
    """Return the committed runs, read once."""
    return RunIndex()


@pytest.fixture
def no_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let the records be an empty folder, and return it."""
    folder = tmp_path / "records"
    folder.mkdir()
    monkeypatch.setattr(records, "FOLDER", folder)
    records.forget()
    yield folder
    records.forget()

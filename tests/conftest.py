"""What every test stands on: markers, a cache of its own, and a sensible number of threads."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see semisfl/cli/__init__.py
# Models here are tiny, tests run side by side, and sums split over threads differ in the last bit.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
import torch

from tests import processes

# No test may fail because the machine is busy.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes minutes; `make test-slow` runs it")
    config.addinivalue_line("markers", "gpu: needs a CUDA device")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session", autouse=True)
def own_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Decoded images go to a cache of this session, the user's data is not looked for, and the
    processes that tests start find this package from any folder, and end with it."""
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(Path(__file__).parent.parent), prepend=os.pathsep)
    patch.setenv("SEMISFL_CACHE", str(tmp_path_factory.mktemp("cache")))
    patch.delenv("SEMISFL_DATA", raising=False)
    with processes.guarded():
        yield
    patch.undo()


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the pictures of reports and of runs, for tests that do not look at them."""
    from semisfl.data import holdings
    from semisfl.runs import plots

    for module in (plots, holdings):
        monkeypatch.setattr(module, "draw", lambda *_: None)


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Undo what a command does to the package's log, also a command of a module's fixture, which runs before this."""
    logger = logging.getLogger("semisfl")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield

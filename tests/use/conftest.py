import functools
from pathlib import Path

import pytest

from semisfl import load
from semisfl.net.tls import certs
from semisfl.runs.loop import Result
from semisfl.use.classifier import Classifier
from tests import toy
from tests.use.trained import Trained, train_toy, write_images


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    @functools.cache
    def run(method: str) -> tuple[Path, Result]:
        place = tmp_path_factory.mktemp("trained") / method
        return place, train_toy(method, place)

    return run


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 24 test images of the toy set in folders by class."""
    return write_images(toy.dataset(), tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("authority") / "certs"
    certs.make_authority(folder)
    certs.make_server(folder, ["localhost"])
    for name in ("camera", "stolen"):
        certs.make_client(folder, name)
    return folder


@pytest.fixture(scope="module")
def model(trained: Trained) -> Classifier:
    return load(trained("semisfl")[0])

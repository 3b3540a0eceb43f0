"""A real device against a malicious server: it refuses, says why, and sends nothing more."""

from pathlib import Path

import pytest
import torch

from semisfl.net.client.agreement import check_weights
from semisfl.settings.policy import PolicyBreach
from tests.net.rogue_server import folder_of_images
from tests.net.rogues import ROGUES, wrong


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of_images(tmp_path_factory.mktemp("images"))


@pytest.mark.parametrize("name", ROGUES)
def test_a_device_refuses_a_malicious_server(name: str, images: Path) -> None:
    assert wrong(ROGUES[name], images) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    check_weights({"a": torch.ones(3), "count": torch.tensor(3)})
    with pytest.raises(PolicyBreach, match="b with NaN or Inf"):
        check_weights({"a": torch.ones(3), "b": torch.tensor([1.0, value])})

"""Model files whose weights are not those of their network."""

from pathlib import Path

import pytest
import torch

from semisfl.runs import checkpoint
from semisfl.runs.checkpoint import CheckpointError
from semisfl.use.classifier import Classifier, load


def test_weights_keep_the_types_of_the_network(model: Classifier, tmp_path: Path) -> None:
    assert model.path is not None
    state = checkpoint.read(model.path)["model"]
    half = {k: v.half() if v.is_floating_point() else v for k, v in state["weights"].items()}
    checkpoint.write(tmp_path / "half.safetensors", {"model": {**state, "weights": half}})
    loaded = load(tmp_path / "half.safetensors")
    kinds = {tensor.dtype for tensor in loaded.network.state_dict().values()}
    assert kinds == {torch.float32, torch.int64} or kinds == {torch.float32}


def test_a_missing_or_an_additional_weight_is_one_line(model: Classifier, tmp_path: Path) -> None:
    assert model.path is not None
    state = checkpoint.read(model.path)["model"]
    for weights in (
        {**state["weights"], "top.more": torch.zeros(1)},
        dict(list(state["weights"].items())[1:]),
    ):
        checkpoint.write(tmp_path / "wrong.safetensors", {"model": {**state, "weights": weights}})
        with pytest.raises(CheckpointError, match="the weights do not fit the network it desc"):
            load(tmp_path / "wrong.safetensors")

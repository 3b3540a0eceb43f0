"""Every cut is priced as the model that is cut there really is."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from semisfl.costs.cuts import cut_of, every_cut
from semisfl.models.build import build
from semisfl.models.zoo import MODELS
from semisfl.settings import catalog, config
from semisfl.settings.config import Config
from tests import toy
from tests.sizes import sizes_of

CODECS = {
    "student_features": "int8",
    "teacher_features": "fp16",
    "gradients": "bf16",
    "models": "int8",
}


def settings(**model: object) -> Config:
    return config.parse({"model": model, "clients": {"batch": 5, "steps": 3}, "wire": CODECS})


@pytest.mark.parametrize("table", ["cnn", "wrn-28-2", "residual"])
def test_sizes_are_those_of_the_model_cut_there(table: str) -> None:
    own = table == "residual"
    shape, classes = ((3, 12, 12), toy.CLASSES) if own else ((3, 32, 32), 10)
    layers = toy.values("semisfl", f"model.layers={toy.RESIDUAL}").model.layers
    options = settings(layers=layers) if own else settings(name=table)
    cuts = every_cut(cut_of(options, shape, classes))
    assert len(cuts) >= 7
    for cut in cuts:
        model = build(options.model.table, shape, classes, cut=cut.index, projector="none")
        assert cut.features == model.features
        assert cut.sizes(5, 3, options.wire) == sizes_of(model, 5, 3, options.wire), cut.name
    # What is no possible cut here is refused by the model too.
    possible = {cut.index for cut in cuts}
    for index in range(1, len(cuts[0].layers)):
        if index not in possible:
            with pytest.raises(ValueError, match="leaves"):
                build(options.model.table, shape, classes, cut=index, projector="none")


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_torch_counts(name: str) -> None:
    row = MODELS[name]
    cut = cut_of(settings(name=name), row.shape, row.classes)
    with torch.device("meta"):
        model = build(name, row.shape, row.classes, cut=catalog.MODELS[name])
        images = torch.empty(1, *row.shape)
    for module, inputs, ours in (
        (model.bottom, images, cut.bottom_flops),
        (model.top, torch.empty(1, cut.features, device="meta"), cut.flops - cut.bottom_flops),
        (model.projector, torch.empty(1, cut.features, device="meta"), cut.head_flops("mlp", 128)),
    ):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            module.eval()(inputs)
        assert counter.get_total_flops() == ours > 0


def test_memory_by_hand() -> None:
    """The digits' CNN up to its first pooling: weights and activations of two images."""
    options = settings(name="cnn", cut="pool1")
    cut = cut_of(options, (1, 28, 28), 10)
    weights, activations = 5 * 5 * 32 + 32, 32 * (24 * 24 + 24 * 24 + 12 * 12)
    assert cut.memory(2, copies=4, kept=1) == 4 * (4 * weights + 2 * activations)
    full_model = cut.memory(2, copies=4, kept=1, whole=True)
    more = (5 * 5 * 32 * 64 + 64) + (1024 * 512 + 512) + (512 * 10 + 10)
    further = 64 * (8 * 8 + 8 * 8 + 4 * 4) + 512 + 512 + 10
    assert full_model == 4 * (4 * (weights + more) + 2 * (activations + further))

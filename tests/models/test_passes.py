"""Several batches through one model."""

import copy

import pytest
import torch
from torch import nn

from semisfl.models.layers import Dropout
from semisfl.models.passes import call_with, passes
from tests.toy import network


def halves(batchnorm: bool, dropout: bool) -> tuple[nn.Sequential, list[str]]:
    """A model as clients hold it, in two parts, and a list that each call of a layer of the first,
    then of the second part adds to."""
    layers = network(batchnorm, dropout)
    cut = next(place for place, layer in enumerate(layers) if isinstance(layer, nn.Flatten))
    for place, layer in enumerate(layers):
        if type(layer) is nn.Dropout:
            layers[place] = Dropout(layer.p)
    model = nn.Sequential(layers[:cut], layers[cut:])
    calls: list[str] = []
    for part, name in zip(model, ("first", "second"), strict=True):
        part[-1].register_forward_hook(lambda *_, name=name: calls.append(name))
    return model, calls


def images(number: int, count: int) -> torch.Tensor:
    return torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize(
    ("batchnorm", "dropout", "training", "calls"),
    [
        (False, False, [True, True], ["first", "second"]),
        (False, False, [False, True], ["first", "second"]),
        (False, True, [False, True], ["first", "second", "second"]),
        (True, False, [True, True], ["first", "second"] * 2),
        (True, False, [False, True], ["first", "second"] * 2),
    ],
)
def test_outputs_and_gradients_are_those_of_one_pass_each(
    batchnorm: bool, dropout: bool, training: list[bool], calls: list[str]
) -> None:
    model, called = halves(batchnorm, dropout)
    batches = [images(0, 5), images(1, 3)]
    plain = copy.deepcopy(model)
    torch.manual_seed(3)
    outputs = passes(model, batches, training)
    assert called == calls
    torch.manual_seed(3)
    wanted = [plain.train(mode)(batch) for mode, batch in zip(training, batches, strict=True)]
    for got, expected in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(got, expected)
    pairs = [
        torch.autograd.grad(sum(o.square().sum() for o in these), list(whose.parameters()))
        for these, whose in ((outputs, model), (wanted, plain))
    ]
    for got, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


def test_dropout_draws_once_for_all_batches() -> None:
    model, called = halves(batchnorm=False, dropout=True)
    batch = images(0, 5)
    one, other = passes(model, [batch, batch], [True, True])
    assert called == ["first", "second"]
    assert not torch.allclose(one, other), "each row has a mask of its own"
    assert not torch.allclose(one, model.eval()(batch))


def test_layers_after_the_shared_ones_may_work_in_place() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(432, 6)),
        nn.Sequential(nn.ReLU(inplace=True), Dropout(0.5), nn.Linear(6, 2)),
    )
    outputs = passes(model, [images(0, 5), images(1, 3)], [False, True])
    torch.testing.assert_close(outputs[0], model.eval()(images(0, 5)))
    torch.cat(outputs).sum().backward()
    assert all(parameter.grad.any() for parameter in model.parameters())


def test_layers_that_are_not_known_see_one_batch_at_a_time() -> None:
    class Centred(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - x.mean(0)

    model = nn.Sequential(nn.Flatten(), Centred(), nn.Linear(432, 2))
    batches = [images(0, 5), images(1, 3)]
    for got, batch in zip(passes(model, batches, [True, True]), batches, strict=True):
        torch.testing.assert_close(got, model(batch))


def test_a_model_is_called_with_other_weights_and_keeps_its_own() -> None:
    """One layer is used twice, another shares its weight, and statistics are replaced too."""
    twice, alike = nn.Linear(6, 6), nn.Linear(6, 6)
    alike.weight = twice.weight
    parts = [nn.Linear(432, 6), nn.BatchNorm1d(6), twice, nn.ReLU(), twice, alike]
    model = nn.Sequential(nn.Flatten(), *parts).eval()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.add_(1)
    own = list(model.parameters())
    weights = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    got = call_with(model, weights, images(0, 5))
    torch.testing.assert_close(got, other(images(0, 5)))
    assert all(one is before for one, before in zip(model.parameters(), own, strict=True))
    got.sum().backward()
    assert twice.weight.grad is None and other[3].weight.grad.any()

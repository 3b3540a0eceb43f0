"""All clients' models computed at once, against each alone: layers and named models."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from semisfl.engine.sgd import SGD
from semisfl.models.build import build
from semisfl.models.layers import Dropout, Layers, Residual, use_generator
from semisfl.models.stack import Stack
from semisfl.models.zoo import MODELS
from semisfl.settings.run import OptimizerConfig
from tests import toy
from tests.twin import largest_difference

SLOTS, SHARE = 3, 4


def small(*layers: nn.Module) -> nn.Sequential:
    return Layers(OrderedDict((f"layer{number}", layer) for number, layer in enumerate(layers)))


def residual() -> nn.Module:
    """Strides, 1 x 1 convolutions, both kinds of shortcut, BatchNorm with and without ReLU after it."""
    down = Residual(
        small(
            nn.Conv2d(6, 8, 3, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
        ),
        small(nn.Conv2d(6, 8, 1, 2, bias=False), nn.BatchNorm2d(8)),
    )
    same = Residual(small(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)))
    stem = nn.Conv2d(2, 6, 3, padding=1, bias=False)
    return small(stem, nn.BatchNorm2d(6), nn.ReLU(), down, nn.ReLU(), same, nn.AdaptiveAvgPool2d(1))


CASES = {
    "residual": residual,
    "pooling": lambda: small(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    ),
    "padded pooling": lambda: small(
        nn.Conv2d(2, 5, 3),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.MaxPool2d(2, padding=1),
        nn.AvgPool2d(2),
    ),
    "plain convolutions": lambda: small(
        nn.Conv2d(2, 4, 3, stride=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 2), nn.ReLU()
    ),
    "grouped": lambda: small(
        nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Conv2d(4, 2, 2, dilation=2)
    ),
    "normalised image by image": lambda: small(
        nn.Conv2d(2, 4, 3),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.Conv2d(4, 4, 3, padding=1, groups=4),
        nn.LayerNorm([4, 7, 7]),
        nn.Conv2d(4, 8, 1, bias=False),
        nn.GroupNorm(4, 8, affine=False),
        nn.Flatten(),
        nn.LayerNorm(8 * 49, bias=False),
    ),
    "linear": lambda: small(
        nn.Flatten(),
        nn.Linear(2 * 81, 7),
        nn.BatchNorm1d(7),
        nn.ReLU(),
        Dropout(0.4),
        nn.Linear(7, 3, bias=False),
        nn.Unflatten(1, (3, 1, 1)),
    ),
    "whole model": lambda: nn.Sequential(
        OrderedDict(
            bottom=small(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten()),
            top=small(nn.Linear(3 * 49, 4)),
        )
    ),
}


def doubled(kind: type[nn.Module], *settings: object) -> nn.Module:
    """A layer of a class of one's own, whose forward does more than that of ``kind``."""
    forward = lambda self, x: 2 * kind.forward(self, x)  # noqa: E731
    own: nn.Module = type(f"Own{kind.__name__}", (kind,), {"forward": forward})(*settings)
    return own


def own_weights(stack: Stack) -> None:
    """Give every slot other weights."""
    for module in stack.modules:
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.rand_like(tensor))


def alike(module: nn.Module, shape: tuple[int, ...], training: bool, slots: int = SLOTS) -> None:
    """Fail unless slots together do what each does alone: outputs, gradients, buffers and two steps of SGD."""
    torch.manual_seed(0)
    together = Stack(module.train(training), slots, together=True)
    alone = Stack(module.train(training), slots, together=False)
    own_weights(together)
    for name, tensor in alone.tensors.items():
        tensor.copy_(together.tensors[name])
    for stack in (together, alone):
        for slot, one in enumerate(stack.modules):
            use_generator(one, torch.Generator().manual_seed(slot))
    sgds = [SGD(stack.parameters, OptimizerConfig()) for stack in (together, alone)]
    assert len(together.parameters) * slots == len(alone.parameters)
    for sgd in sgds:
        sgd.restart(0.05)
    for _ in range(2):
        x = torch.randn(slots * SHARE, *shape).contiguous(memory_format=torch.channels_last)
        got, wanted = together(x), alone(x)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        upstream = torch.randn_like(got)
        for stack, sgd in zip((together, alone), sgds, strict=True):
            sgd.apply(stack.gradients(upstream))
    assert largest_difference(together.tensors, alone.tensors) < 1e-5
    moved = largest_difference(together.tensors, Stack(module, slots).tensors)
    assert moved > 0.09


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_slots_together_do_what_each_does_alone(case: str, training: bool) -> None:
    alike(CASES[case](), (2, 9, 9), training)


def test_a_single_slot_computes_the_same() -> None:
    alike(residual(), (2, 9, 9), training=True, slots=1)


@pytest.mark.parametrize(("name", "cut"), [("resnet18", "relu2_2"), ("wrn-28-2", "flatten")])
def test_residual_models_together(name: str, cut: str) -> None:
    model = build(name, (2, 8, 8), 3, cut=cut, projector="none", seed=1)
    alike(model.bottom, (2, 8, 8), training=True)


@pytest.mark.parametrize(
    # VGG-16 has the layers of VGG-13, and three more of them.
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "vgg16"))
        for name in MODELS
        # Their margins, norms or tokens are computed client by client.
        if not name.startswith(("efficientnet", "convnext", "vit"))
    ],
)
def test_every_named_model_can_be_stacked_at_any_cut(name: str) -> None:
    known = MODELS[name]
    whole = build(name, known.shape, known.classes, projector="none").whole()
    assert Stack(whole, 1, trainable=False, together=True)._pass is not None


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (toy.Doubled(), "Doubled"),
        (nn.Conv2d(2, 3, 3, padding="same"), "Conv2d"),
        (nn.Conv2d(2, 3, 3, padding_mode="reflect", padding=1), "Conv2d"),
        (nn.BatchNorm2d(2, momentum=None), "cumulative average"),
        (nn.BatchNorm2d(2, affine=False), "BatchNorm2d"),
        (nn.BatchNorm2d(2, track_running_stats=False), "BatchNorm2d"),
        (nn.InstanceNorm2d(2), "InstanceNorm2d"),
        (nn.Dropout(0.5), "Dropout"),  # which draws from a global generator
        (doubled(nn.BatchNorm2d, 2), "OwnBatchNorm2d"),
        (doubled(nn.GroupNorm, 1, 2), "OwnGroupNorm"),
        (doubled(nn.LayerNorm, [2, 5, 5]), "OwnLayerNorm"),
        (doubled(Residual, nn.Sequential(nn.ReLU())), "OwnResidual"),
    ],
)
def test_what_cannot_be_stacked_is_named_and_computed_one_by_one(
    layer: nn.Module, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    template = small(nn.Conv2d(2, 2, 1), layer)
    stack = Stack(template.eval(), 2, together=True)
    assert "one by one" in caplog.text and message in caplog.text
    assert len(caplog.messages) == 1 and "\n" not in caplog.messages[0]
    images = torch.randn(4, 2, 5, 5)
    each = torch.cat([template(share) for share in images.chunk(2)])
    torch.testing.assert_close(stack(images), each)


def test_one_slot_that_fails_to_normalise_says_so() -> None:
    stack = Stack(small(nn.Linear(2, 3), nn.BatchNorm1d(3)).train(), 2, together=True)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        stack(torch.randn(2, 2))

"""Models, their parameter counts, and the cut."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl import seeds
from semisfl.costs.cuts import cut_of
from semisfl.models import split as models
from semisfl.models.build import build, build_model, uncut
from semisfl.models.layers import (
    Dropout,
    Residual,
    batchnorms,
    parts_of,
    use_generator,
)
from semisfl.models.own import stages_of
from semisfl.models.shapes import Shape
from semisfl.models.split import SplitModel, parameter_count, split
from semisfl.settings import config, presets
from tests.twin import bn_model

# Settings of the paper's tables: bottom and top parameters and the feature size d.
TABLE = {
    "cnn": ((3, 32, 32), 10, 53_696, 824_842, 1600),
    "alexnet": ((3, 32, 32), 10, 2_251_584, 33_603_594, 4096),
    "vgg13": ((3, 96, 96), 10, 9_410_880, 35_700_746, 4608),
    "vgg16": ((3, 144, 144), 100, 14_723_136, 69_623_908, 12800),
}


@pytest.mark.parametrize("name", TABLE)
def test_parameter_counts(name: str) -> None:
    shape, classes, bottom, top, features = TABLE[name]
    # Memory for VGG16's head alone would be 656 MB: count without it, and the head by arithmetic.
    model = build(name, shape, classes, projector="none")
    assert parameter_count(model.bottom) == bottom
    assert parameter_count(model.top) == top
    assert model.features == features == model.keys
    assert parameter_count(model.projector) == 0


def test_projection_heads() -> None:
    d = 1600
    expected = {
        "mlp": (d * d + d + d * 128 + 128, 128),
        "linear": (d * 128 + 128, 128),
        "none": (0, d),
    }
    for kind, (count, width) in expected.items():
        model = build("cnn", (3, 32, 32), 10, projector=kind)  # type: ignore[arg-type]
        assert parameter_count(model.projector) == count
        assert model.keys == width
        z = model.project(model.bottom(torch.rand(4, 3, 32, 32)))
        assert z.shape == (4, width)
        torch.testing.assert_close(z.norm(dim=1), torch.ones(4))


def pictures(shape: Shape, rows: int = 4) -> tuple[Tensor, Tensor]:
    rng = seeds.generator(1, "pictures")
    return torch.from_numpy(rng.normal(size=(rows, *shape))), torch.from_numpy(
        rng.integers(0, 3, rows)
    )


def without_dropout(model: nn.Module) -> nn.Module:
    for layer in model.modules():
        if isinstance(layer, Dropout | nn.Dropout):
            layer.p = 0.0
    return model


def small_alexnet() -> nn.Sequential:
    """AlexNet's layers in their order, a sixteenth as wide, so that every cut can be tried."""
    layers = list(uncut("alexnet", (1, 8, 8), 3).named_children())
    thin: list[tuple[str, nn.Module]] = []
    for name, layer in layers:
        if isinstance(layer, nn.Conv2d):
            layer = nn.Conv2d(
                max(1, layer.in_channels // 16), layer.out_channels // 16, 3, padding=1
            )
        elif isinstance(layer, nn.Linear):
            classes = 3 if layer.out_features == 3 else layer.out_features // 16
            layer = nn.Linear(layer.in_features // 16, classes)
        thin.append((name, layer))
    return models._stack(thin)


def residual_model() -> nn.Sequential:
    body = OrderedDict(conv1=nn.Conv2d(4, 4, 3, padding=1), relu1=nn.ReLU())
    return nn.Sequential(
        OrderedDict(
            stem=nn.Conv2d(1, 4, 3, stride=2),
            block=Residual(nn.Sequential(body)),
            down=Residual(
                nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, 2, 1)),
                nn.Sequential(OrderedDict(narrow=nn.Conv2d(4, 6, 1, 2))),
            ),
            relu=nn.ReLU(),
            mean=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(6, 3),
        )
    )


WHOLES = {
    "cnn": (lambda: uncut("cnn", (1, 16, 16), 3), (1, 16, 16)),
    "alexnet": (small_alexnet, (1, 8, 8)),
    "own": (bn_model, (1, 16, 16)),
    "residual": (residual_model, (1, 16, 16)),
}


def gradients_of_the_split(model: SplitModel, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Compute them as client and server do: only the gradient of the features crosses."""
    sent = model.bottom(images)
    assert sent.dim() == 2 and sent.shape[1] == model.features
    features = sent.detach().requires_grad_()
    F.cross_entropy(model.top(features), labels).backward()
    assert features.grad is not None
    sent.backward(features.grad)
    parts = (*model.bottom.named_parameters(), *model.top.named_parameters())
    return {name: parameter.grad for name, parameter in parts if parameter.grad is not None}


@pytest.mark.parametrize("name", WHOLES)
def test_split_gradients_equal_the_whole_models_at_every_cut(name: str) -> None:
    make, shape = WHOLES[name]
    images, labels = pictures(shape)
    whole = without_dropout(make().double()).train()
    buffers = copy.deepcopy(whole)
    F.cross_entropy(whole(images), labels).backward()
    expected = {key: parameter.grad for key, parameter in whole.named_parameters()}
    names = [key for key, _ in whole.named_children()]
    learning = [
        i for i, layer in enumerate(whole.children(), 1) if any(True for _ in layer.parameters())
    ]
    cuts: list[int | str] = [
        *range(learning[0], learning[-1]),
        *names[learning[0] - 1 : learning[-1] - 1],
    ]
    for cut in cuts:
        # `split` passes zeros of the default type through: double afterwards.
        model = split(copy.deepcopy(buffers).float(), shape, cut, "none").double()
        for part in (model.bottom, model.top):
            own = {
                key: value
                for key, value in buffers.state_dict().items()
                if key in part.state_dict()
            }
            part.load_state_dict(own)
        model.train()
        torch.testing.assert_close(model(images), copy.deepcopy(buffers)(images), atol=1e-9, rtol=0)
        model.zero_grad()
        result = gradients_of_the_split(model, images, labels)
        assert result.keys() == expected.keys()
        for key, gradient in result.items():
            torch.testing.assert_close(gradient, expected[key], atol=1e-6, rtol=0)


def test_cut_by_index_and_by_name_agree() -> None:
    by_name = build("cnn", (1, 28, 28), 10, cut="relu2", seed=4)
    by_index = build("cnn", (1, 28, 28), 10, cut=5, seed=4)
    assert [n for n, _ in by_name.bottom.named_children()] == [
        n for n, _ in by_index.bottom.named_children()
    ]
    assert by_name.features == by_index.features == 64 * 8 * 8
    images = torch.rand(2, 1, 28, 28)
    assert torch.equal(by_name(images), by_index(images))


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (0, "model.cut = 0 is outside the model; it has 10 layers, use 1 to 9"),
        (10, "model.cut = 10 is outside the model"),
        (-1, "model.cut = -1 is outside the model"),
        (
            "conv7",
            "model.cut = 'conv7' is no layer that the model can be cut after; these are conv1",
        ),
        ("fc2", "model.cut = 'fc2' is no layer that the model can be cut after"),
    ],
)
def test_cut_outside_the_model(cut: int | str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        build("cnn", (1, 28, 28), 10, cut=cut)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_cut_that_leaves_one_side_without_parameters_is_refused() -> None:
    layers = [nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 3), nn.Softmax(1)]
    own = nn.Sequential(*layers)
    for cut, holder in ((2, "clients"), (None, "clients"), (4, "server")):
        with pytest.raises(ValueError, match=f"leaves the {holder} no parameters"):
            split(own, (1, 4, 4), cut)
    with pytest.raises(ValueError, match="no Flatten layer to cut at"):
        split(nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU()), (1, 4, 4))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            nn.Sequential(nn.Flatten(), nn.Linear(16, 4)),
            r"the model makes \[4\] of an image; it must",
        ),
        (
            nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten()),
            r"layer '0' \(Conv2d\) fails: Given",
        ),
    ],
    ids=["outputs", "channels"],
)
def test_mistakes_in_a_users_own_model_are_named(own: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(presets.preset("digits"), (1, 4, 4), 3, stages_of(own, (1, 4, 4)))


def test_weights_follow_from_the_seed_and_global_state_is_left_alone() -> None:
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    one, same, other = (build("cnn", (1, 16, 16), 3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(next(iter(one.parameters())), next(iter(other.parameters())))


def test_dropout_repeats_with_its_generator() -> None:
    model = split(bn_model(), (1, 16, 16)).train()
    assert not any(type(layer) is nn.Dropout for layer in model.modules())
    generator = torch.Generator()
    use_generator(model, generator)
    features = torch.rand(64, model.features)
    outputs = []
    for seed in (3, 3, 4):
        generator.manual_seed(seed)
        outputs.append(model.top(features))
    torch.testing.assert_close(outputs[0], outputs[1], atol=0, rtol=0)
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
def test_layers_that_work_in_place_may_be_cut_anywhere(cut: int) -> None:
    """Features stay as the bottom made them, and gradients are those of one plain pass."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        *(
            nn.Conv2d(3, 4, 3),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.LeakyReLU(0.1, inplace=True),
        ),
        *(nn.Flatten(), nn.Linear(100, 4)),
    )
    model = split(copy.deepcopy(plain), (3, 12, 12), cut=cut)
    images = torch.randn(2, 3, 12, 12)
    features = model.bottom(images).detach().requires_grad_()
    before = features.detach().clone()
    model.top(features).square().sum().backward()
    torch.testing.assert_close(features.detach(), before, rtol=0, atol=0)
    model.bottom(images).backward(features.grad)
    plain(images).square().sum().backward()
    trained = [*model.bottom.parameters(), *model.top.parameters()]
    for got, expected in zip(trained, plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad)


def test_dropout_keeps_the_mean_and_is_off_in_eval() -> None:
    layer = Dropout(0.3)
    layer.generator = torch.Generator().manual_seed(0)
    ones = torch.ones(200_000)
    dropped = layer(ones)
    assert dropped.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
    assert float((dropped == 0).float().mean()) == pytest.approx(0.3, abs=0.01)
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.01)
    assert torch.equal(layer.eval()(ones), ones)


def test_a_layer_that_is_used_twice_stays_in_both_places() -> None:
    relu = nn.ReLU()
    layers = (nn.Conv2d(1, 2, 3), relu, nn.Conv2d(2, 2, 3), relu, nn.Flatten(), nn.Linear(32, 3))
    whole = nn.Sequential(*layers)
    images = torch.randn(4, 1, 8, 8)
    model = split(whole, (1, 8, 8))
    assert len(model.bottom) == 5
    torch.testing.assert_close(model(images), whole(images))


def test_own_sequential_is_split_where_asked() -> None:
    model = split(bn_model(), (1, 16, 16), cut=3, projector="linear", projection=7)
    assert len(batchnorms(model.bottom)) == 1 and len(batchnorms(model.top)) == 2
    assert model.features == 6 * 7 * 7 and model.keys == 7
    assert model(torch.rand(2, 1, 16, 16)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "shape", "cut", "features", "hidden"),
    [
        ("vgg16", (3, 144, 144), None, 12_800, 12_800),
        ("cnn", (3, 32, 32), None, 1_600, 1_600),
        ("cnn", (3, 64, 64), None, 10_816, 2_048),
        ("alexnet", (3, 32, 32), None, 4_096, 4_096),
        ("alexnet", (3, 32, 32), "conv1", 65_536, 2_048),
        ("alexnet", (3, 40, 40), None, 6_400, 2_048),
    ],
)
def test_the_head_is_wide_only_where_it_was_published_so(
    name: str, shape: Shape, cut: str | None, features: int, hidden: int
) -> None:
    """It is as wide as its input for a named model at its published image size, else at most 2,048."""
    with torch.device("meta"):
        model = build(name, shape, 10, cut=cut)
    widths = [one.out_features for one in model.projector if isinstance(one, nn.Linear)]
    assert model.features == features and widths == [hidden, 128]
    chosen = config.parse({"model": {"name": name} | ({"cut": cut} if cut else {})})
    flops = cut_of(chosen, shape, 10).head_flops("mlp", 128)
    assert flops == 2 * (features * hidden + hidden * 128), "plan counts the same head"


def test_the_head_of_a_model_of_ones_own_is_bounded() -> None:
    own = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 900, 10))
    model = build_model(presets.preset("digits"), (1, 30, 30), 10, own)
    assert model.features == 3600 and model.projector[0].out_features == 2048  # type: ignore[index]


def test_a_layer_derived_from_batchnorm_keeps_its_own_forward() -> None:
    class Own(nn.BatchNorm2d):
        pass

    conv, own, relu = nn.Conv2d(1, 2, 3), Own(2), nn.ReLU()
    assert parts_of([conv, own, relu]) == [conv, own, relu]


def test_layers_taken_together_are_those_layers() -> None:
    """Layers that are not fused, or only in part, are among them."""
    others = (
        nn.Conv2d(3, 4, 3, stride=2),
        nn.Conv2d(3, 6, 3, groups=3),
        nn.Conv2d(3, 4, 3, dilation=2),
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.Conv2d(3, 4, 1, padding=1),
        nn.Conv2d(3, 4, 3, padding_mode="reflect", padding=1),
        nn.Conv2d(3, 4, 3, bias=False),
    )
    shape = (3, 32, 32)
    for conv in others:
        layers = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
        layers(torch.zeros(1, *shape))
        model = split(layers, shape)
        images = torch.randn(2, *shape)
        torch.testing.assert_close(model(images), layers(images))


class OwnGroupNorm(nn.Module):
    def __init__(self, groups: int, channels: int) -> None:
        super().__init__()
        self.groups, self.weight = groups, nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.groups, self.weight, self.bias)


@pytest.mark.parametrize("kind", [nn.GroupNorm, OwnGroupNorm])
@pytest.mark.parametrize("channels", [1, 4])
def test_a_groupnorm_that_sees_the_images_themselves_does_not_end_the_process(
    channels: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch computes the gradient of its weights at an address that nothing has, if images lie channels-last."""
    images = torch.rand(2, channels, 5, 6)
    inside = nn.Sequential(
        nn.Sequential(nn.Identity(), kind(1, channels)), nn.Flatten(), nn.Linear(channels * 30, 3)
    )
    bottom = split(inside, (channels, 5, 6), cut=1).bottom
    taken: list[Tensor] = []
    computed = F.group_norm
    monkeypatch.setattr(F, "group_norm", lambda x, *how: taken.append(x) or computed(x, *how))
    out = bottom(images.to(memory_format=torch.channels_last)).view(images.shape)
    assert taken[0].stride() == images.stride()  # else the next line would end the tests
    gradients = torch.autograd.grad((out * images).sum(), list(bottom.parameters()))
    expected = computed(images, 1)
    torch.testing.assert_close(gradients[0], (expected * images).sum((0, 2, 3)))
    torch.testing.assert_close(gradients[1], images.sum((0, 2, 3)))

"""Every attack works on an early cut without defence, and fails on random features."""

from typing import Any

import pytest
import torch

from semisfl.attacks import guesses, inversion, meter
from semisfl.attacks.decoder import decoder_of
from semisfl.attacks.likeness import identified, likeness, psnr, ssim
from semisfl.attacks.meter import RANDOM, Measured
from semisfl.attacks.scene import Scene
from semisfl.data.augment import Normalizer
from semisfl.data.partition import Partition, split
from semisfl.data.sources import load
from semisfl.models.build import build_model
from semisfl.settings.config import parse
from semisfl.settings.policy import Policy

EARLY = 3  # after the first block


def scene_of(count: int, public: int, **model: Any) -> Scene:
    """Return digits and an untrained network, whose early layers leak without training."""
    data = load("digits")
    config = parse({"data": {"augment": {"flip": False, "cutout": 8}}, "model": model})
    shards: Partition = split(
        data.labels[:count].numpy(),
        labeled=40,
        clients=5,
        kind="dirichlet",
        alpha=0.1,
        seed=0,
        classes=10,
    )
    model = build_model(config, data.shape, 10).whole()
    return Scene(
        config,
        model,
        7,
        Normalizer.of(data.mean, data.std),
        data.test_images[:public],
        data.test_labels[:public],
        data.images[:count],
        data.labels[:count],
        shards.clients,
        10,
        accuracy=0.0,
    )


@pytest.fixture(scope="module")
def scene() -> Scene:
    return scene_of(1000, 500)


@pytest.fixture(scope="module")
def undefended(scene: Scene) -> Measured:
    return meter.measure(scene, EARLY, "none", Policy(), quick=True)


@pytest.fixture(scope="module")
def without_content(scene: Scene) -> Measured:
    return meter.measure(scene, EARLY, RANDOM, RANDOM, quick=True)


def test_a_decoder_rebuilds_images_but_not_from_noise(
    undefended: Measured, without_content: Measured
) -> None:
    attacked, none = undefended.numbers["decoder"], without_content.numbers["decoder"]
    chance = undefended.numbers["mean_image"]
    assert attacked["ssim"] > chance["ssim"] + 0.35 and attacked["psnr"] > chance["psnr"] + 3
    assert attacked["identified"] > 0.5
    assert none["ssim"] < chance["ssim"] + 0.05 and none["identified"] < 0.03


@pytest.mark.parametrize("takes", [(24, 12, 12), (16, 28, 28), (1280, 1, 1), (17, 32), (64,)])
@pytest.mark.parametrize("gives", [(1, 28, 28), (3, 40, 31)])
def test_a_decoder_makes_images_of_features_of_any_shape(
    takes: tuple[int, ...], gives: tuple[int, ...]
) -> None:
    images = decoder_of(takes, gives)(torch.randn(1, *takes))  # also of one image
    assert images.shape == (1, *gives) and images.min() >= 0 and images.max() <= 1


def test_optimisation_rebuilds_images_without_public_images(
    undefended: Measured, without_content: Measured
) -> None:
    attacked, none = undefended.numbers["optimised"], without_content.numbers["optimised"]
    assert (
        attacked["identified"] > 0.9
        and attacked["ssim"] > undefended.numbers["mean_image"]["ssim"] + 0.1
    )
    assert none["identified"] < 0.4


def test_class_mix_and_membership_against_chance(
    undefended: Measured, without_content: Measured
) -> None:
    attacked, none = undefended.numbers["class_mix"], without_content.numbers["class_mix"]
    assert attacked["accuracy"] > attacked["chance"] + 0.3
    assert none["accuracy"] < none["chance"] + 0.1
    assert undefended.numbers["membership_auc"] > 0.65
    assert abs(without_content.numbers["membership_auc"] - 0.5) < 0.08


def test_noise_hinders_a_decoder_and_many_uses_help_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semisfl.attacks.scene.VICTIMS", 100)
    layers = [{"kind": "conv", "channels": 8, "kernel": 5}, {"kind": "relu"}, {"kind": "pool"}]
    layers += [{"kind": "flatten"}, {"kind": "linear"}]
    small = scene_of(500, 300, layers=layers, cut=4)
    policy = Policy(clip=2.0, noise=0.1, update_clip=1.0, update_noise=0.01)
    clear = meter.measure(small, EARLY, "none", Policy(), quick=True)
    noisy = meter.measure(small, EARLY, "noise", policy, quick=True)
    often = meter.measure(small, EARLY, "noise", policy, quick=True, uses=8)
    without, once, mean = (one.numbers["decoder"]["ssim"] for one in (clear, noisy, often))
    assert once < without - 0.1 and once + 0.05 < mean < without
    assert (noisy.numbers["uses"], often.numbers["uses"]) == (1, 8)


def test_the_mean_of_k_uses_has_noise_smaller_by_the_root_of_k() -> None:
    draws = torch.Generator().manual_seed(0)
    sent = meter.mean_of_uses(lambda rows: rows + torch.randn(rows.shape, generator=draws), 25)
    assert abs(float(sent(torch.zeros(400, 50)).std()) - 0.2) < 0.005


def test_an_update_on_one_image_reveals_it_and_a_mean_gradient_is_that_of_all(scene: Scene) -> None:
    model = scene.model.eval().requires_grad_()
    parameters = list(model.parameters())
    images = scene.images[:9].float() / 255
    labels = scene.labels[:9]

    def rebuilt(first: int, last: int, seen: list[torch.Tensor]) -> torch.Tensor:
        start = torch.rand(images[first:last].shape, generator=torch.Generator().manual_seed(0))
        return inversion.invert_gradient(
            model, parameters, seen, labels[first:last], scene.prepare, start, steps=60
        )

    alone = inversion.gradient_of(model, parameters, scene.prepare(images[:1]), labels[:1])
    one = likeness(rebuilt(0, 1, alone), images[:1])
    noise = [torch.randn(part.shape, generator=torch.Generator().manual_seed(1)) for part in alone]
    nothing = likeness(rebuilt(0, 1, noise), images[:1])
    assert one["ssim"] > nothing["ssim"] + 0.2
    each = [
        inversion.gradient_of(
            model, parameters, scene.prepare(images[i : i + 1]), labels[i : i + 1]
        )
        for i in range(1, 9)
    ]
    together = inversion.mean_gradient(each)
    mean_gradient = inversion.gradient_of(model, parameters, scene.prepare(images[1:]), labels[1:])
    for mean, joint in zip(together, mean_gradient, strict=True):
        assert torch.allclose(mean, joint, atol=1e-5)


def test_ssim_psnr_and_identification_by_hand() -> None:
    images = torch.rand(6, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(ssim(images, images), torch.ones(6))
    assert ssim(images, 1 - images).max() < 0
    assert torch.allclose(psnr(images, images + 0.1), torch.full((6,), 20.0), atol=1e-3)
    assert identified(images, images) == 1.0
    assert identified(images.roll(1, 0), images) == 0.0


def test_inference_on_made_up_features() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(300) % 3
    public = torch.eye(3)[labels] * 4 + torch.randn(300, 3, generator=generator)
    ones = torch.ones(50, dtype=torch.long)
    client = torch.eye(3)[ones] * 4 + torch.randn(50, 3, generator=generator)
    mix = guesses.guess_classes(public, labels, [client], [ones], 3, generator)
    assert mix.accuracy > 0.9 and mix.chance == 0  # the first class is guessed, if all are as large
    members, others = torch.zeros(5, 2), torch.ones(4, 2)
    assert guesses.membership_auc(members, members, others) == 1.0
    assert guesses.membership_auc(members, others, members) == 0.0
    assert guesses.membership_auc(members, members, members) == 0.5

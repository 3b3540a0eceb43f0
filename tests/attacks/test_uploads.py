"""Test that an uploaded bottom shows the inputs of its last layer, unless noise hides them."""

import pytest
import torch
from torch import Tensor, nn

from semisfl.attacks.uploads import Client, count_rebuilt, curious, malicious, solve_inputs
from semisfl.fleet.outgoing import Outgoing
from semisfl.settings.config import parse
from semisfl.settings.policy import Policy

NOISY = Policy(clip=1.0, noise=0.14, update_clip=0.1, update_noise=0.05)


def random_images(count: int, seed: int) -> Tensor:
    return torch.rand(count, 1, 12, 12, generator=torch.Generator().manual_seed(seed))


def client(bottom: nn.Sequential, classes: int, policy: Policy | None = None) -> Client:
    config = parse({})
    outgoing = Outgoing(policy, unpredictable=True)
    outgoing.agree(config)
    torch.manual_seed(0)
    for parameter in bottom.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    width = bottom(random_images(1, 0)).shape[1]
    top = nn.Linear(width, classes)
    return Client(bottom, top, random_images(40, 1).split(8), config.optimizer, outgoing)


def linear() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 96), nn.ReLU())


def convolution() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.Flatten())


def test_a_curious_server_solves_the_inputs_of_a_linear_layer_from_an_honest_round() -> None:
    """Five steps of eight images with momentum: 40 inputs, from 96 rows of one change."""
    result = curious(client(linear(), 60), random_images(50, 2))
    assert (result["layer"], result["inputs"]) == ("1", 40)
    assert result["rebuilt"] >= 36


def test_a_malicious_server_reads_each_image_from_its_own_row_of_the_weight() -> None:
    result = malicious(client(linear(), 10), random_images(50, 2))
    assert result["rebuilt"] == result["inputs"] == 40


def test_a_convolution_shows_as_many_patches_as_it_has_channels() -> None:
    attacked = client(convolution(), 10)
    result = malicious(attacked, random_images(50, 2))
    assert result["rebuilt"] == result["inputs"] == 16
    # An honest round mixes the patches of all positions: fewer outputs than unknowns.
    honest = curious(attacked, random_images(50, 2))
    assert honest["inputs"] == 40 * 64 and honest["rebuilt"] < 0.02 * honest["inputs"]


@pytest.mark.parametrize("bottom", [linear, convolution])
def test_noise_on_the_upload_hides_them(bottom: type) -> None:
    attacked = client(bottom(), 10, NOISY)
    for attack in (curious, malicious):
        result = attack(attacked, random_images(50, 2))
        assert result["rebuilt"] == 0 and result["correlation"] < 0.6, result


def test_clipping_alone_hides_nothing() -> None:
    clipped = client(linear(), 60, Policy(update_clip=0.001))
    assert curious(clipped, random_images(50, 2))["rebuilt"] >= 36


def test_a_change_is_solved_exactly_and_a_known_noise_is_weighed() -> None:
    draws = torch.Generator().manual_seed(0)
    inputs, gradients = (torch.randn(6, width, generator=draws) for width in (20, 9))
    prior = torch.randn(200, 20, generator=draws)
    change = gradients.T @ inputs
    assert torch.allclose(solve_inputs(change, gradients, 0.0, prior), inputs, atol=1e-3)
    # All noise: nothing is learned, and the mean of the prior is the best guess.
    guess = solve_inputs(change, gradients, 1e6, prior)
    assert torch.allclose(guess, prior.mean(0).expand_as(guess), atol=1e-3)
    assert count_rebuilt(inputs, inputs)[0] == 6 and count_rebuilt(-inputs, inputs)[0] == 0

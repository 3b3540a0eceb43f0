"""A model that computes with a sum, of which one part is learned."""

import copy

import torch
from torch import nn
from torch.func import functional_call

from semisfl.engine.sgd import SGD
from semisfl.engine.sums import Regularisers, add_up
from semisfl.settings.run import OptimizerConfig
from tests.toy import network

CONFIG = OptimizerConfig(weight_decay=0.01)
REGULARISERS = Regularisers(l2=0.3, l1=0.02)


def parts() -> tuple[nn.Sequential, nn.Sequential, nn.Sequential, list[str]]:
    """Sum, fixed part, learned part, and the names of what is added."""
    total, fixed, learned = (network(batchnorm=True) for _ in range(3))
    with torch.no_grad():
        for parameter in learned.parameters():
            parameter.copy_(-0.4 * parameter.roll(1))
        learned.get_parameter("fc1.weight")[0, 0] = 0.0  # of |0| no gradient is taken
        fixed.get_parameter("bn.weight").fill_(1.5)
    names = [name for name, _ in fixed.named_parameters() if not name.startswith("bn.")]
    return total, fixed, learned, names


def images(number: int) -> torch.Tensor:
    return torch.randn(6, 3, 12, 12, generator=torch.Generator().manual_seed(number))


def test_steps_of_a_sum_are_steps_of_its_learned_part() -> None:
    """Against autograd through the sum and the regularisers, and torch's own optimiser."""
    total, fixed, learned, names = parts()
    sigma = {name: value.detach().clone() for name, value in fixed.named_parameters()}
    psi = copy.deepcopy(learned)
    add_up(total, fixed, learned, names, torch.float32)
    sgd = SGD([p for p in total.parameters() if p.requires_grad], CONFIG)
    sgd.restart(0.05)
    theirs = torch.optim.SGD(
        [psi.get_parameter(name) for name in names],
        lr=0.05,
        momentum=CONFIG.momentum,
        nesterov=True,
        weight_decay=CONFIG.weight_decay,
    )
    for number in range(4):
        sgd.descend(total(images(number)).square().mean(), regularisers=REGULARISERS)
        mine = {name: psi.get_parameter(name) for name in names}
        theta = {name: s + mine[name] if name in mine else s for name, s in sigma.items()}
        loss = functional_call(psi, theta, images(number)).square().mean()
        far = sum((p - sigma[name]).square().sum() for name, p in mine.items())
        size = sum(p.abs().sum() for p in mine.values())
        theirs.zero_grad()
        (loss + REGULARISERS.l2 * far + REGULARISERS.l1 * size).backward()
        theirs.step()
    for name, value in psi.state_dict().items():
        torch.testing.assert_close(learned.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    for name, value in sigma.items():
        assert torch.equal(fixed.get_parameter(name), value), "what is fixed stays"
        theta = value + learned.get_parameter(name) if name in names else value
        assert torch.equal(total.get_parameter(name), theta)


def test_layers_compute_with_the_sum_in_their_precision() -> None:
    total, fixed, learned, names = parts()
    add_up(total, fixed, learned, names, torch.bfloat16)
    trained = [p for p in total.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.bfloat16} and len(trained) == len(names)
    psi = [learned.get_parameter(name).detach().clone() for name in names]
    sigma = [fixed.get_parameter(name).detach() for name in names]
    ours, theirs = SGD(trained, CONFIG), SGD(psi, CONFIG)
    for sgd in (ours, theirs):
        sgd.restart(0.1)
    for step in range(3):
        gradients = [torch.randn_like(p).bfloat16() for p in psi]
        used = [None if step == 1 and place == 2 else g for place, g in enumerate(gradients)]
        ours.apply(used, regularisers=REGULARISERS)
        theirs.apply(
            [
                (torch.zeros_like(p) if g is None else g.float())
                + 2 * REGULARISERS.l2 * (p - s)
                + REGULARISERS.l1 * p.sign()
                for g, p, s in zip(used, psi, sigma, strict=True)
            ]
        )
    for name, expected, s in zip(names, psi, sigma, strict=True):
        got = learned.get_parameter(name)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(total.get_parameter(name), (got + s).bfloat16())


def test_what_is_loaded_into_the_parts_is_added_up_anew() -> None:
    total, fixed, learned, names = parts()
    add_up(total, fixed, learned, names, torch.bfloat16)
    state = {
        name: torch.randn_like(value) if value.is_floating_point() else value + 7
        for name, value in fixed.state_dict().items()
    }
    fixed.load_state_dict(state)
    learned.load_state_dict({name: 2 * value for name, value in state.items()})
    total.weights.refresh()
    for name, value in total.named_parameters():
        expected = (3 * state[name]).bfloat16() if name in names else state[name]
        torch.testing.assert_close(value.detach(), expected)
    for name, buffer in total.named_buffers():
        assert torch.equal(buffer, 2 * state[name])
    total.train()(images(0).bfloat16())
    for name, buffer in learned.named_buffers():
        assert not torch.equal(buffer, 2 * state[name]), "a sum's statistics are its learned part's"
        assert torch.equal(buffer, total.get_buffer(name))


def test_layers_that_are_not_known_to_be_cast_keep_full_precision() -> None:
    total, fixed, learned = (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3))
    add_up(total, fixed, learned, [name for name, _ in total.named_parameters()], torch.bfloat16)
    for name, parameter in total.named_parameters():
        assert parameter.dtype is torch.float32
        parts = fixed.get_parameter(name) + learned.get_parameter(name)
        assert torch.equal(parameter, parts)

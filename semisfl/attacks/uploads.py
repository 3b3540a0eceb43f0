"""Solve for the inputs of a layer from the bottom that a client sends back.

A step changes a layer's weight by -lr G^T H: H are the layer's inputs, and G are the gradients at its
outputs, which follow from those that the server sent. With at least as many outputs as rows, the change
of a whole round gives H exactly. A malicious server chooses G so that each row of the weight shows one
input. Here the attacker knows G exactly, which a real one has to work out from activations and pooling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl.engine.weights import State, clone
from semisfl.fleet.outgoing import Outgoing
from semisfl.settings.policy import Policy, upload_bits
from semisfl.settings.run import OptimizerConfig

REBUILT = 0.95
"""An input counts as rebuilt if its correlation with the solution is above this."""
_Layer = nn.Linear | nn.Conv2d


@dataclass(frozen=True)
class Client:
    """Hold what a client does in a round: its bottom, the server's top, and images per step."""

    bottom: nn.Sequential
    top: nn.Module
    batches: Sequence[Tensor]
    """Normalised images of each step."""
    optimizer: OptimizerConfig
    outgoing: Outgoing


def last_weighted(bottom: nn.Sequential) -> _Layer | None:
    """Return the last linear or ungrouped convolutional layer of a bottom; None if it has none.

    A depthwise convolution multiplies each channel on its own, so its change is no product of matrices.
    """
    return next(
        (
            layer
            for layer in reversed(list(bottom.modules()))
            if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)
        ),
        None,
    )


def solve_inputs(change: Tensor, gradients: Tensor, noise: float, prior: Tensor) -> Tensor:
    """Return the best linear estimate of the inputs H [rows, in] from ``change`` = ``gradients``^T H + noise.

    ``change`` is [out, in], ``gradients`` [rows, out]. ``noise`` is its deviation on each weight.
    ``prior`` are such inputs of the attacker's own images: their mean and spread are what H is expected
    to be.
    """
    change, across = change.double(), gradients.double().T
    mean, spread = prior.double().mean(0), prior.double().var(0).mean().clamp(min=1e-12)
    known = across @ across.T
    # Rounding to float32 acts like a little noise.
    ridge = noise**2 / spread + 1e-12 * known.diagonal().max()
    inner = known + ridge * torch.eye(len(known), dtype=known.dtype, device=known.device)
    missing = change - across.sum(1, keepdim=True) * mean
    return (mean + across.T @ torch.linalg.solve(inner, missing)).float()


def count_rebuilt(estimate: Tensor, truth: Tensor) -> tuple[int, float]:
    """Return how many rows of ``truth`` the estimate shows, and the mean correlation.

    Both are [rows, in]. A row is shown if its correlation with the estimate is above `REBUILT`.
    """
    one, other = (rows - rows.mean(1, keepdim=True) for rows in (estimate, truth))
    likeness = F.cosine_similarity(one, other, dim=1)
    varied = other.norm(dim=1) > 1e-6  # a constant input, such as black pixels, shows nothing
    likeness = likeness[varied]
    return int((likeness > REBUILT).sum()), float(likeness.mean()) if len(likeness) else 0.0


def curious(client: Client, public: Tensor) -> dict[str, Any]:
    """Train an honest round of the client, solve for the inputs of its last layer, and return the numbers.

    ``public`` are normalised images of the attacker, whose inputs are what it expects of others.
    """
    bottom = clone(client.bottom).train()
    layer = last_weighted(bottom)
    assert layer is not None
    prior, seen = _inputs(bottom, layer, public), _Seen(layer)
    rates = _weights_of_steps(client.optimizer, len(client.batches))
    optimizer = torch.optim.SGD(
        bottom.parameters(),
        client.optimizer.lr,
        momentum=client.optimizer.momentum,
        nesterov=client.optimizer.momentum > 0,
        weight_decay=client.optimizer.weight_decay,
    )
    before = {name: tensor.clone() for name, tensor in bottom.state_dict().items()}
    for images in client.batches:
        optimizer.zero_grad()
        features = bottom(images)
        logits = client.top(features)
        F.cross_entropy(logits, logits.argmax(1)).backward()
        optimizer.step()
    inputs, gradients = seen.rows(rates)
    sent = client.outgoing.bottom(before, bottom.state_dict()).tensors
    name = _name_of(bottom, layer)
    old = before[name].flatten(1)
    norm = _norm(before, bottom.state_dict())
    scale, noise = _shape_of(client.outgoing.policy, norm)
    change = (sent[name].flatten(1) - old) / scale
    change += client.optimizer.weight_decay * sum(rates) * old
    estimate = solve_inputs(change, gradients, noise / scale, prior)
    return _numbers("curious", name, estimate, inputs) | {"change_norm": norm}


@torch.no_grad()
def malicious(client: Client, public: Tensor) -> dict[str, Any]:
    """Return the numbers of a server that asks for one step with gradient e_i at image i.

    Row i of the weight's change then is the input of image i.
    """
    bottom = clone(client.bottom).eval()
    layer = last_weighted(bottom)
    assert layer is not None
    name, images = _name_of(bottom, layer), torch.cat(list(client.batches))
    count = min(layer.weight.shape[0], len(images))
    inputs = _inputs(bottom, layer, images[:count], centre=True)
    prior = _inputs(bottom, layer, public, centre=True)
    # The gradients are as long as the clip allows.
    policy, length = client.outgoing.policy, float(inputs.norm())
    rate = 1.0 if policy.update_clip is None else policy.update_clip / length
    gradients = -rate * torch.eye(count, layer.weight.shape[0], device=inputs.device)
    before = {key: torch.zeros_like(tensor) for key, tensor in bottom.state_dict().items()}
    after = {**before, name: (gradients.T @ inputs).view(layer.weight.shape)}
    change = client.outgoing.bottom(before, after).tensors[name].flatten(1)
    _, noise = _shape_of(policy, 0.0)
    return _numbers("malicious", name, solve_inputs(change, gradients, noise, prior), inputs)


def _numbers(server: str, layer: str, estimate: Tensor, inputs: Tensor) -> dict[str, Any]:
    """Return an entry of the results: how many inputs were rebuilt, and how well on average."""
    count, correlation = count_rebuilt(estimate, inputs)
    return {
        "server": server,
        "layer": layer.rpartition(".")[0],
        "inputs": len(inputs),
        "rebuilt": count,
        "correlation": round(correlation, 4),
    }


def bits_of(policy: Policy, bottom: nn.Module) -> float | None:
    """Return the most bits that one upload of ``bottom`` carries under ``policy``; None without a bound."""
    floating = [one for one in bottom.state_dict().values() if one.is_floating_point()]
    bits = upload_bits(policy, sum(one.numel() for one in floating))
    return round(bits, 1) if bits < float("inf") else None


class _Seen:
    """Records a layer's inputs and the gradients at its outputs in every step, by hooks.

    They are H and G of every step; `rows` stacks them for `solve_inputs`.
    """

    def __init__(self, layer: _Layer) -> None:
        self._layer = layer
        self._steps: list[tuple[Tensor, Tensor]] = []
        layer.register_forward_hook(self._forward)

    def _forward(self, layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
        patches = _patches(self._layer, inputs[0].detach())
        outputs.register_hook(lambda got: self._steps.append((patches, _by_position(got))))

    def rows(self, rates: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Return all inputs, and what the change of the round multiplied them by."""
        inputs = torch.cat([inputs for inputs, _ in self._steps])
        pairs = zip(rates, self._steps, strict=True)
        return inputs, torch.cat([-rate * gradients for rate, (_, gradients) in pairs])


def _patches(layer: _Layer, inputs: Tensor) -> Tensor:
    """Return the rows that the layer's weight is multiplied with: one per image and position."""
    if isinstance(layer, nn.Linear):
        return inputs
    assert layer.groups == 1 and not isinstance(layer.padding, str)
    cut = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return cut.transpose(1, 2).flatten(0, 1)


def _by_position(outputs: Tensor) -> Tensor:
    """Return [rows, out] of a layer's outputs, in the order of `_patches`."""
    return outputs if outputs.dim() == 2 else outputs.flatten(2).transpose(1, 2).flatten(0, 1)


@torch.no_grad()
def _inputs(bottom: nn.Module, layer: _Layer, images: Tensor, *, centre: bool = False) -> Tensor:
    """Return the layer's inputs for ``images``; with ``centre``, one per image, at the middle."""
    caught: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0].detach()))
    bottom(images)
    handle.remove()
    rows = _patches(layer, caught[0])
    if not centre:
        return rows
    rows = rows.view(len(images), -1, rows.shape[1])
    return rows[:, rows.shape[1] // 2]


def _name_of(bottom: nn.Module, layer: nn.Module) -> str:
    """Return the name of a layer's weight in the bottom's state."""
    return next(f"{name}.weight" for name, module in bottom.named_modules() if module is layer)


def _norm(before: State, after: State) -> float:
    """Return the length of the change of all weights together, as a policy's ``update_clip`` limits it."""
    floating = [name for name, tensor in after.items() if tensor.is_floating_point()]
    return float(torch.stack([(after[n] - before[n]).norm() for n in floating]).norm())


def _shape_of(policy: Policy, norm: float) -> tuple[float, float]:
    """Return by what a change of this norm is scaled, and the noise on each weight."""
    if policy.update_clip is None:
        return 1.0, 0.0
    return min(1.0, policy.update_clip / max(norm, 1e-12)), policy.update_noise * policy.update_clip


def _weights_of_steps(config: OptimizerConfig, steps: int) -> list[float]:
    """Return how far a gradient of 1 in each step moves a weight by the end of the round."""
    rates = []
    for first in range(steps):
        momentum, moved = 0.0, 0.0
        for step in range(first, steps):
            gradient = 1.0 if step == first else 0.0
            momentum = config.momentum * momentum + gradient
            nesterov = gradient + config.momentum * momentum
            moved += config.lr * (nesterov if config.momentum else gradient)
        rates.append(moved)
    return rates

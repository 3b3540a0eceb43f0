"""Attacks by a malicious server that sends only valid frames.

`Hijacker` is the feature-space hijacking attack (Pasquini, Ateniese and Bernaschi 2021). The server
trains its own encoder and decoder on public images. It sends gradients that train its clients' bottoms
to give the same features as its encoder. `plant` needs no gradients: the server sends a bottom that was
trained so that images can be rebuilt from its features.

Both use the fleet as a method does, so they run against simulated clients and against devices.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl.attacks.inversion import Sent
from semisfl.engine.weights import State, clone
from semisfl.fleet.base import Features, Fleet, SplitRound

HIDDEN = 512
RATE = 1e-3
"""Learning rate of the attacker's networks."""


@dataclass(frozen=True)
class Public:
    """The server's own images: pixels in 0..1, and the function that prepares them for a model."""

    pixels: Tensor
    prepare: Callable[[Tensor], Tensor]
    generator: torch.Generator

    def batch(self, count: int) -> Tensor:
        """Return so many random images."""
        chosen = torch.randint(len(self.pixels), (count,), generator=self.generator)
        return self.pixels[chosen.to(self.pixels.device)]


def _decoder(features: int, shape: torch.Size) -> nn.Module:
    return nn.Sequential(
        nn.Linear(features, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, shape.numel()),
        nn.Sigmoid(),
        nn.Unflatten(1, tuple(shape)),
    )


class Hijacker:
    """The server's encoder, decoder and critic. They take one step per step of the clients."""

    def __init__(self, bottom: nn.Module, features: int, public: Public) -> None:
        device = public.pixels.device
        self.public = public
        self.encoder = clone(bottom).requires_grad_().to(device)
        self.decoder = _decoder(features, public.pixels.shape[1:]).to(device)
        # LayerNorm first, so that the critic judges the direction of features, not only their size.
        self.critic = nn.Sequential(
            nn.LayerNorm(features), nn.Linear(features, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)
        ).to(device)
        own = [*self.encoder.parameters(), *self.decoder.parameters()]
        self._own = torch.optim.Adam(own, RATE)
        self._critic = torch.optim.Adam(self.critic.parameters(), RATE, betas=(0.5, 0.9))

    def practise(self, steps: int, batch: int) -> None:
        """Train encoder and decoder before the first client step."""
        for _ in range(steps):
            self._codes(batch)

    def _codes(self, count: int) -> Tensor:
        """Train encoder and decoder for one step on public images, and return the encoder's features."""
        images = self.public.batch(count)
        self._own.zero_grad()
        codes: Tensor = self.encoder(self.public.prepare(images))
        F.mse_loss(self.decoder(codes), images).backward()
        self._own.step()
        return codes

    def gradients(self, features: Tensor) -> Tensor:
        """Train the critic on a step's features, and return the gradients to send to the clients."""
        rows = features.detach()
        codes = self._codes(len(rows))
        self._critic.zero_grad()
        (F.softplus(-self.critic(codes.detach())) + F.softplus(self.critic(rows))).mean().backward()
        self._critic.step()
        wanted = rows.clone().requires_grad_()
        loss = F.softplus(-self.critic(wanted)).mean()
        (gradients,) = torch.autograd.grad(loss, wanted)
        return gradients

    @torch.no_grad()
    def rebuild(self, features: Tensor) -> Tensor:
        """Return the images that the decoder makes from features."""
        images: Tensor = self.decoder(features.detach())
        return images


def hijack(
    fleet: Fleet,
    attacker: Hijacker,
    bottom: State,
    *,
    active: Sequence[int],
    rounds: int,
    steps: int,
    lr: float,
    scale: float = 1.0,
) -> Iterator[tuple[Features, Tensor]]:
    """Run attacked rounds, and yield every step's features with the gradients sent for them."""
    for index in range(rounds):
        fleet.wait_ready()
        fleet.start_round(SplitRound(index, tuple(active), steps, lr, bottom, bottom))
        for _ in range(steps):
            features = fleet.forward()
            # A client expects the gradient of the mean over its own rows, as a method sends it.
            gradients = attacker.gradients(features.student) * len(features.clients) * scale
            fleet.backward(gradients)
            yield features, gradients
        bottom = fleet.finish_round()


def plant(
    bottom: nn.Module, features: int, public: Public, sent: Sent, steps: int = 400, batch: int = 64
) -> tuple[State, nn.Module]:
    """Return a bottom that leaks through the clients' defence, and the decoder that rebuilds its images."""
    encoder = clone(bottom).requires_grad_().to(public.pixels.device)
    decoder = _decoder(features, public.pixels.shape[1:]).to(public.pixels.device)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 1e-3)
    for _ in range(steps):
        images = public.batch(batch)
        optimizer.zero_grad()
        F.mse_loss(decoder(sent(encoder(public.prepare(images)))), images).backward()
        optimizer.step()
    return encoder.state_dict(), decoder

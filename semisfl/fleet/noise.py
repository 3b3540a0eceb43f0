"""Add Gaussian noise that neither its generator nor rounding gives away."""

import math
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

GRID = 64.0
"""Steps of the grid in one deviation of the noise. A value is sent as a whole number of steps."""


def add_noise(values: Tensor, deviation: float, normal: Tensor) -> Tensor:
    """Return ``values`` plus ``deviation`` times the standard ``normal`` draws, on a grid.

    The last bits of a sum of two floats reveal both (Mironov 2012). Here both terms are whole
    numbers of steps, and so is their exact sum. Values are rounded towards 0, so no norm grows.
    """
    step = deviation / GRID
    # Adding 0 makes 0 of -0, whose sign is that of a value however small.
    return (torch.trunc(values / step) + torch.round(normal * GRID)) * step + 0.0


def secret_normal(
    shape: Sequence[int], device: torch.device, random: Callable[[int], bytes] = os.urandom
) -> Tensor:
    """Return standard normal values that nobody can predict, on ``device``.

    torch's generators are no secret: a CPU's has 2^32 seeds, and features that a server set to 0 show
    its state. These are the operating system's random bytes, or others of a secret source, made normal as Box and
    Muller (1958) do.
    """
    count = math.prod(shape)
    pairs = (count + 1) // 2
    words = torch.frombuffer(bytearray(random(8 * pairs)), dtype=torch.int32)
    uniform = (words.bitwise_and(0x7FFFFFFF).float() + 0.5) / 2**31
    radius, angle = (-2 * uniform[:pairs].log()).sqrt(), 2 * math.pi * uniform[pairs:]
    normal = torch.cat((radius * angle.cos(), radius * angle.sin()))
    return normal[:count].view(*shape).to(device)

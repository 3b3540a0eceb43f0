"""What a method's cost formula is made of: bytes of what a round sends, in fp32. Loads no torch.

A formula is ``(Sizes, settings) -> Cost``: down to and up from one active client in a usual round,
the dearer one where a round may differ. Tests hold every run's count to it.
"""

from dataclasses import dataclass

from semisfl.sections import Section


@dataclass(frozen=True)
class Sizes:
    """The projection head and labels never cross: they are not among it."""

    bottom: int
    """S_c, BatchNorm's buffers included."""
    full: int
    """S, bottom and top, BatchNorm's buffers included."""
    statistics: int
    """BatchNorm's buffers alone."""
    features: int
    """F = 4 B_u d K_u, a round's features of one model."""


@dataclass(frozen=True)
class Cost:
    down: int
    up: int

    @property
    def total(self) -> int:
        return self.down + self.up


def nothing(sizes: Sizes, settings: Section | None) -> Cost:
    return Cost(0, 0)

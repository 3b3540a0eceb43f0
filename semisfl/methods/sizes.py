"""The parts of a method's cost formula: bytes sent and passes computed in a round. Loads no torch.

A formula is ``(Sizes, settings) -> Cost`` for one active client and a usual round. If rounds differ, it is
the more expensive kind. It leaves out what is sent only once in several rounds. Tests compare every run's
counts with it.
"""

from dataclasses import dataclass

from semisfl.settings.sections import Section


@dataclass(frozen=True)
class Sizes:
    """Bytes in the run's codecs. The projection head and labels are never sent."""

    bottom: int
    """S_c: the bottom with BatchNorm's buffers."""
    full: int
    """S: bottom and top with BatchNorm's buffers."""
    statistics: int
    """BatchNorm's buffers alone."""
    student_features: int
    """Sizes of features and gradients are those of a whole round: each 4 B_u d K_u in fp32."""
    teacher_features: int
    gradients: int
    resent: bool = False
    """Whether the server sends again what it sent in an earlier round; network clients keep nothing."""


@dataclass(frozen=True)
class Work:
    """The computation of a round in forward passes; a backward pass counts as two."""

    client: float = 4.0
    """Passes of a client's model per image and step: 3 to train on it, 1 to label it."""
    look: float = 0.0
    """Passes of a client's model over all of its images, once per round."""
    copies: int = 4
    """Copies of the weights in a client's memory: student, gradients, momentum and teacher."""
    kept: int = 1
    """Batches per step whose activations a client keeps for the backward pass."""
    server: float = 4.0
    """Passes of the top per row of features; unused if clients hold whole models."""
    supervised: float = 3.0
    """Passes of the whole model per labelled image."""
    head: bool = False
    """Whether the server also computes the projection head."""


@dataclass(frozen=True)
class Cost:
    """Bytes and computation of one client's usual round."""

    down: int
    up: int
    teacher: int = 0
    """Bytes of the teacher's bottom; part of ``down``, as are the gradients."""
    gradients: int = 0
    features: int = 0
    """Bytes of features, a part of ``up``; 0 if clients hold whole models."""
    work: Work = Work()

    @property
    def total(self) -> int:
        """Return the bytes in both directions."""
        return self.down + self.up

    def by_kind(self) -> dict[str, int]:
        """Return the bytes by kind, with the names that a run uses; kinds without bytes are left out."""
        sizes = {
            "features_up": self.features,
            "gradients_down": self.gradients,
            "model_down": self.down - self.gradients - self.teacher,
            "model_up": self.up - self.features,
            "teacher_down": self.teacher,
        }
        return {kind: size for kind, size in sizes.items() if size}


def split_round(sizes: Sizes, work: Work, *, teacher: bool = True) -> Cost:
    """Return the cost of a split round; ``teacher``: whether the client receives the teacher's bottom."""
    features = sizes.student_features + sizes.teacher_features
    return Cost(
        sizes.bottom + teacher * sizes.bottom + sizes.gradients,
        sizes.bottom + features,
        teacher=teacher * sizes.bottom,
        gradients=sizes.gradients,
        features=features,
        work=work,
    )


def whole_round(sizes: Sizes, work: Work) -> Cost:
    """Return the cost of a full round with static BatchNorm: the statistics are sent both ways once more.

    After its last round a run with BatchNorm gathers them again for the final test: S down, statistics up.
    """
    again = sizes.full if sizes.statistics and sizes.resent else 0
    down = sizes.full + sizes.statistics + again
    return Cost(down, sizes.full + sizes.statistics, work=work)


def nothing(sizes: Sizes, settings: Section | None) -> Cost:
    """Return the cost of a method that asks nothing of clients."""
    return Cost(0, 0)

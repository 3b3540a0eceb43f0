"""What a method's cost formula is made of: bytes that a round sends, passes that it computes. Loads no torch.

A formula is ``(Sizes, settings) -> Cost``: down to and up from one active client in a usual round,
the dearer one where a round may differ, without what is sent once in several rounds. Tests hold every
run's count to it.
"""

from dataclasses import dataclass

from semisfl.settings.sections import Section


@dataclass(frozen=True)
class Sizes:
    """Bytes as the run's codecs write them. The projection head and labels never cross."""

    bottom: int
    """S_c, BatchNorm's buffers included."""
    full: int
    """S, bottom and top, BatchNorm's buffers included."""
    statistics: int
    """BatchNorm's buffers alone."""
    student_features: int
    """Of a whole round, as are the next two; each 4 B_u d K_u in fp32."""
    teacher_features: int
    gradients: int
    resent: bool = False
    """Whether clients must be sent again what an earlier round sent them: over a network they keep nothing."""
    teacher_once: int | None = None
    """Of teacher features that cross once per image; None: with every use of it."""


@dataclass(frozen=True)
class Work:
    """What a round computes, in forward passes; a backward pass counts as two."""

    client: float = 4.0
    """Of what a client holds, per image and step: 3 to train on it, 1 to label it."""
    look: float = 0.0
    """Of what a client holds, over all of its images, once per round."""
    copies: int = 4
    """Of its weights in a client's memory: trained ones, their gradients and momentum, a teacher."""
    kept: int = 1
    """Batches of a step whose activations a client keeps for the backward pass."""
    server: float = 4.0
    """Of the top, per row of features; nothing where clients hold whole models."""
    supervised: float = 3.0
    """Of the whole model, per labelled image."""
    head: bool = False
    """Whether the projection head takes part in what the server computes."""


@dataclass(frozen=True)
class Cost:
    down: int
    up: int
    teacher: int = 0
    """Of what goes down, as the next."""
    gradients: int = 0
    features: int = 0
    """Of what goes up; none: clients hold whole models."""
    work: Work = Work()

    @property
    def total(self) -> int:
        return self.down + self.up

    def by_kind(self) -> dict[str, int]:
        """As a run counts them; what is nothing is left out."""
        sizes = {
            "features_up": self.features,
            "gradients_down": self.gradients,
            "model_down": self.down - self.gradients - self.teacher,
            "model_up": self.up - self.features,
            "teacher_down": self.teacher,
        }
        return {kind: size for kind, size in sizes.items() if size}


def split_round(sizes: Sizes, work: Work, *, teacher: bool = True, frozen: bool = True) -> Cost:
    """Of a round of a split model; ``teacher``: whether the client is sent the teacher's bottom;
    ``frozen``: whether that stays as it is for the round."""
    once = sizes.teacher_once if frozen else None
    features = sizes.student_features + (sizes.teacher_features if once is None else once)
    return Cost(
        sizes.bottom + teacher * sizes.bottom + sizes.gradients,
        sizes.bottom + features,
        teacher=teacher * sizes.bottom,
        gradients=sizes.gradients,
        features=features,
        work=work,
    )


def whole_round(sizes: Sizes, work: Work) -> Cost:
    """Of a round of a whole model with static BatchNorm, whose statistics go both ways once more.

    A run of a model with BatchNorm exchanges them once more, for its last test: S down, theirs up.
    """
    again = sizes.full if sizes.statistics and sizes.resent else 0
    down = sizes.full + sizes.statistics + again
    return Cost(down, sizes.full + sizes.statistics, work=work)


def nothing(sizes: Sizes, settings: Section | None) -> Cost:
    return Cost(0, 0)

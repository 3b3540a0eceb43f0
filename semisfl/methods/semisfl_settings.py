"""SemiSFL's settings, and what a round of it sends."""

from typing import Literal

from pydantic import Field

from semisfl.methods.sizes import Cost, Sizes, Work, split_round
from semisfl.settings.sections import Confidence, Section


class SemiSFLSettings(Section):
    """The section ``[semisfl]``. Where the paper and its published code differ, a setting chooses."""

    confidence_threshold: Confidence = Field(
        0.95,
        description="confidence that a pseudo-label needs, tau; by_classes: less with more of them",
    )
    confidence_rule: Literal[">=", ">"] = Field(
        ">=", description="confident if conf >= tau (the authors' code) or > (the paper)"
    )
    temperature: float = Field(0.2, gt=0, description="kappa of the contrastive terms")
    supervised_contrast: bool = Field(True, description="the term T of the supervised loss")
    clustering: bool = Field(True, description="the term C, clustering regularisation")
    queue: Literal["two_level", "single"] = Field(
        "two_level",
        description="memory queue: two levels (the paper), or one ring that is cleared after every round (the authors' code)",
    )
    queue_size: int = Field(1024, ge=0, description="keys that each level holds")
    own_key: bool = Field(
        True, description="an image's own teacher key is a reference in T, as in the authors' code"
    )
    server_pass: Literal["joint", "in_turn"] = Field(
        "joint",
        description="same-step keys of all clients are references (the authors' code), or only one's own (the paper)",
    )
    client_teacher: Literal["frozen", "ema"] = Field(
        "frozen",
        description="teacher bottoms on clients: as sent (the authors' code), or averaged there too (the paper)",
    )
    align: Literal["none", "global", "client"] = Field(
        "none",
        description="correct pseudo-labels by class: for all clients together, or for what each client seems to hold (beyond the paper)",
    )


def cost(sizes: Sizes, settings: SemiSFLSettings) -> Cost:
    """Return the cost of a round for one active client, and what a checkpoint keeps of the queue."""
    # A labelled image passes through the teacher too, for its key; all keys through the head.
    return split_round(sizes, Work(supervised=4.0, head=True))

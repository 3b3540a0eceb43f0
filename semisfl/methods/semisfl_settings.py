"""SemiSFL's settings, and what a round of it sends."""

from typing import Literal

from pydantic import Field, model_validator

from semisfl.methods.sizes import Cost, Sizes, Work, split_round
from semisfl.settings.pseudo_labels import LabelSettings
from semisfl.settings.sections import Section, View


class SemiSFLSettings(Section):
    confidence_threshold: float = Field(
        0.95, ge=0, le=1, description="confidence that a pseudo-label needs, tau"
    )
    confidence_rule: Literal[">=", ">"] = Field(
        ">=", description="confident if conf >= tau (the authors' code) or > (the paper)"
    )
    temperature: float = Field(0.2, gt=0, description="kappa of the contrastive terms")
    supervised_contrast: bool = Field(True, description="the term T of the supervised loss")
    clustering: bool = Field(True, description="the term C, clustering regularisation")
    queue: Literal["two_level", "single", "balanced"] = Field(
        "two_level",
        description="memory queue: the paper's two levels, the code's one cleared ring, or ours, two levels with a ring per class",
    )
    queue_size: int = Field(1024, ge=0, description="keys that each level holds")
    own_key: bool = Field(
        True, description="an image's own teacher key is a reference in T, as in the authors' code"
    )
    server_pass: Literal["joint", "in_turn"] = Field(
        "joint",
        description="same-step keys of all clients are references (the authors' code), or only one's own (the paper)",
    )
    labeled_view: View | Literal["both"] = Field(
        "strong", description="augmentation of labelled images; both: each is shown as either"
    )
    # What follows is beyond the paper, and does nothing as it stands here.
    clustering_against: Literal["keys", "prototypes"] = Field(
        "keys", description="what C holds projections against: single keys, or classes' mean keys"
    )
    server_momentum: float = Field(
        0.0, ge=0, lt=1, description="of the averaged bottoms, from round to round"
    )
    sharpness: float = Field(
        0.0,
        ge=0,
        description="radius of sharpness-aware supervised steps of the top; 0: plain ones",
    )
    labels: LabelSettings = LabelSettings()

    @model_validator(mode="after")
    def _in_turn_knows_when(self) -> "SemiSFLSettings":
        """Serving clients in turn asks when each single key came."""
        for key, value, plain in (
            ("queue", self.queue, self.queue != "balanced"),
            ("clustering_against", self.clustering_against, self.clustering_against == "keys"),
        ):
            if self.server_pass == "in_turn" and not plain:
                raise ValueError(
                    f"semisfl.{key} = {value!r} does not say when a key came, which semisfl.server_pass = "
                    "'in_turn' asks; set that to joint"
                )
        return self


def cost(sizes: Sizes, settings: SemiSFLSettings) -> Cost:
    # A labelled image passes through the teacher too, for its key; all keys through the head.
    views = 2 if settings.labeled_view == "both" else 1
    return split_round(sizes, Work(supervised=3.0 * views + 1, head=True))

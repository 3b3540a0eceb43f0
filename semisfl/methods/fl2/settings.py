"""(FL)²'s settings, and what a round of it sends."""

from pydantic import Field

from semisfl.methods.sizes import Cost, Sizes, Work, whole_round
from semisfl.settings.sections import Section


class FL2Settings(Section):
    confidence_threshold: float = Field(
        0.95,
        ge=0,
        le=1,
        description="confidence of labels that sharpness-aware consistency is asked of",
    )
    rho: float = Field(0.1, ge=0, description="radius of its adversarial weights")
    eta: float = Field(
        0.01,
        ge=0,
        description="added to a weight's size, by which its part of the radius is scaled",
    )
    pretrain: int = Field(
        10, ge=0, description="rounds' worth of supervised steps before the first round"
    )
    global_momentum: float = Field(
        0.5, ge=0, lt=1, description="momentum of the server's aggregation"
    )
    clip_norm: float = Field(1.0, gt=0, description="gradient norm limit, clients and server")


def cost(sizes: Sizes, settings: FL2Settings) -> Cost:
    # Two passes forward and three back per step; before them, labels for all images.
    return whole_round(sizes, Work(client=8.0, kept=2, look=1.0))

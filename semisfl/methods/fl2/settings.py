"""(FL)²'s settings, and what a round of it sends."""

from pydantic import Field

from semisfl.methods.sizes import Cost, Sizes, Work, whole_round
from semisfl.settings.sections import Section


class FL2Settings(Section):
    """The section ``[fl2]``."""

    confidence_threshold: float = Field(
        0.95,
        ge=0,
        le=1,
        description="confidence of labels that sharpness-aware consistency is asked of",
    )


def cost(sizes: Sizes, settings: FL2Settings) -> Cost:
    """Return the cost of a round: SemiFL's bytes and more computation."""
    # Two passes forward and three back per step; before them, labels for all images.
    return whole_round(sizes, Work(client=8.0, kept=2, look=1.0))

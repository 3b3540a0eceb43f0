"""SemiFL's settings, and what a round of it sends."""

from pydantic import Field

from semisfl.methods.sizes import Cost, Sizes, Work, whole_round
from semisfl.settings.sections import Section


class SemiFLSettings(Section):
    """The section ``[semifl]``."""

    confidence_threshold: float = Field(
        0.95, ge=0, le=1, description="keep a pseudo-label from here up"
    )


def cost(sizes: Sizes, settings: SemiFLSettings) -> Cost:
    """Return the cost of a round: the whole model both ways, and BatchNorm's statistics."""
    # Two batches per step, strong and mixed; before them, labels for all images.
    return whole_round(sizes, Work(client=6.0, kept=2, copies=3, look=1.0))

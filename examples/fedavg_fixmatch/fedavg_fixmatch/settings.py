"""The settings, and what a round sends. Loads no torch: `semisfl show` reads this."""

from pydantic import Field

from semisfl.methods.sizes import Cost, Sizes
from semisfl.settings.sections import Section, View


class FixMatchSettings(Section):
    confidence_threshold: float = Field(
        0.95, ge=0, le=1, description="confidence that a pseudo-label needs, tau"
    )
    labeled_view: View = Field("weak", description="augmentation of labelled images")


def cost(sizes: Sizes, settings: FixMatchSettings) -> Cost:
    """Return the bytes of a round: the whole model goes down to an active client, and up from it."""
    return Cost(down=sizes.full, up=sizes.full)

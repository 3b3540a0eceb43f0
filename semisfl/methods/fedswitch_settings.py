"""The settings that FedSwitch and FedSwitch-SL share, and what a round of each sends."""

import math
from typing import Literal

from pydantic import Field

from semisfl.methods.sizes import Cost, Sizes, Work, split_round
from semisfl.settings.sections import Confidence, Section


class FedSwitchSettings(Section):
    """The section ``[fedswitch]``."""

    confidence_threshold: Confidence = Field(
        0.95,
        description="confidence that a pseudo-label needs, tau; by_classes: less with more of them",
    )
    iid_threshold: float = Field(
        0.5,
        ge=-math.inf,  # anything but NaN
        allow_inf_nan=True,
        description="beta: above it the student labels, at or below the teacher; inf: always the teacher",
    )
    align: Literal["none", "global", "client"] = Field(
        "none", description="as semisfl.align; FedSwitch-SL alone, whose server gives the labels"
    )


def cost(sizes: Sizes, settings: FedSwitchSettings, *, teacher: bool = True) -> Cost:
    """Return the cost of a round of FedSwitch for a client that downloads the ``teacher``, or not."""
    # Before its steps a client looks at all its images to see whether they look IID.
    down = (1 + teacher) * sizes.full
    return Cost(down, sizes.full, teacher=teacher * sizes.full, work=Work(look=1.0))


def split_cost(sizes: Sizes, settings: FedSwitchSettings, *, teacher: bool = True) -> Cost:
    """Return the cost of a round of FedSwitch-SL for a client that the ``teacher`` labels, or not."""
    # The top labels twice.
    return split_round(sizes, Work(server=5.0), teacher=teacher)

"""FedMatch's settings, and what a round of it sends."""

from typing import Literal

from pydantic import Field

from semisfl.methods.sizes import Cost, Sizes, Work
from semisfl.settings.sections import Section

HELPERS = 2
"""J, the models of other clients that a client receives, as in its paper."""


class FedMatchSettings(Section):
    """The section ``[fedmatch]``."""

    confidence_threshold: float = Field(0.95, ge=0, le=1, description="keep a sample from here up")
    keep_helpers: bool = Field(
        True,
        description="helpers stay until the next choice; false: one round, as in the authors' code",
    )
    mean_over: Literal["batch", "confident"] = Field(
        "batch",
        description="clients' losses of confident images are divided by the images of the batch, or by the confident ones (the authors' code)",
    )
    lambda_s: float = Field(1.0, ge=0, description="weight of the supervised loss")
    lambda_i: float = Field(1e-2, ge=0, description="weight of inter-client consistency")
    lambda_a: float = Field(1.0, ge=0, description="weight of the agreement pseudo-label loss")
    lambda_l2: float = Field(1e-2, ge=0, description="weight of |sigma - psi|^2")
    lambda_l1: float = Field(1e-6, ge=0, description="weight of |psi|_1")


def cost(sizes: Sizes, settings: FedMatchSettings, *, choosing: bool = False) -> Cost:
    """Return the cost of a round, dense. ``choosing``: helpers are chosen anew in it."""
    again = sizes.resent and settings.keep_helpers
    helpers = HELPERS if choosing or again else 0
    # Plain and strong images, and the plain ones through every helper; sigma beside psi.
    work = Work(client=6.0 + HELPERS, kept=2, copies=4 + HELPERS)
    return Cost((2 + helpers) * sizes.full, sizes.full, work=work)

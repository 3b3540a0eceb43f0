"""The section ``[robust]``: how a server limits the influence of one client. It stays on the server.

The chosen aggregation rule may have settings of its own, in a section that has its name, for example
``[robust.clipped_mean]``. Rules of other packages bring theirs.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from semisfl.settings import catalog, lookup
from semisfl.settings.sections import OpenSection, Section

FEWEST = 3
"""A round of fewer clients has no limits, whatever this section says: of two neither can be the judge of the other.
The server says so at its start."""
SERVED = {"aggregate": "clipped_mean", "features": "limited"}
"""The defaults where clients are real and at least `FEWEST` of them take part in a round."""


class AttackerShare(Section):
    """Settings of the rules trimmed_mean and krum."""

    attackers: float = Field(
        0.2, ge=0, lt=0.5, description="share of a round's clients that may be attackers"
    )


class ClippedMean(Section):
    """Settings of the rule clipped_mean: the length to which longer updates are shortened."""

    limit: float = Field(
        1.0,
        gt=0,
        description="longest update that is not shortened, in medians of the round's updates",
    )


class RobustConfig(OpenSection):
    """``[robust]``: the fields that every run has, and the section of the chosen rule, if it has settings."""

    aggregate: str = Field(
        "mean",
        description=f"how clients' bottoms or models become one ({' | '.join(catalog.AGGREGATES)})",
        json_schema_extra={"served": SERVED["aggregate"]},
    )
    features: Literal["as_sent", "limited"] = Field(
        "as_sent",
        description="limited: the server shortens long features and ignores a client whose student and teacher features disagree",
        json_schema_extra={"served": SERVED["features"]},
    )
    class_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="largest share of a class's positive keys in a step that one client may have; 1: all",
    )

    @model_validator(mode="before")
    @classmethod
    def _parse_own(cls, values: Any) -> Any:
        """Parse the section of the chosen rule by its own class."""
        if not isinstance(values, Mapping):
            return values
        rule = lookup.aggregate(str(values.get("aggregate", "mean")))
        others = {name: lookup.settings_class(one) for name, one in catalog.AGGREGATES.items()}
        return cls.parse_sections(
            values, {rule.name: lookup.settings_class(rule)}, others, "robust."
        )

    @property
    def of_rule(self) -> Section:
        """Return the settings of the chosen rule; an empty section if it has none."""
        return self.own_sections[0] if self.own_sections else Section()

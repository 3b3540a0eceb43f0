"""The section ``[robust]``: how a server limits the influence of one client. It stays on the server.

The chosen aggregation rule may have settings of its own, in a section that has its name, for example
``[robust.clipped_mean]``. Rules of other packages bring theirs.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, create_model

from semisfl.settings import catalog, lookup
from semisfl.settings.sections import ConfigError, Section

FEWEST = 3
"""A round of fewer clients has no limits, whatever this section says: of two neither can be the judge of the other.
The server says so at its start."""
SERVED = {"aggregate": "clipped_mean", "features": "limited"}
"""The defaults where clients are real and at least `FEWEST` of them take part in a round."""


class AttackerShare(Section):
    """Settings of trimmed_mean and krum."""

    attackers: float = Field(
        0.2, ge=0, lt=0.5, description="share of a round's clients that may be attackers"
    )


class ClippedMean(Section):
    limit: float = Field(
        1.0,
        gt=0,
        description="longest update that is not shortened, in medians of the round's updates",
    )


Rule = Annotated[str, AfterValidator(lambda name: lookup.aggregate(name).name)]
_RULE_CHOICES = f"({' | '.join(catalog.AGGREGATES)})"


class RobustConfig(Section):
    """The fields that every run has; `class_for` adds the section of the chosen rule."""

    def __new__(cls, **values: Any) -> "RobustConfig":
        return super().__new__(class_for(values) if cls is RobustConfig else cls)

    aggregate: Rule = Field(
        "mean",
        description=f"how clients' bottoms or models become one {_RULE_CHOICES}",
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

    @property
    def of_rule(self) -> Section:
        """Return the settings of the chosen rule; an empty section if it has none."""
        own: Section = getattr(self, section_of(self.aggregate), None) or Section()
        return own


def section_of(rule: str) -> str:
    """Return the name of a rule's section."""
    return rule.replace("-", "_")


def class_for(values: Mapping[str, Any]) -> type[RobustConfig]:
    """Return `RobustConfig` with the section of the rule that ``values`` choose, if it has settings."""
    rule = str(values.get("aggregate", "mean"))
    try:
        settings = lookup.settings_class(lookup.aggregate(rule))
    except ConfigError:  # the field reports it, with whatever else is wrong
        return RobustConfig
    if settings is None:
        return RobustConfig
    if section_of(rule) in RobustConfig.model_fields:
        raise ConfigError(f"robust.aggregate = {rule!r} has the name of a setting; rename the rule")
    return _with_section(section_of(rule), settings)


@cache
def _with_section(section: str, settings: type[Section]) -> type[RobustConfig]:
    fields: dict[str, Any] = {section: (settings, settings())}
    return create_model("RobustConfig", __base__=RobustConfig, __module__=__name__, **fields)


def rule_sections() -> dict[str, type[Section]]:
    """Return the settings classes of this package's rules, by section."""
    kinds = {name: lookup.settings_class(entry) for name, entry in catalog.AGGREGATES.items()}
    return {section_of(name): kind for name, kind in kinds.items() if kind}

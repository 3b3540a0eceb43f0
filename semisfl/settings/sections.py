"""The base of every section of a configuration, also of those that methods own."""

from types import NoneType
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, model_validator

View = Literal["strong", "weak"]
LabeledView = Literal["strong", "weak", "both", "mixed"]
"""How labelled images are shown; both: each image strongly and weakly; mixed: strongly, blended in pairs."""


class ConfigError(ValueError):
    """A mistake in a configuration, said in one line."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, frozen=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _say_none(cls, values: Any) -> Any:
        """TOML has no null: a field that may be none takes the word for it."""
        if not isinstance(values, dict):
            return values
        optional = {
            name
            for name, field in cls.model_fields.items()
            if NoneType in get_args(field.annotation)
        }
        return {
            key: None if item == "none" and key in optional else item
            for key, item in values.items()
        }

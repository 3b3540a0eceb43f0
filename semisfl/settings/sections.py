"""The base of every section of a configuration, also of those that methods own."""

from types import NoneType
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

View = Literal["strong", "weak"]
LabeledView = Literal["strong", "weak", "both", "mixed"]
"""How labelled images are shown; both: each image strongly and weakly; mixed: strongly, blended in pairs."""


LARGEST = 2**53
"""The largest whole number of a setting, seeds aside."""


class ConfigError(ValueError):
    """Raised with one line about a mistake in a configuration."""


def _confidence(value: Any) -> Any:
    if value == "by_classes":
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise PydanticCustomError("confidence", "Input should be a number from 0 to 1, or 'by_classes'")


Confidence = Annotated[float | Literal["by_classes"], PlainValidator(_confidence)]
"""A probability, or one that follows from the number of classes: `needed_confidence`."""


def needed_confidence(threshold: Confidence, classes: int) -> float:
    """Return tau: as it is set, or by the number of classes: 0.8 for two, down to 0.6 from ten on."""
    # Chosen on validation images: docs/own-images-choice.md.
    return max(0.6, 0.55 + 0.5 / classes) if threshold == "by_classes" else threshold


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, frozen=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _read_none(cls, values: Any) -> Any:
        """Read the word none as None where a field may be None, because TOML has no null."""
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

    @field_validator("*", mode="before")
    @classmethod
    def _check_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for a number, which pydantic reads as 1 and 0, and whole numbers above `LARGEST`."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = {*(get_args(annotation) or (annotation,))} - {NoneType}
        if isinstance(value, bool) and kinds and kinds <= {int, float}:
            name = "integer" if kinds == {int} else "number"
            raise PydanticCustomError("number_type", f"Input should be a valid {name}")
        if isinstance(value, int) and value > LARGEST and info.field_name != "seed":
            raise PydanticCustomError("number_size", f"Input should be at most {LARGEST}")
        return value

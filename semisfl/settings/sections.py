"""The base of every section of a configuration, also of those that methods own, and mistakes in one line of text.

pydantic checks types and ranges; `one_line` turns its errors into sentences that name the key as the user writes
it, the value and the fix.
"""

import difflib
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

View = Literal["strong", "weak"]
LabeledView = Literal["strong", "weak", "both", "mixed"]
"""How labelled images are shown; both: each image strongly and weakly; mixed: strongly, blended in pairs."""


LARGEST = 2**53
"""The largest whole number of a setting, seeds aside: the largest that JSON and floats hold exactly."""


class ConfigError(ValueError):
    """Raised with one line about a mistake in a configuration: the key, the value, the limit and the fix."""


def _confidence(value: Any) -> Any:
    if value == "by_classes":
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise PydanticCustomError("confidence", "Input should be a number from 0 to 1, or 'by_classes'")


Confidence = Annotated[float | Literal["by_classes"], PlainValidator(_confidence)]
"""A probability, or one that follows from the number of classes: `needed_confidence`."""


def needed_confidence(threshold: Confidence, classes: int) -> float:
    """Return tau, the confidence above which a pseudo-label is used, for a data set of ``classes`` classes.

    ``threshold`` is a number from 0 to 1, which is returned, or ``by_classes``: 0.8 for two classes, down to 0.6 from
    ten classes on.
    """
    # Chosen on validation images: reproduction/pages/own-images-choice.md.
    return max(0.6, 0.55 + 0.5 / classes) if threshold == "by_classes" else threshold


class Section(BaseModel):
    """The base class of settings. Unknown keys and values out of range are refused; objects cannot be changed.

    Every field has a default and a ``description``. A method of another package derives its settings from this class,
    and a variant of a built-in method derives them from that method's settings.
    """

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


Kind = TypeVar("Kind", bound=Section)
Kinds = Mapping[str, type[Section] | None]
"""Settings classes by the names of their sections."""


class OpenSection(Section):
    """A section in which a chosen entry (a method, an aggregation rule) has a section of its own.

    That section is parsed by the entry's settings class and is an attribute like any other. Sections of
    entries that are not chosen are checked and left out, because the values of a comparison have those of
    all its methods.
    """

    model_config = ConfigDict(extra="allow")

    @classmethod
    def parse_sections(
        cls, values: Mapping[str, Any], own: Kinds, others: Kinds, prefix: str = ""
    ) -> dict[str, Any]:
        """Return ``values`` with the section of the chosen entry parsed and without those of the others.

        ``own`` and ``others`` are settings classes by section; None: the entry has no settings. ``prefix`` stands before
        the keys of this section in messages. Raises `ConfigError` for a mistake in one of these sections, and for a key
        that is neither a field nor a section.
        """
        kept = {
            key: value for key, value in values.items() if key not in others.keys() - own.keys()
        }
        for name, kind in {**others, **own}.items():
            if kind is None or not (name in own or name in values):
                continue
            parsed = parse_section(kind, values.get(name, {}), f"{prefix}{name}.")
            if name in own:
                kept[name] = parsed
        known = [*cls.model_fields, *own]
        for key in kept.keys() - set(known):
            meant = meant_key(str(key), known, prefix) or "`semisfl show digits` lists all keys"
            raise ConfigError(f"unknown key {prefix + str(key)!r}; {meant}")
        return kept

    @property
    def own_sections(self) -> list[Section]:
        """Return the sections of the chosen entries."""
        return list((self.model_extra or {}).values())


def parse_section(kind: type[Kind], values: Any, prefix: str = "") -> Kind:
    """Return a section of class ``kind`` from plain values.

    ``prefix``: where the section stands, for example ``robust.krum.``. Raises `ConfigError` with one line that names
    every mistake with its whole key.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(one_line(error, kind, known_keys(kind()), prefix)) from error


def known_keys(section: BaseModel, prefix: str = "") -> list[str]:
    """Return the dotted keys of all settings in a section and in those inside it, each after ``prefix``."""
    keys: list[str] = []
    for name, value in section:
        if isinstance(value, BaseModel):
            keys += known_keys(value, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


# --- mistakes in one line -------------------------------------------------------------------------


def one_line(
    error: ValidationError,
    section: type,
    keys: Sequence[str],
    prefix: str = "",
    otherwise: str | None = None,
) -> str:
    """Return the mistakes in ``section`` with their fixes as one line.

    ``error`` is what pydantic raised for the class ``section``. ``keys`` are the settings there are, and ``prefix``
    stands before each of them. ``otherwise`` is the hint for an unknown key that resembles none; by default it lists
    the known keys.
    """
    otherwise = otherwise or (f"known: {', '.join(keys)}" if keys else "remove it")
    parts = []
    for item in error.errors():
        own = _key_of(item["loc"])
        key, value = (prefix + own).replace(".[", "[").rstrip("."), f"{item['input']!r:.80}"
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown key {key!r}; {meant_key(own, keys, prefix) or otherwise}")
        elif item["type"] == "missing":
            parts.append(f"{key} is missing; set it")
        elif item["type"] == "value_error":
            parts.append(str(item["ctx"]["error"]))
        elif item["type"] == "union_tag_invalid":
            known = item["ctx"]["expected_tags"]
            parts.append(
                f"{key}.kind = {item['ctx']['tag']!r:.60} is not known; use one of {known}"
            )
        elif item["type"] == "literal_error":
            parts.append(f"{key} = {value} is not known; use {item['ctx']['expected']}")
        elif item["type"] in ("model_type", "model_attributes_type"):
            parts.append(f"{key} = {value}: {key} is a section; set a key in it")
        else:
            message = item["msg"].removeprefix("Input ").replace("a valid tuple", 'a list, ["..."]')
            if item["type"].startswith(("greater", "less")) and _may_be_none(section, item["loc"]):
                message += ", or none"
            parts.append(f"{key} = {value}: {message[:1].lower()}{message[1:]}")
    return "; ".join(dict.fromkeys(parts))


def _key_of(location: Sequence[int | str]) -> str:
    """Return a place as ``model.layers[0].conv.channels``: pydantic has a layer's kind behind its index."""
    pieces = (f"[{piece}]" if isinstance(piece, int) else f".{piece}" for piece in location)
    return "".join(pieces).removeprefix(".")


def _may_be_none(section: type, location: Sequence[int | str]) -> bool:
    """Return whether the field at a place may be None: its error then offers none too."""
    kind: Any = section
    for piece in location:
        field = kind.model_fields.get(piece) if hasattr(kind, "model_fields") else None
        kind = field.annotation if field else None
    return NoneType in get_args(kind)


def meant_key(key: str, keys: Sequence[str], prefix: str) -> str | None:
    """Return the hint for an unknown key: which of ``keys`` was meant; None if it resembles none of them."""
    near = difflib.get_close_matches(key, keys, n=1, cutoff=0.6) if "[" not in key else []
    return f"did you mean {prefix + near[0]!r}?" if near else None

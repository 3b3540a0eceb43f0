"""A configuration as TOML with a line of explanation a field."""

from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from semisfl.config import Config, Section
from semisfl.runs.directory import toml_value


def commented_toml(config: Config) -> str:
    """Valid TOML: saved to a file, it gives the same configuration back."""
    return "\n".join(_lines(config, "")) + "\n"


def _lines(section: Section, path: str) -> list[str]:
    fields = type(section).model_fields
    plain, inner, values = [], [], section.model_dump()
    for name, field in fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            inner += _lines(value, f"{path}.{name}" if path else name)
        else:
            plain.append((name, values[name], field))
    header = ["", f"[{path}]"] if path and plain else []
    return header + [_line(*entry) for entry in plain] + inner


def _line(name: str, value: Any, field: FieldInfo) -> str:
    # TOML has no null: a field left out means none.
    text = f"# {name} = none" if value is None else f"{name} = {toml_value(value)}"
    return f"{text:<32}# {field.description}{_choices(field.annotation)}"


def _choices(annotation: Any) -> str:
    return f" ({' | '.join(get_args(annotation))})" if get_origin(annotation) is Literal else ""

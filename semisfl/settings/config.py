"""What a run is, typed and validated: its sections put together, and read from what users write."""

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from semisfl.settings import catalog, lookup
from semisfl.settings.catalog import NamedMethod
from semisfl.settings.policy import Policy
from semisfl.settings.retired import without_retired
from semisfl.settings.run import (
    ClientsConfig,
    ControllerConfig,
    DataConfig,
    FleetConfig,
    ModelConfig,
    NetworkConfig,
    OptimizerConfig,
    RobustConfig,
    RuntimeConfig,
    ServerConfig,
    StopConfig,
    TeacherConfig,
    WireConfig,
)
from semisfl.settings.sections import ConfigError as ConfigError
from semisfl.settings.sections import Section as Section

Settings = TypeVar("Settings", bound=Section)


def _known_method(name: str) -> str:
    lookup.method(name)
    return name


def with_known_codec(policy: Policy, where: str) -> Policy:
    """``policy``, if its codec is one that is known here; ``where`` it was given."""
    try:
        if policy.codec is not None:
            lookup.codec(policy.codec)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return policy


def _known_codec(policy: Policy) -> Policy:
    return with_known_codec(policy, "policy.codec")


_METHOD_CHOICES = f"({' | '.join(catalog.METHODS)} | package.module:Class)"
_SINK_CHOICES = f"({' | '.join(catalog.SINKS)} | package.module:Class)"


class Config(Section):
    """What every run has, and the sections of methods, which `config_class` adds: each is its method's."""

    def __new__(cls, **values: Any) -> "Config":
        return super().__new__(_class_for(values) if cls is Config else cls)

    @classmethod
    def model_validate(cls, obj: Any, **how: Any) -> Self:
        if cls is Config and isinstance(obj, Mapping):
            return cast(Self, _class_for(obj).model_validate(obj, **how))
        return super().model_validate(obj, **how)

    method: Annotated[str, AfterValidator(_known_method)] = Field(
        "semisfl", description=f"how to train {_METHOD_CHOICES}"
    )
    rounds: int = Field(30, ge=1, description="rounds of training, H")
    seed: int = Field(0, ge=0, description="every draw follows from it")
    sinks: tuple[Annotated[str, AfterValidator(lookup.check_sink)], ...] = Field(
        (), description=f"where rows go besides metrics.jsonl {_SINK_CHOICES}"
    )
    data: DataConfig = DataConfig()
    clients: ClientsConfig = ClientsConfig()
    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    teacher: TeacherConfig = TeacherConfig()
    controller: ControllerConfig = ControllerConfig()
    wire: WireConfig = WireConfig()
    robust: RobustConfig = RobustConfig()
    fleet: FleetConfig = FleetConfig()
    network: NetworkConfig = NetworkConfig()
    policy: Annotated[Policy, AfterValidator(_known_codec)] = Policy()
    stop: StopConfig = StopConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.clients.active > self.clients.total:
            raise ValueError(
                f"clients.active = {self.clients.active} exceeds clients.total = {self.clients.total}"
            )
        if self.network.quorum > self.clients.active:
            raise ValueError(
                f"network.quorum = {self.network.quorum} exceeds clients.active = {self.clients.active}"
            )
        if self.wire.teacher_once and self.teacher.client == "ema":
            raise ValueError(
                "wire.teacher_once = true needs teachers that stay as they are sent: "
                "set teacher.client = 'frozen', or leave it out"
            )
        if self.optimizer.lr_min > self.optimizer.lr:
            raise ValueError(
                f"optimizer.lr_min = {self.optimizer.lr_min} exceeds optimizer.lr = {self.optimizer.lr}; "
                "set optimizer.lr_min too"
            )
        return self

    def settings(self, kind: type[Settings]) -> Settings:
        """The section that is a ``kind``: a method asks for its own."""
        for name in type(self).model_fields:
            if type(section := getattr(self, name)) is kind:
                return section
        raise TypeError(f"this configuration has no {kind.__name__}; its method is {self.method!r}")


def config_class(method: NamedMethod | None = None) -> type[Config]:
    """A configuration with the sections of this package's methods and of ``method``.

    Of other packages' methods only the chosen one's is there, so that what a run writes down can be
    read where nothing but that one is installed.
    """
    settings = lookup.settings_class(method) if method else None
    if method is None or settings is None or method.section is None:
        return _with_section(None, None)
    if method.section in Config.model_fields or hasattr(Config, method.section):
        raise ConfigError(
            f"method {method.name!r} calls its section {method.section!r}, as every run has one; rename it"
        )
    built_in = _built_in_sections().get(method.section)
    if built_in not in (None, settings):
        raise ConfigError(
            f"method {method.name!r} calls its section {method.section!r}, which is another method's; rename it"
        )
    return _with_section(*((None, None) if built_in else (method.section, settings)))


@cache
def _with_section(name: str | None, settings: type[Section] | None) -> type[Config]:
    sections = _built_in_sections() | ({name: settings} if name and settings else {})
    fields: dict[str, Any] = {key: (kind, kind()) for key, kind in sections.items()}
    return create_model("Config", __base__=Config, __module__=__name__, **fields)


@cache
def _built_in_sections() -> dict[str, type[Section]]:
    found = {row.section: lookup.settings_class(row) for row in catalog.METHODS.values()}
    return {name: kind for name, kind in found.items() if name and kind}


def _class_for(values: Mapping[str, Any]) -> type[Config]:
    name = values.get("method")
    try:
        chosen = lookup.method(name) if isinstance(name, str) else None
    except ConfigError:  # the field says so, with whatever else is wrong
        chosen = None
    return config_class(chosen)


def parse(values: Mapping[str, Any], others: Iterable[NamedMethod] = ()) -> Config:
    """A Config from nested plain values; mistakes become one ConfigError line naming the key.

    Sections of methods that are not this package's and not the one chosen (installed ones, and
    ``others``) are passed over, as a comparison's values have those of all its methods.
    """
    kind = _class_for(values)
    passed_over = set(values) - set(kind.model_fields)
    if passed_over:
        rows = (*others, *lookup.methods().values())
        passed_over &= {row.section for row in rows if row.section}
    current = without_retired(
        {key: values[key] for key in values if key not in passed_over}, known_keys(kind)
    )
    try:
        return kind.model_validate(current)
    except ValidationError as error:
        raise ConfigError(_one_line(error, kind)) from error


def read(path: Path) -> dict[str, Any]:
    """The plain values in a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 text") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def override(values: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """``values`` with dotted ``key=value`` assignments applied, for ``--set``."""
    result = _copy(values)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {assignment!r} is not key=value, e.g. --set rounds=10")
        *sections, leaf = key.strip().split(".")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise ConfigError(f"--set {assignment!r}: {section!r} is a value, not a section")
        target[leaf] = _value(text.strip())
    return result


def _value(text: str) -> Any:
    """A TOML value if it is one, else the text itself, so that quotes are optional."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _copy(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _copy(item) if isinstance(item, dict) else item for key, item in values.items()}


def known_keys(section: type[BaseModel] | None = None, prefix: str = "") -> list[str]:
    section = section or config_class()
    keys = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += known_keys(field.annotation, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def _one_line(error: ValidationError, kind: type[Config]) -> str:
    parts = []
    for item in error.errors():
        key = ".".join(str(piece) for piece in item["loc"])
        if item["type"] == "extra_forbidden":
            parts.append(_unknown(key, kind))
        elif item["type"] == "value_error":
            parts.append(str(item["ctx"]["error"]))
        elif item["type"] == "literal_error":
            parts.append(f"{key} = {item['input']!r} is not known; use {item['ctx']['expected']}")
        else:
            message = item["msg"].removeprefix("Input ")
            parts.append(f"{key} = {item['input']!r}: {message[:1].lower()}{message[1:]}")
    return "; ".join(dict.fromkeys(parts))


def _unknown(key: str, kind: type[Config]) -> str:
    import difflib

    near = difflib.get_close_matches(key, known_keys(kind), n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else "`semisfl show digits` lists all keys"
    return f"unknown key {key!r}; {hint}"

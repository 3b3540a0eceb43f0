"""The configuration of a run: all sections together, and how plain values become one."""

from collections.abc import Iterable, Mapping, Set
from functools import cache
from typing import Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from semisfl.settings import catalog, lookup
from semisfl.settings.entries import NamedMethod
from semisfl.settings.mistakes import one_line
from semisfl.settings.plain_values import override as override
from semisfl.settings.plain_values import read as read
from semisfl.settings.policy import Policy
from semisfl.settings.robust import RobustConfig, class_for, rule_sections, section_of
from semisfl.settings.run import (
    ClientsConfig,
    ControllerConfig,
    DataConfig,
    FleetConfig,
    ModelConfig,
    NetworkConfig,
    OptimizerConfig,
    RuntimeConfig,
    ServerConfig,
    StopConfig,
    TeacherConfig,
    WireConfig,
)
from semisfl.settings.sections import ConfigError as ConfigError
from semisfl.settings.sections import LabeledView
from semisfl.settings.sections import Section as Section

Settings = TypeVar("Settings", bound=Section)
AnyPolicy = TypeVar("AnyPolicy", bound=Policy)


def _known_method(name: str) -> str:
    lookup.method(name)
    return name


def with_known_codec(policy: AnyPolicy, where: str) -> AnyPolicy:
    """Return ``policy`` if its codec is known; ``where``: its place, for the error."""
    try:
        if policy.codec is not None:
            lookup.codec(policy.codec)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return policy


def _for_a_run(policy: Policy) -> Policy:
    return with_known_codec(policy, "policy.codec")


ALL_KEYS = "`semisfl show digits` lists all keys"
_METHOD_CHOICES = f"({' | '.join(catalog.METHODS)} | package.module:Class)"
_SINK_CHOICES = f"({' | '.join(catalog.SINKS)} | package.module:Class)"


class Config(Section):
    """The common sections. `config_class` adds the section of the method, and of the aggregation rule."""

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
    seed: int = Field(0, ge=0, description="seed of all random numbers")
    sinks: tuple[Annotated[str, AfterValidator(lookup.check_sink)], ...] = Field(
        (), description=f"where round metrics go besides metrics.jsonl {_SINK_CHOICES}"
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
    policy: Annotated[Policy, AfterValidator(_for_a_run)] = Policy()
    stop: StopConfig = StopConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if self.clients.active > self.clients.total:
            raise ValueError(
                f"clients.active = {self.clients.active} exceeds clients.total = {self.clients.total}; "
                "lower the first or raise the second"
            )
        if self.network.quorum > self.clients.active:
            raise ValueError(
                f"network.quorum = {self.network.quorum} exceeds clients.active = {self.clients.active}; "
                "lower the first or raise the second"
            )
        if self.optimizer.lr_min > self.optimizer.lr:
            raise ValueError(
                f"optimizer.lr_min = {self.optimizer.lr_min} exceeds optimizer.lr = {self.optimizer.lr}; "
                "set optimizer.lr_min too"
            )
        return self

    @property
    def labeled_view(self) -> LabeledView:
        """Return how labelled images are shown: as ``server.labeled_view`` says, or as the method does."""
        own = cast(LabeledView, lookup.method(self.method).labeled_view)
        return self.server.labeled_view or own

    def in_fleet(self, kind: Literal["local", "network", "cluster"]) -> Self:
        """Return the configuration with the clients elsewhere."""
        return self.model_copy(update={"fleet": FleetConfig(kind=kind)})

    @property
    def client_rounds(self) -> int:
        """Return the number of rounds in which clients take part."""
        return max(0, self.rounds - self.server.pretrain_rounds)

    def settings(self, kind: type[Settings]) -> Settings:
        """Return the section of class ``kind``: a method asks for its own."""
        for name in type(self).model_fields:
            if type(section := getattr(self, name)) is kind:
                return section
        raise ConfigError(
            f"{self.method} asks for {kind.__name__}, which its catalog entry does not name as settings; set settings "
            "in the attribute `entry` of its class"
        )


def config_class(
    method: NamedMethod | None = None, robust: type[RobustConfig] = RobustConfig
) -> type[Config]:
    """Return the configuration with the section of ``method``, and with ``robust`` as it is."""
    settings = lookup.settings_class(method) if method else None
    if method is None or settings is None or method.section is None:
        return _with_sections(None, None, robust)
    if method.section in Config.model_fields or hasattr(Config, method.section):
        raise ConfigError(
            f"method {method.name!r} calls its section {method.section!r}, as every run has one; rename it"
        )
    if built_in_sections().get(method.section) not in (None, settings):
        raise ConfigError(
            f"method {method.name!r} calls its section {method.section!r}, which is another method's; rename it"
        )
    return _with_sections(method.section, settings, robust)


@cache
def _with_sections(
    name: str | None, settings: type[Section] | None, robust: type[RobustConfig]
) -> type[Config]:
    fields: dict[str, Any] = {name: (settings, settings())} if name and settings else {}
    if robust is not RobustConfig:
        fields["robust"] = (robust, robust())
    return create_model("Config", __base__=Config, __module__=__name__, **fields)


@cache
def built_in_sections() -> dict[str, type[Section]]:
    """Return the settings classes of this package's methods, by section."""
    kinds = {entry.section: lookup.settings_class(entry) for entry in catalog.METHODS.values()}
    return {name: kind for name, kind in kinds.items() if name and kind}


def _class_for(values: Mapping[str, Any]) -> type[Config]:
    robust = values.get("robust", {})
    kind = type(robust) if isinstance(robust, RobustConfig) else RobustConfig
    if isinstance(robust, Mapping):
        kind = class_for(robust)
    return config_class(_method_in(values), kind)


def _method_in(values: Mapping[str, Any]) -> NamedMethod | None:
    name = values.get("method", Config.model_fields["method"].default)
    try:
        return lookup.method(name) if isinstance(name, str) else None
    except ConfigError:  # the field reports it, with whatever else is wrong
        return None


def parse(values: Mapping[str, Any], others: Iterable[NamedMethod] = ()) -> Config:
    """Return a Config from nested plain values; a mistake becomes a ConfigError of one line.

    Sections of methods and rules that are not chosen are checked and left out, because the values
    of a comparison have those of all its methods. ``others``: methods without a name here.
    """
    if not isinstance(values, Mapping):
        raise TypeError(
            f"values is a {type(values).__name__}; it must be a dictionary of settings (semisfl.preset takes a name)"
        )
    values = _without_own_view(dict(values))
    kind = _class_for(values)
    entries = (*others, *lookup.METHODS.all().values())
    sections = {entry.section for entry in entries if entry.section} - set(kind.model_fields)
    values = _without_others(values, sections, built_in_sections(), "")
    if isinstance(robust := values.get("robust"), dict):
        rules = {section_of(name) for name in lookup.AGGREGATES.names()}
        rules -= set(class_for(robust).model_fields)
        values["robust"] = _without_others(robust, rules, rule_sections(), "robust.")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(one_line(error, kind, known_keys(kind), "", ALL_KEYS)) from error


def _without_own_view(values: dict[str, Any]) -> dict[str, Any]:
    """Return ``values`` without a ``server.labeled_view`` that the method has anyway.

    Runs that say it and runs that do not are then the same.
    """
    method, server = _method_in(values), values.get("server")
    if method is None or not isinstance(server, Mapping):
        return values
    if server.get("labeled_view") != method.labeled_view:
        return values
    others = {key: value for key, value in server.items() if key != "labeled_view"}
    return {**values, "server": others}


def _without_others(
    values: Mapping[str, Any],
    others: Set[str],
    classes: Mapping[str, type[Section]],
    prefix: str,
) -> dict[str, Any]:
    """Return ``values`` without the sections ``others``; a mistake in one of ours is still one."""
    for name in others & values.keys() & classes.keys():
        try:
            classes[name].model_validate(values[name])
        except ValidationError as error:
            keys, place = known_keys(classes[name]), f"{prefix}{name}."
            raise ConfigError(one_line(error, classes[name], keys, place, ALL_KEYS)) from error
    return {key: value for key, value in values.items() if key not in others}


def capped(config: Config, most: int) -> Config:
    """Return the configuration with a client's batch of at most ``most`` images.

    For use in a run only: its files keep the batch that the user set.
    """
    if config.clients.batch <= most:
        return config
    return config.model_copy(update={"clients": config.clients.model_copy(update={"batch": most})})


def known_keys(section: type[BaseModel] | None = None, prefix: str = "") -> list[str]:
    """Return the dotted keys of all settings in ``section``; by default of a run of SemiSFL."""
    section = section or _class_for({})
    keys = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += known_keys(field.annotation, f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys

"""The configuration of a run: all sections together, and how plain values become one.

Values travel one way. A preset, a TOML file and ``--set`` give nested plain values (`presets`, `plain_values`);
`parse` makes one `Config` of them and checks it; everything else reads that object. It cannot be changed:
``model_copy`` makes another one.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, Field, ValidationError, model_validator

from semisfl.settings import catalog, lookup
from semisfl.settings.catalog import NamedMethod
from semisfl.settings.plain_values import override as override, read as read, read_about
from semisfl.settings.policy import Policy, with_known_codec
from semisfl.settings.robust import RobustConfig
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
from semisfl.settings.sections import (
    ConfigError as ConfigError,
    Kind,
    LabeledView,
    OpenSection,
    Section as Section,
    known_keys as known_keys,
    one_line,
)

PRETRAINED_OPTIMIZER: dict[str, Any] = {
    "kind": "adamw",
    "lr": 3e-3,
    "lr_pretrained": 3e-4,
    "lr_min": 0.0,
    "weight_decay": 0.02,
}
"""The defaults of ``[optimizer]`` if ``model.weights`` is set and the optimiser's kind is not."""
ALL_KEYS = "`semisfl show digits` lists all keys"


def _sink_name(name: str) -> str:
    return lookup.check_name(name, catalog.SINKS, "sinks")


class Config(OpenSection):
    """The settings of a run: the common sections, and that of the method, for example ``config.semisfl``.

    A method reads its own section by `settings`, with the class of its settings. Sections of other methods may be
    among the values, because a comparison has one file for all; they are checked and left out.
    """

    method: str = Field(
        "semisfl",
        description=f"how to train ({' | '.join(catalog.METHODS)} | package.module:Class)",
    )
    rounds: int = Field(30, ge=1, description="rounds of training, H")
    seed: int = Field(0, ge=0, description="seed of all random numbers")
    sinks: tuple[Annotated[str, AfterValidator(_sink_name)], ...] = Field(
        (),
        description="where round metrics go besides metrics.jsonl "
        f"({' | '.join(catalog.SINKS)} | package.module:Class)",
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
    policy: Annotated[Policy, AfterValidator(with_known_codec)] = Policy()
    stop: StopConfig = StopConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @model_validator(mode="before")
    @classmethod
    def _parse_own(cls, values: Any) -> Any:
        """Parse the section of the method by its own class; leave out a view of labelled images that is its own."""
        if not isinstance(values, Mapping):
            return values
        values = {**values, **_pretrained_defaults(values)}
        entry = lookup.method(str(values.get("method", "semisfl")))
        own = {entry.section: lookup.settings_class(entry)} if entry.section else {}
        values = cls.parse_sections(values, own, _built_in_sections())
        server = values.get("server")
        if isinstance(server, Mapping) and server.get("labeled_view") == entry.labeled_view:
            # Runs that say it and runs that do not are then the same.
            others = {key: value for key, value in server.items() if key != "labeled_view"}
            values["server"] = others
        return values

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        """Check what concerns several sections."""
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
        if self.clients.bottom == "frozen" and lookup.method(self.method).works:
            raise ValueError(
                f"clients.bottom = 'frozen': method = {self.method!r} trains the whole model on the clients; choose a "
                "split method (semisfl, fedswitch-sl), or set clients.bottom = 'trained'"
            )
        if lines := self.policy.about_uploads(self.clients.bottom):
            raise ValueError(lines[0])
        if self.data.features is not None and (
            self.clients.bottom != "frozen" or self.data.unlabeled is not None
        ):
            raise ValueError(
                f"data.features = {self.data.features!r} needs clients.bottom = 'frozen' and no data.unlabeled; set these "
                "so, or leave data.features out"
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
        """Return the same configuration with ``fleet.kind`` = ``kind``: a run is set up once and may live anywhere.

        Raises `ConfigError` if clients of this kind would have to keep their momentum between rounds.
        """
        if kind != "local" and self.optimizer.keep_momentum:
            raise ConfigError(
                "optimizer.keep_momentum = true is for clients in one process: others keep nothing between rounds; "
                "set it to false"
            )
        return self.model_copy(update={"fleet": FleetConfig(kind=kind)})

    @property
    def client_rounds(self) -> int:
        """Return the number of rounds in which clients take part."""
        return max(0, self.rounds - self.server.pretrain_rounds)

    def settings(self, kind: type[Kind]) -> Kind:
        """Return the method's section of class ``kind``.

        A method derived from another may have settings derived from that one's: both methods then find the section by
        the class that they know. Raises `ConfigError` if the method has no such section.
        """
        for section in self.own_sections:
            if isinstance(section, kind):
                return section
        raise ConfigError(
            f"{self.method} asks for {kind.__name__}, which its catalog entry does not name as settings; set settings "
            "in the attribute `entry` of its class"
        )


def _pretrained_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections whose defaults are others if ``model.weights`` is set.

    ``data.size`` is the usual side of the weights' images, and the optimiser is `PRETRAINED_OPTIMIZER`.
    """
    model, data = values.get("model"), values.get("data", {})
    if not isinstance(model, Mapping) or not isinstance(data, Mapping):
        return {}
    changed, optimizer = {}, values.get("optimizer", {})
    side = read_about(str(model.get("weights"))).get("side") or catalog.usual_side(
        str(model.get("weights", "none")), str(model.get("name"))
    )
    if side and data.get("size") in (None, "none"):
        changed["data"] = {**data, "size": side}
    unset = isinstance(optimizer, Mapping) and "kind" not in optimizer
    if unset and model.get("weights") not in (None, "none"):
        changed["optimizer"] = {**PRETRAINED_OPTIMIZER, **optimizer}
    return changed


@cache
def _built_in_sections() -> dict[str, type[Section] | None]:
    """Return the settings classes of this package's methods, by section."""
    entries = [entry for entry in catalog.METHODS.values() if entry.section]
    return {str(entry.section): lookup.settings_class(entry) for entry in entries}


def parse(values: Mapping[str, Any], others: Iterable[NamedMethod] = ()) -> Config:
    """Return a Config from nested plain values, for example ``{"rounds": 3, "optimizer": {"lr": 0.1}}``.

    ``others``: methods outside the catalog whose sections ``values`` may have, as those of a comparison do. What
    ``values`` leave out has its default. Raises `ConfigError` with one line that names every mistake and its fix.
    """
    if not isinstance(values, Mapping):
        raise TypeError(
            f"values is a {type(values).__name__}; it must be a dictionary of settings (semisfl.preset takes a name)"
        )
    unread = {entry.section for entry in others if entry.section}
    if unread:
        unread -= {lookup.method(values.get("method", "semisfl")).section}
        values = {key: value for key, value in values.items() if key not in unread}
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(one_line(error, Config, known_keys(Config()), "", ALL_KEYS)) from error


def cap_batch(config: Config, most: int) -> Config:
    """Return the configuration with a client's batch B_u of at most ``most`` images: the largest client has no more.

    For use in a run only: its files keep the batch that the user set.
    """
    if config.clients.batch <= most:
        return config
    return config.model_copy(update={"clients": config.clients.model_copy(update={"batch": most})})

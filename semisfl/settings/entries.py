"""The form of a catalog entry: a method, data set, codec, aggregation rule or sink."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NamedMethod:
    """One way to train. ``code`` is its class; what a class needs: `semisfl.methods.base.Method`."""

    name: str
    code: str
    title: str
    """Its name as people write it."""
    summary: str = ""
    note: str = ""
    """Names reconstructions and our own choices; shown wherever the method's numbers are."""
    section: str | None = None
    """Where its settings stand in a configuration; methods may share one."""
    settings: str | None = None
    """Their class, a `semisfl.settings.sections.Section`, in a module that loads no torch."""
    labeled_view: str = "weak"
    """How it shows labelled images where ``server.labeled_view`` is none."""
    metrics: str | None = None
    """A class derived from `semisfl.metrics.MethodMetrics`, in a module that loads no torch: what only this method reports."""
    works: tuple[str, ...] = ()
    """Classes of its client halves, for clients that live in processes of their own."""
    cost: str | None = None
    """``(Sizes, settings) -> Cost`` of a usual round; see `semisfl.methods.sizes`."""


@dataclass(frozen=True, kw_only=True)
class NamedData:
    """A data set: how it is shown to a model, and where it is kept."""

    name: str
    summary: str
    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    images: int | None = None
    """For training, unlabelled ones included; None: not known before they are loaded."""
    size: int | None = None
    """Images are brought to this side; None: they are of one size already."""
    file: str | None = None
    """A packed file within a package, ``package:file.npz``."""
    repository: str | None = None
    """On the Hugging Face hub, for what is neither in a package nor in ``$SEMISFL_DATA``."""
    subset: str | None = None
    """The hub's name of a configuration, where a repository has several."""


@dataclass(frozen=True, kw_only=True)
class NamedCodec:
    """One encoding of tensors for sending. ``code`` is a `semisfl.fleet.codec.Codec`."""

    name: str
    code: str
    summary: str


@dataclass(frozen=True, kw_only=True)
class NamedAggregate:
    """One way to make one state of several clients'. ``code`` is a `semisfl.fleet.aggregate.Rule`."""

    name: str
    code: str
    summary: str
    settings: str | None = None
    """The class of its own settings, a `semisfl.settings.sections.Section`; they stand in ``[robust.name]``."""


@dataclass(frozen=True, kw_only=True)
class NamedSink:
    """One place for a run's round metrics to go. ``code`` is a `semisfl.runs.sinks.Sink`."""

    name: str
    code: str
    summary: str
    extra: str | None = None
    """The extra of this package that installs what it needs: ``pip install 'semisfl[extra]'``."""

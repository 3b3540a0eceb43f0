"""The form of a catalog entry: a method, data set, codec, aggregation rule or sink."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NamedMethod:
    """A method. `semisfl.methods.base.Method` says what the class ``code`` must have."""

    name: str
    code: str
    title: str
    """Its name as people write it."""
    summary: str = ""
    note: str = ""
    """Names reconstructions and our own choices; shown wherever the method's numbers are."""
    section: str | None = None
    """The configuration's section with its settings; methods may share one."""
    settings: str | None = None
    """The class of its settings, a `semisfl.settings.sections.Section`, in a module that loads no torch."""
    labeled_view: str = "weak"
    """Augmentation of labelled images if ``server.labeled_view`` is none."""
    metrics: str | None = None
    """The class of the metrics that only this method reports, derived from `semisfl.metrics.MethodMetrics`,
    in a module that loads no torch."""
    works: tuple[str, ...] = ()
    """Classes of its client halves, for clients that live in processes of their own."""
    cost: str | None = None
    """``(Sizes, settings) -> Cost`` of a usual round; see `semisfl.methods.sizes`."""


@dataclass(frozen=True, kw_only=True)
class NamedData:
    """A data set: the shape and normalisation of its images, and where they are."""

    name: str
    summary: str
    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    images: int | None = None
    """Number of training images, unlabelled ones included; None: not known before they are loaded."""
    size: int | None = None
    """Images are resized to this side; None: they have one size already."""
    file: str | None = None
    """A packed file within a package, ``package:file.npz``."""
    repository: str | None = None
    """A repository on the Hugging Face hub, used if the set is neither in a package nor in ``$SEMISFL_DATA``."""
    subset: str | None = None
    """The hub's name of a configuration, where a repository has several."""


@dataclass(frozen=True, kw_only=True)
class NamedCodec:
    """An encoding of tensors for sending. ``code`` is a `semisfl.fleet.codec.Codec`."""

    name: str
    code: str
    summary: str


@dataclass(frozen=True, kw_only=True)
class NamedAggregate:
    """A rule that combines several clients' states into one. ``code`` is a `semisfl.fleet.aggregate.Rule`."""

    name: str
    code: str
    summary: str
    settings: str | None = None
    """The class of its settings, a `semisfl.settings.sections.Section`; their section is ``[robust.name]``."""


@dataclass(frozen=True, kw_only=True)
class NamedSink:
    """A destination of a run's round metrics. ``code`` is a `semisfl.runs.sinks.Sink`."""

    name: str
    code: str
    summary: str
    extra: str | None = None
    """The extra of this package that installs what it needs: ``pip install 'semisfl[extra]'``."""

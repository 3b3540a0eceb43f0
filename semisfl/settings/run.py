"""The sections of every configuration.

Each field has its default, its range and its meaning; `semisfl show` prints all of them. Symbols such as
B_u, K_s and |V_h| are those of the paper. A section checks what it can decide by itself; `semisfl.settings.config`
checks what concerns several sections.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from semisfl.settings import catalog, lookup
from semisfl.settings.layer_kinds import Layer, Layers
from semisfl.settings.plain_values import read_about
from semisfl.settings.sections import ConfigError, LabeledView, Section

CUSTOM = "custom"
"""The name of a model that the user describes by its layers."""
MOST_ACTIVE = 32
"""Clients with a frozen bottom that are active in a round by default."""
CODE = "code"
"""The name of a model that was given to `train` as code, and that no layers describe; a digest follows it."""


def _codec_name(name: str, field: ValidationInfo) -> str:
    return lookup.check_name(name, catalog.CODECS, f"wire.{field.field_name}")


Codec = Annotated[str, AfterValidator(_codec_name)]
_CODEC_CHOICES = f"({' | '.join(catalog.CODECS)})"


class PartitionConfig(Section):
    """``[data.partition]``: how the unlabelled images are divided among the clients of a simulation.

    Devices have images of their own, and this section does not concern them.
    """

    kind: Literal["iid", "dirichlet", "folders", "own"] = Field(
        "dirichlet",
        description="how the unlabelled images are divided among clients; folders: a folder per client; "
        "own: by the program that passes them",
    )
    alpha: float = Field(0.1, gt=0, description="Dirichlet concentration; smaller is more uneven")


class AugmentConfig(Section):
    """``[data.augment]``: what the weak and the strong augmentation do.

    Cropping and the fourteen operations of the strong view have no settings (`semisfl.data.augment`).
    """

    flip: bool = Field(True, description="flip half of the images left to right")
    cutout: int = Field(
        16,
        ge=0,
        description="side of the grey square of a strong view, in pixels; half of the image's or less",
    )


class DataConfig(Section):
    """``[data]``: the images, and which of them are labelled, unlabelled and for testing."""

    name: str = Field("digits", description="a named set or a path to images (file or folder)")
    labeled: int = Field(40, ge=1, description="labelled images on the server, |D_l|")
    unlabeled: str | None = Field(
        None,
        description="another data set for the clients' images, named like name; none: the rest of name",
    )
    features: str | None = Field(
        None,
        description="a folder of rows that clients with a frozen bottom have sent, one file per client: the folder features of another run or server; none: the clients encode their images",
    )
    validation: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of the training images on which rounds are tested; the test set is then used "
        "once, at the end; none: rounds are tested on the test set",
    )
    size: int | None = Field(
        None, ge=8, description="resize images to this side; none: as they are"
    )
    partition: PartitionConfig = PartitionConfig()
    augment: AugmentConfig = AugmentConfig()


class ClientsConfig(Section):
    """``[clients]``: how many clients there are, and what each of them computes in a round."""

    total: int = Field(10, ge=1, description="clients, N")
    active: int = Field(
        5,
        ge=1,
        description="clients that take part in a round, drawn at random, |V_h|; of a frozen bottom, if not set: all, up to 32",
    )
    batch: int = Field(64, ge=1, description="unlabelled images per client and step, B_u")
    steps: int = Field(50, ge=1, description="cross-entity (or local) steps per round, K_u")
    epochs: int | None = Field(
        None,
        ge=1,
        description="methods with whole models on clients: a client ends its round after so many passes over the images it trains on, or after steps, whichever is first; none: after steps",
    )
    bottom: Literal["trained", "frozen"] = Field(
        "trained",
        description="layers on the clients: trained, or frozen: each client encodes its images once, and the server trains the other layers",
    )
    weak_views: int = Field(
        2, ge=1, le=64, description="weak views that a frozen bottom encodes of each image"
    )
    strong_views: int = Field(
        4, ge=1, le=64, description="strong views that a frozen bottom encodes of each image"
    )

    @model_validator(mode="before")
    @classmethod
    def _all_active(cls, values: Any) -> Any:
        """Let all clients with a frozen bottom, up to `MOST_ACTIVE`, be in each step: their rows are there anyway."""
        if not isinstance(values, dict) or values.get("bottom") != "frozen" or "active" in values:
            return values
        total = values.get("total", cls.model_fields["total"].default)
        return {"active": min(total, MOST_ACTIVE) if isinstance(total, int) else 1, **values}

    @property
    def views(self) -> dict[str, int]:
        """Return how many views of each kind a frozen bottom encodes of each image."""
        return {"weak": self.weak_views, "strong": self.strong_views}


class ServerConfig(Section):
    """``[server]``: the supervised steps with which the server begins every round.

    The number of steps falls during the run as ``[controller]`` says.
    """

    batch: int = Field(64, ge=1, description="labelled images per step, B_s")
    steps: int = Field(100, ge=1, description="supervised steps in the first round, K_s")
    pretrain_rounds: int = Field(0, ge=0, description="first rounds without clients")
    labeled_view: LabeledView | None = Field(
        None,
        description="augmentation of labelled images: strong, weak, both of each image, or mixed (strong, blended in pairs with their labels, beyond the paper); none: the method's own, which is strong for SemiSFL and weak for the others",
    )


class ModelConfig(Section):
    """``[model]``: the network, where it is cut, and the projection head of the contrastive loss.

    The clients train the layers up to the cut (the bottom, w_c), the server the rest (the top, w_s) and the
    head (w_p). The network is one of `semisfl.models.zoo`, a table of layers (`semisfl.settings.layer_kinds`), or
    a module that a program passes to `semisfl.train`.
    """

    name: str = Field(
        "cnn",
        description="a model of `semisfl list`; custom if layers are given, code-... for a module given to train()",
    )
    layers: Layers | None = Field(
        None, description="your own model, one table per layer; none: the model called name"
    )
    weights: str | None = Field(
        None,
        description="start from imagenet (for efficientnet-lite0), a file (a run's best.safetensors, or torchvision's or timm's names, .safetensors or .pth), a folder with model.safetensors or hub:OWNER/NAME; none: random weights",
    )
    cut: int | str | None = Field(
        None,
        description="last layer on the clients, by index or name; none: the usual one of a backbone, else the first flatten",
    )
    projector: Literal["mlp", "linear", "none"] = Field(
        "mlp",
        description="projection head, w_p; the hidden layer of mlp has at most 2,048 units, and as many as its input for a named model at its published image size",
    )
    projection: int = Field(128, ge=1, description="length of a projected feature")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Let layers replace the name, which every preset sets; take them from a file of `semisfl.table_of`."""
        if not isinstance(values, dict):
            return values
        if values.get("layers") in (None, "none"):
            found = read_about(str(values.get("weights"))).get("layers")
            values = values | ({"layers": found} if found else {})
        if values.get("layers") not in (None, "none"):
            code = str(values.get("name")).startswith(f"{CODE}-")  # the top; these are the bottom's
            return values if code else {**values, "name": CUSTOM}
        return {"cut": catalog.MODELS.get(str(values.get("name")))} | {
            key: one for key, one in values.items() if key != "cut" or one not in (None, "none")
        }

    @model_validator(mode="after")
    def _custom_has_layers(self) -> "ModelConfig":
        """Refuse a name that no table belongs to."""
        if self.name == CUSTOM and self.layers is None:
            raise ValueError(
                f"model.name = {CUSTOM!r} needs model.layers; give them, or a known name"
            )
        if self.layers is None and self.name not in catalog.MODELS and not self.is_code:
            raise ValueError(
                f"model.name = {self.name!r} is not known; known: {', '.join(catalog.MODELS)}; or give "
                "model.layers a table of your own"
            )
        return self

    @property
    def is_code(self) -> bool:
        """Return whether a program passed the network, which no file then holds."""
        return self.name.partition("-")[0] == CODE  # runs of earlier versions have no digest

    @property
    def table(self) -> str | tuple[Layer, ...]:
        """Return what to build: the user's layers, or the name of a known model."""
        if self.is_code:
            raise ConfigError(
                f"model.name = {self.name!r}: this run's network, or its top, was given to train() as code, which no file "
                "holds; give it again, as train(..., model=...) or resume(..., model=...), or its top as top=..."
            )
        return self.layers or self.name


class OptimizerConfig(Section):
    """``[optimizer]``: how the weights are stepped, with a cosine schedule over all rounds.

    ``kind`` is the server's optimiser; clients that train always use SGD.
    """

    kind: Literal["sgd", "adamw"] = Field(
        "sgd",
        description="the server's optimiser; adamw: its moments live across rounds, and its rate rises over the first 50 steps",
    )

    lr: float = Field(0.02, gt=0, description="learning rate of the first round, eta")
    lr_pretrained: float | None = Field(
        None,
        gt=0,
        description="learning rate of layers whose weights came from model.weights, and of clients that train, in the first round; none: lr",
    )
    lr_min: float = Field(
        0.005, ge=0, description="learning rate at the end of the cosine schedule"
    )
    momentum: float = Field(
        0.9, ge=0, lt=1, description="Nesterov momentum of SGD, reset each round; 0: plain SGD"
    )
    keep_momentum: bool = Field(
        False,
        description="SGD's momentum lives across rounds instead, on the server and on simulated clients with whole models",
    )
    weight_decay: float = Field(5e-4, ge=0, description="weight decay of every parameter")

    @property
    def pretrained_share(self) -> float:
        """Return the learning rate of pretrained layers as a share of that of new ones."""
        return 1.0 if self.lr_pretrained is None else self.lr_pretrained / self.lr


class TeacherConfig(Section):
    """``[teacher]``: the moving average of the weights that makes pseudo-labels."""

    ema_decay: float = Field(0.99, ge=0, le=1, description="gamma of the teacher's moving average")
    warmup: bool = Field(
        True,
        description="decay min(1 - 1/(t+1), gamma), as in the authors' code; false: gamma, as in the paper",
    )


class ControllerConfig(Section):
    """``[controller]``: how the number of supervised steps K_s follows the two losses (Eq. (8) of the paper)."""

    kind: Literal["normalised", "raw", "fixed"] = Field(
        "normalised",
        description="how K_s is lowered: by losses per learning rate and step (the authors' code), by the losses themselves (the paper), never",
    )
    step_decay: float = Field(1.5, ge=1, description="alpha: K_s is divided by this number")
    min_steps_factor: float = Field(8.0, ge=0, description="beta: K_min = beta K_u |D_l| / |D|")
    period: int = Field(
        100, ge=2, description="rounds that a decision looks back on, in windows of a tenth"
    )

    @model_validator(mode="after")
    def _whole_windows(self) -> "ControllerConfig":
        # The controller averages windows of a tenth of a period, at least one round.
        if self.period >= 20 and self.period % 10:
            raise ValueError(
                f"controller.period = {self.period} must be a multiple of 10, or below 20"
            )
        return self


class WireConfig(Section):
    """``[wire]``: the codec of everything that is sent. Simulations apply it too, so losses and bytes are the same."""

    student_features: Codec = Field(
        "fp32", description=f"how student features are encoded {_CODEC_CHOICES}"
    )
    teacher_features: Codec = Field(
        "fp32", description=f"how teacher features are encoded {_CODEC_CHOICES}"
    )
    gradients: Codec = Field("fp32", description=f"how gradients are encoded {_CODEC_CHOICES}")
    models: Codec = Field("fp32", description=f"how models are encoded {_CODEC_CHOICES}")

    @property
    def codecs(self) -> set[str]:
        """Return the names of all codecs that are used."""
        return {self.student_features, self.teacher_features, self.gradients, self.models}

    def recoded(self, codec: str) -> "WireConfig":
        """Return the same section with ``codec`` for everything that is sent."""
        return self.model_copy(update=dict.fromkeys(type(self).model_fields, codec))


class NetworkConfig(Section):
    """``[network]``: when a server of devices goes on without some of them."""

    deadline: float = Field(
        60.0,
        gt=0,
        description="seconds without progress after which a round goes on without a client",
    )
    quorum: int = Field(1, ge=1, description="fewest clients with which a round goes on")


class FleetConfig(Section):
    """``[fleet]``: where the clients live. Commands set it; it changes no result."""

    kind: Literal["local", "network", "cluster"] = Field(
        "local",
        description="where clients live: in this process, on other machines (`semisfl serve`), "
        "or in all processes of torchrun",
    )


class StopConfig(Section):
    """A run ends after the first round in which one of these is met, and can go on beyond it."""

    target: float | None = Field(None, gt=0, le=100, description="end at this accuracy, in percent")
    patience: int | None = Field(
        None, ge=1, description="end after so many tests in a row without a better accuracy"
    )
    hours: float | None = Field(
        None, gt=0, description="end when the rounds have taken this long together"
    )
    gigabytes: float | None = Field(
        None, gt=0, description="end when so many 10^9 bytes were sent, up and down"
    )


class RuntimeConfig(Section):
    """``[runtime]``: how a run computes, tests and saves. Only ``precision`` and ``deterministic`` change its numbers."""

    precision: Literal["auto", "fp32", "tf32", "bf16"] = Field(
        "auto", description="arithmetic of the models; auto: bf16 on a GPU, fp32 elsewhere"
    )
    deterministic: bool = Field(False, description="bit-identical repeats on a GPU, slower")
    evaluate_every: int = Field(
        1, ge=1, description="rounds between two tests; the last round is tested"
    )
    best_by: Literal["accuracy", "macro_f1"] = Field(
        "accuracy",
        description="the measure of the round that is kept as best; macro_f1 counts every class alike",
    )
    checkpoint_every: int = Field(10, ge=1, description="rounds between two checkpoints")

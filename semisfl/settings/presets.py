"""Presets and variants: named starting points of a run.

A preset is a function that returns the plain values of a `Config`: only those that differ from the defaults. A
variant is a function from values to changes of them, written behind a preset: ``cifar10+as_published_code``.
The first line of each docstring is what `semisfl list` prints.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from semisfl.settings import lookup
from semisfl.settings.config import Config, ConfigError, parse
from semisfl.settings.plain_values import flatten
from semisfl.settings.robust import FEWEST, SERVED

Values = dict[str, Any]


def digits() -> Values:
    """Embedded MNIST subset, 40 labels, Dirichlet(0.1) over 10 clients: minutes on a laptop."""
    return {
        "rounds": 30,
        "data": {
            "name": "digits",
            "labeled": 40,
            "partition": {"kind": "dirichlet", "alpha": 0.1},
            # A mirrored digit is no digit, and 16 of 28 pixels is most of one.
            "augment": {"flip": False, "cutout": 8},
        },
        "clients": {"total": 10, "active": 5, "batch": 32, "steps": 10},
        "server": {"batch": 32, "steps": 20},
        "model": {"name": "cnn"},
    }


def images() -> Values:
    """Your own images: rounds are judged on a tenth of the labelled ones."""
    # Chosen on the validation images of five sets: reproduction/pages/own-images-choice.md.
    return {
        "rounds": 150,
        "data": {
            "name": "images",
            "labeled": 100,
            "validation": 0.1,
            "partition": {"kind": "dirichlet", "alpha": 0.1},
        },
        "clients": {"total": 10, "active": 5, "batch": 32, "steps": 20},
        "server": {"batch": 32, "steps": 50, "labeled_view": "mixed"},
        "model": {"name": "cnn"},
        "optimizer": {"lr": 0.04},
        "semisfl": {
            "confidence_threshold": "by_classes",
            "client_teacher": "ema",
            "align": "client",
        },
        "fedswitch": {"confidence_threshold": "by_classes"},
    }


def photos() -> Values:
    """Your own photographs, from ImageNet's weights: clients encode each photograph once and send it once."""
    return {
        "rounds": 25,
        "data": {
            "name": "photos",
            "labeled": 100,
            "size": 96,
            "validation": 0.1,
            "partition": {"kind": "dirichlet", "alpha": 0.1},
            # A third of the side; half of it hides small objects.
            "augment": {"cutout": 32},
        },
        "clients": {"total": 10, "batch": 16, "steps": 20, "bottom": "frozen"},
        "server": {"steps": 20, "labeled_view": "strong"},
        "model": {"name": "efficientnet-lite0", "weights": "imagenet"},
        "wire": {"student_features": "int8", "teacher_features": "int8"},
        "semisfl": {"confidence_threshold": 0.95, "align": "client"},
        "fedswitch": {"confidence_threshold": 0.95, "align": "client"},
    }


def _paper(
    name: str, model: str, labeled: int, batch: int, server_batch: int, **more: Any
) -> Values:
    """Return the paper's settings for one data set.

    ``batch`` and ``server_batch`` are B_u and B_s. 30 clients, of which 10 are active, and the batches are those of
    its published code. ``more`` replaces whole sections.
    """
    return {
        "rounds": 1000,
        "data": {"name": name, "labeled": labeled, "partition": {"kind": "iid"}},
        "clients": {"total": 30, "active": 10, "batch": batch, "steps": 50},
        "server": {"batch": server_batch, "steps": 100, **more.pop("server", {})},
        "model": {"name": model},
        "runtime": {"evaluate_every": 10, "checkpoint_every": 100},
        **more,
    }


def cifar10() -> Values:
    """The paper's CIFAR-10: AlexNet, 4,000 labels, 30 clients, 1,000 rounds, IID."""
    # The paper's equation, not its published code: measured to be better here and on SVHN (reproduction/pages/paper-choices.md).
    return _paper("cifar10", "alexnet", 4000, 64, 64, semisfl={"client_teacher": "ema"})


def svhn() -> Values:
    """The paper's SVHN: CNN, 1,000 labels, 30 clients, 1,000 rounds, IID; digits are mirrored, as there."""
    more = {"semisfl": {"client_teacher": "ema"}, "server": {"labeled_view": "weak"}}
    return _paper("svhn", "cnn", 1000, 64, 64, **more)


def stl10() -> Values:
    """The paper's STL-10: VGG13, 5,000 labels, 30 clients, 1,000 rounds."""
    return _paper("stl10", "vgg13", 5000, 32, 64)


def image100() -> Values:
    """The paper's IMAGE-100: VGG16 on 144 x 144 pixels, 5,000 labels, 20 rounds without clients first."""
    return _paper("image100", "vgg16", 5000, 64, 128, server={"pretrain_rounds": 20})


def field() -> Values:
    """The field's comparison: CIFAR-10, WRN-28-2, 40 labels, 10 of 100 clients, 5 local epochs, 800 rounds, IID."""
    # As (FL)²'s public code has it. Five passes of 500 images are 80 steps, which split methods take too.
    return {
        "rounds": 800,
        "data": {"name": "cifar10", "labeled": 40, "partition": {"kind": "iid"}},
        "clients": {"total": 100, "active": 10, "batch": 32, "steps": 80, "epochs": 5},
        "server": {"batch": 10, "steps": 20},
        "model": {"name": "wrn-28-2"},
        "optimizer": {"lr": 0.03, "lr_min": 0.0},
        "runtime": {"evaluate_every": 10, "checkpoint_every": 100},
    }


PRESETS: dict[str, Callable[[], Values]] = {
    "digits": digits,
    "images": images,
    "photos": photos,
    "cifar10": cifar10,
    "svhn": svhn,
    "stl10": stl10,
    "image100": image100,
    "field": field,
}


def as_published_code(values: Values) -> Values:
    """Every choice in which the paper and its published code differ, as in the code."""
    data = values.get("data", {}).get("name")
    return {
        "server": {
            "pretrain_rounds": 20 if data == "image100" else 0,
            "labeled_view": "weak" if data == "svhn" else "none",
        },
        "teacher": {"warmup": True},
        "controller": {"kind": "normalised"},
        "semisfl": {
            "queue": "single",
            "own_key": True,
            "confidence_rule": ">=",
            "server_pass": "joint",
            "client_teacher": "frozen",
        },
    }


def as_in_paper(values: Values) -> Values:
    """The same choices as the paper's text and equations have them."""
    return {
        "teacher": {"warmup": False},
        "controller": {"kind": "raw"},
        "semisfl": {
            "queue": "two_level",
            "own_key": False,
            "confidence_rule": ">",
            "server_pass": "in_turn",
            "client_teacher": "ema",
        },
        "server": {"pretrain_rounds": 0, "labeled_view": "none"},
    }


def fedmatch_original(values: Values) -> Values:
    """FedMatch's weights as its authors publish them (tuned for their network and plain SGD at 1e-3)."""
    return {
        "method": "fedmatch",
        "optimizer": {"lr": 1e-3, "lr_min": 1e-3, "momentum": 0.0, "weight_decay": 0.0},
        "fedmatch": {
            "confidence_threshold": 0.85,
            "mean_over": "confident",
            "lambda_s": 10.0,
            "lambda_i": 1e-2,
            "lambda_a": 1e-2,
            "lambda_l2": 10.0,
            "lambda_l1": 1e-5,
            "keep_helpers": False,
        },
    }


def semifl_original(values: Values) -> Values:
    """SemiFL's network, rate, batches, epochs and momentum as its authors publish them."""
    labeled = values.get("data", {}).get("labeled", 40)
    batch = 250 if labeled > 1000 else 10
    return {
        "method": "semifl",
        **{key: value for key, value in field().items() if key != "data"},
        "clients": {"total": 100, "active": 10, "batch": 10, "steps": 250, "epochs": 5},
        "server": {"batch": batch, "steps": 5 * -(-labeled // batch)},
        "optimizer": {"lr": 0.03, "lr_min": 0.0, "keep_momentum": True},
    }


def frontier(values: Values) -> Values:
    """SemiSFL beyond its paper: labels corrected by what each client holds, and a sixth of the bytes per round."""
    return {
        "semisfl": {"client_teacher": "ema", "align": "client"},
        "wire": {
            "student_features": "int4",
            "teacher_features": "int4",
            "gradients": "int4",
            "models": "int8",
        },
    }


VARIANTS: dict[str, Callable[[Values], Values]] = {
    "as_published_code": as_published_code,
    "as_in_paper": as_in_paper,
    "fedmatch_original": fedmatch_original,
    "semifl_original": semifl_original,
    "frontier": frontier,
}


def merge(values: Values, changes: Values) -> Values:
    """Return ``values`` with ``changes`` applied section by section; neither is changed."""
    merged = dict(values)
    for key, change in changes.items():
        inner = merged.get(key)
        merged[key] = (
            merge(inner, change) if isinstance(inner, dict) and isinstance(change, dict) else change
        )
    return merged


def values_of(name: str) -> Values:
    """Return the plain values of ``cifar10``, or ``cifar10+as_published_code``; a variant alone applies to ``cifar10``.

    Raises `ConfigError` with the known names.
    """
    base, *variants = name.split("+")
    if base in VARIANTS:
        base, variants = "cifar10", [base, *variants]
    if base not in PRESETS:
        raise ConfigError(
            f"preset {base!r} is not known; known: {', '.join((*PRESETS, *VARIANTS))}, or FILE.toml"
        )
    values = PRESETS[base]()
    for variant in variants:
        if variant not in VARIANTS:
            raise ConfigError(f"variant {variant!r} is not known; known: {', '.join(VARIANTS)}")
        values = merge(values, VARIANTS[variant](values))
    return values


def changes(settings: Mapping[str, Any]) -> tuple[str, Values]:
    """Return the preset or variant that differs from ``settings`` in the fewest values, and its values of those.

    ``settings`` are all values of a configuration by dotted key, with lists as values. A preset is compared with the
    method of ``settings``, so that settings of another method do not count.
    """
    names = [*PRESETS, *(f"{base}+{variant}" for base in PRESETS for variant in VARIANTS)]
    there = {name: _all_values(name, str(settings["method"])) for name in names}
    changed = {
        name: {key: values.get(key) for key in settings if settings[key] != values.get(key)}
        for name, values in there.items()
    }
    nearest = min(changed, key=lambda name: len(changed[name]))
    return nearest, changed[nearest]


@cache
def _all_values(name: str, method: str) -> Values:
    """Return the values of a preset under a method, defaults included, by dotted key."""
    config = parse(complete(name, values_of(name) | {"method": method}))
    return flatten(config.model_dump(mode="json", exclude_none=True), lists=False)


def limit_influence(values: Values) -> Values:
    """Return the values with limits on each client's influence, where they do not say otherwise.

    They are the defaults where clients are real devices; a round of fewer than `FEWEST` clients has no limits.
    """
    enough = parse(values).clients.active >= FEWEST
    return merge({"robust": SERVED}, values) if enough else values


def complete(name: str, values: Values) -> Values:
    """Return the values of preset ``name``, changed by a user, with what the preset chooses by the other values."""
    before, weights = values_of(name), values.get("model", {}).get("weights", "none")
    rates = values.get("optimizer")
    if (
        weights != "none"
        and rates == before.get("optimizer")
        and weights not in before["model"].values()
    ):
        # The preset's rates are for random weights; trained ones have defaults of their own.
        values = {key: value for key, value in values.items() if key != "optimizer"}
    own = name.split("+")[0] in ("images", "photos")
    return limit_influence(values) if own else values


def default_for(data: str | None) -> str:
    """Return the preset for images that a user names by ``data``: ``images`` for a path, else ``digits``.

    ``data`` is a path, the name of a data set, or None.
    """
    return "digits" if data is None or lookup.data(data) else "images"


def preset(name: str) -> Config:
    """Return the configuration of a preset, for example ``preset("cifar10+frontier")``."""
    return parse(complete(name, values_of(name)))

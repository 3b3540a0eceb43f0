"""Write MODEL_CARD.md: what a model is, its training data, its quality, and what is known about leakage."""

import json
import re
from pathlib import Path
from typing import Any

from semisfl.data.decode import LARGE
from semisfl.files import write_whole
from semisfl.runs.labels import without
from semisfl.runs.portable import Description
from semisfl.runs.preset_changes import changes, flat
from semisfl.settings import lookup
from semisfl.settings.counts import counted
from semisfl.settings.sections import ConfigError
from semisfl.use.classifier import Classifier

KINDS = {
    "features_up": "features of the clients' images; an attacker at the server may be able to turn them back into "
    "pictures",
    "gradients_down": "gradients of these features; they tell a client something about the server's labels",
    "model_up": "clients' weights; parts of their images may be reconstructed from them",
    "model_down": "the shared weights",
    "teacher_down": "the teacher's weights",
}
"""Traffic by kind and direction, with what an attacker may learn from it."""


def write(model: Classifier, path: Path) -> None:
    write_whole(path, card(model).encode())


def card(model: Classifier) -> str:
    about = model.description
    sections = {
        "What it is": _about_model(model),
        "Intended use": _use(about),
        "Trained on": _data(about),
        "How good it is": _quality(about),
        "What is known about leakage": _leakage(about),
        "Settings": _settings(about),
    }
    body = "\n\n".join(f"## {title}\n{text}" for title, text in sections.items())
    return f"{front_matter(about)}\n# {_name(about)}\n\n{body}\n"


def front_matter(about: Description) -> str:
    """Return what the Hugging Face hub reads: YAML, with every value written as JSON, which is YAML too."""
    metrics = {"accuracy": about.accuracy, "f1": about.macro_f1}
    names = {"accuracy": "accuracy, %", "f1": "macro-F1, %"}
    values: dict[str, Any] = {
        "library_name": "semisfl",
        "pipeline_tag": "image-classification",
        "tags": ["semi-supervised-learning", "federated-learning", about.method],
    }
    known = lookup.DATA.all().get(about.data)
    if known is not None and known.repository:
        values["datasets"] = [known.repository]
    if about.accuracy is not None:
        result = {
            "task": {"type": "image-classification"},
            "dataset": {"name": about.data, "type": about.data, "split": about.judged_on},
            "metrics": [
                {"type": kind, "name": names[kind], "value": round(value, 2)}
                for kind, value in metrics.items()
                if value is not None
            ],
        }
        values["model-index"] = [{"name": _name(about), "results": [result]}]
    lines = [f"{key}: {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(["---", *lines, "---", ""])


def _class(name: str) -> str:
    """Return a class's name on one line, as it is: not as Markdown."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(name.split()))


def _name(about: Description) -> str:
    return f"{_title(about.method)} on {about.data}"


def _use(about: Description) -> str:
    return (
        f"It tells {len(about.classes)} classes apart in images like those of `{about.data}`. Every image gets "
        "one of these classes, also an image of something else: use the probabilities to leave doubtful ones to "
        "a person. Few images had labels, and the other labels were guessed in training, so a class that is rare or "
        "looks like another may be wrong more often than the accuracy suggests. Test it on images of your own before "
        "you rely on it, and do not let it decide alone about people. Add the licence of your images and of this "
        "model here."
    )


def _title(method: str) -> str:
    try:
        return lookup.method(method).title
    except ConfigError:  # a method of a package that is not installed here
        return method


def _about_model(model: Classifier) -> str:
    about = model.description
    channels, height, width = about.shape
    names = ", ".join(map(_class, about.classes))
    return (
        f"An image classifier of {len(about.classes)} classes: {names}.\n\n"
        f"- input: uint8 images [n, {channels}, {height}, {width}], n free; normalised inside by mean "
        f"{_numbers(about.mean)} and standard deviation {_numbers(about.std)} of values in 0 to 1\n"
        f"- image files: turned upright by their EXIF orientation, converted to {'grey' if channels == 1 else 'RGB'}, "
        f"and resized to {width} x {height} pixels by bilinear interpolation, without keeping the aspect ratio; "
        "do the same where you call the model, since another resizing changes answers; a JPEG of more than "
        f"{LARGE / 1e6:.1f} million pixels is decoded at a fraction of its size first, which changes answers a little\n"
        f"- output: class probabilities [n, {len(about.classes)}], in the order above\n"
        f"- cut: the bottom gives {model.network.features} features per image\n"
        f"- network: the {about.network} of a run of {_title(about.method)} (`{about.method}`), "
        f"semisfl {about.version}\n"
        f"- hash of classes and weights: `{model.digest}`"
    )


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _data(about: Description) -> str:
    server = f"`{about.data}`: {about.labeled:,} labelled images on the server"
    digests = "".join(
        f"\n- SHA-256 of the {kind} images with labels: `{about.digests[key]}`"
        for key, kind in (("labeled", "labelled"), ("judged", about.judged_on))
        if key in about.digests
    )
    digests = f"\n{digests}" if digests else ""
    if not about.sent:
        return f"{server}, and no other.{digests}"
    # A run over a network has so many places, and not all need be taken.
    real = about.settings.get("fleet", {}).get("kind") == "network"
    total = counted(about.settings["clients"]["total"], "client")
    clients = f"{'up to ' if real else ''}{total}"
    held = "" if about.unlabeled is None else f"{about.unlabeled:,} "
    return (
        f"{server}; {held}unlabelled images on {clients}, which kept them. Labels of "
        f"the clients' images were not used.{digests}"
    )


def _quality(about: Description) -> str:
    if about.accuracy is None:
        return "It was not tested."
    return (
        f"{about.accuracy:.1f} % of {about.tested_on:,} {about.judged_on} images of `{about.data}`, which were not "
        f"trained on, after {counted(about.tested_after, 'round')}.{_at_the_end(about)} {_chosen(about)} `semisfl evaluate` "
        f"tells precision, recall and calibration on images of your own.{_by_class(about)}"
    )


def _chosen(about: Description) -> str:
    measure = str(flat(about.settings).get("runtime.best_by", "accuracy")).replace("_f1", "-F1")
    if about.judged_on == "validation":
        return (
            f"The round that a run keeps as best has the highest {measure} on these validation images; the test "
            "images had no part in the choice."
        )
    return (
        f"The round that a run keeps as best has the highest {measure} on these same test images: they chose it, "
        "so expect a little less on others. With `data.validation` the choice does not look at the test images."
    )


def _by_class(about: Description) -> str:
    if about.macro_f1 is None or about.recall_by_class is None:
        return ""
    lines = [
        f"- {_class(name)}: {'no image' if recall is None else f'{recall:.1f} %'}"
        for name, recall in zip(about.classes, about.recall_by_class, strict=True)
    ]
    return "\n".join([f"\n\nMacro-F1 {about.macro_f1:.1f} %. Recall of each class:\n", *lines])


def _at_the_end(about: Description) -> str:
    if about.test_accuracy is None:
        return ""
    return f" {about.test_accuracy:.1f} % of the test images, which were read once, at the end."


def _leakage(about: Description) -> str:
    sent = [
        f"- {KINDS.get(kind, kind.replace('_', ', '))}: {size:,} bytes"
        for kind, size in about.sent.items()
        if size
    ]
    first = "Nothing was sent between server and clients: the clients' images were not used."
    if sent:
        first = "Sent between the server and all clients together, up to this model:"
    return "\n".join(
        [
            first,
            *sent,
            "",
            "No client's image was sent. That does not prove that nothing can be learned about the images: features, "
            "gradients and weights can be inverted in part. Whether a certain image was trained on can often "
            "be told from a model (membership inference); this was not measured for this model. The codecs and the "
            "noise of what was sent are under Settings.",
        ]
    )


def _settings(about: Description) -> str:
    settings = {key: value for key, value in flat(about.settings).items() if value is not None}
    read = without(lookup.unread_settings(about.method), settings)
    if read.get("fleet.kind") == "network":
        read.pop("data.labeled", None)  # such a server uses all labelled images that it has
    try:
        preset, changed = changes(read)
    except (ConfigError, KeyError, AttributeError):
        # The settings of a method that is not installed, or of no run.
        return "\n".join(f"- `{key} = {value}`" for key, value in read.items())
    lines = [
        f"- `{key} = {read[key]}` (preset: {'none' if before is None else before})"
        for key, before in changed.items()
    ]
    return "\n".join(
        [f"As in the preset `{preset}` of semisfl {about.version}, except:", "", *lines]
    )

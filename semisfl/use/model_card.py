"""The text of MODEL_CARD.md: what a model is, its training data, its quality, and what is known about leakage.

Everything in it comes from the `Description` inside the model's file, so the card can be written anywhere. It
begins with the front matter that the Hugging Face hub reads.
"""

import json
import re
from typing import Any

from semisfl.data.decode import LARGE
from semisfl.runs.portable import Description
from semisfl.settings import catalog, lookup
from semisfl.settings.counts import plural
from semisfl.settings.plain_values import flatten
from semisfl.settings.presets import changes
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


def card(model: Classifier) -> str:
    """Return the card of a model in Markdown."""
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
    return f"{_front_matter(about)}\n# {_name(about)}\n\n{body}\n"


def _front_matter(about: Description) -> str:
    """Return what the Hugging Face hub reads: YAML, with every value written as JSON, which is YAML too."""
    values: dict[str, Any] = {
        "library_name": "semisfl",
        "pipeline_tag": "image-classification",
        "tags": ["semi-supervised-learning", "federated-learning", about.method],
    }
    known = catalog.DATA.get(about.data)
    if known is not None and known.repository:
        values["datasets"] = [known.repository]
    if about.accuracy is not None and about.macro_f1 is not None:
        metrics = [
            ("accuracy", "accuracy, %", about.accuracy),
            ("f1", "macro-F1, %", about.macro_f1),
        ]
        result = {
            "task": {"type": "image-classification"},
            "dataset": {"name": about.data, "type": about.data, "split": about.judged_on},
            "metrics": [
                {"type": kind, "name": name, "value": round(value, 2)}
                for kind, name, value in metrics
            ],
        }
        values["model-index"] = [{"name": _name(about), "results": [result]}]
    lines = [f"{key}: {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(["---", *lines, "---", ""])


def _class(name: str) -> str:
    """Return a class's name on one line, as it is: not as Markdown."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(name.split()))


def _name(about: Description) -> str:
    """Return the title of the card: method and data set."""
    return f"{lookup.title_of(about.method)} on {about.data}"


def _use(about: Description) -> str:
    """Return what the model is for, and what it must not be trusted with."""
    return (
        f"It tells {len(about.classes)} classes apart in images like those of `{about.data}`. Every image gets "
        "one of these classes, also an image of something else: use the probabilities to leave doubtful ones to "
        "a person. Few images had labels, and the other labels were guessed in training, so a class that is rare or "
        "looks like another may be wrong more often than the accuracy suggests. Test it on images of your own before "
        "you rely on it, and do not let it decide alone about people. Add the licence of your images and of this "
        "model here."
    )


def _about_model(model: Classifier) -> str:
    """Return the input, the output and the origin of the network."""
    about = model.description
    channels, height, width = about.shape
    names = ", ".join(map(_class, about.classes))
    origin = about.settings.get("model", {}).get("origin")  # the weights' source and licence
    began = f"- began with weights of {_class(origin)}\n" if origin else ""
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (about.mean, about.std))
    return (
        f"An image classifier of {len(about.classes)} classes: {names}.\n\n"
        f"- input: uint8 images [n, {channels}, {height}, {width}], n free; normalised inside by mean {mean} "
        f"and standard deviation {std} of values in 0 to 1\n"
        f"- image files: turned upright by their EXIF orientation, converted to {'grey' if channels == 1 else 'RGB'}, "
        f"and resized to {width} x {height} pixels by bilinear interpolation, without keeping the aspect ratio; "
        "do the same where you call the model, since another resizing changes answers; a JPEG of more than "
        f"{LARGE / 1e6:.1f} million pixels is decoded at a fraction of its size first, which changes answers a little\n"
        f"- output: class probabilities [n, {len(about.classes)}], in the order above\n"
        f"- cut: the bottom gives {model.network.features} features per image\n"
        f"{began}"
        f"- network: the {about.network} of a run of {lookup.title_of(about.method)} (`{about.method}`), "
        f"semisfl {about.version}\n"
        f"- hash of classes and weights: `{model.digest}`"
    )


def _data(about: Description) -> str:
    """Return who held which images in training, with the digests by which others can recognise the data."""
    text = f"`{about.data}`: {about.labeled:,} labelled images on the server"
    if about.sent:
        # A server with devices has so many places, and not all need be taken.
        up_to = "up to " if _is_served(about) else ""
        clients = plural(about.settings["clients"]["total"], "client")
        held = "" if about.unlabeled is None else f"{about.unlabeled:,} "
        text += (
            f"; {held}unlabelled images on {up_to}{clients}, which kept them. Labels of the clients' images "
            "were not used."
        )
    else:
        text += ", and no other."
    digests = [
        f"- SHA-256 of the {kind} images with labels: `{about.digests[key]}`"
        for key, kind in (("labeled", "labelled"), ("judged", about.judged_on))
        if key in about.digests
    ]
    return "\n".join([text, "", *digests] if digests else [text])


def _is_served(about: Description) -> bool:
    """Return whether the clients were real devices."""
    return bool(about.settings.get("fleet", {}).get("kind") == "network")


def _quality(about: Description) -> str:
    """Return the accuracy and the recall of each class, and on which images they were measured."""
    if about.accuracy is None or about.macro_f1 is None:
        return "It was not tested."
    measure = str(flatten(about.settings).get("runtime.best_by", "accuracy")).replace("_f1", "-F1")
    chosen = (
        "validation images; the test images had no part in the choice."
        if about.judged_on == "validation"
        else "same test images: they chose it, so expect a little less on others. With `data.validation` the "
        "choice does not look at the test images."
    )
    at_the_end = (
        ""
        if about.test_accuracy is None
        else f" {about.test_accuracy:.1f} % of the test images, which were read once, at the end."
    )
    text = (
        f"{about.accuracy:.1f} % of {about.tested_on:,} {about.judged_on} images of `{about.data}`, which were not "
        f"trained on, after {plural(about.tested_after, 'round')}.{at_the_end} The round that a run keeps as best "
        f"has the highest {measure} on these {chosen} `semisfl evaluate` tells precision, recall and calibration "
        f"on images of your own.\n\nMacro-F1 {about.macro_f1:.1f} %. Recall of each class:\n"
    )
    recalls = [
        f"- {_class(name)}: {'no image' if recall is None else f'{recall:.1f} %'}"
        for name, recall in zip(about.classes, about.recall_by_class or (), strict=True)
    ]
    return "\n".join([text, *recalls])


def _leakage(about: Description) -> str:
    """Return how many bytes of each kind were sent in training, and what an attacker may learn from them."""
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
    """Return the settings in which the run differs from the nearest preset; all of them if there is none."""
    settings = {
        key: value
        for key, value in flatten(about.settings, lists=False).items()
        if value is not None
    }
    unread = tuple(f"{key}." for key in lookup.unread_settings(about.method))
    read = {key: value for key, value in settings.items() if not f"{key}.".startswith(unread)}
    if _is_served(about):
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
    first = f"As in the preset `{preset}` of semisfl {about.version}, except:"
    return "\n".join([first, "", *lines])

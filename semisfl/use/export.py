"""Export a trained model for other programs: a file, checked on real images, and a model card.

A file holds the whole model, its bottom or its top, with the normalisation of images and the softmax inside, so
that other programs need to know nothing of this package. Each file is run once and compared with the original
before it gets its name.
"""

import copy
import io
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from semisfl.data import sources
from semisfl.files import write_whole
from semisfl.models.layers import Gate, Layers, Residual, named_layers
from semisfl.runs import checkpoint
from semisfl.runs.directory import RunDirectory
from semisfl.runs.portable import answering_weights
from semisfl.settings.counts import plural
from semisfl.use import onnx_file
from semisfl.use.classifier import Classifier, load
from semisfl.use.model_card import card
from semisfl.use.pictures import batches, files_of

Format = Literal["onnx", "torch", "safetensors"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}
Part = Literal["whole", "bottom", "top"]
INPUTS: dict[Part, str] = {"whole": "images", "bottom": "images", "top": "features"}
OUTPUTS: dict[Part, str] = {"whole": "probabilities", "bottom": "features", "top": "probabilities"}
"""Name of each part's input and output. Images are uint8 [n, C, H, W], features float32 [n, d]."""
HALVES: dict[Part, tuple[str, ...]] = {
    "whole": ("bottom", "top"),
    "bottom": ("bottom",),
    "top": ("top",),
}
"""The halves of the model that each part consists of."""
MOST_CHECKED = 256
"""Images on which an exported file is checked."""
TOLERANCE = 1e-4
"""Greatest difference of an exported part, as a share of its largest value (at least 1)."""
AGREEMENT = 0.95
"""Share of images that must get the same class once weights are int8."""
CALIBRATING = 128
"""Images that show an int8 model its values; the check is made on others where there are any."""

Runner = Callable[[Tensor], Tensor]
"""A function that runs an exported file: the part's input -> its output."""


@dataclass(frozen=True)
class Exported:
    """The files that were written, and how well the exported one agrees with the original."""

    path: Path
    card: Path
    images: int
    """Number of images that it was checked on."""
    difference: float
    """Largest difference from the original's output."""
    agreement: float
    """Share of images whose most probable class is the same."""


def export(
    model: Classifier,
    images: Tensor,
    folder: Path,
    *,
    to: Format = "onnx",
    part: Part = "whole",
    int8: bool = False,
) -> Exported:
    """Write one part of a model into a folder, check it, and write a model card beside it.

    Args:
        model: the model; it is moved to the CPU.
        images: uint8 images [n, C, H, W] on which the file is compared with the original.
        folder: where to write; it is made if it does not exist.
        to: onnx, torch (a program of `torch.export`) or safetensors (weights for `load`).
        part: whole, bottom or top. The file accepts any batch size.
        int8: store weights and activations in 8 bits, for onnx only. Half of the images calibrate the
            ranges, the other half checks.

    Raises `ValueError`, and keeps no file, if its answers differ from the original's.
    """
    if int8 and to != "onnx":
        raise ValueError(
            f"--quantize int8 is there for --to onnx, not for {to}: leave it out, or export to onnx"
        )
    model = model.to("cpu")
    model.need(*HALVES[part])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{part}{'-int8' if int8 else ''}{SUFFIXES[to]}"
    calibrating, checking = images[:CALIBRATING], images
    if int8 and len(images) > 1:
        # Shuffled, because images may be sorted by class, and each half is to have all classes.
        images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
        half = min(CALIBRATING, len(images) // 2)
        calibrating, checking = images[:half], images[half:]
    with tempfile.TemporaryDirectory(dir=folder, prefix=".export-") as place:
        draft = Path(place) / path.name
        WRITERS[to](model, part, draft)
        if int8:
            onnx_file.quantize(draft, _input_of(model, part, calibrating))
        difference, agreement = check(model, part, RUNNERS[to](draft, part), checking, int8)
        os.replace(draft, path)
    exported = Exported(path, folder / "MODEL_CARD.md", len(checking), difference, agreement)
    write_whole(exported.card, card(model).encode())
    return exported


# --- the part as a plain module ------------------------------------------------------------------


class Normalize(nn.Module):
    """Normalise uint8 images [n, C, H, W] by a scale and an offset for each channel."""

    scale: Tensor
    offset: Tensor

    def __init__(self, scale: Tensor, offset: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale.view(-1, 1, 1).clone())
        self.register_buffer("offset", offset.view(-1, 1, 1).clone())

    def forward(self, images: Tensor) -> Tensor:
        """Return normalised images [n, C, H, W] in float32."""
        return images.float() * self.scale + self.offset


def _plain(module: nn.Module) -> nn.Module:
    """Return ``module`` without this package's fused operations, which other programs lack."""
    if isinstance(module, Residual | Gate):
        plain = copy.copy(module)
        plain._modules = {name: _plain(one) for name, one in module.named_children()}
        return plain
    if isinstance(module, Layers):
        # Exporters write Python code, in which a layer cannot be called ``class``.
        layers = ((f"{n}_" if iskeyword(n) else n, _plain(one)) for n, one in named_layers(module))
        return nn.Sequential(OrderedDict(layers))
    return module


def module_of(model: Classifier, part: Part) -> nn.Module:
    """Return a plain module: images to probabilities, images to features, or features to probabilities."""
    steps: dict[str, nn.Module] = {}
    if INPUTS[part] == "images":
        steps["normalize"] = Normalize(model.normalizer.scale, model.normalizer.offset)
    for half in HALVES[part]:
        steps[half] = _plain(getattr(model.network, half))
    if OUTPUTS[part] == "probabilities":
        steps["softmax"] = nn.Softmax(1)
    return nn.Sequential(OrderedDict(steps)).eval().requires_grad_(False)


def _input_of(model: Classifier, part: Part, images: Tensor) -> Tensor:
    """Return the input of ``part`` for uint8 ``images``."""
    return images if INPUTS[part] == "images" else model.features(images)


def _example(model: Classifier, part: Part) -> Tensor:
    """Return an input of two rows: with one, an exporter would fix the batch size."""
    if INPUTS[part] == "features":
        return torch.zeros(2, model.network.features)
    return torch.zeros(2, *model.shape, dtype=torch.uint8)


def about(model: Classifier, part: Part) -> dict[str, Any]:
    """Return the metadata of an exported file, by which `load` and split inference know what it is."""
    return {
        "part": part,
        "identity": model.identity,
        "digest": model.digest,
        "description": model.description.as_dict(),
    }


# --- formats -------------------------------------------------------------------------------------


def _write_onnx(model: Classifier, part: Part, path: Path) -> None:
    names, facts = (INPUTS[part], OUTPUTS[part]), about(model, part)
    onnx_file.write(module_of(model, part), _example(model, part), names, facts, path)


def _write_torch(model: Classifier, part: Part, path: Path) -> None:
    batch = torch.export.Dim("batch", min=1)
    module, inputs = module_of(model, part), (_example(model, part),)
    program = torch.export.export(module, inputs, dynamic_shapes=({0: batch},))
    content = io.BytesIO()  # on a full disk torch's own writer ends the process
    facts = {"semisfl.json": json.dumps(about(model, part))}
    torch.export.save(program, content, extra_files=facts)
    path.write_bytes(content.getvalue())


def _write_safetensors(model: Classifier, part: Part, path: Path) -> None:
    prefixes = tuple(f"{name}." for name in HALVES[part])
    weights = answering_weights(model.network)
    kept = {name: tensor for name, tensor in weights.items() if name.startswith(prefixes)}
    checkpoint.write(path, {"model": {**about(model, part), "weights": kept}})


WRITERS: dict[Format, Callable[[Classifier, Part, Path], None]] = {
    "onnx": _write_onnx,
    "torch": _write_torch,
    "safetensors": _write_safetensors,
}


def _run_safetensors(path: Path, part: Part) -> Runner:
    model = load(path)
    return {"whole": model.probabilities, "bottom": model.features, "top": model.answer}[part]


RUNNERS: dict[Format, Callable[[Path, Part], Runner]] = {
    "onnx": lambda path, _: onnx_file.File(path),
    "torch": lambda path, _: torch.export.load(path).module(),
    "safetensors": _run_safetensors,
}


# --- checking ------------------------------------------------------------------------------------


def check(
    model: Classifier, part: Part, run: Runner, images: Tensor, int8: bool
) -> tuple[float, float]:
    """Compare an exported part with the original.

    Args:
        model: the original.
        part: what was exported.
        run: runs the exported file.
        images: uint8 images [n, C, H, W]. The first is run alone, so that a fixed batch size is noticed.
        int8: whether weights were rounded: outputs may differ then, and classes must agree.

    Returns the largest difference of an output, and the share of images with equal classes. Raises `ValueError`
    if outputs differ by more than `TOLERANCE`, or with ``int8`` fewer than `AGREEMENT` of the classes agree.
    """
    inputs = _input_of(model, part, images)
    expected = model.features(images) if part == "bottom" else model.probabilities(images)
    outputs = torch.cat([run(batch) for batch in (inputs[:1], inputs[1:]) if len(batch)])
    difference = float((outputs - expected).abs().max())
    answers, originals = (
        (model.answer(outputs), model.answer(expected))
        if part == "bottom" and "top" in model.parts
        else (outputs, expected)
    )
    agreement = float((answers.argmax(1) == originals.argmax(1)).float().mean())
    allowed = TOLERANCE * max(1.0, float(expected.abs().max()))
    # `not <=`, so that NaN is a mismatch too.
    if not int8 and not difference <= allowed:
        raise ValueError(
            f"the exported {part} differs from the original by up to {difference:.2g} on "
            f"{plural(len(images), 'image')}, above {allowed:.2g}; it is not kept"
        )
    if int8 and not agreement >= AGREEMENT:
        raise ValueError(
            f"as int8 the {part} gives another class for {1 - agreement:.1%} of {plural(len(images), 'image')}, "
            f"above {1 - AGREEMENT:.0%}; it is not kept: export without --quantize, or check with "
            "more images of the kind it will see"
        )
    return difference, agreement


def images_to_check(model: Classifier, places: Sequence[Path] | None) -> Tensor:
    """Return uint8 images [n, C, H, W] on which an exported file can be checked, at most `MOST_CHECKED`.

    ``places``: image files or folders of them; None: the test images of the run's data set. Raises
    `ValueError` if there are none.
    """
    if not places:
        return _test_images(model)
    files = _spaced([file for place in places for file in files_of(place)])
    read = list(batches(files, model.shape))
    images = torch.cat([batch.images for batch in read])
    if not len(images):
        image, reason = read[0].skipped[0]
        raise ValueError(f"none of {plural(len(files), 'image')} can be read: {image}: {reason}")
    return images


def _test_images(model: Classifier) -> Tensor:
    """Return test images of the data set of the model's run, or training images if it has no test images."""
    assert model.path is not None
    try:
        about = RunDirectory.open(model.path.parent).config().data
        data = sources.load(about.name, size=about.size)
    except ValueError as error:
        raise ValueError(
            f"there are no images to check the exported model on ({error}); give some: --check IMAGES"
        ) from error
    images = data.test_images if len(data.test_images) else data.images
    return images[_spaced(range(len(images)))]


def _spaced(things: Sequence[Any]) -> list[Any]:
    """Return at most MOST_CHECKED of the things, evenly spaced: they may be sorted by class."""
    taken = min(MOST_CHECKED, len(things))
    return [things[number * len(things) // taken] for number in range(taken)]

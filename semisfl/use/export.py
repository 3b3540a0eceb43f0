"""Export a trained model for other programs: a file, checked on real images, and a model card."""

import io
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from semisfl.runs import checkpoint
from semisfl.runs.portable import answering_weights
from semisfl.settings.counts import counted
from semisfl.use import model_card, onnx_file, parts
from semisfl.use.classifier import Classifier
from semisfl.use.model_file import load
from semisfl.use.parts import INPUTS, NEEDS, OUTPUTS, Part

Format = Literal["onnx", "torch", "safetensors"]
SUFFIXES: dict[Format, str] = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}
TOLERANCE = 1e-4
"""Greatest difference of an exported part, as a share of its largest value (at least 1)."""
AGREEMENT = 0.95
"""Share of images that must get the same class once weights are int8."""
CALIBRATING = 128
"""Images that show an int8 model its values; the check is made on others where there are any."""

Runner = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Exported:
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
    """Write ``part`` of ``model`` into ``folder`` and check it on uint8 ``images``.

    If the file's answers differ from the original's, raises an error and removes the file.
    """
    if int8 and to != "onnx":
        raise ValueError(
            f"--quantize int8 is there for --to onnx, not for {to}: leave it out, or export to onnx"
        )
    if not len(images):
        raise ValueError("there is no image to check the exported model on; give some")
    model = model.to("cpu")
    model.need(*NEEDS[part])
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
        try:
            WRITERS[to](model, part, draft)
            if int8:
                onnx_file.quantize(draft, parts.input_of(model, part, calibrating))
        except OSError as error:
            error.filename = str(path)  # its own is the draft, or none
            raise
        difference, agreement = check(model, part, RUNNERS[to](draft, part), checking, int8)
        os.replace(draft, path)
    exported = Exported(path, folder / "MODEL_CARD.md", len(checking), difference, agreement)
    model_card.write(model, exported.card)
    return exported


def about(model: Classifier, part: Part) -> dict[str, Any]:
    """Return the metadata of an exported file."""
    return {
        "part": part,
        "identity": model.identity,
        "digest": model.digest,
        "description": model.description.as_dict(),
    }


# --- formats -------------------------------------------------------------------------------------


def _write_onnx(model: Classifier, part: Part, path: Path) -> None:
    names = (INPUTS[part], OUTPUTS[part])
    module = parts.module_of(model, part)
    onnx_file.write(module, parts.example(model, part), names, about(model, part), path)


def _write_torch(model: Classifier, part: Part, path: Path) -> None:
    batch = torch.export.Dim("batch", min=1)
    module, inputs = parts.module_of(model, part), (parts.example(model, part),)
    program = torch.export.export(module, inputs, dynamic_shapes=({0: batch},))
    content = io.BytesIO()  # on a full disk torch's own writer ends the process
    facts = {"semisfl.json": json.dumps(about(model, part))}
    torch.export.save(program, content, extra_files=facts)
    path.write_bytes(content.getvalue())


def _write_safetensors(model: Classifier, part: Part, path: Path) -> None:
    prefixes = tuple(f"{name}." for name in NEEDS[part])
    weights = answering_weights(model.network)
    kept = {name: tensor for name, tensor in weights.items() if name.startswith(prefixes)}
    facts = about(model, part)
    model_state = {key: facts[key] for key in ("description", "digest")} | {"weights": kept}
    checkpoint.write(path, {"model": model_state})


WRITERS: dict[Format, Callable[[Classifier, Part, Path], None]] = {
    "onnx": _write_onnx,
    "torch": _write_torch,
    "safetensors": _write_safetensors,
}


def _run_torch(path: Path, _: Part) -> Runner:
    runner: Runner = torch.export.load(path).module()
    return runner


def _run_safetensors(path: Path, part: Part) -> Runner:
    model = load(path)
    runners: dict[Part, Runner] = {
        "whole": model.probabilities,
        "bottom": model.features,
        "top": model.answer,
    }
    return runners[part]


RUNNERS: dict[Format, Callable[[Path, Part], Runner]] = {
    "onnx": lambda path, _: onnx_file.File(path),
    "torch": _run_torch,
    "safetensors": _run_safetensors,
}


# --- checking ------------------------------------------------------------------------------------


def check(
    model: Classifier, part: Part, run: Runner, images: Tensor, int8: bool
) -> tuple[float, float]:
    """Return (largest difference, share of equal classes) on ``images``; `ValueError` if they differ too much.

    One of the batches is a single image, so that a fixed batch size is noticed.
    """
    inputs = parts.input_of(model, part, images)
    expected = model.features(images) if part == "bottom" else model.probabilities(images)
    outputs = torch.cat([run(batch) for batch in (inputs[:1], inputs[1:]) if len(batch)])
    if outputs.shape != expected.shape:
        raise ValueError(
            f"the exported {part} gives {list(outputs.shape)} where the original gives "
            f"{list(expected.shape)}"
        )
    difference = float((outputs - expected).abs().max())
    answers = model.answer(outputs) if part == "bottom" and "top" in model.parts else outputs
    originals = model.probabilities(images) if answers is not outputs else expected
    agreement = float((answers.argmax(1) == originals.argmax(1)).float().mean())
    allowed = TOLERANCE * max(1.0, float(expected.abs().max()))
    # `not <=`, so that NaN is a mismatch too.
    if not int8 and not difference <= allowed:
        raise ValueError(
            f"the exported {part} differs from the original by up to {difference:.2g} on "
            f"{counted(len(images), 'image')}, above {allowed:.2g}; it is not kept"
        )
    if int8 and not agreement >= AGREEMENT:
        raise ValueError(
            f"as int8 the {part} gives another class for {1 - agreement:.1%} of {counted(len(images), 'image')}, "
            f"above {1 - AGREEMENT:.0%}; it is not kept: export without --quantize, or check with "
            "more images of the kind it will see"
        )
    return difference, agreement

"""``semisfl predict``, ``evaluate`` and ``export``: use a trained model."""

import csv
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from semisfl.cli import console
from semisfl.cli.options import Device, Json

if TYPE_CHECKING:
    from semisfl.use.classifier import Classifier, Predictions
    from semisfl.use.evaluation import Evaluation

RunOrFile = Annotated[
    Path, typer.Argument(metavar="RUN|FILE", help="A run's directory, or a .safetensors file.")
]
Top = Annotated[int, typer.Option(min=1, help="So many classes per image.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV for a spreadsheet.")]
Cut = Annotated[
    str | None, typer.Option(help="Cut after this layer instead of where it was trained.")
]
MOST_COLUMNS = 12
"""Classes up to which a terminal has room for the confusion matrix."""


def open_model(path: Path, device: str) -> "Classifier":
    from semisfl.engine.hardware import Hardware
    from semisfl.use.model_file import load

    return load(path).to(Hardware(device).device)


def cut_at(model: "Classifier", cut: str | None) -> "Classifier":
    """Cut elsewhere, if a layer's name or number is given."""
    return model if cut is None else model.recut(int(cut) if cut.isdigit() else cut)


def predict(
    run: RunOrFile,
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    top: Top = 3,
    device: Device = "auto",
    json_: Json = False,
    csv_: Csv = False,
) -> None:
    """The classes of new images, with the run's own size and normalisation."""
    found = open_model(run, device).predict(images)
    tell_predictions(found, top, as_json=json_, as_csv=csv_)


def tell_predictions(found: "Predictions", top: int, *, as_json: bool, as_csv: bool) -> None:
    """On stdout what was found, on stderr what could not be read; an error if that was everything."""
    if as_json and as_csv:
        raise ValueError("--json and --csv are two ways of printing the same; choose one")
    for skipped in found.skipped:
        console.say(f"warning: skipped {skipped.image}: {skipped.reason}")
    best = list(zip(found.names, found.top(top), strict=True))
    if as_json:
        told = [
            {"image": name, "classes": [{"name": c, "probability": p} for c, p in classes]}
            for name, classes in best
        ]
        skipped_too = [skipped._asdict() for skipped in found.skipped]
        print(json.dumps({"images": told, "skipped": skipped_too}))
    elif as_csv:
        count = min(top, len(found.classes))
        writer = csv.writer(sys.stdout, lineterminator="\n")
        ranks = range(1, count + 1)
        writer.writerow(
            ["image", *(f"{what}{n}" for n in ranks for what in ("class", "probability"))]
        )
        for name, classes in best:
            writer.writerow([name, *(cell for c, p in classes for cell in (c, f"{p:.6f}"))])
    else:
        for name, classes in best:
            print(f"{name}: {', '.join(f'{c} {100 * p:.1f} %' for c, p in classes)}")
    if not best:
        raise ValueError(f"none of the {len(found.skipped)} images could be read")


def evaluate(
    run: RunOrFile,
    data: Annotated[
        str,
        typer.Option(help="A folder of class folders (or with one, test/); or a named set."),
    ],
    out: Annotated[Path, typer.Option(help="Picture to write.")] = Path("confusion.png"),
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Accuracy, precision and recall by class, confusion matrix and calibration on labelled images."""
    from semisfl.use import evaluation, evaluation_plot

    found = evaluation.evaluate_on(open_model(run, device), data)
    for skipped in found.skipped:
        console.say(f"warning: skipped {skipped.image}: {skipped.reason}")
    if not json_:
        _print(found)
    picture = console.picture_at(out)
    if picture:
        evaluation_plot.draw(found, picture)
    if json_:
        print(json.dumps(found.as_dict() | {"picture": str(picture) if picture else None}))
    elif picture:
        print(f"picture: {picture}")


def _print(found: "Evaluation") -> None:
    print(
        f"accuracy {found.accuracy:.1f} % on {found.images} images; calibration error "
        f"{found.calibration_error:.1f} %"
    )
    table = console.table("", ("class", "images", "precision %", "recall %"))
    rows = zip(found.classes, found.confusion, found.precision, found.recall, strict=True)
    for name, row, *shares in rows:
        told = ("–" if share is None else f"{share:.1f}" for share in shares)
        table.add_row(name, str(row.sum()), *told)
    console.out.print(table)
    if len(found.classes) <= MOST_COLUMNS:
        _print_confusion(found)
    else:
        _print_worst(found)
    sys.stdout.flush()


def _print_confusion(found: "Evaluation") -> None:
    table = console.table("", ("true \\ predicted", *found.classes))
    for name, row in zip(found.classes, found.confusion.tolist(), strict=True):
        table.add_row(name, *(str(count) if count else "·" for count in row))
    console.out.print(table)


def _print_worst(found: "Evaluation") -> None:
    """What is confused most, where the whole matrix does not fit; the picture has all of it."""
    import numpy as np

    wrong = found.confusion.copy()
    np.fill_diagonal(wrong, 0)
    for place in np.argsort(wrong, axis=None)[::-1][:MOST_COLUMNS].tolist():
        true, given = divmod(place, len(found.classes))
        if count := wrong[true, given]:
            print(f"{count} images of {found.classes[true]} are taken for {found.classes[given]}")


class Format(StrEnum):
    onnx = "onnx"
    torch = "torch"
    safetensors = "safetensors"


class Part(StrEnum):
    whole = "whole"
    bottom = "bottom"
    top = "top"


class Quantization(StrEnum):
    int8 = "int8"


def export(
    run: RunOrFile,
    to: Annotated[Format, typer.Option(help="onnx, torch (a torch.export .pt2) or safetensors.")],
    part: Annotated[Part, typer.Option(help="The whole model, or a half of it.")] = Part.whole,
    quantize: Annotated[
        Quantization | None, typer.Option(help="Weights and values in 8 bits; onnx only.")
    ] = None,
    check: Annotated[
        list[Path] | None,
        typer.Option(help="Images or folders to check it on; default: the run's test images."),
    ] = None,
    cut: Cut = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder; default: export/ beside the model's file.")
    ] = None,
    json_: Json = False,
) -> None:
    """Write the model for other programs, checked against the original, with a MODEL_CARD.md."""
    from semisfl.use import export as exports
    from semisfl.use import real_images
    from semisfl.use.model_file import find

    model = open_model(run, "cpu")
    images = real_images.to_check(model, check)
    folder = out or find(run).parent / "export"
    model = cut_at(model, cut)
    made = exports.export(
        model, images, folder, to=to.value, part=part.value, int8=quantize is not None
    )
    size = made.path.stat().st_size
    if json_:
        told = {"file": str(made.path), "card": str(made.card), "bytes": size}
        checked = {"images": made.images, "difference": made.difference}
        print(json.dumps(told | checked | {"agreement": made.agreement}))
        return
    print(
        f"{made.path}: {console.amount(size)}; on {made.images} images it differs from the original by "
        f"at most {made.difference:.2g} and gives the same class for {made.agreement:.1%}"
    )
    print(f"card: {made.card}")


COMMANDS = {"predict": predict, "evaluate": evaluate, "export": export}

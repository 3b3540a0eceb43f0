"""``semisfl predict``, ``evaluate`` and ``export``: use a trained model.

A model is a run's directory, whose best checkpoint is taken, or a .safetensors file of a run or an export.
"""

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from semisfl.cli import console, output
from semisfl.cli.options import Device, Json
from semisfl.files import save_picture
from semisfl.settings.counts import amount, plural

if TYPE_CHECKING:
    from semisfl.use.classifier import Classifier, Predictions
    from semisfl.use.evaluation import Evaluation

RunOrFile = Annotated[
    Path, typer.Argument(metavar="RUN|FILE", help="A run's directory, or a .safetensors file.")
]
"""The trained model that a command uses."""
Top = Annotated[int, typer.Option(min=1, help="Classes to print per image.")]
"""The number of most probable classes that are printed for each image."""
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV.")]
"""Print comma-separated values on stdout, with a line of titles."""
Cut = Annotated[
    str | None,
    typer.Option(help="Cut the model after this layer instead of where it was cut in training."),
]
"""The layer after which the model is cut into the device's bottom and the server's top."""
MOST_COLUMNS = 12
"""A confusion matrix with more classes does not fit a terminal."""


def open_model(path: Path, device: str) -> "Classifier":
    """Return a trained model on a device, with a warning if no round of it was trained.

    Args:
        path: a run's directory, or a .safetensors file.
        device: the option ``--device``.
    """
    from semisfl.engine.hardware import Hardware
    from semisfl.use.classifier import load

    model = load(path)
    if model.rounds == 0:
        console.say(
            f"{path} is untrained: no round is done, so its answers mean nothing", "warning"
        )
    return model.to(Hardware(device).device)


def cut_at(model: "Classifier", cut: str | None) -> "Classifier":
    """Return the model cut into bottom and top at another layer.

    Args:
        model: the model.
        cut: the layer's name or its number from the first layer; None leaves the model as it is.
    """
    return model if cut is None else model.recut(int(cut) if cut.isdigit() else cut)


def predict(
    run: RunOrFile,
    images: Annotated[list[Path], typer.Argument(help="Image files, or folders of them.")],
    top: Top = 3,
    device: Device = "auto",
    json_: Json = False,
    csv_: Csv = False,
) -> None:
    """Classify new images with a trained model."""
    if not any(place.exists() for place in images):
        raise ValueError(f"{images[0]} does not exist; name image files, or folders of them")
    predictions = open_model(run, device).predict(images)
    print_predictions(predictions, top, as_json=json_, as_csv=csv_)


def print_predictions(predictions: "Predictions", top: int, *, as_json: bool, as_csv: bool) -> None:
    """Print predictions on stdout, and the images that could not be read on stderr.

    Args:
        predictions: the probabilities of each image.
        top: the number of most probable classes to print.
        as_json: print one JSON object.
        as_csv: print a line per image with its classes and their probabilities.

    Raises `ValueError` if no image could be read.
    """
    if as_json and as_csv:
        raise ValueError("--json and --csv cannot be combined; choose one")
    for skipped in predictions.skipped:
        console.say(console.printable(f"skipped {skipped.image}: {skipped.reason}"), "warning")
    # For each image the names and probabilities of its most probable classes.
    best = list(zip(predictions.names, predictions.top(top), strict=True))
    if as_json:
        plain = [
            {"image": name, "classes": [{"name": c, "probability": p} for c, p in classes]}
            for name, classes in best
        ]
        skipped_too = [skipped._asdict() for skipped in predictions.skipped]
        print(json.dumps({"images": plain, "skipped": skipped_too}))
    elif as_csv:
        ranks = range(1, min(top, len(predictions.classes)) + 1)
        titles = [f"{what}{rank}" for rank in ranks for what in ("class", "probability")]
        rows = [
            [name, *(cell for c, p in classes for cell in (c, f"{p:.6f}"))]
            for name, classes in best
        ]
        csv.writer(sys.stdout, lineterminator="\n").writerows([["image", *titles], *rows])
    else:
        for name, classes in best:
            answers = ", ".join(f"{c} {100 * p:.1f} %" for c, p in classes)
            print(console.printable(f"{name}: {answers}"))
    if not best:
        raise ValueError(f"none of {plural(len(predictions.skipped), 'image')} could be read")


def evaluate(
    run: RunOrFile,
    data: Annotated[
        str,
        typer.Option(
            help="A folder of class folders, or with test/ of them; a CSV file; or a named data set."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Picture to write.")] = Path("confusion.png"),
    device: Device = "auto",
    json_: Json = False,
) -> None:
    """Test a model on labelled images: accuracy, precision, recall, confusion matrix, calibration."""
    from semisfl.use import evaluation

    result = evaluation.evaluate_on(open_model(run, device), data)
    for skipped in result.skipped:
        console.say(console.printable(f"skipped {skipped.image}: {skipped.reason}"), "warning")
    if not json_:
        _print(result)
    picture = output.draw(out, lambda file: save_picture(evaluation.picture(result), file))
    if json_:
        print(json.dumps(result.as_dict() | {"picture": str(picture) if picture else None}))
    elif picture:
        print(f"picture: {picture}")


def _print(result: "Evaluation") -> None:
    """Print the accuracy of an evaluation, precision and recall by class, and which classes were confused."""
    print(
        f"accuracy {result.accuracy:.1f} % on {plural(result.images, 'image')}; macro-F1 {result.macro_f1:.1f} %; "
        f"calibration error {result.calibration_error:.1f} %"
    )
    table = output.table("", ("class", "images", "precision %", "recall %"))
    names = [console.printable(name) for name in result.classes]
    rows = zip(names, result.confusion, result.precision, result.recall, strict=True)
    for name, row, *shares in rows:
        cells = (output.known(share, "{:.1f}".format) for share in shares)
        table.add_row(name, str(row.sum()), *cells)
    output.show(table)
    if len(names) <= MOST_COLUMNS:
        _print_confusion(names, result)
    else:
        _print_worst(names, result)
    sys.stdout.flush()


def _print_confusion(names: list[str], result: "Evaluation") -> None:
    """Print a line for each true class with the number of images by predicted class."""
    table = output.table("", ("true \\ predicted", *names))
    for name, row in zip(names, result.confusion.tolist(), strict=True):
        table.add_row(name, *(str(count) if count else "·" for count in row))
    output.show(table)


def _print_worst(names: list[str], result: "Evaluation") -> None:
    """Print the most frequent confusions; the picture has the whole matrix."""
    import numpy as np

    wrong = result.confusion.copy()
    np.fill_diagonal(wrong, 0)
    for place in np.argsort(wrong, axis=None)[::-1][:MOST_COLUMNS].tolist():
        true, guess = divmod(place, len(names))
        if count := wrong[true, guess]:
            print(f"{names[true]} classified as {names[guess]}: {plural(count, 'image')}")


def export(
    run: RunOrFile,
    to: Annotated[
        Literal["onnx", "torch", "safetensors"],
        typer.Option(help="onnx, torch (a torch.export .pt2) or safetensors."),
    ],
    part: Annotated[
        Literal["whole", "bottom", "top"], typer.Option(help="Which part of the model to write.")
    ] = "whole",
    quantize: Annotated[
        Literal["int8"] | None,
        typer.Option(help="Store weights and activations in 8 bits; onnx only."),
    ] = None,
    check: Annotated[
        list[Path] | None,
        typer.Option(help="Images to check the file with; default: the run's test images."),
    ] = None,
    cut: Cut = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder; default: export/ beside the model's file.")
    ] = None,
    json_: Json = False,
) -> None:
    """Write the model for other programs, check the file against the original, add a MODEL_CARD.md.

    The file is run on the images of the check: the differences of its probabilities are printed and kept in the card.
    """
    from semisfl.use import export as exports
    from semisfl.use.classifier import find

    model = open_model(run, "cpu")
    images = exports.images_to_check(model, check)
    folder = out or find(run).parent / "export"
    model = cut_at(model, cut)
    made = exports.export(model, images, folder, to=to, part=part, int8=quantize is not None)
    size = made.path.stat().st_size
    if json_:
        written = {"file": str(made.path), "card": str(made.card), "bytes": size}
        checked = {"images": made.images, "difference": made.difference}
        print(json.dumps(written | checked | {"agreement": made.agreement}))
        return
    print(
        f"{made.path}: {amount(size)}; on {plural(made.images, 'image')} it differs from the original by "
        f"at most {made.difference:.2g} and gives the same class for {made.agreement:.1%}"
    )
    print(f"card: {made.card}")

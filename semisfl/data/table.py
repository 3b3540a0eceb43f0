"""Read a CSV file that lists images: ``path,label`` with a header line, and if wanted ``split,client``.

Paths are relative to the file's own folder. An empty label means unknown. ``split`` is train (also if
empty) or test. ``client`` names the client that holds an image without a label.
"""

import csv
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from semisfl.data.decode import Listing, Source, open_image
from semisfl.data.folder import class_name

COLUMNS = ("path", "label", "split", "client")


def source(file: Path) -> Source:
    """Return the images that a CSV file lists; every line is checked before any image is read.

    Raises ValueError with the number of the first line that makes no sense.
    """
    lines = _lines(file)
    # Training images first, then test images; within each the file's order.
    lines.sort(key=lambda line: line["split"] == "test")
    paths = [file.parent / line["path"] for line in lines]
    return Source(file.stem, (file, *paths), lambda: _listing(lines, paths))


def test_images(file: Path) -> list[tuple[str, Path]]:
    """Return class and path of the test images; of all images with a label if no line has a split."""
    lines = _lines(file)
    if any(line["split"] for line in lines):
        lines = [line for line in lines if line["split"] == "test"]
    images = [(line["label"], file.parent / line["path"]) for line in lines if line["label"]]
    if not images:
        raise ValueError(f"{file} lists no test image; add lines with a label and split = test")
    return images


def _lines(file: Path) -> list[dict[str, str]]:
    """Return the lines as texts by column; raise ValueError for the first that makes no sense."""
    lines: list[dict[str, str]] = []
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            reader = csv.DictReader(text)
            reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
            if missing := {"path", "label"} - set(reader.fieldnames):
                raise ValueError(
                    f"{file} lacks the columns {', '.join(sorted(missing))}; commas separate columns"
                )
            for values in reader:
                lines.append(_line(file, reader.line_num, values))
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text; save it as CSV in UTF-8") from error
    if not lines:
        raise ValueError(f"{file} lists no image; add a line per image")
    places = Counter(os.path.normpath(line["path"]) for line in lines)
    if twice := [path for path, count in places.items() if count > 1]:
        # It would have two labels, or be trained and tested on.
        raise ValueError(f"{file} lists {twice[0]!r} twice; list it once")
    return lines


def _line(file: Path, number: int, values: Mapping[str | None, str | None]) -> dict[str, str]:
    """Return one line's texts by column; raise ValueError if it names no file or contradicts itself."""
    line = {column: (values.get(column) or "").strip() for column in COLUMNS}
    line["label"] = class_name(line["label"])
    where = f"{file}, line {number}"
    if not line["path"] or not (file.parent / line["path"]).is_file():
        raise ValueError(
            f"{where}: {line['path']!r} is no file; paths are relative to {file.parent}"
        )
    if line["split"] not in ("", "train", "test"):
        raise ValueError(f"{where}: split = {line['split']!r}; use train or test")
    if line["client"] and (line["label"] or line["split"] == "test"):
        raise ValueError(
            f"{where}: client = {line['client']!r} holds an image without a label, for training; "
            "empty label and split, or client"
        )
    return line


def _listing(lines: list[dict[str, str]], paths: list[Path]) -> Listing:
    classes = sorted({line["label"] for line in lines if line["label"]})
    holders = sorted({line["client"] for line in lines if line["client"]})
    number = {name: place for place, name in enumerate(classes)}
    holder = {name: place for place, name in enumerate(holders)}
    return Listing(
        names=[line["path"] for line in lines],
        open=lambda place: open_image(paths[place]),
        labels=np.array([number.get(line["label"], -1) for line in lines], np.int64),
        trains=sum(line["split"] != "test" for line in lines),
        classes=tuple(classes),
        holders=tuple(holders),
        holder=np.array([holder.get(line["client"], -1) for line in lines], np.int64),
    )

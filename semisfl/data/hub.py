"""Read named data sets from the Hugging Face hub, or from a local copy without a network.

A local copy is a ``save_to_disk`` directory, or a directory of parquet files named by their split
(``train-00000-of-00001.parquet``), as the hub's repositories hold them. The package ``datasets``
is an extra and imported only here.
"""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image as PILImage

from semisfl.data.decode import Listing, Source, open_image
from semisfl.settings.catalog import NamedData

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels")
TEST_SPLITS = ("test", "validation")


def is_copy(path: Path) -> bool:
    """Return whether a directory is a ``save_to_disk`` copy or holds parquet files."""
    return path.is_dir() and ((path / "dataset_dict.json").exists() or bool(_parquet(path)))


def copy(path: Path, subset: str | None = None) -> Source:
    """Return the set in a local copy; ``subset`` names one of the sets of a copy that has several."""
    if subset and (path / subset).is_dir():
        return copy(path / subset)
    if (path / "dataset_dict.json").exists():
        files = tuple(sorted(file for file in path.rglob("*") if file.is_file()))
        return Source(path.name, files, lambda: listing(_library().load_from_disk(str(path))))
    files = _parquet(path)
    splits: dict[str, list[str]] = {}
    for file in files:
        splits.setdefault(file.stem.split("-")[0], []).append(str(file))
    return Source(
        path.name,
        files,
        lambda: listing(_library().load_dataset("parquet", data_files=splits)),
    )


def _parquet(path: Path) -> tuple[Path, ...]:
    """Return the parquet files here or one folder down, as in the hub's repositories."""
    return tuple(sorted([*path.glob("*.parquet"), *path.glob("*/*.parquet")]))


def download(entry: NamedData) -> Source:
    """Fetch a named set from the hub; the library keeps it in its own cache.

    Raises ValueError if the package ``datasets`` is not installed or the hub cannot be reached.
    """
    library = _library()
    try:
        splits = library.load_dataset(entry.repository, entry.subset)
    except Exception as error:  # the network fails in the ways of three libraries
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{entry.name} could not be fetched from the hub ({entry.repository}: {first_line}); "
            "point SEMISFL_DATA at a local copy"
        ) from error
    files = {Path(part["filename"]) for held in splits.values() for part in held.cache_files}
    return Source(entry.name, tuple(sorted(files)), lambda: listing(splits))


def _library() -> ModuleType:
    try:
        library = importlib.import_module("datasets")
        library.load_dataset  # noqa: B018  a folder called datasets would import just as well
    except (ImportError, AttributeError):
        raise ValueError(
            "the package 'datasets' is not installed: pip install 'semisfl[datasets]', or point "
            "SEMISFL_DATA at packed .npz files or image folders"
        ) from None
    return library


def listing(splits: Any, image: str | None = None, label: str | None = None) -> Listing:
    """List the images of a set's splits (name -> table): train, unlabelled, then test.

    ``image`` and ``label`` name the columns; None: the usual names are looked for. Raises ValueError if a
    split or a column is missing.
    """
    test = next((name for name in TEST_SPLITS if name in splits), None)
    if "train" not in splits or test is None:
        raise ValueError(
            f"the splits {', '.join(splits)} lack 'train', or one of {', '.join(TEST_SPLITS)}"
        )
    order = ["train", *(["unlabeled"] if "unlabeled" in splits else []), test]
    image = _column(splits["train"], (image,) if image else IMAGE_COLUMNS)
    label = _column(splits["train"], (label,) if label else LABEL_COLUMNS)
    bytes_only = _library().Image(decode=False)  # so that our own allow-list of formats holds
    tables = [splits[name].cast_column(image, bytes_only) for name in order]
    labels = [
        np.full(len(table), -1) if name == "unlabeled" else np.array(table[label][:], np.int64)
        for name, table in zip(order, tables, strict=True)
    ]
    starts = np.cumsum([0, *(len(table) for table in tables)])

    def open_at(place: int) -> PILImage.Image:
        table = int(np.searchsorted(starts, place, side="right")) - 1
        cell = tables[table][place - int(starts[table])][image]
        return open_image(cell["bytes"] or Path(cell["path"]))

    known = getattr(splits["train"].features[label], "names", None)
    return Listing(
        names=[
            f"{name} image {n}"
            for name, t in zip(order, tables, strict=True)
            for n in range(len(t))
        ],
        open=open_at,
        labels=np.concatenate(labels),
        trains=int(starts[-2]),
        classes=tuple(known or map(str, range(int(labels[0].max()) + 1))),
    )


def _column(table: Any, names: tuple[str, ...]) -> str:
    column = next((name for name in names if name in table.column_names), None)
    if column is None:
        raise ValueError(
            f"none of the columns {', '.join(names)} is among {', '.join(table.column_names)}"
        )
    return column

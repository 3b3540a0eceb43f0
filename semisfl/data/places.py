"""Find out what kind of data set lies at a path."""

from pathlib import Path

from semisfl.data import folder, hub, npz, table
from semisfl.data.decode import Source


def at(path: Path, subset: str | None = None) -> Source | None:
    """Return the source at a path, or None if nothing is there."""
    if folder.has_classes(path):  # whatever else lies beside them
        return folder.source(path)
    if hub.is_copy(path):
        return hub.copy(path, subset)
    if files := npz.find(path):
        return npz.source(files)
    if path.is_dir():
        return folder.source(path)
    if path.suffix.lower() == ".csv" and path.is_file():
        return table.source(path)
    if path.exists():
        raise ValueError(f"{path} is no data set; give a folder of images, a .csv or a .npz file")
    return None

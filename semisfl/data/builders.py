"""Check and convert what people have for `Dataset`: arrays, torch and Hugging Face data sets."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from semisfl.data import hub, npz
from semisfl.data.decode import Listing, Unsupported, check_mode


def class_names(classes: Any) -> tuple[str, ...]:
    """Return the names of classes as text: a checkpoint holds no numbers of numpy and no bytes."""
    if not isinstance(classes, Iterable):
        raise ValueError(f"classes is {classes!r}; it must be a list of the classes' names")
    return tuple(one.decode() if isinstance(one, bytes) else str(one) for one in classes)


def channel_values(name: str, values: Any) -> tuple[float, ...]:
    """Return ``values``, the mean or the deviation of each channel, as Python's floats."""
    try:
        return tuple(float(value) for value in values)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {values!r}; it must be one number per channel") from None


def array_fields(
    images: Any,
    labels: Any,
    test_images: Any,
    test_labels: Any,
    unlabeled: Any,
    classes: Sequence[str] | None,
) -> dict[str, Any]:
    """Return the fields of a `Dataset` from arrays, all but mean and standard deviation."""
    pixels = _pixels(images, "images")
    numbers, names = _numbers(labels, "labels", classes)
    tested, names = _numbers(test_labels, "test_labels", names)
    if unlabeled is not None:
        more = _pixels(unlabeled, "unlabeled")
        if more.shape[1:] != pixels.shape[1:]:
            raise ValueError(
                f"unlabeled images are {list(more.shape[1:])} but images are "
                f"{list(pixels.shape[1:])} (channels, height, width); resize one of them"
            )
        pixels = torch.cat([pixels, more])
        numbers = torch.cat([numbers, torch.full((len(more),), -1, device="cpu")])
    if names is None:
        names = _numbered(torch.cat([numbers, tested]).numpy())
    return {
        "classes": names,
        "images": pixels,
        "labels": numbers,
        "test_images": _pixels(test_images, "test_images"),
        "test_labels": tested,
    }


def _pixels(values: Any, name: str) -> torch.Tensor:
    """Return uint8 images [n, C, H, W]."""
    array = _array(values, name)
    if array.dtype.kind == "f":
        if array.size and not (array.min() >= 0 and array.max() <= 1):  # NaN fails too
            raise ValueError(
                f"{name} holds floats from {array.min():g} to {array.max():g}; give uint8 values, or "
                "floats from 0 to 1 (not normalised)"
            )
        array = np.round(array * 255).astype(np.uint8)
    return torch.from_numpy(np.ascontiguousarray(npz.with_channels(array, name)))


def _array(values: Any, name: str) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    if isinstance(values, np.ndarray):
        return values
    if isinstance(values, list | tuple):
        try:
            return np.asarray(values)
        except ValueError as error:  # pieces of different shapes
            raise ValueError(f"{name} is a list whose parts differ in shape; {error}") from error
    raise TypeError(
        f"{name} is a {type(values).__name__}; it must be a numpy array or a torch tensor"
    )


def _numbers(
    values: Any, name: str, classes: Sequence[str] | None
) -> tuple[torch.Tensor, tuple[str, ...] | None]:
    """Return labels as numbers, and the class names if they are known."""
    array = _array(values, name)
    known = class_names(classes) if classes is not None else None
    if array.ndim != 1:
        raise ValueError(
            f"{name} is {array.dtype} {list(array.shape)}; it must be [n], one whole number or class name per "
            "image"
        )
    if array.dtype.kind in "iu":
        return torch.from_numpy(array.astype(np.int64)), known
    if array.dtype.kind == "S":
        array = np.char.decode(array, "utf-8")
    words_as_objects = array.dtype.kind == "O" and all(isinstance(word, str) for word in array)
    if array.dtype.kind in "UT" or words_as_objects:
        words = [str(word) for word in array.tolist()]
        known = known or tuple(sorted(set(words)))
        place = {name: number for number, name in enumerate(known)}
        if other := sorted(set(words) - set(place)):
            raise ValueError(f"{name} names the class {other[0]!r}; known are {', '.join(known)}")
        return torch.tensor([place[word] for word in words], dtype=torch.int64, device="cpu"), known
    raise ValueError(
        f"{name} is {array.dtype} {list(array.shape)}; it must hold whole numbers or class names"
    )


def _numbered(labels: np.ndarray) -> tuple[str, ...]:
    """Return the numbers 0, 1, ... as names of the classes; raise ValueError if one has no image."""
    classes = range(int(labels.max(initial=-1)) + 1)
    if missing := sorted(set(classes) - set(labels.tolist())):
        raise ValueError(
            f"no image has the label {missing[0]}, and the highest is {classes[-1]}; number the classes from 0 "
            "on without gaps, or name them all with classes=[...]"
        )
    return tuple(map(str, classes))


def torch_listing(train: Any, test: Any, unlabeled: Any, classes: Sequence[str] | None) -> Listing:
    """List the images of torch data sets, whose items are (image, label)."""
    parts = [("train", train), *([("unlabeled", unlabeled)] if unlabeled is not None else [])]
    parts.append(("test", test))
    for name, part in parts:
        if not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
            raise TypeError(
                f"{name} is a {type(part).__name__}; it must be a torch data set with a length and "
                "items (image, label)"
            )
    items = [(name, part, place) for name, part in parts for place in range(len(part))]
    labels = np.array([_label(*item) for item in items], np.int64)
    names = classes if classes is not None else getattr(train, "classes", None)
    if names is None:
        names = _numbered(labels)
    return Listing(
        names=[f"{name} image {place}" for name, _, place in items],
        open=lambda number: _picture(*items[number]),
        labels=labels,
        trains=len(items) - len(test),
        classes=class_names(names),
    )


def _item(name: str, part: Any, place: int) -> tuple[Any, Any]:
    item = part[place]
    if isinstance(item, tuple | list) and len(item) >= 2:
        return item[0], item[1]
    if name == "unlabeled":
        return item, -1
    raise TypeError(
        f"item {place} of {name} is a {type(item).__name__}; it must be a pair (image, label)"
    )


def _label(name: str, part: Any, place: int) -> int:
    """Return the label of an item; raise the reason if its image or its label cannot be used."""
    image, label = _item(name, part, place)
    _as_picture(image, f"the image of item {place} of {name}")
    if name == "unlabeled":
        return -1
    try:
        number = int(label)
        if number != label and not isinstance(label, str):
            raise ValueError
        return number
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise TypeError(
            f"the label of item {place} of {name} is {label!r}; it must be a whole number"
        ) from None


def _picture(name: str, part: Any, place: int) -> Image.Image:
    image = _as_picture(_item(name, part, place)[0], f"the image of item {place} of {name}")
    copied = image.copy()
    copied.format = image.format  # by which 16-bit grey is known
    return copied


def _as_picture(image: Any, name: str) -> Image.Image:
    """Return an item's image as a Pillow image; raise ValueError or TypeError if it cannot be used."""
    if not isinstance(image, Image.Image):
        array = _array(image, name)
        return npz.picture(_pixels(array[None], name)[0].numpy())
    try:
        check_mode(image)
    except Unsupported as error:
        raise ValueError(f"{name} cannot be used: {error}") from None
    return image


def hf_listing(dataset: Any, image: str | None, label: str | None) -> Listing:
    """List the images of a Hugging Face ``DatasetDict``."""
    if not isinstance(dataset, Mapping) or not all(
        hasattr(part, "cast_column") for part in dataset.values()
    ):
        raise TypeError(
            f"dataset is a {type(dataset).__name__}; it must be a Hugging Face DatasetDict with the "
            "splits train and test, e.g. of datasets.load_dataset(...)"
        )
    return hub.listing(dataset, image, label)

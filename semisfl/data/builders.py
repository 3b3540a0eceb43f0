"""Convert what people have into the fields of a `Dataset` (arrays) or a `Listing` (torch data sets)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from semisfl.data import npz
from semisfl.data.decode import Listing, check_mode


def class_names(classes: Any) -> tuple[str, ...]:
    """Return the names of classes as texts: a checkpoint holds no numbers of numpy and no bytes."""
    return tuple(one.decode() if isinstance(one, bytes) else str(one) for one in classes)


def array_fields(
    images: Any,
    labels: Any,
    test_images: Any,
    test_labels: Any,
    unlabeled: Any,
    classes: Sequence[str] | None,
) -> dict[str, Any]:
    """Return the fields of a `Dataset` from arrays, all but mean and standard deviation.

    The arguments are those of `Dataset.from_arrays`. Raises ValueError for shapes, types and ranges that cannot be
    images or labels.
    """
    pixels = _pixels(images, "images")
    numbers, names = _numbers(labels, "labels", classes)
    tested, names = _numbers(test_labels, "test_labels", names)
    if unlabeled is not None:
        more = _pixels(unlabeled, "unlabeled")
        pixels = torch.cat([pixels, more])
        numbers = torch.cat([numbers, torch.full((len(more),), -1, device="cpu")])
    if names is None:
        names = _number_names(torch.cat([numbers, tested]).numpy())
    return {
        "classes": names,
        "images": pixels,
        "labels": numbers,
        "test_images": _pixels(test_images, "test_images"),
        "test_labels": tested,
    }


def _pixels(values: Any, name: str) -> torch.Tensor:
    """Return uint8 images [n, C, H, W] from uint8 values, or from floats from 0 to 1."""
    array = _array(values)
    if array.dtype.kind == "f":
        if array.size and not (array.min() >= 0 and array.max() <= 1):  # NaN fails too
            raise ValueError(
                f"{name} holds floats from {array.min():g} to {array.max():g}; give uint8 values, or "
                "floats from 0 to 1 (not normalised)"
            )
        array = np.round(array * 255).astype(np.uint8)
    return torch.from_numpy(np.ascontiguousarray(npz.with_channels(array, name)))


def _array(values: Any) -> np.ndarray:
    """Return a tensor on any device, an array or nested lists as an array."""
    return np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)


def _numbers(
    values: Any, name: str, classes: Sequence[str] | None
) -> tuple[torch.Tensor, tuple[str, ...] | None]:
    """Return labels as int64 [n], and the class names if they are known; labels may be class names."""
    array = _array(values)
    known = class_names(classes) if classes is not None else None
    if array.ndim == 1 and array.dtype.kind in "iu":
        return torch.from_numpy(array.astype(np.int64)), known
    if array.ndim != 1 or array.dtype.kind not in "USTO":
        raise ValueError(
            f"{name} is {array.dtype} {list(array.shape)}; it must be [n], one whole number or class name per "
            "image"
        )
    words = class_names(array.tolist())
    known = known or tuple(sorted(set(words)))
    if other := sorted(set(words) - set(known)):
        raise ValueError(f"{name} names the class {other[0]!r}; known are {', '.join(known)}")
    places = [known.index(word) for word in words]
    return torch.tensor(places, dtype=torch.int64, device="cpu"), known


def _number_names(labels: np.ndarray) -> tuple[str, ...]:
    """Return the numbers 0, 1, ... as names of the classes; raise ValueError if one has no image."""
    classes = range(int(labels.max(initial=-1)) + 1)
    if missing := sorted(set(classes) - set(labels.tolist())):
        raise ValueError(
            f"no image has the label {missing[0]}, and the highest is {classes[-1]}; number the classes from 0 "
            "on without gaps, or name them all with classes=[...]"
        )
    return tuple(map(str, classes))


def torch_listing(train: Any, test: Any, unlabeled: Any, classes: Sequence[str] | None) -> Listing:
    """List the images of torch data sets, whose items are pairs (image, label).

    Items of ``unlabeled`` may also be images alone. ``classes`` None: those of ``train``, else numbers.
    Raises ValueError if a class without a name has no image.
    """
    parts = {"train": train, "unlabeled": unlabeled, "test": test}
    items = [
        (name, part, place)
        for name, part in parts.items()
        if part is not None
        for place in range(len(part))
    ]
    labels = np.array(
        [-1 if part is unlabeled else int(part[place][1]) for _, part, place in items], np.int64
    )
    names = classes if classes is not None else getattr(train, "classes", None)

    def opened(number: int) -> Image.Image:
        name, part, place = items[number]
        item = part[place]
        return _picture(item[0] if isinstance(item, tuple | list) else item, name)

    return Listing(
        names=[f"{name} image {place}" for name, _, place in items],
        open=opened,
        labels=labels,
        trains=len(items) - len(test),
        classes=class_names(names) if names is not None else _number_names(labels),
    )


def _picture(image: Any, name: str) -> Image.Image:
    """Return an item's image as a Pillow image that its reader may close."""
    if not isinstance(image, Image.Image):
        return npz.picture(_pixels(_array(image)[None], name)[0].numpy())
    check_mode(image)
    copied = image.copy()
    copied.format = image.format  # by which 16-bit grey is known
    return copied

"""A few augmented views of each image, drawn once: for a frozen bottom, which encodes them for good.

The draws follow from the run's seed, the client and the image, so that a client draws the same views again, whatever
images it has beside this one.
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from semisfl import seeds
from semisfl.data import augment
from semisfl.data.augment import Augmentation

KINDS = ("weak", "strong")
"""The kinds of views, in the order in which an image has them."""

DIGEST_BYTES = 16
"""Bytes of a `content_digest`."""


def content_digest(tensor: Tensor) -> str:
    """Return the digest of a tensor's values, as 32 hexadecimal digits: of an image [C, H, W], its identity."""
    return hashlib.blake2b(
        tensor.cpu().contiguous().numpy().data, digest_size=DIGEST_BYTES
    ).hexdigest()


def views_of(
    images: Tensor,
    digests: Sequence[str],
    client: str,
    counts: Mapping[str, int],
    augmentation: Augmentation,
    seed: int,
) -> Tensor:
    """Return the views of uint8 images [n, C, H, W] as [n, views, C, H, W], the weak views of each image first.

    ``digests``: the `content_digest` of each image; ``client``: its name in the run; ``counts``: how many views of each kind.
    """
    made = []
    for kind, apply in zip(KINDS, (augment.weak, augment.strong), strict=True):
        draw = getattr(augmentation, f"draw_{kind}")
        # All images at once: a generator of its own for each takes longer than a GPU's bottom.
        rng = seeds.Streams([seeds.derive(seed, "view", client, one, kind) for one in digests])
        draws = draw(rng, (len(images), counts[kind]), *images.shape[2:])
        views = apply(images.repeat_interleave(counts[kind], 0), draws)
        made.append(views.unflatten(0, (len(images), -1)))
    return torch.cat(made, 1)

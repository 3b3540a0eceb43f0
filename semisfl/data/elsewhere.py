"""Take unlabelled images from another place than the labelled ones (``data.unlabeled``)."""

from dataclasses import replace

import numpy as np
import torch

from semisfl.data.dataset import Dataset


def join(labeled: Dataset, unlabeled: Dataset) -> Dataset:
    """Return one data set: the server's images first, then the clients'.

    Of ``labeled`` only the labelled training images and the test images are used. Of ``unlabeled``
    the test images are left out, and if it has client folders, also images outside them. The
    clients' labels are kept, for the partition and statistics, if both sets have the same classes.
    """
    known = labeled.labels >= 0
    if not known.any():
        raise ValueError(
            f"{labeled.name} has no labelled training images for the server; add some, or set data.name to another set"
        )
    if torch.equal(labeled.images, unlabeled.images):
        raise ValueError(
            "data.unlabeled has the images of data.name, and clients would hold the labelled ones; leave it out: "
            "they hold the rest of data.name"
        )
    # Images outside client folders, or in a single one, are divided among all clients.
    holders = unlabeled.clients if unlabeled.clients and len(unlabeled.clients) > 1 else None
    images, labels, clients = unlabeled.images, unlabeled.labels, None
    served = int(known.sum())
    if holders:
        taken = np.sort(np.concatenate(list(holders.values())))
        images, labels = images[taken], labels[taken]
        clients = {name: served + np.searchsorted(taken, rows) for name, rows in holders.items()}
    if unlabeled.classes != labeled.classes:
        labels = torch.full_like(labels, -1)
    return replace(
        labeled,
        images=torch.cat([labeled.images[known], images]),
        labels=torch.cat([labeled.labels[known], labels]),
        clients=clients,
        served=served,
        notes=(*labeled.notes, *unlabeled.notes),
    )

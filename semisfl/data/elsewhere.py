"""Unlabelled images from another place than the labelled ones: ``data.unlabeled``."""

from dataclasses import replace

import numpy as np
import torch

from semisfl.data.sources import Dataset


def join(labeled: Dataset, unlabeled: Dataset) -> Dataset:
    """One set whose first images are the server's, all others the clients'.

    What the server's set has besides labelled training images is left out, and so are the test images
    of the other one, and what no client's folder there holds if it has such folders. Labels of the
    clients' images are kept, for the partition and the statistics, where the classes are the same ones.
    """
    known = labeled.labels >= 0
    if not known.any():
        raise ValueError(f"{labeled.name} has no labelled training images for the server")
    # Loose images, or those of one folder, are for all clients.
    holders = unlabeled.clients if unlabeled.clients and len(unlabeled.clients) > 1 else None
    taken = np.arange(len(unlabeled.images))
    if holders:
        taken = np.sort(np.concatenate(list(holders.values())))
    images, labels = unlabeled.images[taken], unlabeled.labels[taken]
    if unlabeled.classes != labeled.classes:
        labels = torch.full_like(labels, -1)
    served = int(known.sum())
    clients = None
    if holders:
        clients = {name: served + np.searchsorted(taken, rows) for name, rows in holders.items()}
    return replace(
        labeled,
        images=torch.cat([labeled.images[known], images]),
        labels=torch.cat([labeled.labels[known], labels]),
        clients=clients,
        served=served,
        notes=(*labeled.notes, *unlabeled.notes),
    )

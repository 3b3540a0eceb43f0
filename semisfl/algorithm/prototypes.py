"""Classes' mean keys, to be held against in place of single keys; beyond the paper, and off unless set."""

import torch
from torch.nn import functional as F

from semisfl.algorithm.losses import References


@torch.no_grad()
def prototypes(references: References, classes: int) -> References:
    """For each class the direction of the mean of the keys that may be its positives, if there are any."""
    columns = torch.arange(classes, device=references.labels.device)
    member = (references.labels.unsqueeze(1) == columns) & references.positive.unsqueeze(1)
    member = member & references.present.unsqueeze(1)
    # Not in the models' precision, to which a matrix product would be cast.
    with torch.autocast(references.keys.device.type, enabled=False):
        means = F.normalize(member.float().t() @ references.keys.float(), dim=1)
    there = member.any(0)
    return References(means, columns, there, there)

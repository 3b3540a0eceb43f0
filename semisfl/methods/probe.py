"""The linear probe: logistic regression on the frozen network's features of the labelled images; nothing is sent.

It is the rival of every run that begins with trained weights, and where such a run's last linear layer begins.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from semisfl.data.labeled import LabeledImages
from semisfl.engine.inference import outputs
from semisfl.engine.regression import regression, span
from semisfl.methods.base import Setup
from semisfl.metrics import MethodMetrics

FOLDS = 5
DECAYS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
"""Weight decays of standardised features that cross-validation tries, strongest first."""
WEAK_VIEWS = 3
"""Weak views of each labelled image beside the image itself."""
ROUGH = 3e-3
"""The tolerance of a fit that is only compared with others."""


class Probe:
    """Fit the last linear layer to the labelled images in the first round; later rounds change nothing."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.student = setup, setup.model.whole()

    def round(self, round_index: int) -> MethodMetrics:
        """Fit the head in round 0; report the mean cross-entropy of the views that it is fitted to."""
        loss = None
        if round_index == 0:
            with self.setup.hardware.arithmetic():
                loss = fit_head(self.student, self.setup.labeled, self.setup.classes)
        return MethodMetrics(learning_rate=0.0, supervised_steps=0, loss_supervised=loss)

    def tested(self) -> Mapping[str, nn.Module]:
        """Return the network with its fitted head."""
        return {"student": self.student}

    def state_dict(self) -> dict[str, Any]:
        return {"student": self.student.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.student.load_state_dict(state["student"])


def fit_head(model: nn.Module, labeled: LabeledImages, classes: int) -> float:
    """Make the last linear layer of ``model`` the logistic regression of its inputs; return its mean cross-entropy.

    ``model`` is bottom and top, and keeps its other layers. It is fitted to every labelled image and a few
    weak views of it. The weight decay is the one with the best accuracy in cross-validation on the labelled images.
    Raises ValueError if the model does not end with a linear layer.
    """
    bottom, top = cast(tuple[nn.Module, nn.Sequential], model.children())
    if not isinstance(head := top[-1], nn.Linear):
        raise ValueError(
            f"the model's last layer is {type(head).__name__}; a linear probe needs one that ends with a linear layer"
        )
    body, labels = nn.Sequential(bottom, top[:-1]), labeled.labels
    features = torch.cat([*outputs(body, labeled.views(WEAK_VIEWS), labeled.normalized)]).float()
    with torch.autocast(features.device.type, enabled=False):
        # Standardised, so that one decay suits all; the last column is the bias, and without one the mean must stay.
        bias = float(head.bias is not None)
        mean, scale = bias * features.mean(0), features.std(0).clamp(min=1e-6)
        # In double precision: in single precision the loss is too coarse to find the end of a flat valley.
        features = ((features - mean) / scale).double()
        # The optimum lies in the span of the rows, and a fit in its few columns is the fit in all of them.
        basis = span(features)
        columns = F.pad(features @ basis, (0, 1), value=bias)
        decay, views = best_decay(columns.float(), labels, classes), labels.repeat(1 + WEAK_VIEWS)
        fitted = regression(columns, views, decay, classes)
        loss = float(F.cross_entropy(columns @ fitted.T, views))
        weight, offset = (fitted[:, :-1] @ basis.T).float(), fitted[:, -1].float()
    with torch.no_grad():
        head.weight.copy_(weight / scale)
        if head.bias is not None:
            head.bias.copy_(offset - head.weight @ mean)
    return loss


def best_decay(features: Tensor, labels: Tensor, classes: int) -> float:
    """Return the weight decay of `DECAYS` with the best accuracy in cross-validation, then the least cross-entropy.

    ``features``: [views * images, d + 1], first those of the images themselves. An image is left out with all its
    views, and each class is spread over the folds.
    """
    member, views = F.one_hot(labels, classes), len(features) // len(labels)
    fold = ((member.cumsum(0) * member).sum(1) - 1) % FOLDS
    scores = torch.zeros(len(DECAYS), 2, dtype=torch.float64)
    for out in (fold == number for number in range(FOLDS)):
        if not out.any() or out.all():  # nothing to test, or nothing to learn from
            continue
        kept, weight = ~out.repeat(views), None
        for score, decay in zip(scores, DECAYS, strict=True):
            weight = regression(
                features[kept], labels.repeat(views)[kept], decay, classes, weight, ROUGH
            )
            logits = features[: len(labels)][out] @ weight.T
            score[0] += int((logits.argmax(1) == labels[out]).sum())
            score[1] -= float(F.cross_entropy(logits, labels[out], reduction="sum"))
    return DECAYS[max(range(len(DECAYS)), key=lambda index: scores[index].tolist())]

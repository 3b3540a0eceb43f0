"""Use a trained model: classes of new images, accuracy on a test set."""

import numpy as np
import torch
from torch import Tensor, nn

from semisfl.data.augment import Normalizer
from semisfl.data.dataset import Dataset
from semisfl.engine.inference import outputs


def predict(model: nn.Module, images: Tensor | np.ndarray, data: Dataset) -> Tensor:
    """Return class probabilities [n, classes] of uint8 images, normalised as ``data`` was in training."""
    if isinstance(images, np.ndarray):
        images = torch.from_numpy(np.ascontiguousarray(images))
    if images.dtype != torch.uint8 or images.shape[1:] != data.images.shape[1:]:
        raise ValueError(
            f"images are {images.dtype} {list(images.shape)}; the model was trained on torch.uint8 "
            f"[n, {', '.join(map(str, data.images.shape[1:]))}]"
        )
    device = next(model.parameters()).device
    normalize = Normalizer.of(data.mean, data.std).to(device)
    answers = outputs(model, images, lambda part: normalize(part.to(device)))
    parts = [logits.softmax(1).cpu() for logits in answers]
    return torch.cat(parts) if parts else torch.empty(0, len(data.classes), device="cpu")


def evaluate(model: nn.Module, data: Dataset) -> float:
    """Return the accuracy in percent on the test images of ``data``."""
    if not len(data.test_labels):
        raise ValueError(
            f"data set {data.name!r} has no test images; evaluate on data that has some"
        )
    chosen = predict(model, data.test_images, data).argmax(1)
    return 100 * int((chosen == data.test_labels.cpu()).sum()) / len(chosen)

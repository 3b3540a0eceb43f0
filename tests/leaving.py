"""A fleet whose clients stop answering, for the split methods' tests."""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from semisfl.fleet.base import Features, Fleet


def leave(
    fleet: Fleet, missing: Collection[int], watch: Callable[[Features], None] = lambda _: None
) -> list[Tensor]:
    """From now on ``missing`` never answer. ``watch`` sees each step's features before the server
    does; the gradients sent back in each step are collected in the list returned."""
    forward, backward = fleet.forward, fleet.backward
    whole: list[Features] = []
    sent: list[Tensor] = []

    def partly() -> Features:
        features = forward()
        whole.append(features)
        rows = torch.cat([there(features, client) for client in features.clients])
        truth = features.truth[rows] if features.truth is not None else None
        left = Features(
            features.student.detach()[rows].requires_grad_(),
            features.teacher[rows],
            tuple(client for client in features.clients if client not in missing),
            truth,
        )
        watch(left)
        return left

    def there(features: Features, client: int) -> Tensor:
        first = features.clients.index(client) * features.batch
        return torch.arange(first, first if client in missing else first + features.batch)

    def padded(gradients: Tensor) -> None:
        sent.append(gradients.clone())
        everybody = torch.zeros_like(whole[-1].student)
        rows = torch.cat([there(whole[-1], client) for client in whole[-1].clients])
        backward(everybody.index_copy(0, rows, gradients))

    fleet.forward, fleet.backward = partly, padded  # type: ignore[method-assign]
    return sent

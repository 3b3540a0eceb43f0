"""The teacher: an exponential moving average of the student, parameters and buffers alike."""

import copy

import torch
from torch import Tensor, nn


def as_view(flat: Tensor, shape: torch.Size, *lead: int) -> Tensor:
    """``flat`` as ``lead`` + ``shape``; convolution weights lie channels-last, as the kernels want them."""
    if len(shape) == 4:
        out, channels, height, width = shape
        return flat.view(*lead, out, height, width, channels).movedim(-1, -3)
    return flat.view(*lead, *shape)


def flatten_storage(module: nn.Module) -> Tensor:
    """Move all floating-point parameters and buffers into one tensor; they become views of it.

    A moving average of a whole model is then a single operation.
    """
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    flat = torch.empty(sum(t.numel() for t in tensors), device=tensors[0].device, dtype=tensors[0].dtype)
    start = 0
    for tensor in tensors:
        view = as_view(flat[start : start + tensor.numel()], tensor.shape)
        view.copy_(tensor.data)
        tensor.data = view
        start += tensor.numel()
    return flat


class Teacher:
    """Follows ``student``; starts as its copy, never receives gradients, always in eval mode.

    With ``warmup`` the decay of the t-th update (t = 1, 2, ...) is min(1 - 1/(t+1), decay), as in
    the published code; without, it is ``decay`` from the start, as in the paper. BatchNorm's
    running statistics are averaged with the weights; its batch counter is copied.
    """

    def __init__(self, student: nn.Module, decay: float, warmup: bool = True) -> None:
        self.model = copy.deepcopy(student).eval().requires_grad_(False)
        self.decay = decay
        self.warmup = warmup
        self._student = student
        self._source = flatten_storage(student)
        self._target = flatten_storage(self.model)
        self._counters = [
            (mine, theirs)
            for mine, theirs in zip(self.model.buffers(), student.buffers(), strict=True)
            if not mine.is_floating_point()
        ]
        self.updates = torch.zeros((), device=self._target.device)

    @torch.no_grad()
    def update(self) -> None:
        """w~ <- m w~ + (1 - m) w."""
        first = next(self._student.parameters())
        assert first.data_ptr() == self._source.data_ptr(), "the student's weights moved elsewhere"
        self.updates.add_(1)
        if self.warmup:
            keep = (1 - 1 / (self.updates + 1)).clamp(max=self.decay)
        else:
            keep = torch.full_like(self.updates, self.decay)
        self._target.lerp_(self._source, 1 - keep)
        for mine, theirs in self._counters:
            mine.copy_(theirs)

    def state_dict(self) -> dict[str, Tensor]:
        return {"updates": self.updates, **{f"model.{k}": v for k, v in self.model.state_dict().items()}}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.updates.copy_(state["updates"])
        self.model.load_state_dict({k.removeprefix("model."): v for k, v in state.items() if k != "updates"})


@torch.no_grad()
def follow(target: nn.Module, source: nn.Module, keep: Tensor) -> None:
    """target <- keep target + (1 - keep) source, buffers included; counters are copied."""
    mine, theirs = target.state_dict(), source.state_dict()
    for name, tensor in mine.items():
        if tensor.is_floating_point():
            tensor.lerp_(theirs[name], 1 - keep)
        else:
            tensor.copy_(theirs[name])

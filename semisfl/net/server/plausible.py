"""What is believed of the values a client sends."""

from collections.abc import Mapping

from torch import Tensor

ABSURD = 1e6
"""No feature, weight or statistic of a working model is anywhere near this large."""
MOST_COUNTED = 2**53
"""The most a counter may say: up to here a mean of counters, taken in doubles, is exact."""


def unbelievable(tensors: Mapping[str, Tensor]) -> str | None:
    """What is wrong with values that came from a client; None if they may be used."""
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        low, high = (float(value) for value in tensor.aminmax())
        most = ABSURD if tensor.is_floating_point() else float(MOST_COUNTED)
        # Comparisons with NaN are false, so this catches NaN too.
        if not (low >= -most and high <= most):
            return f"{name} runs from {low:g} to {high:g}; at most {most:g} either way is believed"
        if name.endswith(("running_var", "num_batches_tracked")) and low < 0:
            return f"{name} goes down to {low:g}; it cannot be negative"
    return None

"""Operations in two forms, plain PyTorch and Triton for CUDA; PyTorch's dispatcher chooses.

`register_cuda` adds the CUDA forms where Triton works; without it a GPU uses the plain ones too.

A new operation is a function in `plain` with its schema, a fused form in a file of its own, an entry
in `cuda_forms.FORMS`, and a test that holds the two against each other in Triton's interpreter.
"""

import logging
from functools import lru_cache

from semisfl.engine.kernels.plain import (
    LIBRARY,
    bias_relu_pool,
    contrast,
    conv_norm_relu_pool,
    conv_relu_pool,
    cross_entropy,
    ema_step,
    linear_relu,
    norm_relu_pool,
    normalized_row,
    sgd_step,
    stacked_conv,
    stacked_conv_relu_pool,
    unit_rows,
)

__all__ = [
    "bias_relu_pool",
    "contrast",
    "conv_norm_relu_pool",
    "conv_relu_pool",
    "cross_entropy",
    "ema_step",
    "linear_relu",
    "norm_relu_pool",
    "normalized_row",
    "register_cuda",
    "sgd_step",
    "stacked_conv",
    "stacked_conv_relu_pool",
    "unit_rows",
]

log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def register_cuda() -> bool:
    """Register the CUDA form of every operation, once per process.

    Returns False, with a warning unless Triton is missing, where the forms do not work; nothing is
    registered then.
    """
    try:
        from semisfl.engine.kernels import cuda_forms
    except ImportError:
        return False
    try:
        cuda_forms.try_out()
    except Exception as error:  # Triton, the compiler and the driver each fail in their own way
        log.warning("the fused GPU kernels do not work here and plain ones are used: %r", error)
        return False
    for name, form in cuda_forms.FORMS.items():
        # Registered under the autograd key, because the forms bring their own backward passes.
        for key in ("AutogradCUDA", "CUDA"):
            LIBRARY.impl(name, form, key)
    return True

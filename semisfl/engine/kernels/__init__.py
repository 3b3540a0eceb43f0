"""Operations in two forms, plain PyTorch and Triton for CUDA; PyTorch's dispatcher chooses.

`register_cuda` adds the CUDA forms where Triton works; without it a GPU uses the plain ones too.
"""

import logging
from functools import lru_cache

from semisfl.engine.kernels.plain import LIBRARY
from semisfl.engine.kernels.plain import bias_relu_pool as bias_relu_pool
from semisfl.engine.kernels.plain import contrast as contrast
from semisfl.engine.kernels.plain import conv_norm_relu_pool as conv_norm_relu_pool
from semisfl.engine.kernels.plain import conv_relu_pool as conv_relu_pool
from semisfl.engine.kernels.plain import cross_entropy as cross_entropy
from semisfl.engine.kernels.plain import ema_step as ema_step
from semisfl.engine.kernels.plain import linear_relu as linear_relu
from semisfl.engine.kernels.plain import norm_relu_pool as norm_relu_pool
from semisfl.engine.kernels.plain import normalized_row as normalized_row
from semisfl.engine.kernels.plain import sgd_step as sgd_step
from semisfl.engine.kernels.plain import stacked_conv as stacked_conv
from semisfl.engine.kernels.plain import stacked_conv_relu_pool as stacked_conv_relu_pool
from semisfl.engine.kernels.plain import unit_rows as unit_rows

log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def register_cuda() -> bool:
    """Register the CUDA form of every operation; return False if Triton is missing or does not work."""
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

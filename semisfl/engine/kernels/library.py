"""Everything that is fused, by name. Imported only on a GPU with Triton."""

import torch

from semisfl.engine.kernels.contrast import contrast
from semisfl.engine.kernels.convolution import FEW, conv_relu
from semisfl.engine.kernels.images import normalized_row
from semisfl.engine.kernels.pooling import bias_relu
from semisfl.engine.kernels.update import follow, sgd

__all__ = [
    "FEW",
    "bias_relu",
    "contrast",
    "conv_relu",
    "follow",
    "normalized_row",
    "sgd",
    "try_out",
]


def try_out() -> None:
    """Compile and run the smallest kernel, so that a machine on which that fails is known early."""
    target, source = torch.zeros(8, device="cuda"), torch.ones(8, device="cuda")
    work = torch.zeros(8, device="cuda", dtype=torch.bfloat16)
    follow(target, source, work, torch.zeros((), device="cuda"))
    if not torch.equal(target, source):
        raise RuntimeError("a fused kernel gave a wrong result")

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Select and normalise the images of one step from those of a round, in one pass.

The step's number is a tensor on the device, so that a captured step shows other images in each replay.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _normalized_row(
    views, counter, scale, offset, out, size,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    channel = place % CHANNELS
    image, pixel = place // (CHANNELS * PIXELS), place // CHANNELS % PIXELS
    source = tl.load(counter) * size + (image * CHANNELS + channel) * PIXELS + pixel
    value = tl.load(views + source, mask=inside, other=0).to(tl.float32)
    value = tl.load(offset + channel) + value * tl.load(scale + channel)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


def normalized_row(
    views: Tensor, counter: Tensor, scale: Tensor, offset: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return `plain.normalized_row` of images on a GPU, channels-last in memory."""
    _, images, channels, height, width = views.shape
    out = torch.empty(
        (images, channels, height, width),
        device=views.device,
        dtype=dtype,
        memory_format=torch.channels_last,
    )
    _normalized_row[(triton.cdiv(out.numel(), BLOCK),)](
        views, counter, scale, offset, out, out.numel(),
        PIXELS=height * width, CHANNELS=channels, BLOCK=BLOCK,
    )  # fmt: skip
    return out

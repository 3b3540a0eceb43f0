# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""The kernels of `convolution`: a convolution as a matrix product whose left side is gathered.

Images are channels-last, weights [output, row, column, input]; the third axis of a launch is the
client. Few input channels (an image's three) are gathered entry by entry; more, a stretch of one
pixel's channels at a time.

Capital letters are the fields of `convolution.Geometry`: height and width before (H, W) and after
(OH, OW), channels in and out (CI, CO), the weight's rows and columns (KH, KW), padding and strides.
BM, BN and BK are the tile's rows, columns and depth of one product.
"""

import triton
import triton.language as tl

from semisfl.engine.kernels.pooling import CLOSED


@triton.jit
def _place(m, height: tl.constexpr, width: tl.constexpr):
    """Return image, row and column of pixel ``m``."""
    return m // (height * width), m % (height * width) // width, m % width


@triton.jit
def _gathered(
    x, image, row, column, k, known, H: tl.constexpr, W: tl.constexpr, CI: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Return entries ``k`` of the windows that start at ``row``, ``column``; 0 outside the image."""
    down, right = k // (KW * CI), k // CI % KW
    there = known[:, None] & (k < KH * KW * CI)[None, :]
    if PADDED:
        r, c = row[:, None] + down[None, :], column[:, None] + right[None, :]
        there = there & (r >= 0) & (r < H) & (c >= 0) & (c < W)
    start, shift = ((image * H + row) * W + column) * CI, (down * W + right) * CI + k % CI
    return tl.load(x + start[:, None] + shift[None, :], mask=there, other=0.0)


@triton.jit
def _channels(x, image, row, column, k, known, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr):
    """Return channels ``k`` of single pixels; 0 outside the image."""
    there = (row >= 0) & (row < H) & (column >= 0) & (column < W) & known
    return tl.load(
        x + (((image * H + row) * W + column) * C)[:, None] + k[None, :],
        mask=there[:, None] & (k < C)[None, :],
        other=0.0,
    )


@triton.jit
def convolve(
    x, weight, bias, known, out, which, weight_stride, bias_stride, images,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, CI: tl.constexpr,
    CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr,
    POOL: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr, RELU: tl.constexpr,
    KEEP: tl.constexpr, GATHER: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute one result per window of POOL x POOL pixels; the pixels of a window are computed in turn.

    ``DOWN`` and ``RIGHT`` are the strides. ``known`` holds the statistics of `moments`.
    """
    client = tl.program_id(2).to(tl.int64)
    # Evaluation batches have any number of images; do not compile the kernel again for each.
    count = images * ((OH // POOL) * (OW // POOL))
    chunks: tl.constexpr = (CI + BK - 1) // BK
    x += client * images * (H * W * CI)
    weight += client * weight_stride
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    image, window_row, window_column = _place(m, OH // POOL, OW // POOL)
    best = tl.full([BM, BN], float("-inf"), tl.float32)
    chosen = tl.zeros([BM, BN], tl.int8)
    for corner in range(POOL * POOL):
        row = (window_row * POOL + corner // POOL) * DOWN - PAD_H
        column = (window_column * POOL + corner % POOL) * RIGHT - PAD_W
        total = tl.zeros([BM, BN], tl.float32)
        if GATHER:
            for start in range(0, KH * KW * CI, BK):
                k = start + tl.arange(0, BK)
                left = _gathered(
                    x, image, row, column, k, m < count, H, W, CI, KH, KW, PAD_H + PAD_W > 0
                )
                exists = (k < KH * KW * CI)[:, None] & (n < CO)[None, :]
                right = tl.load(
                    weight + n[None, :] * (KH * KW * CI) + k[:, None], mask=exists, other=0.0
                )
                total = tl.dot(left, right, total)
        else:
            for turn in range(KH * KW * chunks):
                tap = turn // chunks
                k = turn % chunks * BK + tl.arange(0, BK)
                r, c = row + tap // KW, column + tap % KW
                left = _channels(x, image, r, c, k, m < count, H, W, CI)
                right = tl.load(
                    weight + (n * (KH * KW * CI) + tap * CI)[None, :] + k[:, None],
                    mask=(k < CI)[:, None] & (n < CO)[None, :],
                    other=0.0,
                )
                total = tl.dot(left, right, total)
        if NORMED:
            place = known + (2 * tl.num_programs(2) + client) * CO + n
            total *= tl.load(place, mask=n < CO, other=0.0)[None, :]
            total += tl.load(place + tl.num_programs(2) * CO, mask=n < CO, other=0.0)[None, :]
        # A NaN wins: it must not be hidden.
        wins = (total > best) | (total != total)
        best = tl.where(wins, total, best)
        chosen = tl.where(wins, corner, chosen).to(tl.int8)
    if BIASED:
        place = bias + client * bias_stride + n
        best += tl.load(place, mask=n < CO, other=0.0).to(tl.float32)[None, :]
    target = client * count * CO + m[:, None] * CO + n[None, :]
    inside = (m < count)[:, None] & (n < CO)[None, :]
    if RELU:
        is_open = (best > 0) | (best != best)
        if KEEP:
            tl.store(which + target, tl.where(is_open, chosen, CLOSED).to(tl.uint8), mask=inside)
        best = tl.where(is_open, best, 0.0)
    tl.store(out + target, best.to(out.dtype.element_ty), mask=inside)


@triton.jit
def to_input(
    grad, weight, out, weight_stride,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, CI: tl.constexpr,
    CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr,
    IMAGES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the images, a tile of [pixels, input channels] per program.

    Every tap of the weight is one product with the upstream pixels that it met in the forward pass.
    """
    client = tl.program_id(2).to(tl.int64)
    count: tl.constexpr = IMAGES * H * W
    grad += client * (IMAGES * OH * OW * CO)
    weight += client * weight_stride
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    image, row, column = _place(m, H, W)
    row += PAD_H
    column += PAD_W
    total = tl.zeros([BM, BN], tl.float32)
    chunks: tl.constexpr = (CO + BK - 1) // BK
    for turn in range(KH * KW * chunks):
        tap = turn // chunks
        k = turn % chunks * BK + tl.arange(0, BK)
        r, c = row - tap // KW, column - tap % KW
        met = m < count
        if DOWN * RIGHT > 1:
            met = met & (r >= 0) & (c >= 0) & (r % DOWN == 0) & (c % RIGHT == 0)
            r, c = r // DOWN, c // RIGHT
        left = _channels(grad, image, r, c, k, met, OH, OW, CO)
        right = tl.load(
            weight + (k * (KH * KW * CI) + tap * CI)[:, None] + n[None, :],
            mask=(k < CO)[:, None] & (n < CI)[None, :],
            other=0.0,
        )
        total = tl.dot(left, right, total)
    tl.store(
        out + client * (count * CI) + m[:, None] * CI + n[None, :],
        total.to(out.dtype.element_ty),
        mask=(m < count)[:, None] & (n < CI)[None, :],
    )


@triton.jit
def to_weight(
    x, grad, out,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, CI: tl.constexpr,
    CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr,
    IMAGES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one tap of the weight, summed over all pixels: [output, input] channels per program."""
    client = tl.program_id(2).to(tl.int64)
    count: tl.constexpr = IMAGES * OH * OW
    x += client * (IMAGES * H * W * CI)
    grad += client * (count * CO)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    tiles: tl.constexpr = (CI + BN - 1) // BN
    tap = tl.program_id(1) // tiles
    n = tl.program_id(1) % tiles * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, count, BK):
        pixel = start + tl.arange(0, BK)
        image, row, column = _place(pixel, OH, OW)
        r, c = row * DOWN + tap // KW - PAD_H, column * RIGHT + tap % KW - PAD_W
        known = pixel < count
        left = tl.load(
            grad + pixel[:, None] * CO + m[None, :],
            mask=known[:, None] & (m < CO)[None, :],
            other=0.0,
        )
        right = _channels(x, image, r, c, n, known, H, W, CI)
        total = tl.dot(tl.trans(left), right, total)
    tl.store(
        out + client * (CO * KH * KW * CI) + ((m * (KH * KW) + tap) * CI)[:, None] + n[None, :],
        total.to(out.dtype.element_ty),
        mask=(m < CO)[:, None] & (n < CI)[None, :],
    )


@triton.jit
def to_few_weights(
    x, grad, which, out, sums,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, CI: tl.constexpr,
    CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr,
    IMAGES: tl.constexpr, POOL: tl.constexpr, RELU: tl.constexpr, PARTS: tl.constexpr,
    TURNS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute a part of the sum over pixels of the gradients of a small weight and of the bias.

    Reads the gradient of the pooled image; ``which`` is the position of the maximum in each window.
    """
    client = tl.program_id(2).to(tl.int64)
    count: tl.constexpr = IMAGES * (OH // POOL) * (OW // POOL)
    x += client * (IMAGES * H * W * CI)
    tiles: tl.constexpr = (KH * KW * CI + BN - 1) // BN
    m = tl.program_id(1) // tiles * BM + tl.arange(0, BM)
    n = tl.program_id(1) % tiles * BN + tl.arange(0, BN)
    total = tl.zeros([BM, BN], tl.float32)
    of_bias = tl.zeros([BM], tl.float32)
    for turn in range(TURNS):
        pixel = (tl.program_id(0) + turn * PARTS) * BK + tl.arange(0, BK)
        inside = (pixel < count)[:, None] & (m < CO)[None, :]
        source = client * (count * CO) + pixel[:, None] * CO + m[None, :]
        value = tl.load(grad + source, mask=inside, other=0.0)
        chosen = tl.zeros([BK, BM], tl.int32)
        if RELU:
            chosen = tl.load(which + source, mask=inside, other=CLOSED).to(tl.int32)
        of_bias += tl.sum(tl.where(chosen == CLOSED, 0.0, value.to(tl.float32)), axis=0)
        image, window_row, window_column = _place(pixel, OH // POOL, OW // POOL)
        for corner in range(POOL * POOL):
            row = (window_row * POOL + corner // POOL) * DOWN - PAD_H
            column = (window_column * POOL + corner % POOL) * RIGHT - PAD_W
            right = _gathered(
                x, image, row, column, n, pixel < count, H, W, CI, KH, KW, PAD_H + PAD_W > 0
            )
            left = tl.where(chosen == corner, value, 0.0).to(right.dtype)
            total = tl.dot(tl.trans(left), right, total)
    part = tl.program_id(0) * tl.num_programs(2) + tl.program_id(2)
    tl.store(
        out + part.to(tl.int64) * (CO * KH * KW * CI) + m[:, None] * (KH * KW * CI) + n[None, :],
        total,
        mask=(m < CO)[:, None] & (n < KH * KW * CI)[None, :],
    )
    if tl.program_id(1) % tiles == 0:
        tl.store(sums + part * CO + m, of_bias, mask=m < CO)

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""The kernels of `normalisation`: BatchNorm, ReLU and 2 x 2 pooling of several clients in few passes.

Images are channels-last, client after client; the third axis of a launch is the client. The
statistics of the channels (mean, 1 / deviation, factor and offset) are [4, clients, channels]. Only
the images before BatchNorm are kept for the backward pass, which computes again which pixel of a
window was the maximum and whether its ReLU is open.

Arguments: ``across`` and ``down`` are the pooled width and height, ``count`` the windows or pixels of
one client, ``parts`` the programs that share a sum, ``turns`` the tiles that each of them computes.
"""

import triton
import triton.language as tl


@triton.jit
def _known(rows, row: tl.constexpr, client, c, channels):
    """Return row ``row`` of the statistics of a client's channels."""
    source = (row * tl.num_programs(2) + client) * channels + c
    return tl.load(rows + source, mask=c < channels, other=0.0)[None, :]


@triton.jit
def _corner(pixel, corner: tl.constexpr, across, down, width, height, POOL: tl.constexpr):
    """Return the offsets of a window's pixel in the unpooled image, and a mask of those inside it."""
    line = pixel // across
    row, column = POOL * (line % down) + corner // POOL, POOL * (pixel % across) + corner % POOL
    return ((line // down) * height + row) * width + column, (row < height) & (column < width)


@triton.jit
def moments(
    x, sums, count, channels, parts, turns, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute parts of each channel's sum and sum of squares, relative to the channel's first value."""
    client = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    x += client * count * channels
    first = tl.load(x + c, mask=c < channels, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([PIXELS, CHANNELS], tl.float32)
    squares = tl.zeros([PIXELS, CHANNELS], tl.float32)
    for turn in range(turns):
        pixel = (tl.program_id(0) + turn * parts) * PIXELS + tl.arange(0, PIXELS)
        inside = (pixel < count)[:, None] & (c < channels)[None, :]
        value = tl.load(x + pixel[:, None] * channels + c[None, :], mask=inside, other=0.0)
        distance = tl.where(inside, value.to(tl.float32) - first, 0.0)
        total += distance
        squares += distance * distance
    target = sums + (tl.program_id(0) * tl.num_programs(2) + client) * 2 * channels + c
    tl.store(target, tl.sum(total, axis=0), mask=c < channels)
    tl.store(target + channels, tl.sum(squares, axis=0), mask=c < channels)


@triton.jit
def _added(sums, client, c, channels, parts, ROWS: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the two totals of the partial ``sums``."""
    one = tl.zeros([ROWS, CHANNELS], tl.float32)
    two = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in range(0, parts, ROWS):
        part = start + tl.arange(0, ROWS)
        source = ((part * tl.num_programs(2) + client) * 2 * channels)[:, None] + c[None, :]
        inside = (part < parts)[:, None] & (c < channels)[None, :]
        one += tl.load(sums + source, mask=inside, other=0.0)
        two += tl.load(sums + source + channels, mask=inside, other=0.0)
    return tl.sum(one, axis=0), tl.sum(two, axis=0)


@triton.jit
def settle(
    x, sums, shift, weight, bias, running_mean, running_var, known,
    shift_stride, weight_stride, bias_stride, mean_stride, var_stride,
    count, channels, parts, momentum, eps,
    TRAINING: tl.constexpr, SHIFTED: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute a channel's mean, 1 / deviation, and the factor and offset that normalise it.

    ``shift`` moves only the running mean.
    """
    client = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = c < channels
    offset = tl.zeros([CHANNELS], tl.float32)
    if SHIFTED:
        offset = tl.load(shift + client * shift_stride + c, mask=there, other=0.0).to(tl.float32)
    running_mean += client * mean_stride + c
    running_var += client * var_stride + c
    mean = tl.load(running_mean, mask=there, other=0.0) - offset
    variance = tl.load(running_var, mask=there, other=1.0)
    if TRAINING:
        one, two = _added(sums, client, c, channels, parts, ROWS, CHANNELS)
        first = tl.load(x + client * count * channels + c, mask=there, other=0.0).to(tl.float32)
        distance = one / count
        own = tl.maximum(two / count - distance * distance, 0.0)
        kept = 1 - momentum
        tl.store(
            running_mean,
            kept * (mean + offset) + momentum * (first + distance + offset),
            mask=there,
        )
        unbiased = own * (count / (count - 1.0))
        tl.store(running_var, kept * variance + momentum * unbiased, mask=there)
        mean, variance = first + distance, own
    inverse = 1.0 / tl.sqrt(variance + eps)
    factor = inverse * tl.load(weight + client * weight_stride + c, mask=there, other=0.0)
    beta = tl.load(bias + client * bias_stride + c, mask=there, other=0.0)
    step = tl.num_programs(2) * channels
    known += client * channels + c
    tl.store(known, mean, mask=there)
    tl.store(known + step, inverse, mask=there)
    tl.store(known + 2 * step, factor, mask=there)
    tl.store(known + 3 * step, beta - mean * factor, mask=there)


@triton.jit
def normalise(
    x, known, out, count, channels, across, down, width, height,
    RELU: tl.constexpr, POOL: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Normalise, apply ReLU and pool: ``count`` windows per client."""
    client = tl.program_id(2).to(tl.int64)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (pixel < count)[:, None] & (c < channels)[None, :]
    factor, offset = _known(known, 2, client, c, channels), _known(known, 3, client, c, channels)
    x += client * (count // (across * down)) * (width * height) * channels
    best = tl.full([PIXELS, CHANNELS], float("-inf"), tl.float32)
    for corner in tl.static_range(0, POOL * POOL):
        source, _ = _corner(pixel, corner, across, down, width, height, POOL)
        value = tl.load(x + source[:, None] * channels + c[None, :], mask=inside, other=0.0)
        value = value.to(tl.float32) * factor + offset
        # A NaN wins, as in PyTorch: it must not be hidden.
        best = tl.where((value > best) | (value != value), value, best)
    if RELU:
        best = tl.where((best > 0) | (best != best), best, 0.0)
    target = client * count * channels + pixel[:, None] * channels + c[None, :]
    tl.store(out + target, best.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _chosen(
    x, pixel, c, inside, factor, offset, channels, across, down, width, height,
    RELU: tl.constexpr, POOL: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Return each window's maximum before BatchNorm, its position, and whether its ReLU is open."""
    best = tl.full([PIXELS, CHANNELS], float("-inf"), tl.float32)
    values = tl.zeros([PIXELS, CHANNELS], tl.float32)
    which = tl.zeros([PIXELS, CHANNELS], tl.int32)
    for corner in tl.static_range(0, POOL * POOL):
        source, _ = _corner(pixel, corner, across, down, width, height, POOL)
        raw = tl.load(x + source[:, None] * channels + c[None, :], mask=inside, other=0.0)
        value = raw.to(tl.float32) * factor + offset
        wins = (value > best) | (value != value)
        best = tl.where(wins, value, best)
        values = tl.where(wins, raw.to(tl.float32), values)
        which = tl.where(wins, corner, which)
    is_open = inside
    if RELU:
        is_open = inside & ((best > 0) | (best != best))
    return values, which, is_open


@triton.jit
def reduce(
    x, grad, known, sums, count, channels, across, down, width, height, parts, turns,
    RELU: tl.constexpr, POOL: tl.constexpr, PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute parts of two sums over windows: gradient, and gradient times normalised value."""
    client = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    mean, inverse = _known(known, 0, client, c, channels), _known(known, 1, client, c, channels)
    factor, offset = _known(known, 2, client, c, channels), _known(known, 3, client, c, channels)
    x += client * (count // (across * down)) * (width * height) * channels
    grad += client * count * channels
    one = tl.zeros([PIXELS, CHANNELS], tl.float32)
    two = tl.zeros([PIXELS, CHANNELS], tl.float32)
    for turn in range(turns):
        pixel = (tl.program_id(0) + turn * parts) * PIXELS + tl.arange(0, PIXELS)
        inside = (pixel < count)[:, None] & (c < channels)[None, :]
        values, _, is_open = _chosen(
            x, pixel, c, inside, factor, offset, channels, across, down, width, height,
            RELU, POOL, PIXELS, CHANNELS,
        )  # fmt: skip
        upstream = tl.load(grad + pixel[:, None] * channels + c[None, :], mask=inside, other=0.0)
        upstream = tl.where(is_open, upstream.to(tl.float32), 0.0)
        one += upstream
        two += upstream * (values - mean) * inverse
    target = sums + (tl.program_id(0) * tl.num_programs(2) + client) * 2 * channels + c
    tl.store(target, tl.sum(one, axis=0), mask=c < channels)
    tl.store(target + channels, tl.sum(two, axis=0), mask=c < channels)


@triton.jit
def settle_back(
    sums, known, of_weight, of_bias, coefficients, count, channels, parts,
    TRAINING: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of weight and bias, and two coefficients per channel for `to_raw`.

    In training a value's gradient also depends linearly on the value, through mean and deviation: the
    coefficients are the factor and the offset of that line.
    """
    client = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = c < channels
    one, two = _added(sums, client, c, channels, parts, ROWS, CHANNELS)
    place = client * channels + c
    tl.store(of_bias + place, one, mask=there)
    tl.store(of_weight + place, two, mask=there)
    if TRAINING:
        step = tl.num_programs(2) * channels
        mean = tl.load(known + place, mask=there, other=0.0)
        inverse = tl.load(known + step + place, mask=there, other=0.0)
        factor = tl.load(known + 2 * step + place, mask=there, other=0.0)
        slope = -factor * inverse * two / count
        tl.store(coefficients + place, slope, mask=there)
        tl.store(coefficients + step + place, -factor * one / count - slope * mean, mask=there)


@triton.jit
def to_raw(
    x, grad, known, coefficients, out, count, channels, across, down, width, height, full_across, full_down,
    RELU: tl.constexpr, POOL: tl.constexpr, TRAINING: tl.constexpr,
    PIXELS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient before BatchNorm. Its windows (``full_``) include an odd last row or column."""
    client = tl.program_id(2).to(tl.int64)
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    factor, offset = _known(known, 2, client, c, channels), _known(known, 3, client, c, channels)
    images = count // (full_across * full_down)
    start = client * images * (width * height) * channels
    line = pixel // full_across
    row, column = line % full_down, pixel % full_across
    pooled = ((line // full_down) * down + row) * across + column
    there = (pixel < count)[:, None] & (c < channels)[None, :]
    whole = there & ((row < down) & (column < across))[:, None]
    _, which, is_open = _chosen(
        x + start, pixel, c, whole, factor, offset, channels, full_across, full_down, width, height,
        RELU, POOL, PIXELS, CHANNELS,
    )  # fmt: skip
    grad += client * images * (across * down) * channels
    upstream = tl.load(grad + pooled[:, None] * channels + c[None, :], mask=whole, other=0.0)
    upstream = tl.where(is_open, upstream.to(tl.float32), 0.0) * factor
    for corner in tl.static_range(0, POOL * POOL):
        source, exists = _corner(pixel, corner, full_across, full_down, width, height, POOL)
        place = start + source[:, None] * channels + c[None, :]
        inside = there & exists[:, None]
        value = tl.where(which == corner, upstream, 0.0)
        if TRAINING:
            raw = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
            value += raw * _known(coefficients, 0, client, c, channels)
            value += _known(coefficients, 1, client, c, channels)
        tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)

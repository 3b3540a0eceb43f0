"""Augmentation against Pillow, and the draws against the chances they claim to follow."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from semisfl.data import augment, operations
from semisfl.data.augment import Augmentation, Normalizer, StrongDraws, WeakDraws
from semisfl.data.operations import OPERATIONS, TABLE_PIXELS
from semisfl.seeds import Streams, derive, generator

SIZES = [(32, 32), (28, 28), (23, 40)]  # height, width
LEVELS = [sign * level for level in range(1, 10) for sign in (1, -1)]


def pictures(mode: str, height: int, width: int) -> list[Image.Image]:
    """Shaded backgrounds, shapes with hard edges and grain, as in photographs; and hard cases."""
    rng = generator(7, "pictures", mode, height, width)
    y, x = np.mgrid[:height, :width] / max(height, width)
    made = []
    for number in range(5):
        waves = [np.sin(rng.uniform(2, 9) * x + rng.uniform(2, 9) * y) for _ in range(3)]
        shade = rng.uniform(60, 200, 3) + rng.uniform(10, 50, 3) * np.stack(waves, -1)
        image = Image.fromarray(shade.clip(0, 255).astype(np.uint8))
        draw = ImageDraw.Draw(image)
        for _ in range(4):
            left, top = int(rng.integers(0, width)), int(rng.integers(0, height))
            color = tuple(int(value) for value in rng.integers(0, 256, 3))
            draw.ellipse((left, top, left + width // 3, top + height // 4), fill=color)
            draw.line((left, top, *rng.integers(0, width, 2)), fill=color[::-1])
        grain = rng.normal(0, 2 + 3 * number, (height, width, 3))
        made.append(Image.fromarray((np.asarray(image) + grain).clip(0, 255).astype(np.uint8)))
    made.append(Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)))
    made.append(Image.new("RGB", (width, height), (3, 200, 77)))  # one value a channel
    nearly_black = Image.new("RGB", (width, height))  # too few other pixels to equalise
    nearly_black.putpixel((width // 2, 3), (255, 9, 80))
    made.append(nearly_black)
    return [image.convert(mode) for image in made]


def to_tensor(images: list[Image.Image]) -> torch.Tensor:
    arrays = [np.atleast_3d(np.asarray(image)).transpose(2, 0, 1) for image in images]
    return torch.from_numpy(np.stack(arrays))


def by_affine(*matrix: float) -> Callable[[Image.Image], Image.Image]:
    return lambda image: image.transform(image.size, Image.Transform.AFFINE, matrix)


def pillow(name: str, image: Image.Image, level: int) -> Image.Image:
    """The operation as published, on one image."""
    strength = abs(level)
    factor = strength * 0.9 / 10 + 0.05
    shear, shift = level * 0.3 / 10, level * 0.3 / 10
    table: dict[str, Callable[[Image.Image], Image.Image]] = {
        "autocontrast": ImageOps.autocontrast,
        "equalize": ImageOps.equalize,
        "identity": lambda i: i,
        "brightness": lambda i: ImageEnhance.Brightness(i).enhance(factor),
        "color": lambda i: ImageEnhance.Color(i).enhance(factor),
        "contrast": lambda i: ImageEnhance.Contrast(i).enhance(factor),
        "sharpness": lambda i: ImageEnhance.Sharpness(i).enhance(factor),
        "posterize": lambda i: ImageOps.posterize(i, int(strength * 4 / 10) + 4),
        "rotate": lambda i: i.rotate(3 * level),
        "shear_x": by_affine(1, shear, 0, 0, 1, 0),
        "shear_y": by_affine(1, 0, 0, shear, 1, 0),
        "solarize": lambda i: ImageOps.solarize(i, 256 - int(strength * 256 / 10)),
        "translate_x": by_affine(1, 0, int(shift * image.width), 0, 1, 0),
        "translate_y": by_affine(1, 0, 0, 0, 1, int(shift * image.height)),
    }
    return table[name](image)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_equals_pillow(name: str, size: tuple[int, int], mode: str) -> None:
    images = pictures(mode, *size)
    batch = to_tensor(images)
    # Per-sample magnitudes: every image at every level, in one batch.
    levels = np.repeat(np.array(LEVELS, dtype=np.int8), len(images))
    ours = OPERATIONS[name](batch.repeat(len(LEVELS), 1, 1, 1), levels).short()
    theirs = to_tensor([pillow(name, image, level) for level in LEVELS for image in images])
    difference = (ours - theirs).abs()
    # Look-up tables and nearest-neighbour moves are exact. Blends are truncated floats: a Pillow
    # built with fused multiply-adds may land on the other side of a whole number.
    blends = name in ("brightness", "color", "contrast", "sharpness")
    assert difference.max() <= (1 if blends else 0)
    assert (difference > 0).float().mean() < 0.005
    if name != "identity" and not (name == "color" and mode == "L"):
        assert (ours != batch.repeat(len(LEVELS), 1, 1, 1)).any()


@pytest.mark.parametrize("name", ["rotate", "shear_x", "shear_y", "translate_x", "translate_y"])
def test_large_images_are_moved_as_pillow_does_and_no_table_is_kept(name: str) -> None:
    height, width = 290, 230
    assert height * width > TABLE_PIXELS
    before = operations._sources.cache_info().misses
    levels = [9, -4, 9, 1]
    images = pictures("RGB", height, width)[: len(levels)]
    ours = OPERATIONS[name](to_tensor(images).byte(), np.array(levels, dtype=np.int8))
    theirs = [pillow(name, image, level) for image, level in zip(images, levels, strict=True)]
    assert torch.equal(ours.short(), to_tensor(theirs).short())
    assert operations._sources.cache_info().misses == before


@pytest.mark.parametrize("size", [(1, 1), (2, 5), (5, 2), (3, 3)], ids=str)
def test_operations_on_tiny_images(size: tuple[int, int]) -> None:
    values = generator(3, "tiny").integers(0, 256, (4, 3, *size), dtype=np.uint8)
    images = [Image.fromarray(image.transpose(1, 2, 0)) for image in values]
    for name in OPERATIONS:
        ours = OPERATIONS[name](torch.from_numpy(values), np.full(4, -5, np.int8))
        theirs = to_tensor([pillow(name, image, -5) for image in images])
        assert (ours.short() - theirs).abs().max() <= 1, name


def weak_reference(image: np.ndarray, flip: bool, shift_y: int, shift_x: int) -> np.ndarray:
    """[C, H, W]: flip, pad by reflection, crop."""
    _, height, width = image.shape
    pad = max(abs(shift_y), abs(shift_x))
    flipped = image[:, :, ::-1] if flip else image
    padded = np.pad(flipped, ((0, 0), (pad, pad), (pad, pad)), mode="reflect")
    top, left = pad + shift_y, pad + shift_x
    return padded[:, top : top + height, left : left + width]


def strong_reference(image: np.ndarray, draws: StrongDraws, i: int) -> np.ndarray:
    moved = weak_reference(image, draws.flip[i], draws.shift_y[i], draws.shift_x[i])
    picture = Image.fromarray(moved.transpose(1, 2, 0).squeeze())
    for slot in range(draws.operation.shape[1]):
        if draws.applied[i, slot]:
            name = list(OPERATIONS)[draws.operation[i, slot]]
            picture = pillow(name, picture, int(draws.level[i, slot]))
    top, left, bottom, right = (int(edge) for edge in draws.box[i])
    grey = (127,) * len(picture.getbands())
    inclusive = (left, top, right - 1, bottom - 1)
    ImageDraw.Draw(picture).rectangle(inclusive, grey if len(grey) > 1 else 127)
    return np.atleast_3d(np.asarray(picture)).transpose(2, 0, 1)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_weak_and_strong_equal_the_plain_pipeline(size: tuple[int, int], mode: str) -> None:
    images = to_tensor(pictures(mode, *size)).repeat(50, 1, 1, 1)
    draws = Augmentation().draw_strong(generator(1, "draws"), (len(images),), *size)
    before = images.clone()
    weak, strong = augment.weak(images, draws), augment.strong(images, draws)
    assert torch.equal(images, before)
    for i, image in enumerate(images.numpy()):
        expected = weak_reference(image, draws.flip[i], draws.shift_y[i], draws.shift_x[i])
        assert np.array_equal(weak[i].numpy(), expected)
    theirs = np.stack([strong_reference(im, draws, i) for i, im in enumerate(images.numpy())])
    # Exact where Pillow rounds as we do; a grey level off in a first blend may grow in a second.
    assert (strong.numpy() != theirs).mean() < 0.002


def test_batch_equals_one_by_one_and_step_by_step() -> None:
    images = to_tensor(pictures("RGB", 32, 32)).repeat(9, 1, 1, 1).view(6, 12, 3, 32, 32)
    draws = Augmentation().draw_strong(generator(2, "draws"), (6, 12), 32, 32)
    whole = augment.strong(images.flatten(0, 1), draws).view_as(images)
    for step in range(6):
        assert torch.equal(augment.strong(images[step], draws[step]), whole[step])
        for i in range(12):
            alone = augment.strong(images[step, i : i + 1], draws[step, i : i + 1])
            assert torch.equal(alone[0], whole[step, i])
    pair = augment.strong(images[2:4].flatten(0, 1), draws[2:4])
    assert torch.equal(pair.view(2, 12, 3, 32, 32), whole[2:4])
    joined = StrongDraws.concatenate([draws[4], draws[0]])
    assert joined.flip.shape == (24,)
    both = augment.strong(torch.cat([images[4], images[0]]), joined)
    assert torch.equal(both, torch.cat([whole[4], whole[0]]))
    assert WeakDraws.concatenate([draws[:, :5], draws[:, 5:]], axis=1).flip.shape == (6, 12)


def test_draws_follow_from_the_generator_alone() -> None:
    augmentation = Augmentation()
    one, same, other = (
        augmentation.draw_strong(generator(seed, "draws"), (3, 40), 32, 32) for seed in (5, 5, 6)
    )
    for name in ("flip", "shift_y", "shift_x", "operation", "applied", "level", "box"):
        assert np.array_equal(getattr(one, name), getattr(same, name))
        assert not np.array_equal(getattr(one, name), getattr(other, name))
        assert getattr(one, name).itemsize <= 2


def test_an_image_has_the_same_draws_alone_and_among_others() -> None:
    of_images = [derive(5, image) for image in range(40)]
    both = [
        Augmentation().draw_strong(Streams(some), (len(some), 3), 32, 64)
        for some in (of_images, of_images[17:18])
    ]
    for name in ("flip", "shift_y", "shift_x", "operation", "applied", "level", "box"):
        among, alone = (getattr(draws, name) for draws in both)
        assert np.array_equal(among[17:18], alone) and among.dtype == alone.dtype


def shares(values: np.ndarray, expected: list[int]) -> np.ndarray:
    """How often each expected value came up; nothing else may."""
    levels, counts = np.unique(values, return_counts=True)
    assert levels.tolist() == expected
    return counts / values.size


@pytest.mark.parametrize("together", [False, True])
def test_draws_have_the_stated_chances(together: bool) -> None:
    n = 60_000  # the tolerances below are over five standard deviations
    many = Streams([derive(4, image) for image in range(n // 2)])
    draws = Augmentation().draw_strong(many, (n // 2, 2), 32, 64).flatten()
    if not together:
        draws = Augmentation().draw_strong(generator(4, "draws"), (n,), 32, 64)
    assert draws.flip.mean() == pytest.approx(0.5, abs=0.011)
    assert shares(draws.shift_y, list(range(-4, 5))) == pytest.approx(1 / 9, abs=0.007)
    assert shares(draws.shift_x, list(range(-8, 9))) == pytest.approx(1 / 17, abs=0.006)
    assert shares(draws.operation, list(range(14))) == pytest.approx(1 / 14, abs=0.004)
    assert shares(np.abs(draws.level), list(range(1, 10))) == pytest.approx(1 / 9, abs=0.005)
    assert (draws.level < 0).mean() == pytest.approx(0.5, abs=0.008)
    assert draws.applied.mean() == pytest.approx(0.5, abs=0.008)
    # With replacement, and the two slots independent of each other.
    assert (draws.operation[:, 0] == draws.operation[:, 1]).mean() == pytest.approx(
        1 / 14, abs=0.006
    )
    assert draws.applied.all(1).mean() == pytest.approx(0.25, abs=0.01)
    # The square: 16 and an inclusive end; corners below 0 are moved to 0, so 9 of 32 lie there.
    top, left, bottom, right = draws.box.T
    assert shares(top, list(range(24))) == pytest.approx([9 / 32] + [1 / 32] * 23, abs=0.01)
    assert shares(left, list(range(56))) == pytest.approx([9 / 64] + [1 / 64] * 55, abs=0.008)
    assert np.array_equal(bottom, np.minimum(32, top + 17))
    assert np.array_equal(right, np.minimum(64, left + 17))


def test_cutout_covers_its_box_and_nothing_else() -> None:
    plain = Augmentation(flip=False, pad=0, num_ops=0)
    images = to_tensor(pictures("RGB", 32, 32)).clamp(max=120).repeat(10, 1, 1, 1)
    draws = plain.draw_strong(generator(8, "cutout"), (len(images),), 32, 32)
    result = augment.strong(images, draws)
    for image, cut, (top, left, bottom, right) in zip(images, result, draws.box, strict=True):
        expected = image.clone()
        expected[:, top:bottom, left:right] = 127
        assert torch.equal(cut, expected)
    grey = (result == 127).all(1).sum((1, 2))
    assert grey.max() == 17 * 17 and grey.min() >= 9 * 9
    small = plain.draw_strong(generator(9, "cutout"), (500,), 10, 10).box
    assert small[:, :2].max() == 1 and (small[:, 2:] == 10).all()
    without = Augmentation(flip=False, pad=0, num_ops=0, cutout=0)
    draws = without.draw_strong(generator(8, "cutout"), (len(images),), 32, 32)
    assert torch.equal(augment.strong(images, draws), images)


@pytest.mark.parametrize("channels", [1, 3])
def test_normalizer(channels: int) -> None:
    mean, std = (0.4914, 0.4822, 0.4465)[:channels], (0.2023, 0.1994, 0.2010)[:channels]
    images = to_tensor(pictures("RGB", 23, 40))[:, :channels]
    normalize = Normalizer.of(mean, std).to("cpu")
    by_channel = [np.array(v)[:, None, None] for v in (mean, std)]
    expected = (images.numpy() / 255 - by_channel[0]) / by_channel[1]
    result = normalize(images)
    assert result.dtype == torch.float32 and result.shape == images.shape
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert np.abs(result.numpy() - expected).max() < 2e-6
    half = normalize(images, torch.bfloat16)
    assert torch.equal(half, result.bfloat16())
    with pytest.raises(ValueError, match=f"of 2 channels: give uint8 images of {channels} chan"):
        normalize(torch.zeros(1, 2, 4, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="std above 0"):
        Normalizer.of((0.5,), (0.0,))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_gpu_equals_cpu_and_never_waits(mode: str) -> None:
    images = to_tensor(pictures(mode, 32, 32)).repeat(100, 1, 1, 1)
    draws = Augmentation().draw_strong(generator(1, "gpu"), (len(images),), 32, 32)
    normalize = Normalizer.of((0.5,) * images.shape[1], (0.25,) * images.shape[1])
    there, normalize_there = images.cuda(), normalize.to("cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        strong = augment.strong(there, draws)
        floats = normalize_there(strong)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = augment.strong(images, draws)
    assert torch.equal(strong.cpu(), expected)
    assert torch.allclose(floats.cpu(), normalize(expected), atol=1e-6)


def test_a_square_larger_than_any_image_covers_it() -> None:
    for cutout in (64, 32768, 2**70):
        draws = Augmentation(cutout=cutout).draw_strong(np.random.default_rng(0), (50,), 20, 32)
        assert (draws.box == [0, 0, 20, 32]).all() and draws.box.dtype == np.int16

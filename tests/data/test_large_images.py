"""Images of every mode and format, small and large, upright and turned."""

import functools
import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from semisfl.data import decode
from semisfl.data.decode import open_image, pixels_of


@functools.cache
def picture(width: int, height: int) -> Image.Image:
    """A smooth picture with a different colour in every corner."""
    x, y = np.linspace(0, 255, width), np.linspace(0, 255, height)
    red, green = np.meshgrid(x, y)
    values = np.stack([red, green, 255 - red], 2).astype(np.uint8)
    return Image.fromarray(values)


def plainly(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    upright = ImageOps.exif_transpose(image)
    return np.asarray(upright.convert("RGB").resize(size, Image.Resampling.BILINEAR))


@pytest.mark.parametrize("turn", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF"])
def test_a_large_image_is_decoded_as_a_small_one_would_be(form: str, turn: int) -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x112] = turn
    picture(2401, 1799).save(file, form, exif=exif, compress_level=1)
    decoded = pixels_of(open_image(file.getvalue()), (32, 24), 3).transpose(1, 2, 0)
    expected = plainly(Image.open(file), (32, 24))
    assert np.abs(decoded.astype(int) - expected).max() <= 6


@pytest.mark.parametrize("side", [64, 2560])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I;16", "CMYK", "LAB"])
def test_every_mode_is_read_as_grey(mode: str, side: int) -> None:
    level = 255 if mode == "1" else 200  # others are dithered there
    small = Image.new("L", (64, 64), 0)
    small.paste(level, (0, 0, 64, 32))
    image = small.resize((side, side), Image.Resampling.NEAREST)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image).astype(np.uint16) * 257)
    else:
        image = image.convert("RGB" if mode == "LAB" else "L").convert(mode)
    decoded = pixels_of(image, (16, 16), 1)[0]
    assert np.abs(decoded[:7].astype(int) - level).max() <= 8 and decoded[9:].max() <= 8


def test_only_a_jpeg_may_have_more_pixels_than_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MAX_PIXELS", 10**6)
    for form, opens in (("JPEG", True), ("PNG", False)):
        file = io.BytesIO()
        picture(1200, 1200).save(file, form)
        if opens:
            assert open_image(file.getvalue()).size == (1200, 1200)
            continue
        with pytest.raises(decode.Unsupported, match="a 1200x1200 PNG has more than"):
            open_image(file.getvalue())


def test_a_decoder_reads_a_large_jpeg_at_a_fraction_of_its_size() -> None:
    file = io.BytesIO()
    picture(2400, 1800).save(file, "JPEG")
    image = open_image(file.getvalue())
    assert pixels_of(image, (32, 24), 3).shape == (3, 24, 32)
    assert image.size == (300, 225)

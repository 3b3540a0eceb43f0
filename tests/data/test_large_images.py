"""Files of a few kilobytes that hold millions of pixels, and photographs of large cameras."""

import asyncio
import functools
import io
import struct
import time
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin

from semisfl.data import decode, large
from semisfl.data.dataset import Dataset
from semisfl.data.decode import open_image, pixels_of
from semisfl.data.large import TooLarge
from semisfl.use import pictures
from tests.net.rogue_server import Peer, attacked, folder_of_images, run_device, terms
from tests.use.trained import residual_model

MB = 1_000_000
SIDE = 8192
"""Its square is 64 Mi pixels."""


def bomb(path: Path, mode: str = "1") -> Path:
    Image.new(mode, (SIDE, SIDE)).save(path, optimize=False)
    return path


@pytest.fixture(scope="module")
def bombs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes with bombs, and images that are as they should be."""
    folder = tmp_path_factory.mktemp("bombs")
    first = bomb(folder / "first.png")
    assert first.stat().st_size < 10_000
    for part, count in (("train", 2), ("test", 1)):
        for name in ("cat", "dog"):
            place = folder_of_images(folder / part / name, 8, 12)
            for number in range(count):
                (place / f"bomb{number}.png").write_bytes(first.read_bytes())
    first.unlink()
    return folder


MOST = 200 * MB
"""One image as Pillow keeps it (67 MB), and what a command takes by itself."""


def test_bombs_in_the_folder_of_a_device(bombs: Path) -> None:
    async def script(peer: Peer) -> None:
        ready = await peer.welcome(terms())
        assert ready.kind == "ready" and ready.fields["images"] == 20
        await asyncio.sleep(0.1)

    ended, server = attacked(script, bombs / "train", most=MOST, seconds=20)
    assert [item.kind for item in server.received][:2] == ["hello", "ready"], ended
    assert 0 < ended.peak < MOST, ended


def test_a_png_beyond_the_budget_is_not_decoded_to_look_for_its_orientation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = open_image(bomb(tmp_path / "bomb.png", "RGBA"))
    monkeypatch.setattr(image, "load", lambda: pytest.fail("decoded"))
    with pytest.raises(TooLarge, match="a 8192x8192 PNG takes"):
        pixels_of(image, (12, 12), 3, room=60 * MB)


def test_headers_of_large_pngs_are_read_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow decodes a PNG to look for EXIF data behind its pixels."""
    for number in range(4):
        Image.new("1", (2100, 2100)).save(tmp_path / f"{number}.png")
    busy, most, load = [0], [0], PngImagePlugin.PngImageFile.load

    def slowly(image: PngImagePlugin.PngImageFile) -> object:
        busy[0] += 1
        most[0] = max(most[0], busy[0])
        time.sleep(0.05)
        busy[0] -= 1
        return load(image)

    monkeypatch.setattr(PngImagePlugin.PngImageFile, "load", slowly)
    monkeypatch.setattr(decode, "CHUNK", 1)
    monkeypatch.setattr(decode.os, "cpu_count", lambda: 4)
    assert len(Dataset.from_folder(tmp_path, size=8).images) == 4
    assert most[0] == 1


def test_bombs_for_predict(bombs: Path, tmp_path: Path) -> None:
    model = residual_model(tmp_path)
    ended = run_device(["predict", str(model.path), str(bombs / "train"), "--csv"], MOST)
    assert ended.status == 0 and ended.peak < MOST, ended
    assert ended.output.count("/bomb0.png,") == ended.output.count("/bomb1.png,") == 2


def test_bombs_for_a_run(bombs: Path, tmp_path: Path) -> None:
    settings = [
        "data.size=12",
        "rounds=1",
        "clients.total=2",
        "clients.active=2",
        "clients.steps=1",
    ]
    settings += ["server.steps=1", "data.labeled=4", "clients.batch=2", "server.batch=2"]
    settings += ['model.layers=[{kind="flatten"},{kind="linear",features=8},{kind="linear"}]']
    settings += ["model.cut=2", f"data.name={bombs}"]
    words = ["run", "digits", "--out", str(tmp_path / "run"), "--device", "cpu", "--set", *settings]
    ended = run_device(words, most=2 * MOST)
    assert ended.status == 0 and ended.peak < 1.5 * MOST, ended


def tiled(side: int, tile: int) -> bytes:
    """A grey TIFF of one tile, which may be larger than the image."""
    data = zlib.compress(bytes(tile * tile), 9)
    tags = {256: side, 257: side, 258: 8, 259: 8, 262: 1, 277: 1, 322: tile, 323: tile}
    start = 8 + 2 + 12 * (len(tags) + 2) + 4
    entries = {**tags, 324: start, 325: len(data)}
    lines = (struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries.items())
    head = b"II*\0" + struct.pack("<IH", 8, len(entries))
    return head + b"".join(lines) + struct.pack("<I", 0) + data


def test_a_small_tiff_with_a_giant_tile_is_refused() -> None:
    """Its decoder would take 67 MB for 64 x 64 pixels."""
    forged = tiled(64, 8192)
    assert len(forged) < 300_000
    with pytest.raises(TooLarge, match="a 64x64 TIFF has tiles of 67108864 pixels"):
        open_image(forged)
    assert pixels_of(open_image(tiled(64, 128)), (12, 12), 1).shape == (1, 12, 12)


# --- the same image as before --------------------------------------------------------------------


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


def test_a_photograph_of_two_hundred_million_pixels_is_read(tmp_path: Path) -> None:
    file = tmp_path / "phone.jpg"
    Image.new("L", (16384, 12288), 77).save(file, quality=30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert abs(int(pictures.read(file, (1, 32, 32)).mean()) - 77) <= 1


def test_what_cannot_be_decoded_in_parts_has_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large, "MAX_PIXELS", 10**6)
    file = io.BytesIO()
    picture(1200, 1200).save(file, "JPEG", progressive=True)
    with pytest.raises(TooLarge, match="a 1200x1200 JPEG has more than"):
        open_image(file.getvalue())
    file = io.BytesIO()
    picture(1200, 1200).save(file, "PNG")
    with pytest.raises(TooLarge, match="a 1200x1200 PNG has more than"):
        open_image(file.getvalue())
    wide = tmp_path / "wide.png"
    Image.new("1", (20_000, 20_000)).save(wide)
    with pytest.raises(ValueError, match=r"has more than .* pixels; make it smaller"):
        pictures.read(wide, (3, 12, 12))

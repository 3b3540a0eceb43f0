"""Draw originals above their reconstructions, so that a person can judge what the numbers mean."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw
from torch import Tensor

from semisfl.attacks.meter import Measured

ACROSS, ZOOM, LABEL, GAP = 12, 64, 190, 8
"""Images in a line; and in pixels the side of an image, the width of the caption, and the gap between lines."""
WIDTH = 28
"""Letters of a line beside the images."""


def draw(measured: Sequence[Measured], path: Path) -> None:
    """Write a picture to ``path``: two lines of images per measurement, the originals above the rebuilt ones.

    Cut, defence, SSIM and the share of identified images stand beside them.
    """
    each = 2 * ZOOM + GAP
    sheet = Image.new("RGB", (LABEL + ACROSS * (ZOOM + 2), each * len(measured)), "white")
    pen = ImageDraw.Draw(sheet)
    for place, item in enumerate(measured):
        top, numbers = place * each, item.numbers
        caption = (
            f"cut after {numbers['cut']}\n{_wrapped(numbers['defence'])}\n"
            f"SSIM {numbers['decoder']['ssim']:.2f} (mean image {numbers['mean_image']['ssim']:.2f})\n"
            f"identified {numbers['decoder']['identified']:.0%}"
        )
        pen.multiline_text((4, top + 4), caption, fill="black", spacing=3)
        for column in range(min(ACROSS, len(item.originals))):
            left = LABEL + column * (ZOOM + 2)
            sheet.paste(_pixels(item.originals[column]), (left, top))
            sheet.paste(_pixels(item.rebuilt[column]), (left, top + ZOOM))
    sheet.save(path)


def _wrapped(text: str) -> str:
    return "\n".join(text[start : start + WIDTH] for start in range(0, len(text), WIDTH))


def _pixels(image: Tensor) -> Image.Image:
    values = (image.clamp(0, 1) * 255).byte().cpu().permute(1, 2, 0).numpy()
    shown = Image.fromarray(values[:, :, 0] if values.shape[2] == 1 else values)
    return shown.convert("RGB").resize((ZOOM, ZOOM), Image.Resampling.NEAREST)

"""Draw reconstructions below their originals, so that a person can judge what the numbers mean."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from PIL import Image, ImageDraw
from torch import Tensor

from semisfl.attacks.meter import Measured

ACROSS, ZOOM, LABEL, GAP = 12, 64, 190, 8
"""Images in a line; and in pixels the least side of an image, the width of the caption, and the gap between lines."""
WIDTH = 28
"""Letters of a line beside the images."""


def draw(measured: Sequence[Measured], path: Path) -> None:
    """Write a picture to ``path``: a line of originals, then a line of rebuilt images for each measurement.

    Cut, defence, SSIM and the share of identified images stand beside them. All measurements attack the same images.
    """
    first = measured[0]
    side = max(ZOOM, first.originals.shape[-1])
    mean = first.numbers["mean_image"]["ssim"]
    lines = [(f"original\n\nSSIM of the mean image {mean:.2f}", first.originals)]
    for numbers, rebuilt in ((one.numbers, one.rebuilt) for one in measured):
        words = f"cut after {numbers['cut']}\n{fill(numbers['defence'], WIDTH)}\nSSIM "
        words += "{ssim:.2f}\nidentified {identified:.0%}".format(**numbers["decoder"])
        lines.append((words, rebuilt))
    sheet = Image.new("RGB", (LABEL + ACROSS * (side + 2), (side + GAP) * len(lines)), "white")
    for place, (caption, images) in enumerate(lines):
        top = place * (side + GAP)
        ImageDraw.Draw(sheet).multiline_text((4, top + 4), caption, fill="black", spacing=3)
        for column, image in enumerate(images[:ACROSS]):
            sheet.paste(_pixels(image, side), (LABEL + column * (side + 2), top))
    sheet.save(path)


def _pixels(image: Tensor, side: int) -> Image.Image:
    colours = (image.clamp(0, 1) * 255).byte().cpu().expand(3, -1, -1).permute(1, 2, 0)
    return Image.fromarray(colours.numpy()).resize((side, side), Image.Resampling.NEAREST)

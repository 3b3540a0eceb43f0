"""Originals above what an attacker makes of them."""

from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw
from torch import Tensor

from semisfl.attacks.meter import Measured

ACROSS, ZOOM, LABEL, GAP = 12, 64, 190, 8


def draw(measured: Sequence[Measured], path: Path) -> None:
    """Two rows of pictures for every row of the table, with its cut, defence and SSIM beside them."""
    each = 2 * ZOOM + GAP
    sheet = Image.new("RGB", (LABEL + ACROSS * (ZOOM + 2), each * len(measured)), "white")
    pen = ImageDraw.Draw(sheet)
    for place, item in enumerate(measured):
        top, row = place * each, item.row
        said = (
            f"cut after {row['cut']}\n{_wrapped(row['defence'])}\n"
            f"SSIM {row['decoder']['ssim']:.2f} (mean image {row['mean_image']['ssim']:.2f})\n"
            f"identified {row['decoder']['identified']:.0%}"
        )
        pen.multiline_text((4, top + 4), said, fill="black", spacing=3)
        for column in range(min(ACROSS, len(item.originals))):
            left = LABEL + column * (ZOOM + 2)
            sheet.paste(_pixels(item.originals[column]), (left, top))
            sheet.paste(_pixels(item.rebuilt[column]), (left, top + ZOOM))
    sheet.save(path)


def _wrapped(text: str, width: int = 28) -> str:
    return "\n".join(text[start : start + width] for start in range(0, len(text), width))


def _pixels(image: Tensor) -> Image.Image:
    values = (image.clamp(0, 1) * 255).byte().cpu().permute(1, 2, 0).numpy()
    shown = Image.fromarray(values[:, :, 0] if values.shape[2] == 1 else values)
    return shown.convert("RGB").resize((ZOOM, ZOOM), Image.Resampling.NEAREST)

"""Write counts and bytes in words.

Units are decimal: 1 kB is 1,000 bytes.
"""


def plural(count: int, noun: str) -> str:
    """Return ``1 image``, ``2 images``; ``1 class``, ``2 classes``."""
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def amount(size: float) -> str:
    """Return bytes with a unit and three digits: ``1.23 kB``, ``999 MB``."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.95 else f"{size:.3g} {unit}"

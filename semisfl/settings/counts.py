"""Say how many there are of something."""


def counted(count: int, noun: str) -> str:
    """Return ``1 image``, ``2 images``; ``1 class``, ``2 classes``."""
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")

"""Say why an image cannot be read."""

from PIL import UnidentifiedImageError

from semisfl.data.decode import FORMATS


def reason(error: Exception) -> str:
    """Return in one line why reading an image raised ``error``."""
    if isinstance(error, UnidentifiedImageError):
        return f"it is no image of {', '.join(FORMATS)}"
    if isinstance(error, ValueError):
        return str(error)
    text = " ".join(str(error).split())
    if isinstance(error, OSError):
        return error.strerror or text
    return f"it is damaged: {text}"

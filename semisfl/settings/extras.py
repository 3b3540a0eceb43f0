"""Name the extra of this package that installs what is missing."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(extra: str, *packages: str) -> Iterator[None]:
    """Import packages inside the block; raise `ValueError` with the extra that brings one of ``packages``."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").split(".")[0] in packages:
            raise missing(extra, error.name) from error
        raise


def missing(extra: str, module: str | None) -> ValueError:
    """Return the error for a module that ``extra`` installs."""
    return ValueError(
        f"this needs further packages: pip install 'semisfl[{extra}]' (no module {module!r})"
    )

"""Fused GPU operations, written in Triton. `fused` gives them where they work."""

import logging
from functools import lru_cache
from typing import Any

log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def fused() -> Any:
    """The operations, or None where Triton is not installed or finds no compiler."""
    try:
        from semisfl.engine.kernels import library
    except ImportError:
        return None
    try:
        library.try_out()
    except Exception as error:  # Triton, the compiler and the driver each fail in their own way
        log.warning("the fused GPU kernels do not work here and plain ones are used: %r", error)
        return None
    return library

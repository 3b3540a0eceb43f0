"""Bound the memory that foreign code takes, with the help of the system."""

import contextlib
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

_ONE_AT_A_TIME = threading.Lock()
"""The limit is the whole process's."""


class MemoryLimit:
    """Let the process take ``most`` bytes more than it has now, inside `enforced`; None: any. Only Linux obeys."""

    def __init__(self, most: int | None) -> None:
        taken = _taken()
        self._most = None if most is None or taken is None else taken + most

    @contextlib.contextmanager
    def enforced(self) -> Iterator[None]:
        """Let allocations beyond the limit fail in the block."""
        if self._most is None:
            yield
            return
        with _ONE_AT_A_TIME:
            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            known = [one for one in (soft, hard) if one != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_DATA, (min([self._most, *known]), hard))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _taken() -> int | None:
    """Return the bytes of private memory that the process has reserved; None if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")

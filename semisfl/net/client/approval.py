"""Let an owner decide which terms run on their device, and remember the answer."""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from semisfl.files import append_whole
from semisfl.net.client.shown_terms import text_of_terms
from semisfl.settings.policy import PolicyBreach

log = logging.getLogger(__name__)


class NotAccepted(PolicyBreach):
    """Raised for terms that nobody has accepted for this device."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"its owner has not accepted the terms {digest}")
        self.digest = digest


class Digested(Protocol):
    """Terms of a run, or of a model that is served."""

    @property
    def digest(self) -> str: ...


Ask = Callable[[str], bool]
"""Shows the text to the owner and returns whether they accept."""


class Approval:
    """Accept terms by their digest: those of ``accepted`` or else of ``file``, and those that the owner accepts.

    ``ask`` asks the owner; None: nobody is there, and other terms are refused. Accepted terms are
    added to ``file``.
    """

    def __init__(
        self, accepted: Iterable[str] = (), file: Path | None = None, ask: Ask | None = None
    ) -> None:
        self._file = file
        self._ask = ask
        self._remembered = _read(file)
        self._accepted = set(accepted) or set(self._remembered)

    def check(self, terms: Digested, show: Callable[[Any], str] = text_of_terms) -> None:
        """Raise `NotAccepted` unless the terms are accepted; ``show`` makes the text for the owner."""
        digest = terms.digest
        if digest in self._accepted & self._remembered:
            # The folder may have come with this file, from the person who made the certificate.
            log.info("the terms %s are not asked about: %s accepts them", digest, self._file)
        elif digest not in self._accepted and not (self._ask and self._ask(show(terms))):
            raise NotAccepted(digest)
        self._accepted.add(digest)
        self._remember(digest)

    def _remember(self, digest: str) -> None:
        if self._file is None or digest in self._remembered:
            return
        self._remembered.add(digest)
        try:
            append_whole(self._file, f"{digest}\n".encode(), private=True)
        except OSError as error:
            # A service may have a folder that it cannot write to, and --accept in its unit.
            level = logging.WARNING if self._ask is not None else logging.DEBUG
            log.log(level, "%s cannot be written: %s", self._file, error.strerror or error)


def _read(file: Path | None) -> set[str]:
    """Return the digests of a file; none if there is no file."""
    try:
        return set() if file is None else set(file.read_text(encoding="utf-8").split())
    except FileNotFoundError:
        return set()
    except (OSError, UnicodeDecodeError) as error:
        log.warning("%s cannot be read and counts as empty: %s", file, error)
        return set()

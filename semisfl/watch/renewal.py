"""Load a page's certificate again when it is renewed, while the page is served."""

import logging
import ssl
from pathlib import Path

from semisfl.files import stamp

log = logging.getLogger(__name__)


class Certificate:
    """server.crt and server.key of ``folder``, as they are when somebody connects to `context`."""

    def __init__(self, folder: Path) -> None:
        self._files = (folder / "server.crt", folder / "server.key")
        self._stamp = self._refused = stamp(*self._files)
        self.context = self._latest = self._read()
        # Called with every hello, whether it names a host or not.
        self.context.sni_callback = self._show

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._files, password="")
        return context

    def _show(self, connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        self._look()
        connection.context = self._latest

    def _look(self) -> None:
        """Load a renewed pair; keep the old one until the new one is complete."""
        current = stamp(*self._files)
        if current == self._stamp:
            return
        try:
            self._latest = self._read()
        except OSError as error:
            if current != self._refused:
                self._refused = current
                log.warning(
                    "cannot use %s and its key: %s; going on with those read before",
                    self._files[0],
                    error,
                )
            return
        self._stamp = current
        log.info("%s is new; connections to the page use it from now on", self._files[0])

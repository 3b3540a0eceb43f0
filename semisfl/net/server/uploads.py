"""Ask each device of a frozen bottom for the rows that its file lacks, on the loop: training never waits for it.

One upload is a number of questions over the device's stream: see `semisfl.net.messages`. The server keeps one part of
it in memory and appends each to the device's file, so a device that is killed is asked for the rest when it comes
back. A file is published, by its name, once the device has sent all images that it had.
"""

import logging
import os
from collections import Counter
from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torch import Tensor

from semisfl.data.fixed_views import DIGEST_BYTES
from semisfl.files import append_whole, write_whole
from semisfl.fleet.rows import TOGETHER, TOGETHER_CPU, RowFile, RowFormat, first_line, records
from semisfl.net import messages
from semisfl.net.frames import Frame, WireError, decode, encode
from semisfl.net.messages import MOST_STORED, Schemas
from semisfl.net.server.session import Session
from semisfl.net.server.sessions import Sessions
from semisfl.net.server.value_checks import impossible
from semisfl.settings.counts import plural

log = logging.getLogger(__name__)

PART = 2**20
"""Bytes of rows that are asked for at a time; those of a pass of a device's encoder may be more."""
CHECKED = 8
"""Images whose rows are decoded at a time, to check their values."""


class RowStore:
    """The folder with the file of each device. The loop appends to them; the thread that trains reads ``files``."""

    def __init__(self, folder: Path, form: RowFormat, about: Mapping[str, Any]) -> None:
        """Open ``folder`` with what earlier processes of this run left there; ``form`` and ``about`` are of all rows."""
        folder.mkdir(mode=0o700, exist_ok=True)
        self.form, self._folder, self._about = form, folder, about
        self.files = {file.client: file for file in map(RowFile, folder.glob("*.rows"))}
        """The published file of each device that has one."""
        self.downloads: Counter[str] = Counter()
        """How many times each device has got the bottom."""

    def path(self, name: str) -> Path:
        """Return the file of a device: its suffix is ``.part`` before it is published first."""
        path = self._folder / f"{quote(name, safe='')}.rows"
        return path if path.exists() else path.with_suffix(".part")

    def begin(self, name: str) -> bytes:
        """Return the digests of the images whose rows are in a device's file, which is made if there is none."""
        if not (path := self.path(name)).exists():
            write_whole(path, first_line(self.form, {"client": name, **self._about}))
        file = RowFile(path)
        os.truncate(path, file.end)  # a killed process may have written half an image
        return file.digests

    def publish(self, name: str) -> int:
        """Let rounds draw from all that a device's file has now; return its number of images."""
        path = self.path(name)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self.files[name] = RowFile(path.replace(path.with_suffix(".rows")))
        return self.files[name].images


class Uploads:
    """Receive the rows of every device. All of it happens on the loop."""

    def __init__(
        self, sessions: Sessions, schemas: Schemas, store: RowStore, weights: Mapping[str, Tensor]
    ) -> None:
        """Write rows to ``store``. ``weights`` are the bottom's, as the frame ``weights`` has them."""
        self._sessions, self._schemas, self._store = sessions, schemas, store
        codec, form = schemas.config.wire.models, store.form
        # One frame for all devices: a copy for each would not fit into memory.
        self._weights = b"".join(encode("weights", {}, weights, codec))
        # The passes of a device's encoder are full then.
        whole = TOGETHER_CPU // gcd(TOGETHER_CPU, sum(form.views.values()))
        self._together = max(1, min(TOGETHER, PART // form.size) // whole) * whole

    def begin(self, session: Session) -> None:
        """Tell a device that has its place which images are here, and ask how many are missing."""
        digests, more = self._store.begin(session.identity), True
        while more:
            more = len(digests) > MOST_STORED
            frame = _frame("stored", images=digests[:MOST_STORED], more=more)
            digests = digests[MOST_STORED:]
            session.tell(frame) if more else session.ask(frame, messages.MISSING.limit)

    def take(self, session: Session, ticket: int, data: bytearray) -> None:
        """Take an answer of a device, and ask for more.

        Raises `WireError` if it is no possible answer, and `OSError` if the disk refuses it.
        """
        rows = {"rows": self._schemas.rows(session.asked)}
        due = rows if session.asked else {"missing": messages.MISSING}
        frame = decode(data, {**due, "refusal": messages.REFUSAL})
        if frame.kind == "refusal":
            self._sessions.dismiss(session, frame.fields["reason"])
            return
        (self._keep if session.asked else self._prepare)(session, frame)
        self._go_on(session)

    def _prepare(self, session: Session, frame: Frame) -> None:
        """Note how many images a device says are missing, and send it the bottom if it needs that."""
        session.missing = frame.fields["images"]
        if not 0 <= session.missing <= self._sessions.roster.images[session.client]:
            raise WireError(f"it says that {session.missing} of its images are missing")
        session.downloads = frame.fields["bottom"] and session.missing > 0
        if session.downloads:
            session.tell(self._weights)

    def _keep(self, session: Session, frame: Frame) -> None:
        """Write the rows of some images; raise `WireError` for values that are impossible."""
        digests, rows, name = frame.fields["images"], frame.tensors["rows"], session.identity
        if len(digests) != session.asked * DIGEST_BYTES:
            raise WireError(f"it names {len(digests)} bytes of digests for {session.asked} images")
        # Few at a time: in a processor's cache that takes a third of the time.
        some = map(self._store.form.unpack_images, rows.split(CHECKED))
        if (fault := next(filter(None, map(impossible, some)), None)) is not None:
            raise WireError(fault)
        append_whole(self._store.path(name), records(digests, rows))
        self._store.downloads[name] += session.downloads
        session.missing, session.downloads = session.missing - session.asked, False

    def _go_on(self, session: Session) -> None:
        """Ask for the next images; if none is missing, publish the file, and tell the device and who waits for files."""
        session.asked = min(session.missing, self._together)
        if session.asked:
            question = _frame("encode", images=session.asked)
            session.ask(question, self._schemas.rows(session.asked).limit)
            return
        images = self._store.publish(session.identity)
        log.info("the rows of %s of %s are here", plural(images, "image"), session.identity)
        session.tell(_frame("published", images=images))
        with self._sessions.changed:
            self._sessions.changed.notify_all()


def _frame(kind: str, **fields: Any) -> bytes:
    return b"".join(encode(kind, fields, {}))

"""What a device does, in a small status file while it runs, and in its last line.

The status file is for a supervisor or a person: one JSON object with `time`, `state` (what the device does, or how it
ended), `rounds`, `images`, `unreadable`, `bytes_sent`, `bytes_received`, `bits_per_image` (null: no bound) and, after a
failure, `reason`.
"""

import contextlib
import json
import logging
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from semisfl.files import timestamp, write_whole
from semisfl.net.client.device import Device
from semisfl.settings.counts import amount, plural

log = logging.getLogger(__name__)

STATUS_SECONDS = 10.0
"""Between two versions of the status file."""


class Report:
    """Follow one device. A thread writes the ``status`` file, if any, as JSON."""

    def __init__(self, status: Path | None = None) -> None:
        """Write the file ``status`` every STATUS_SECONDS and at the end; None: no file."""
        self._status = status
        self._device: Device | None = None
        self._ended: str | None = None
        """Why the device ended: finished, stopped, failed or the kind of a `Rejected`; None while it runs."""
        self._reason: str | None = None
        self._over = threading.Event()

    @property
    def busy(self) -> bool:
        """Return whether the device is in a round, or encodes its images."""
        return self._device is not None and self._device.doing.startswith(("training", "encoding"))

    @contextlib.contextmanager
    def following(self, device: Device) -> Iterator[None]:
        """Follow ``device`` inside the block, and note how the block ends."""
        self._device = device
        writer = threading.Thread(target=self._keep_status, daemon=True)
        writer.start()
        try:
            yield
            self._ended = "finished" if device.finished else "stopped"
        except BaseException as error:
            self._ended, self._reason = getattr(error, "kind", "failed"), str(error)
            raise
        finally:
            self._over.set()
            writer.join()

    def line(self) -> str:
        """Return in one line why the device ended, its rounds and images, and what it sent and received."""
        if self._device is None:
            return "stopped before connecting"
        now, upload = self._values(self._device), self._device.upload
        known = {
            "finished": "the run is finished" if upload is None else "the server has all rows",
            "stopped": f"stopped while {self._device.doing}",
        }
        why = known.get(self._ended or "", str(self._reason))
        if not now["bytes_received"]:
            return why
        images = plural(now["images"], "image")
        did = f"{plural(now['rounds'], 'round')} with {images}"
        if upload is not None:
            did = f"rows of {upload.sent} of {images} sent now"
        bits = now["bits_per_image"]
        carries = "no bound on" if bits is None else f"at most {bits:,}"
        return (
            f"{why}; {did}, {carries} bits per image, "
            f"{amount(now['bytes_sent'])} sent, {amount(now['bytes_received'])} received"
        )

    def _values(self, device: Device) -> dict[str, Any]:
        """Return the entries of the status file, but for the time."""
        member, bits = device.joined, device.allowance.total.bits
        values = {
            "state": self._ended or device.doing,
            "rounds": device.rounds,
            "images": len(member.images) if member else 0,
            "unreadable": member.skipped if member else 0,
            "bytes_sent": device.connection.sent,
            "bytes_received": device.connection.received,
            "bits_per_image": round(bits, 1) if bits < math.inf else None,
        }
        return values | ({"reason": self._reason} if self._reason else {})

    def _keep_status(self) -> None:
        self._write_status()
        while not self._over.wait(STATUS_SECONDS):
            self._write_status()
        self._write_status()

    def _write_status(self) -> None:
        """Write the status file; an error of the disk stops nothing."""
        if self._status is None or self._device is None:
            return
        values = {"time": timestamp(), **self._values(self._device)}
        try:
            write_whole(self._status, (json.dumps(values) + "\n").encode())
        except OSError as error:
            log.warning("cannot write the status to %s: %s", self._status, error)

"""Report what a device does: in a small status file while it runs, and in its last line."""

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
from semisfl.net.client.rejection import Rejected
from semisfl.settings.counts import amount, counted

log = logging.getLogger(__name__)

STATUS_SECONDS = 10.0


class Report:
    """Follow one device. The status file, if any, is written by a thread of its own."""

    def __init__(self, status: Path | None = None) -> None:
        self.ended: str | None = None
        """Why the device ended: finished, stopped or the kind of a `Rejected`; None while it runs."""
        self._status = status
        self._device: Device | None = None
        self._reason: str | None = None
        self._over = threading.Event()
        self._failed = False

    @property
    def busy(self) -> bool:
        """Return whether the device is in a round."""
        return self._device is not None and self._device.doing.startswith("training")

    @contextlib.contextmanager
    def following(self, device: Device) -> Iterator[None]:
        """Follow ``device`` inside the block, and note how the block ends."""
        self._device = device
        self._write()
        keeper = threading.Thread(target=self._keep, daemon=True)
        keeper.start()
        try:
            yield
            self.ended = "finished" if device.finished else "stopped"
        except Rejected as refused:
            self.ended, self._reason = refused.kind, str(refused)
            raise
        except BaseException as error:
            self.ended, self._reason = "failed", str(error)
            raise
        finally:
            self._over.set()
            keeper.join()

    def line(self) -> str:
        """Return in one line why the device ended and what it did."""
        if self._device is None:
            return "stopped before connecting"
        now, doing = self._values(self._device), self._device.doing
        known = {"finished": "the run is finished", "stopped": f"stopped while {doing}"}
        why = known.get(self.ended or "", self._reason)
        if not now["bytes_received"]:
            return str(why)
        bits = now["bits_per_image"]
        carries = "no bound on" if bits is None else f"at most {bits:,}"
        return (
            f"{why}; {counted(now['rounds'], 'round')} with {counted(now['images'], 'image')}, {carries} bits per image, "
            f"{amount(now['bytes_sent'])} sent, {amount(now['bytes_received'])} received"
        )

    def _values(self, device: Device) -> dict[str, Any]:
        sent, received = device.bytes_moved
        images, skipped = device.image_count
        values: dict[str, Any] = {"state": self.ended or device.doing, "rounds": device.rounds}
        values |= {"images": images, "unreadable": skipped}
        values |= {"bytes_sent": sent, "bytes_received": received}
        bits = device.bits_per_image
        values["bits_per_image"] = round(bits, 1) if bits < math.inf else None
        return values | ({"reason": self._reason} if self._reason else {})

    def _keep(self) -> None:
        while not self._over.wait(STATUS_SECONDS):
            self._write()
        self._write()

    def _write(self) -> None:
        """Write the status file; an error of the disk is logged once and stops nothing."""
        if self._status is None or self._device is None:
            return
        values = {"time": timestamp(), **self._values(self._device)}
        try:
            write_whole(self._status, (json.dumps(values) + "\n").encode())
            self._failed = False
        except OSError as error:
            if not self._failed:
                log.warning("cannot write the status to %s: %s", self._status, error)
            self._failed = True

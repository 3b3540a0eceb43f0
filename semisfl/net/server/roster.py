"""Give each client a place, which it keeps until it is removed, and remember how many images it holds.

The place is the client's index in the run: it seeds its draws, and its bytes are counted under it. The roster is
``roster.json`` in the run's directory and part of every checkpoint.
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from semisfl.files import write_whole
from semisfl.settings.sections import ConfigError

log = logging.getLogger(__name__)

REMOVED = "removed.txt"
"""The file of a run's directory with the names of removed devices, one per line. They stay out as long as it names them."""

Bytes = tuple[int, int]
"""Up and down."""


def removed_names(directory: Path) -> set[str]:
    """Return the devices that the operator has removed from the run in ``directory``."""
    path = directory / REMOVED
    return set(path.read_text(encoding="utf-8").splitlines()) if path.exists() else set()


def remove_device(directory: Path, name: str) -> None:
    """Let the server of the run in ``directory`` remove the device ``name`` before its next round, and keep it out."""
    names = sorted({*removed_names(directory), name})
    write_whole(directory / REMOVED, "".join(f"{one}\n" for one in names).encode())


class Roster:
    """Assign places 0..total-1: a newcomer gets the first that is free.

    With a file, every enrolment is on disk before the client learns its index. A server killed
    before its first checkpoint then still gives every client the index that seeds its draws.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.index: dict[str, int] = {}
        self.images: dict[int, int] = {}
        """How many images each client reported last; the sum is the unlabelled part of |D|."""
        self.serials: dict[str, int] = {}
        """The certificate that each client showed last."""
        self.before: dict[int, Bytes] = {}
        """Bytes up and down of each place before its client came: those of clients that had it earlier."""
        self.moved: Callable[[], Mapping[int, Bytes]] = dict
        """Returns the bytes up and down of each place so far."""
        self._path: Path | None = None
        self._changing = threading.Lock()

    @property
    def full(self) -> bool:
        """Return whether every place is taken."""
        return len(self.index) >= self.total

    def keep_in(self, path: Path) -> None:
        """Read the file if it exists, and write every change to it from now on.

        The file is newer than any checkpoint: places may have been freed since.
        """
        if path.exists():
            try:
                self.load_state_dict(json.loads(path.read_text(encoding="utf-8")))
            except (ConfigError, OSError):
                raise
            except Exception as error:  # JSON of any other form raises nearly anything
                if not self.index:
                    raise ConfigError(
                        f"{path}, which says who is which client, is damaged, and there is no "
                        "checkpoint that knows it; restore the file, or start a run elsewhere"
                    ) from error
                log.warning("%s is damaged; clients are numbered as in the checkpoint", path)
                write_whole(path, json.dumps(self.state_dict()).encode())
        self._path = path

    def enrol(self, identity: str, images: int, serial: int | None = None) -> int | None:
        """Return this identity's place; None if every place is taken by others.

        ``serial`` is that of its certificate: once it is revoked, the place is free.
        """
        with self._changing:
            if identity not in self.index and self.full:
                return None
            taken = set(self.index.values())
            free = next((place for place in range(self.total) if place not in taken), -1)
            client = self.index.get(identity, free)
            index, counts = {**self.index, identity: client}, {**self.images, client: images}
            serials = self.serials if serial is None else {**self.serials, identity: serial}
            before = self.before
            if identity not in self.index:
                before = {**before, client: self.moved().get(client, (0, 0))}
            self._change(index, counts, serials, before)
            return client

    def remove(self, identity: str) -> int:
        """Free the place of ``identity``, which has one, and return it."""
        with self._changing:
            client = self.index[identity]
            index = {name: place for name, place in self.index.items() if name != identity}
            counts = {place: count for place, count in self.images.items() if place != client}
            serials = {name: one for name, one in self.serials.items() if name != identity}
            before = {place: moved for place, moved in self.before.items() if place != client}
            self._change(index, counts, serials, before)
            return client

    def _change(
        self,
        index: dict[str, int],
        images: dict[int, int],
        serials: dict[str, int],
        before: dict[int, Bytes],
    ) -> None:
        now = (index, images, serials, before)
        if now != (self.index, self.images, self.serials, self.before):
            if self._path is not None:
                write_whole(self._path, json.dumps(_plain(*now)).encode())
            # Only now: a change that the disk refused is none.
            self.index, self.images, self.serials, self.before = now

    def name(self, client: int) -> str:
        """Return the name of the device with this place."""
        return next(
            (name for name, index in self.index.items() if index == client), f"client {client}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return names, places and numbers of images, as they are kept on disk."""
        return _plain(self.index, self.images, self.serials, self.before)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over ``state`` in place of what is known."""
        index = {str(name): int(place) for name, place in state["index"].items()}
        places = sorted(index.values())
        if len(set(places)) < len(places) or not all(0 <= one < self.total for one in places):
            raise ConfigError(
                f"a roster with the places {places} does not fit clients.total = {self.total}: each must be "
                "taken once and be below it; remove devices with `semisfl fleet RUN remove NAME` first"
            )
        images = {int(place): int(count) for place, count in state["images"].items()}
        serials = {name: int(text, 16) for name, text in state.get("serials", {}).items()}
        before = state.get("before", {}).items()
        self.before = {int(place): (int(up), int(down)) for place, (up, down) in before}
        self.index = dict(sorted(index.items(), key=lambda item: item[1]))
        self.images, self.serials = images, serials


def _plain(
    index: Mapping[str, int],
    images: Mapping[int, int],
    serials: Mapping[str, int],
    before: Mapping[int, Bytes],
) -> dict[str, Any]:
    return {
        "index": dict(index),
        "images": {str(client): count for client, count in images.items()},
        "serials": {name: f"{serial:x}" for name, serial in serials.items()},
        "before": {str(place): list(moved) for place, moved in before.items()},
    }

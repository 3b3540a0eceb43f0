"""Give each client an index that never changes, and remember how many images it holds."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from semisfl.files import write_whole
from semisfl.settings.sections import ConfigError

log = logging.getLogger(__name__)


class Roster:
    """Assign indices 0..total-1 in order of first arrival.

    With a file, every enrolment is on disk before the client learns its index. A server killed
    before its first checkpoint then still gives every client the index that seeds its draws.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.index: dict[str, int] = {}
        self.images: dict[int, int] = {}
        """How many images each client reported last; the sum is the unlabelled part of |D|."""
        self._path: Path | None = None

    def keep_in(self, path: Path) -> None:
        """Read the file if it exists, and write every change to it from now on."""
        if path.exists():
            state = _read(path)
            if state is not None:
                self.load_state_dict(state)
            elif not self.index:
                raise ConfigError(
                    f"{path}, which says who is which client, is damaged, and there is no checkpoint "
                    "that knows it; restore the file, or start a run elsewhere"
                )
            else:
                log.warning("%s is damaged; clients are numbered as in the checkpoint", path)
                write_whole(path, json.dumps(self.state_dict()).encode())
        self._path = path

    def enrol(self, identity: str, images: int) -> int | None:
        """This identity's index; None if every place is taken by others."""
        if identity not in self.index and len(self.index) >= self.total:
            return None
        client = self.index.get(identity, len(self.index))
        if (self.index.get(identity), self.images.get(client)) != (client, images):
            index, held = {**self.index, identity: client}, {**self.images, client: images}
            if self._path is not None:
                write_whole(self._path, json.dumps(_plain(index, held)).encode())
            # Only now: an enrolment that the disk refused is none.
            self.index, self.images = index, held
        return client

    def name(self, client: int) -> str:
        return next(
            (name for name, index in self.index.items() if index == client), f"client {client}"
        )

    def state_dict(self) -> dict[str, Any]:
        return _plain(self.index, self.images)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over ``state``; identities enrolled meanwhile must not disagree with it."""
        if not isinstance(
            state.get("index"), Mapping
        ):  # as files were before they held the numbers of images
            state = {"index": state, "images": {}}
        merged = {str(name): int(index) for name, index in state["index"].items()}
        for name, index in self.index.items():
            if merged.setdefault(name, index) != index:
                raise ValueError(
                    f"{name} is client {index} here and client {merged[name]} in the checkpoint; "
                    "start the server with the --out folder the checkpoint came from"
                )
        if sorted(merged.values()) != list(range(len(merged))) or len(merged) > self.total:
            raise ValueError(
                f"a roster of {len(merged)} clients with indices {sorted(merged.values())} does not fit "
                f"clients.total = {self.total}; indices must be 0, 1, 2, ... below it"
            )
        self.index = dict(sorted(merged.items(), key=lambda item: item[1]))
        self.images = {int(c): int(n) for c, n in state["images"].items()} | self.images


def _read(path: Path) -> dict[str, Any] | None:
    """Return the file's content; None if it is damaged."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return state if isinstance(state, dict) else None


def _plain(index: Mapping[str, int], images: Mapping[int, int]) -> dict[str, Any]:
    return {"index": dict(index), "images": {str(client): n for client, n in images.items()}}

"""The fleet of a frozen bottom over the network: a method trains on the rows that devices have sent.

Devices need not be here in a round: they send their rows once (`semisfl.net.server.uploads`), and the round draws from
their files. Which files, and how many of their images, is fixed at the end of the round before, and saved with it; so
a run that is resumed repeats its round with the same images, whatever arrived meanwhile.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from semisfl.files import write_whole
from semisfl.fleet.base import SplitRound
from semisfl.fleet.caps import refuse_views
from semisfl.fleet.codec import roundtrip_state, state_bytes
from semisfl.fleet.frozen import FOLDER, Stored, StoredRounds
from semisfl.fleet.packing import join_states
from semisfl.fleet.setup import FleetSetup
from semisfl.models.freezing import weights_digest
from semisfl.net.server.fleet import NetworkFleet
from semisfl.net.server.uploads import RowStore, Uploads
from semisfl.net.server.waiting import Waiting
from semisfl.settings.counts import amount, plural
from semisfl.settings.policy import DevicePolicy
from semisfl.stopping import Stopped


class FrozenNetworkFleet(StoredRounds, NetworkFleet):
    """The server's side of a run with a frozen bottom."""

    capturable = False

    def __init__(self, setup: FleetSetup, **listening: Any) -> None:
        """Take the port now; ``listening`` are the options of `NetworkFleet`.

        Raises `PolicyBreach` if all views of an image together exceed a quota of the run's own policy.
        """
        own = DevicePolicy.model_validate(dict(setup.config.policy))
        refuse_views(own, setup.config.clients, setup.model.features)
        super().__init__(setup, **listening)
        self.prepare(setup)
        self.waiting = Waiting(self.config, self.sessions, setup.stop, self._with_rows)
        self._model, self._ends = setup.model, ExitStack()
        self._downloads: dict[str, int] = {}
        """How many times each device had got the bottom when the run was saved."""
        self._images: dict[str, int] = {}
        """How many images of each device's file the next round draws from; empty before the first round."""

    def open(self, directory: Path | None) -> None:
        """Let devices in. Their rows are kept in ``directory``; without one, in a temporary folder."""
        self._folder = (directory or Path(self._ends.enter_context(TemporaryDirectory()))) / FOLDER
        # Only now: a checkpoint may have brought other weights than the model had at first.
        bottom = roundtrip_state(self._model.bottom.state_dict(), self.config.wire.models)
        self.terms = replace(self.terms, bottom=weights_digest(bottom))
        self.sessions.terms = self.terms
        self._bottom_bytes = state_bytes(bottom, self.config.wire.models)
        self.store = RowStore(self._folder, self._form, self.about(bottom))
        self.store.downloads.update(self._downloads)
        weights = join_states({"bottom": bottom})
        uploads = Uploads(self.sessions, self._schemas, self.store, weights)
        self.sessions.begin, self.sessions.take = uploads.begin, uploads.take
        super().open(directory)

    # --- whose rows are there --------------------------------------------------------------------

    def _published(self) -> dict[str, int]:
        """Return how many images' rows are there of each device that has a place, less files that must come again."""
        files = dict(self.store.files)
        images = {name: files[name].images for name in self.roster.index if name in files}
        return {name: n for name, n in images.items() if n >= self._images.get(name, 0)}

    def _with_rows(self) -> set[int]:
        """Return the clients that have sent their rows; any thread may call."""
        return {self.roster.index[name] for name in self._published()}

    def image_counts(self) -> Mapping[int, int]:
        """Return how many images' rows the next round may draw from, by client."""
        index = self.roster.index
        return {index[name]: count for name, count in self._images.items() if name in index}

    def present(self) -> Sequence[int]:
        """Return the clients whose rows the next round may draw from."""
        return sorted(self.image_counts())

    def wait_ready(self) -> None:
        """Return once a quorum has sent its rows; then the images of the first round are fixed, on the disk too."""
        self.waiting.until_ready()
        if not self._images and self.device_log.round is None:
            first = self._folder / "first_round.json"  # a killed process may have begun it
            if not first.exists():
                write_whole(first, json.dumps(self._published()).encode())
            self._images = json.loads(first.read_text())
        if not self.present():  # those of the round were removed from the run
            self._images = self._published()
        # A file that somebody removed is sent again; devices that came since the round was fixed do not replace it.
        while absent := self.image_counts().keys() - self._with_rows():
            self.waiting.wait(len(self._with_rows()) + len(absent))

    def collect(self) -> bool:
        """Return True once every client has sent its rows, or False if the run was asked to end before."""
        complete = False
        with suppress(Stopped):
            complete = self.waiting.wait(self.roster.total)
        self._count_sent()
        self._status.count_bytes()
        return complete

    def contents(self) -> str:
        """Return in one line how many images of how many devices are in the folder."""
        images, files = self._published(), self.store.files
        return (
            f"{plural(sum(images.values()), 'image')} of {len(images)} of {plural(self.roster.total, 'device')}, "
            f"{amount(sum(files[name].bytes for name in images))}, in {self._folder}"
        )

    # --- a round ---------------------------------------------------------------------------------

    def start_round(self, plan: SplitRound) -> None:
        """Count what devices have sent so far, and draw the round's rows."""
        self.device_log.round = plan.index
        self._count_sent()
        files, images = self.store.files, self._images.items()
        index = self.roster.index
        self.draw(
            plan, {index[name]: Stored(files[name], n) for name, n in images if name in index}
        )

    def _count_sent(self) -> None:
        """Count the bytes of what is there: rows count once, also if the round is repeated or the run resumed."""
        index = self.roster.index
        for name in self._published():
            # A place keeps the bytes of a device that had it before.
            up, down = self.roster.before.get(client := index[name], (0, 0))
            times = max(1, self.store.downloads[name])
            self.traffic.send_once("features", "up", client, up + self.store.files[name].bytes)
            self.traffic.send_once("model", "down", client, down + times * self._bottom_bytes)

    def settle(self, good: bool) -> str | None:
        """End a round: the next one draws from what is there now."""
        self.sessions.free_places()
        self._images = self._published()
        return super().settle(good)

    # --- lasting and ending ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return also the images of the next round, and how often devices have got the bottom."""
        downloads = dict(self.store.downloads)
        return {**super().state_dict(), "images": self._images, "downloads": downloads}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        super().load_state_dict(state)
        self._images, self._downloads = dict(state["images"]), state["downloads"]

    def close(self, finished: bool) -> None:
        """Say goodbye, and remove the temporary folder, if there is one."""
        super().close(finished)
        self._ends.close()

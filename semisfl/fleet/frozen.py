"""The fleet of a frozen bottom: it answers a method's questions from stored rows.

The bottom never changes, so a client encodes its images once (`semisfl.fleet.rows`). A round draws images and views;
their rows are copied to the device as they are encoded, and decoded step by step. Nothing is sent but the bottom,
once to each client, and its rows, once back.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from semisfl import seeds
from semisfl.data.fixed_views import KINDS, content_digest
from semisfl.data.positions import draw_positions
from semisfl.engine.weights import clone
from semisfl.fleet.base import ClientResult, ClientWork, Features, FullRound, SplitRound, State
from semisfl.fleet.block import ClientsHere
from semisfl.fleet.caps import refuse_views
from semisfl.fleet.codec import roundtrip_state, state_bytes
from semisfl.fleet.local import Simulation
from semisfl.fleet.rows import TOGETHER, Encoder, RowFile, RowFormat, first_line
from semisfl.fleet.setup import FleetSetup
from semisfl.models.freezing import weights_digest
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.counts import plural
from semisfl.settings.policy import DevicePolicy

log = logging.getLogger(__name__)

FOLDER = "features"
"""The folder of the clients' files in a run's directory."""
MUST_EQUAL = {
    "features": "set data.size or model.cut as in the run that made the rows",
    "views": "set clients.weak_views and clients.strong_views as there",
    "codecs": "set wire.teacher_features (of weak views) and wire.student_features as there",
    "normalised by": "set model.weights as in the run that made the rows, or data.name if there were no weights",
    "bottom": "set model.name, model.weights and model.cut, and without weights also seed, as in the run that made the rows",
}
"""What a file of ``data.features`` must have as the run has it, each with the settings to change."""


class Stored(NamedTuple):
    """What a round may draw of a client: the first ``images`` of its ``file``."""

    file: RowFile
    images: int
    truth: Tensor | None = None
    """The true labels of these images [images], where a simulation knows them."""


class StoredRounds:
    """Base of the fleets of a frozen bottom: a round's rows are drawn from the clients' files and given step by step."""

    def prepare(self, setup: FleetSetup) -> None:
        """Take the run's ``setup``, which says what the rows of all files are."""
        self._config, self._form = setup.config, RowFormat.of(setup.config, setup.model.features)
        self._normalised_by = [setup.mean, setup.std]
        self._round: dict[str, Tensor] = {}
        """The round's packed rows [steps, rows of all clients, bytes] of each kind, and perhaps ``truth``."""
        self._step = torch.zeros(1, dtype=torch.long, device=setup.hardware.device)

    def about(self, bottom: State) -> dict[str, Any]:
        """Return what rows follow from beside the client's name and images: a file of other rows is not used.

        ``bottom``: the weights as clients get them.
        """
        return {
            "bottom": weights_digest(bottom),
            "seed": self._config.seed,
            "augment": self._config.data.augment.model_dump(),
            "normalised by": self._normalised_by,
            "policy": self._config.policy.model_dump(mode="json"),
        }

    def draw(self, plan: SplitRound, stored: Mapping[int, Stored]) -> None:
        """Draw the round's rows of every active client and copy them to the device."""
        self._plan = plan
        drawn = [self._draw(client, stored[client]) for client in plan.active]
        for name in drawn[0]:
            rows = torch.cat([one[name] for one in drawn], 1)
            before = self._round.get(name, rows[:0])
            fits = before.shape == rows.shape  # then a captured step reads it where it is
            self._round[name] = before.copy_(rows) if fits else rows.to(self._step.device)
        self._step.zero_()

    def _draw(self, client: int, stored: Stored) -> dict[str, Tensor]:
        """Return a client's packed rows of the round, [steps, batch, bytes] by kind, and ``truth`` [steps, batch]."""
        plan, clients, seed = self._plan, self._config.clients, self._config.seed
        images = draw_positions(seed, plan.index, client, stored.images, plan.steps, clients.batch)
        rng = seeds.generator(seed, "drawn-views", plan.index, client)
        views = {kind: rng.integers(clients.views[kind], size=images.shape) for kind in KINDS}
        drawn = {kind: stored.file.draw(kind, images, views[kind]) for kind in KINDS}
        truth = stored.truth
        return drawn if truth is None else drawn | {"truth": truth[torch.from_numpy(images)]}

    def forward(self) -> Features:
        """Return the step's rows: strong views as the student's features, weak views as the teacher's."""
        rows = {name: steps.index_select(0, self._step)[0] for name, steps in self._round.items()}
        weak, strong = (self._form.unpack(kind, rows[kind]) for kind in KINDS)
        return Features(strong.requires_grad_(), weak, self._plan.active, rows.get("truth"))

    def backward(self, gradients: Tensor) -> None:
        """Go to the next step: a frozen bottom has no use for gradients."""
        self._step.add_(1)

    def finish_round(self) -> State:
        """Return the bottom that the round began with."""
        return dict(self._plan.bottom)

    def train(self, work: ClientWork, plan: FullRound) -> list[ClientResult]:
        raise AssertionError("the configuration refuses whole-model methods for a frozen bottom")


Piece = tuple[int, str, int, list[str]]
"""Some of a client's images: its index and its name, the place of their first one, and their digests."""


class EncodingClients(ClientsHere):
    """Simulated clients of this process that encode their images with a frozen bottom."""

    def __init__(self, setup: FleetSetup) -> None:
        """Raise `PolicyBreach` if all views of an image together exceed a quota of the policy."""
        super().__init__(setup)
        refuse_views(self.outgoing.policy, self.config.clients, setup.model.features)
        # A copy: the method trains the model it was given, and its weights move to another place.
        self.bottom = clone(setup.model.bottom)
        self.form = RowFormat.of(self.config, setup.model.features)
        self._encoder = Encoder(self.bottom, setup.normalizer, self.outgoing, self.config)

    def images_at(self, client: int, first: int = 0, count: int | None = None) -> Tensor:
        """Return ``count`` images of a client, or all, from place ``first`` on."""
        places = torch.from_numpy(self.shards[client][first:][:count])
        return self.images.index_select(0, places.to(self.images.device))

    def encode(self, piece: Piece) -> Tensor:
        """Return the packed rows [images, bytes] of some images."""
        client, name, first, digests = piece
        images = self.images_at(client, first, len(digests))
        return self.form.pack(self._encoder.rows(images, name, digests).tensors)


class FrozenFleet(StoredRounds, Simulation):
    """Simulated clients with a frozen bottom.

    All of them encode their images when the first round with clients begins, as devices send them when they come,
    whether a round draws them or not. With ``data.features`` the rows were made before, and are in that folder.
    """

    capturable = True
    clients: EncodingClients

    def __init__(self, setup: FleetSetup) -> None:
        """Raise `PolicyBreach` if all views of an image together exceed a quota of the policy."""
        super().__init__(EncodingClients(setup))
        self.prepare(setup)
        # What a client sends it sends once: rounds use no quota.
        self._policy = DevicePolicy()
        self._model, self._stop = setup.model, setup.stop
        self._files, self._ends = list[RowFile](), ExitStack()
        self._expected: Mapping[str, str] = {}
        """The digest of each file's images, if the run is resumed with ``data.features``."""

    def open(self, directory: Path | None) -> None:
        """Keep the clients' files in the run's ``directory``; without one, in a temporary folder.

        Raises `ConfigError` for files of ``data.features`` that do not fit the run.
        """
        self._folder = (directory or Path(self._ends.enter_context(TemporaryDirectory()))) / FOLDER
        if self.config.data.features is not None:
            # Only now: a checkpoint may have brought other weights than the model had at first.
            weights = roundtrip_state(self._model.bottom.state_dict(), self.config.wire.models)
            self._files = collected(self.config)
            for file in self._files:
                check_fits(file, json.loads(first_line(self._form, self.about(weights))))
                if self._expected.get(file.client, images := _images_of(file)) != images:
                    raise ConfigError(
                        f"data.features: the images of {file.path} are not those that the run began with; put the "
                        "former file there"
                    )

    def close(self, finished: bool) -> None:
        """Remove the temporary folder, if there is one."""
        self._ends.close()

    def state_dict(self) -> dict[str, Any]:
        """Return which images' rows are in the files of ``data.features``."""
        if self.config.data.features is None:
            return {}
        return {"images": {file.client: _images_of(file) for file in self._files}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the same images."""
        self._expected = state.get("images", {})

    def start_round(self, plan: SplitRound) -> None:
        """Let all clients encode their images if they have not yet, then draw the round's rows."""
        self._files = self._files or self._encoded(plan.bottom)
        labels, model = self.clients.labels.cpu(), state_bytes(plan.bottom, self.config.wire.models)
        stored = {}
        for client, file in enumerate(self._files):
            # Sent once, also if the round is repeated or the run resumed.
            self.traffic.send_once("model", "down", client, model)
            self.traffic.send_once("features", "up", client, file.bytes)
            shard = self.clients.shards[client]
            stored[client] = Stored(file, len(shard), labels[torch.from_numpy(shard)])
        self.draw(plan, stored)

    def _encoded(self, bottom: State) -> list[RowFile]:
        """Return every client's file; images are encoded unless an earlier process did, with the same settings."""
        begun, weights = time.perf_counter(), roundtrip_state(bottom, self.config.wire.models)
        self.clients.bottom.load_state_dict(weights)
        about, names = self.about(weights), self.members()
        files: dict[int, RowFile] = {}
        missing: dict[int, tuple[bytes, list[str]]] = {}
        for client, name in names.items():
            line = first_line(self._form, {"client": name, **about})
            digests = [content_digest(image) for image in self.clients.images_at(client).cpu()]
            if (file := RowFile.find(self._path(client), line, digests)) is not None:
                files[client] = file
            else:
                missing[client] = line, digests
        pieces = [
            (client, names[client], first, digests[first : first + TOGETHER])
            for client, (_, digests) in missing.items()
            for first in range(0, len(digests), TOGETHER)
        ]
        # Strict, so that `_rows` runs to its end, behind the last piece.
        encoded = zip(pieces, self._rows(pieces), strict=True)
        for client, parts in groupby(encoded, lambda part: part[0][0]):
            rows = (packed for _, packed in parts)
            files[client] = RowFile.write(self._path(client), *missing[client], rows)
        if pieces:
            images, seconds = sum(len(piece[-1]) for piece in pieces), time.perf_counter() - begun
            log.info("%s encoded in %.1f s", plural(images, "image"), seconds)
        return [files[client] for client in sorted(files)]

    def _path(self, client: int) -> Path:
        return self._folder / f"{client}.rows"

    def _rows(self, pieces: Sequence[Piece]) -> Iterator[Tensor]:
        """Yield the packed rows of each piece in order."""
        for piece in pieces:
            self._stop.check()
            yield self.clients.encode(piece)


# --- rows that are there already -----------------------------------------------------------------


def collected(config: Config) -> list[RowFile]:
    """Return the files in the folder ``data.features``, one per client, in the order of their names' lengths and letters.

    Raises `ConfigError` if they are not as many as ``clients.total``, or if one is damaged or without images.
    """
    folder = Path(str(config.data.features))
    paths = sorted(folder.glob("*.rows"), key=lambda path: (len(path.name), path.name))
    if len(paths) != config.clients.total:
        raise ConfigError(
            f"data.features = {str(folder)!r} holds rows of {plural(len(paths), 'client')} but clients.total = "
            f"{config.clients.total}; set clients.total = {len(paths)}"
            if paths
            else f"data.features = {str(folder)!r} holds no rows (*.rows); name the folder {FOLDER!r} of a run"
        )
    files = list(map(RowFile, paths))
    for file in files:
        if not file.images or file.end != file.path.stat().st_size:
            raise ConfigError(
                f"{file.path} ends after {plural(file.images, 'image')}, within the next one; copy it again"
            )
    return files


def check_fits(file: RowFile, ours: Mapping[str, Any]) -> None:
    """Raise `ConfigError`, with the setting to change, for rows that are not what a run computes with: ``ours``."""
    for key, change in MUST_EQUAL.items():
        if (theirs := file.about.get(key)) != ours[key]:
            raise ConfigError(
                f"{file.path}: its {key} = {theirs}, and the run's = {ours[key]}; {change}"
            )


def _images_of(file: RowFile) -> str:
    return hashlib.blake2b(file.digests, digest_size=16).hexdigest()

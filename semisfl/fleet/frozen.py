"""The fleet of a frozen bottom: it answers a method's questions from stored rows.

The bottom never changes, so a client encodes its images once (`semisfl.fleet.rows`). A round draws images and views;
their rows are copied to the device as they are encoded, and decoded step by step. Nothing is sent but the bottom,
once to each client, and its rows, once back.
"""

from collections.abc import Mapping
from contextlib import ExitStack
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
from semisfl.fleet.rows import TOGETHER, Encoder, RowFile, RowFormat
from semisfl.fleet.setup import FleetSetup
from semisfl.models.freezing import weights_digest
from semisfl.settings.policy import DevicePolicy

FOLDER = "features"
"""The folder of the clients' files in a run's directory."""


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


class FrozenFleet(StoredRounds, Simulation):
    """Simulated clients with a frozen bottom. A client encodes its images in the first round it takes part in."""

    capturable = True

    def __init__(self, setup: FleetSetup) -> None:
        """Raise `PolicyBreach` if all views of an image together exceed a quota of the policy."""
        super().__init__(ClientsHere(setup))
        self.prepare(setup)
        outgoing = self.clients.outgoing
        refuse_views(outgoing.policy, self.config.clients, setup.model.features)
        # What a client sends it sends once: rounds use no quota.
        self._policy = DevicePolicy()
        # A copy: the method trains the model it was given, and its weights move to another place.
        self._encoder = Encoder(clone(setup.model.bottom), setup.normalizer, outgoing, self.config)
        self._stop, self._files, self._ends = setup.stop, dict[int, RowFile](), ExitStack()

    def open(self, directory: Path | None) -> None:
        """Keep the clients' files in the run's ``directory``; without one, in a temporary folder."""
        self._folder = (directory or Path(self._ends.enter_context(TemporaryDirectory()))) / FOLDER

    def close(self, finished: bool) -> None:
        """Remove the temporary folder, if there is one."""
        self._ends.close()

    def start_round(self, plan: SplitRound) -> None:
        """Let new clients encode their images, then draw the round's rows."""
        self._plan = plan
        self.draw(plan, {client: self._stored(client) for client in plan.active})

    def _stored(self, client: int) -> Stored:
        """Return a client's rows, encoded now if this is its first round, and count its bytes."""
        if client not in self._files:
            self._files[client] = self._encoded(client)
        # Set and not added: both are sent once, also if the round is repeated or the run resumed.
        counts, file = self.traffic.counts, self._files[client]
        counts["model", "down", client] = state_bytes(self._plan.bottom, self.config.wire.models)
        counts["features", "up", client] = file.bytes
        shard = torch.from_numpy(self.clients.shards[client])
        return Stored(file, file.images, self.clients.labels.cpu()[shard])

    def _encoded(self, client: int) -> RowFile:
        """Return a client's file; its images are encoded unless an earlier process did, with the same settings."""
        self._stop.check()
        bottom = roundtrip_state(self._plan.bottom, self.config.wire.models)
        self._encoder.bottom.load_state_dict(bottom)
        all_images, shard = self.clients.images, self.clients.shards[client]
        images = all_images.index_select(0, torch.from_numpy(shard).to(all_images.device))
        name, digests = self.members()[client], [content_digest(image) for image in images.cpu()]
        about = {"client": name, **self.about(bottom)}
        parts = (
            (images[first : first + TOGETHER], name, digests[first : first + TOGETHER])
            for first in range(0, len(images), TOGETHER)
        )
        packed = (self._form.pack(self._encoder.rows(*part).tensors) for part in parts)
        return RowFile.made(self._folder / f"{name}.rows", self._form, about, digests, packed)

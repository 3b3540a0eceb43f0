"""The fleet of a frozen bottom: it answers a method's questions from stored rows.

The bottom never changes, so a client encodes its images once (`semisfl.fleet.rows`). A round draws images and views;
their rows are copied to the device as they are encoded, and decoded step by step. Nothing is sent but the bottom,
once to each client, and its rows, once back.
"""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from semisfl import seeds
from semisfl.data.fixed_views import KINDS, content_digest
from semisfl.data.positions import draw_positions
from semisfl.engine.weights import clone
from semisfl.fleet.base import ClientResult, ClientWork, Features, FullRound, SplitRound, State
from semisfl.fleet.block import ClientsHere
from semisfl.fleet.caps import RoundUse, Spent
from semisfl.fleet.codec import roundtrip_state, state_bytes
from semisfl.fleet.local import Simulation
from semisfl.fleet.rows import TOGETHER, Encoder, RowFile, RowFormat
from semisfl.fleet.setup import FleetSetup
from semisfl.settings.policy import DevicePolicy, PolicyBreach, feature_bits

FOLDER = "features"
"""The folder of the clients' files in a run's directory."""


class FrozenFleet(Simulation):
    """Simulated clients with a frozen bottom. A client encodes its images in the first round it takes part in."""

    capturable = True

    def __init__(self, setup: FleetSetup) -> None:
        """Raise `PolicyBreach` if all views of an image together exceed a quota of the policy."""
        super().__init__(ClientsHere(setup))
        sent, features, outgoing = self.config.clients, setup.model.features, self.clients.outgoing
        views = sum(sent.views.values())
        use = RoundUse(views, views * feature_bits(outgoing.policy, features))
        if excess := Spent().plus(use).excess(outgoing.policy):
            raise PolicyBreach(
                f"{excess}; lower clients.weak_views = {sent.weak_views} or "
                f"clients.strong_views = {sent.strong_views}, or raise the limit"
            )
        # What a client sends it sends once: rounds use no quota.
        self._policy = DevicePolicy()
        # A copy: the method trains the model it was given, and its weights move to another place.
        self._encoder = Encoder(clone(setup.model.bottom), setup.normalizer, outgoing, self.config)
        self._form = RowFormat(
            {
                "weak": self.config.wire.teacher_features,
                "strong": self.config.wire.student_features,
            },
            sent.views,
            features,
        )
        self._about = {
            "seed": self.config.seed,
            "augment": self.config.data.augment.model_dump(),
            "normalised by": [setup.mean, setup.std],
            "policy": outgoing.policy.model_dump(mode="json"),
        }
        self._stop, self._files, self._ends = setup.stop, dict[int, RowFile](), ExitStack()
        self._round: dict[str, Tensor] = {}
        """The round's packed rows [steps, rows of all clients, bytes] of each kind, and ``truth``."""
        self._step = torch.zeros(1, dtype=torch.long, device=setup.hardware.device)

    def open(self, directory: Path | None) -> None:
        """Keep the clients' files in the run's ``directory``; without one, in a temporary folder."""
        self._folder = (directory or Path(self._ends.enter_context(TemporaryDirectory()))) / FOLDER

    def close(self, finished: bool) -> None:
        """Remove the temporary folder, if there is one."""
        self._ends.close()

    def start_round(self, plan: SplitRound) -> None:
        """Let new clients encode their images, then draw the round's rows and copy them to the device."""
        self._plan = plan
        drawn = [self._draw(client) for client in plan.active]
        for name in drawn[0]:
            rows = torch.cat([one[name] for one in drawn], 1)
            before = self._round.get(name, rows[:0])
            fits = before.shape == rows.shape  # then a captured step reads it where it is
            self._round[name] = before.copy_(rows) if fits else rows.to(self._step.device)
        self._step.zero_()

    def _draw(self, client: int) -> dict[str, Tensor]:
        """Return a client's packed rows of the round, [steps, batch, bytes] by kind, and ``truth`` [steps, batch]."""
        plan, config, shard = self._plan, self.config, self.clients.shards[client]
        if client not in self._files:
            self._files[client] = self._encoded(client)
        # Set and not added: both are sent once, also if the round is repeated or the run resumed.
        counts = self.traffic.counts
        counts["model", "down", client] = state_bytes(plan.bottom, config.wire.models)
        counts["features", "up", client] = self._files[client].bytes
        images = draw_positions(
            config.seed, plan.index, client, len(shard), plan.steps, config.clients.batch
        )
        rng = seeds.generator(config.seed, "drawn-views", plan.index, client)
        views = {kind: rng.integers(self._form.views[kind], size=images.shape) for kind in KINDS}
        drawn = {kind: self._files[client].draw(kind, images, views[kind]) for kind in KINDS}
        return drawn | {"truth": self.clients.labels.cpu()[torch.from_numpy(shard[images])]}

    def _encoded(self, client: int) -> RowFile:
        """Return a client's file; its images are encoded unless an earlier process did, with the same settings."""
        self._stop.check()
        bottom = roundtrip_state(self._plan.bottom, self.config.wire.models)
        self._encoder.bottom.load_state_dict(bottom)
        all_images, shard = self.clients.images, self.clients.shards[client]
        images = all_images.index_select(0, torch.from_numpy(shard).to(all_images.device))
        name, digests = str(client), [content_digest(image) for image in images.cpu()]
        weights = {tensor: content_digest(values) for tensor, values in bottom.items()}
        about = {"client": name, "images": digests, "bottom": weights, **self._about}
        parts = (
            (images[first : first + TOGETHER], name, digests[first : first + TOGETHER])
            for first in range(0, len(images), TOGETHER)
        )
        packed = (self._form.pack(self._encoder.rows(*part).tensors) for part in parts)
        return RowFile(self._folder / f"{name}.rows", self._form, about, packed)

    def forward(self) -> Features:
        """Return the step's rows: strong views as the student's features, weak views as the teacher's."""
        rows = {name: steps.index_select(0, self._step)[0] for name, steps in self._round.items()}
        weak, strong = (self._form.unpack(kind, rows[kind]) for kind in KINDS)
        return Features(strong.requires_grad_(), weak, self._plan.active, rows["truth"])

    def backward(self, gradients: Tensor) -> None:
        """Go to the next step: a frozen bottom has no use for gradients."""
        self._step.add_(1)

    def finish_round(self) -> State:
        """Return the bottom that the round began with."""
        return dict(self._plan.bottom)

    def train(self, work: ClientWork, plan: FullRound) -> list[ClientResult]:
        raise AssertionError("the configuration refuses whole-model methods for a frozen bottom")

"""Hold a client's images, model and block of one while it belongs to a run."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from semisfl.engine.hardware import Hardware
from semisfl.fleet.block import ClientBlock
from semisfl.fleet.caps import Held
from semisfl.fleet.outgoing import Outgoing
from semisfl.fleet.setup import FleetSetup
from semisfl.models.build import build_model
from semisfl.models.shapes import Shape
from semisfl.net.messages import Schemas
from semisfl.net.terms import Terms
from semisfl.stopping import StopFlag

VIEWS_AHEAD = 32 * 2**20
"""Bytes of augmented images that a device makes ahead of the step that uses them."""
Images = Callable[[Shape], tuple[Tensor, int]]
"""(channels, height, width) -> uint8 images of that shape, and how many could not be read."""


class Member:
    """Hold what a client needs in every round of one run."""

    block: ClientBlock

    def __init__(self, terms: Terms, load: Images, hardware: Hardware) -> None:
        self.config = terms.config
        self.hardware = hardware
        self.client = -1
        self.terms = terms
        built = build_model(terms.config, terms.shape, terms.classes, projector="none")
        self.model = built.to(hardware.device)
        self.schemas = Schemas.of(terms.config, self.model)
        # Split rounds need no top, and a device may not have the room for one.
        self.model.top.to("meta")
        self.images, self.skipped = load(terms.shape)

    @property
    def held(self) -> Held:
        """Return the sizes that decide what a round costs."""
        return Held.of(self.model, self.config.clients.batch, len(self.images))

    def hold_whole_model(self) -> None:
        """Make room for the top, whose weights come with the round."""
        if any(tensor.is_meta for tensor in self.model.top.state_dict().values()):
            self.model.top.to_empty(device=self.hardware.device)

    def enrol(self, client: int, stop: StopFlag, outgoing: Outgoing | None = None) -> None:
        """Make the block of one; a client keeps its index for the whole run."""
        if client == self.client:
            return
        self.client = client
        nobody = np.empty(0, dtype=np.int64)
        terms, device = self.terms, self.hardware.device
        setup = FleetSetup(
            self.config,
            self.model,
            self.hardware,
            terms.shape,
            terms.classes,
            terms.mean,
            terms.std,
            images=self.images.to(device),
            labels=torch.full((len(self.images),), -1, device=device),
            shards=[nobody] * client + [np.arange(len(self.images))],
            outgoing=outgoing,
            stop=stop,
        )
        self.block = ClientBlock(setup)
        self.block.batches.budget = VIEWS_AHEAD

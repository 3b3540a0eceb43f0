"""A device's part in one run: its images, its model, and the block of one client that trains it."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from semisfl.engine.hardware import Hardware
from semisfl.fleet.block import ClientBlock
from semisfl.fleet.caps import RoundSizes
from semisfl.fleet.outgoing import Outgoing
from semisfl.fleet.setup import FleetSetup
from semisfl.models.build import build_bottom, build_model
from semisfl.models.shapes import Shape
from semisfl.net.messages import Schemas
from semisfl.net.terms import Terms
from semisfl.settings import lookup
from semisfl.stopping import StopFlag

VIEWS_AHEAD = 32 * 2**20
"""Bytes of augmented images that a device makes ahead of the step that uses them."""
Images = Callable[[Shape], tuple[Tensor, int]]
"""(channels, height, width) -> uint8 images of that shape, and how many could not be read."""


class Member:
    """What a device needs in every round of one run, built from the run's terms alone."""

    block: ClientBlock
    """The engine of this client; there is none before `enrol`."""

    def __init__(self, terms: Terms, load: Images, hardware: Hardware) -> None:
        """Build the model of ``terms`` on ``hardware`` and ``load`` the images in their shape.

        Raises `ValueError` if the model cannot be built or is larger than any model may be, and what ``load``
        raises.
        """
        self.config = terms.config
        self.hardware = hardware
        self.client = -1
        """This client's index in the run; -1 before `enrol`."""
        self.terms = terms
        about = terms.config, terms.shape, terms.classes
        whole = lookup.method(terms.config.method).works
        built = build_model(*about, projector="none") if whole else build_bottom(*about)
        self.model = built.to(hardware.device)
        self.schemas = Schemas.of(terms.config, self.model)
        self.images, self.skipped = load(terms.shape)

    @property
    def sizes(self) -> RoundSizes:
        """Return the sizes that decide what a round uses of the quotas."""
        return RoundSizes.of(self.model, self.config.clients.batch, len(self.images))

    def enrol(self, client: int, stop: StopFlag, outgoing: Outgoing | None = None) -> None:
        """Make the block of a client that trains, once: a client keeps its index for the whole run.

        Args:
            client: the index in the run, which decides the client's random draws.
            stop: ends a round between two iterations.
            outgoing: applies the policy to all that the block gives out.
        """
        if client == self.client:
            return
        self.client = client
        if self.terms.bottom:
            return
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

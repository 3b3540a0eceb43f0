"""Hold everything that a fleet of any kind is made from."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from torch import Tensor

from semisfl.data.augment import Augmentation, Normalizer
from semisfl.data.batches import RoundBatches
from semisfl.engine.hardware import Hardware
from semisfl.fleet.outgoing import Outgoing
from semisfl.models.shapes import Shape
from semisfl.models.split import SplitModel
from semisfl.settings.config import Config
from semisfl.stopping import StopFlag


@dataclass(frozen=True)
class NetworkOptions:
    """Where a run's server listens and whose certificates it accepts."""

    listen: str
    """HOST:PORT; port 0 takes a free one."""
    certificates: Path | None
    """The authority's folder; None only with ``insecure_loopback``."""
    insecure_loopback: bool = False


@dataclass(frozen=True)
class FleetSetup:
    """The model, the images and the settings that a fleet of any kind is made from."""

    config: Config
    model: SplitModel
    hardware: Hardware
    shape: Shape
    """Channels, height and width of an image."""
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    images: Tensor | None = None
    """On the hardware's device; None where clients keep their own elsewhere."""
    labels: Tensor | None = None
    """The true ones of ``images``, used for statistics only (-1: unknown)."""
    shards: Sequence[np.ndarray] = ()
    """Which of ``images`` each client holds."""
    network: NetworkOptions | None = None
    outgoing: Outgoing | None = None
    """A device's own; None: one made from `config.policy`."""
    stop: StopFlag = field(default_factory=StopFlag)

    def digest(self) -> int:
        """Return a checksum of the images and of who holds which; equal wherever the data is equal."""
        assert self.images is not None and self.labels is not None
        some = self.images[:: max(1, len(self.images) // 1000)]
        parts = [np.array(self.images.shape), some.cpu().numpy(), self.labels.cpu().numpy()]
        checksum = 0
        for part in (*parts, *self.shards):
            checksum = zlib.crc32(np.ascontiguousarray(part).tobytes(), checksum)
        return checksum

    @property
    def normalizer(self) -> Normalizer:
        """Return the run's normalisation of images, on its device."""
        return Normalizer.of(self.mean, self.std).to(self.hardware.device)

    def batches(self, images: Tensor) -> RoundBatches:
        """Return batches of ``images``, augmented and normalised as in this run."""
        augmentation = Augmentation.of(self.config.data.augment)
        hardware = self.hardware
        return RoundBatches(
            images, augmentation, self.normalizer, hardware.dtype, whole=hardware.capture
        )

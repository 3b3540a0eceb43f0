"""Hold a device to the memory that its owner allows: large things are reserved before they are allocated."""

import re

from semisfl.data.operations import table_bytes
from semisfl.engine.hardware import Hardware, free_memory
from semisfl.fleet.slot import PREDICT_BATCH
from semisfl.models.memory import FP32, footprint
from semisfl.net import chunks
from semisfl.net.terms import Terms, placed_model
from semisfl.settings.counts import amount
from semisfl.settings.policy import PolicyBreach
from semisfl.settings.sections import ConfigError

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
FRAMES = 4
"""Large frames at a time: one in use, one that arrives, two that wait (`connection.INBOX`)."""
COPIES = 8
"""Copies of the weights: as built, as cloned, as sent, trained, teacher's, gradients, momentum, as uploaded."""
FULL_COPIES = 13
"""The same for whole models: a method may have five networks in place of two, and add two up on the way."""
KEPT = 3
"""Batches of activations: the student's with their gradients, and the teacher's."""
FULL_PASSES = 2
"""Passes for training that are kept at a time: a method of whole models may go back through two together."""
BYTES_PER_USE = 256
"""Most bytes that are drawn for one image of one step: positions, and both views' augmentation."""
PREDICTIONS = 4
"""Copies of the predictions of all images: as computed, together, and as they are counted by class."""
OPERATION = 8
"""Most bytes that an operation of augmentation takes for each byte of a step's views."""
VIEWS_SHARE = 8
"""The budget divided by this is for augmented images made ahead."""
MAKING = 5
"""A stretch of augmented images takes this many times its bytes while it is made beside the one before."""
FIX = "join with a larger --memory, or ask for less (clients.batch, clients.steps, data.size, model.cut)"

UNKNOWN = 4 * 2**30
"""Free bytes to assume if the system does not say."""


class Budget:
    """Count what is reserved, by name; ``total`` None: half of the memory that is free now."""

    def __init__(self, total: int | None = None, fix: str = FIX) -> None:
        free = free_memory()
        self.total = (UNKNOWN if free is None else free) // 2 if total is None else total
        self._fix = fix
        self._reserved: dict[str, int] = {}
        self._pixels, self._predictions, self._pass = 1, 0, 0

    def reserve(self, use: str, size: int) -> None:
        """Set what ``use`` takes; raise `PolicyBreach` if everything together exceeds the total."""
        self._reserved[use] = size
        if sum(self._reserved.values()) > self.total:
            to_server = "this run needs more memory than the device may use"
            raise PolicyBreach(f"this run {self.words()}; {self._fix}", to_server)

    def begin(self, terms: Terms, hardware: Hardware, full_model: bool) -> None:
        """Reserve what a run's terms need besides the images, instead of any run before.

        ``full_model``: the device trains the whole model.
        """
        self._reserved = {}
        placed, held = placed_model(terms.config.model, terms.shape, terms.classes)
        part, full = footprint(placed[:held]), footprint(placed)
        trained, clients = full if full_model else part, terms.config.clients
        copies, passes = (FULL_COPIES, FULL_PASSES) if full_model else (COPIES, 1)
        self.reserve("model", trained.bytes(0, copies, 0) + full.bytes(0, 1, 0))
        self.reserve("batch", trained.bytes(clients.batch, 0, KEPT - 1 + passes))
        self.reserve("workspace", trained.workspace(clients.batch, passes))
        self.reserve("draws", clients.steps * clients.batch * BYTES_PER_USE)
        channels, height, width = terms.shape
        step = 2 * clients.batch * channels * height * width
        steps = clients.steps
        if not hardware.capture:
            views = self.total // VIEWS_SHARE
            steps = min(MAKING * steps, max(1, views // max(1, step)))
        # In bytes as they are made, normalised for one step, and what the operations need meanwhile.
        self.reserve("views", step * (steps + 4 + OPERATION) + table_bytes(height, width))
        self._pixels = channels * height * width
        self._predictions = FP32 * PREDICTIONS * terms.classes if full_model else 0
        self._pass = FP32 * trained.passing + (1 + FP32 + OPERATION) * self._pixels

    @property
    def stretch(self) -> int:
        """Return the bytes of augmented images that may be made ahead at a time."""
        return self.total // VIEWS_SHARE // MAKING

    @property
    def left(self) -> int:
        """Return the bytes that are not reserved."""
        return self.total - sum(self._reserved.values())

    def images(self, size: int) -> None:
        """Reserve all images as they are trained on, and what a full-model method predicts for them."""
        self.reserve("images", size)
        if self._predictions:
            count = size // self._pixels
            together = min(count, PREDICT_BATCH) * self._pass
            self.reserve("predictions", count * self._predictions + together)

    def frames(self, size: int) -> None:
        """Reserve the frames that may be here at a time; each takes ``size`` bytes at most, also once decoded.

        What gRPC has received beyond them is counted with them.
        """
        self.reserve("messages", FRAMES * size + chunks.WINDOW)

    def words(self) -> str:
        """Return what is reserved, in one line."""
        parts = ", ".join(f"{use} {amount(size)}" for use, size in self._reserved.items())
        needed = amount(sum(self._reserved.values()))
        return f"needs up to {needed} of memory, of {amount(self.total)}: {parts}"


def parse_memory(text: str) -> int:
    """Return the bytes of ``2GB``, ``500MB`` or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise ConfigError(f"--memory {text!r:.40} is no amount; write e.g. 2GB or 500MB")
    if not (count := int(float(match[1]) * UNITS[match[2].upper()])):
        raise ConfigError(f"--memory {text!r:.40} is no memory at all; write e.g. 2GB or 500MB")
    return count

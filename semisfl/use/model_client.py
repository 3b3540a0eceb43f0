"""The device of split inference: it runs the bottom, with torch or onnxruntime, and sends features."""

import contextlib
import logging
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from semisfl.data.augment import Normalizer
from semisfl.engine.inference import outputs
from semisfl.files import cache_folder
from semisfl.fleet.consent import about_images
from semisfl.fleet.outgoing import Outgoing
from semisfl.models.build import build
from semisfl.models.split import SplitModel
from semisfl.net.client.identity import Target
from semisfl.net.client.owner import Owner
from semisfl.net.frames import decode, encode
from semisfl.net.messages import table
from semisfl.runs import checkpoint
from semisfl.runs.checkpoint import CheckpointError
from semisfl.settings import lookup
from semisfl.settings.bits import feature_bits
from semisfl.settings.policy import PolicyBreach
from semisfl.use import onnx_file
from semisfl.use import split_inference as protocol
from semisfl.use.classifier import (
    ListedPictures,
    Pictures,
    Predictions,
    listed_pictures,
    predictions,
)
from semisfl.use.model_connection import ModelConnection, described
from semisfl.use.model_file import load
from semisfl.use.pictures import content_digest
from semisfl.use.served_model import ServedModel

log = logging.getLogger(__name__)

ROUNDING = 1e-4
"""Largest rounding error of a probability."""
Bottom = Callable[[Tensor], Tensor]
"""uint8 images -> features"""


class ModelClient:
    """Use a server's model from a device. ``bottom`` is a file of `semisfl export --part bottom`.

    Without one the bottom is fetched from the server, once, and kept in the cache, if the ``owner``
    accepts it. With ``send_images`` the images themselves are sent, to a server that accepts them. All
    that leaves passes the owner's policy. ``codec`` None: the policy's, else fp32.
    """

    def __init__(
        self,
        target: Target,
        *,
        codec: str | None = None,
        bottom: Path | None = None,
        send_images: bool = False,
        owner: Owner | None = None,
    ) -> None:
        lookup.codec(codec or "fp32")
        self._owner = owner or Owner()
        self._outgoing = Outgoing(self._owner.policy, encode, unpredictable=True)
        self._address, self._codec = target.address, self._outgoing.codec(codec)
        self.connection = ModelConnection(target.address, target.credentials)
        try:
            self._begin(bottom, send_images)
        except BaseException:
            self.close()
            raise

    def _begin(self, bottom: Path | None, send_images: bool) -> None:
        if send_images and (reason := about_images(self._owner.policy)):
            raise PolicyBreach(reason)
        model, images = described(self.connection)
        self.classes, self.shape, self.identity = model.classes, model.shape, model.identity
        self._features = model.features
        self._rows = protocol.rows_at_a_time(model.features, self._codec)
        self._row_bits = feature_bits(self._outgoing.policy, model.features)
        self._bottom: Bottom | None = None
        if send_images and not images:
            raise ValueError(f"{self._address} takes features, no images; leave out --send-images")
        if not send_images:
            self._bottom = self._from_file(bottom) if bottom else self._from_server(model)

    # --- the bottom ------------------------------------------------------------------------------

    def _from_file(self, path: Path) -> Bottom:
        runner: Bottom
        if path.suffix == ".onnx":
            file = onnx_file.File(path)
            identity, part = file.about()["identity"], file.about()["part"]
            # A file may mix the images of a call, and bits are counted for each image alone.
            runner = self._one_by_one(file) if self._row_bits < math.inf else file
            shape = self.shape  # onnxruntime refuses any other than the file's
        else:
            model = load(path)
            model.need("bottom")
            identity, part, runner = model.identity, "bottom", model.features
            shape = model.shape
        if part != "bottom" or (identity, shape) != (self.identity, self.shape):
            raise ValueError(
                f"{path} is not the bottom of the model that {self._address} serves, or cut elsewhere; "
                "export it from the same run, with the server's --cut, or leave out --bottom"
            )
        return runner

    def _from_server(self, model: ServedModel) -> Bottom:
        """Return the bottom from the cache, or fetch it: the table, its weights and the normalisation."""
        if model.layers is None:
            raise ValueError(
                f"the model of {self._address} is described by no layer table; give its bottom as a "
                "file, --bottom"
            )
        if model.bottom is None:
            raise ValueError(
                f"{self._address} serves the top alone, or is of an earlier version; give its bottom "
                "as a file, --bottom"
            )
        self._owner.approval.check(model.digest)
        # Tensors on "meta" take no memory: the top, which stays on the server, is never allocated.
        with torch.device("meta"):
            network = build(
                model.layers, model.shape, len(model.classes), cut=model.cut, projector="none"
            )
        weights = self._weights(network.bottom.state_dict(), model.bottom)
        network.bottom.load_state_dict(weights, assign=True)
        return _bottom(network, Normalizer.of(model.mean, model.std))

    def _weights(self, like: dict[str, Tensor], digest: str) -> dict[str, Tensor]:
        """Return the weights with this digest from the cache, or fetch them.

        Copies are kept by what they hold, so that no server can replace another one's.
        """
        name = "".join(letter if letter.isalnum() else "-" for letter in digest)
        cached = cache_folder() / f"bottom-{name[:64]}.safetensors"
        with contextlib.suppress(CheckpointError, KeyError):
            kept = dict(checkpoint.read(cached)["bottom"])
            # A server may describe other layers than those weights have.
            if digest == checkpoint.digest(kept) and table(kept) == table(like):
                return kept
        weights = self._fetched(like)
        if digest != checkpoint.digest(weights):
            raise ValueError(
                f"{self._address} sends another bottom than it describes; if its model was not replaced "
                "meanwhile, do not trust its answers"
            )
        try:
            cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            checkpoint.write(cached, {"bottom": weights}, private=True)
        except OSError as error:
            log.warning("the bottom cannot be kept in %s: %s", cached, error.strerror or error)
        return weights

    def _fetched(self, like: dict[str, Tensor]) -> dict[str, Tensor]:
        whole, frame = protocol.bottom_schema(like), bytearray()
        for part, schema in enumerate(protocol.parts_schemas(whole.size("bottom"))):
            request = b"".join(self._outgoing.frame("fetch", {"part": part}))
            answer = self.connection.ask("Fetch", request, "part", schema)
            frame += answer.tensors["bytes"].numpy().data
        return decode(frame, {"bottom": whole}).tensors

    # --- asking ----------------------------------------------------------------------------------

    def predict(self, images: Pictures) -> Predictions:
        """Classify images, as `Classifier.predict` does; raise `PolicyBreach` beyond the policy's caps.

        Links that lead out of a folder are not followed, as in training.
        """
        listed = listed_pictures(images, follow_links=False)
        self._spend(listed)
        return predictions(listed, self.shape, self.classes, self._answers, self._rows)

    def probabilities(self, images: Tensor) -> Tensor:
        """Return the probabilities [n, classes] of at most MOST_ROWS uint8 images."""
        self._spend(images)
        return self._answers(images)

    @property
    def carried(self) -> str:
        """Return what a row of features carries about its image, in one line."""
        if self._bottom is None:
            return "the images themselves were sent"
        if self._row_bits == math.inf:
            return "what was sent has no bound in bits: the policy has no noise"
        return f"what was sent carries at most {self._row_bits:.1f} bits of each image"

    def _spend(self, images: ListedPictures) -> None:
        """Count one use of every image, on disk before anything is sent."""
        policy = self._owner.policy
        if policy.uses_per_image is not None or policy.bits_per_image is not None:
            digests = [content_digest(image) for image in images]
            self._owner.allowance.take_answers(policy, digests, self._row_bits)

    def _answers(self, images: Tensor) -> Tensor:
        if not len(images):
            return torch.empty(0, len(self.classes))
        metadata = ((protocol.ROWS, str(len(images))), (protocol.CODEC, self._codec))
        schema = protocol.answers_schema(len(images), len(self.classes))
        if self._bottom is None:
            call, cleared = "Images", self._outgoing.pictures(images)
        else:
            call, rows = "Features", self._checked(self._bottom(images), len(images))
            cleared = self._outgoing.answerable(rows)
        fields = {"identity": self.identity}
        request = b"".join(self._outgoing.frame(call.lower(), fields, cleared, self._codec))
        frame = self.connection.ask(call, request, "answers", schema, metadata)
        probabilities = frame.tensors["probabilities"]
        # Comparisons with NaN are false, so this catches NaN too.
        if not bool(((probabilities >= 0) & (probabilities <= 1 + ROUNDING)).all()):
            raise ValueError(
                f"{self._address} answers with numbers that are no probabilities; its model is damaged, "
                "or it is not to be trusted"
            )
        return probabilities

    def _one_by_one(self, bottom: Bottom) -> Bottom:
        """Return ``bottom`` for one image at a time; it could else give two rows of one and none of another."""
        return lambda images: torch.cat(
            [self._checked(bottom(image), 1) for image in images.split(1)]
        )

    def _checked(self, rows: Tensor, count: int) -> Tensor:
        """Return the bottom's ``rows``; raise `ValueError` unless they are as the bits were counted for."""
        wanted = (count, self._features)
        if tuple(rows.shape) != wanted or rows.dtype != torch.float32:
            raise ValueError(
                f"the bottom gives {rows.dtype} {list(rows.shape)}, and {self._address} takes torch.float32 "
                f"{list(wanted)}; give the file of the model that it serves"
            )
        return rows

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> "ModelClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bottom(network: SplitModel, normalizer: Normalizer) -> Bottom:
    network.bottom.eval().requires_grad_(False)
    return lambda images: torch.cat(list(outputs(network.bottom, images, normalizer)))

"""A device's side of a frozen bottom: it sends the rows of each of its images once, and may leave.

The server says which images it has the rows of, so the device keeps no list. It downloads the bottom if an image is
missing, checks that its weights are those that the terms name, and encodes and sends some images at a time. A device
that is started again, with more images or after a crash, goes on where the server's list ends.
"""

from collections import Counter
from typing import TYPE_CHECKING

from semisfl.data.augment import Normalizer
from semisfl.data.fixed_views import DIGEST_BYTES, content_digest
from semisfl.fleet.caps import refuse_views
from semisfl.fleet.packing import split_states
from semisfl.fleet.rows import TOGETHER, Encoder, RowFormat
from semisfl.models.freezing import weights_digest
from semisfl.net import messages, ranges
from semisfl.net.client.connection import Received
from semisfl.net.frames import Frame
from semisfl.settings.policy import PolicyBreach, feature_bits

if TYPE_CHECKING:
    from semisfl.net.client.device import Device


class Upload:
    """What the device still has to send, over any number of connections to the servers of one run."""

    def __init__(self, device: "Device", name: str) -> None:
        """Take the device's images, and its ``name``, from which the draws of the views follow.

        Raises `PolicyBreach` if all views of an image together exceed a quota of the policy.
        """
        self.steps = {
            "stored": self._answer_missing,
            "weights": self._take_bottom,
            "encode": self._send_rows,
            "published": self._end,
        }
        """What to do with each frame."""
        self._device, self._member, self._name = device, device.member, name
        member, outgoing, terms = device.member, device.outgoing, device.member.terms
        refuse_views(outgoing.policy, member.config.clients, member.model.features)
        normalizer = Normalizer.of(terms.mean, terms.std).to(member.hardware.device)
        self._encoder = Encoder(member.model.bottom, normalizer, outgoing, member.config)
        self._form = RowFormat.of(member.config, member.model.features)
        # Rows that these follow from are the same whenever they are sent, and count once.
        self._about = f"{terms.digest} {outgoing.policy.model_dump_json()}"
        outgoing.secret = device.allowance.secret + self._about.encode()
        self._digests = [content_digest(image) for image in member.images]
        self._stored: Counter[str] = Counter()
        self._missing: list[int] = []
        """The places of images whose rows the server lacks."""
        self._has_bottom = False
        self.sent = 0
        """How many images' rows were sent so far."""

    def begin(self) -> None:
        """Expect to be told which images the server has, and forget what it said over another connection."""
        self._stored.clear()
        self._device.expect(stored=messages.STORED)

    def _answer_missing(self, received: Received, frame: Frame) -> None:
        """Take some digests of images that the server has; after the last ones answer how many it lacks.

        These are counted before anything of them is sent.
        """
        names, size = frame.fields["images"].hex(), 2 * DIGEST_BYTES
        self._stored.update(names[at : at + size] for at in range(0, len(names), size))
        if frame.fields["more"]:
            return
        self._missing.clear()
        for place, digest in enumerate(self._digests):
            self._stored[digest] -= 1  # a folder may hold an image twice
            if self._stored[digest] < 0:
                self._missing.append(place)
        self._device.expect(
            weights=self._member.schemas.weights,
            encode=messages.ENCODE,
            published=messages.PUBLISHED,
        )
        policy, missing = self._device.outgoing.policy, [self._digests[at] for at in self._missing]
        views, bits = self._form.views, feature_bits(policy, self._form.features)
        self._device.allowance.take_views(policy, self._about, missing, sum(views.values()), bits)
        fields = {"images": len(self._missing), "bottom": not self._has_bottom}
        self._device.answer(received, "missing", fields)

    def _take_bottom(self, received: Received, frame: Frame) -> None:
        """Load the bottom's weights if they are those that the terms name: no others are used."""
        weights = split_states(frame.tensors, ["bottom"])["bottom"]
        self._has_bottom = weights_digest(weights) == self._member.terms.bottom
        if self._has_bottom:
            self._member.model.bottom.load_state_dict(weights)

    def _send_rows(self, received: Received, frame: Frame) -> None:
        """Encode the next missing images, as many as the server asks for, and send their rows."""
        count, device, member = frame.fields["images"], self._device, self._member
        ranges.check("images", count, ranges.Range(1, min(TOGETHER, len(self._missing))))
        if not self._has_bottom:
            raise PolicyBreach("the server sent no bottom with the weights that its terms name")
        places = self._missing[:count]
        del self._missing[:count]
        digests = [self._digests[place] for place in places]
        images = member.images[places].to(member.hardware.device)
        rows = self._encoder.rows(images, self._name, digests).packed(self._form.pack)
        device.answer(received, "rows", {"images": bytes.fromhex("".join(digests))}, rows)
        self.sent += count

    def _end(self, received: Received, frame: Frame) -> None:
        """Let the device end: the server keeps the rows of all its images."""
        self._device.finished = True

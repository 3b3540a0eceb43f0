"""A device's side of a split round: features at every step, the trained bottom after the last one.

The frame that begins the round holds the bottom's weights and the teacher's. At each step the device sends the
features of one batch, of the student and of the teacher, and the server answers with the gradients of the student's.
After the last step the device sends its trained bottom. All that leaves is clipped and gets noise by the policy.
"""

from typing import TYPE_CHECKING

from semisfl.fleet.base import SplitRound
from semisfl.fleet.packing import split_states
from semisfl.net.client.agreement import check_gradients
from semisfl.net.client.connection import Received
from semisfl.net.frames import Frame
from semisfl.settings.policy import PolicyBreach

if TYPE_CHECKING:
    from semisfl.net.client.device import Device


class ClientSplitRound:
    """One split round. The device hands it every gradient, and lets it send what answers it."""

    def __init__(self, device: "Device", frame: Frame) -> None:
        """Take the weights of the ``frame`` that begins the round."""
        self._device, self._member = device, device.member
        fields, states = frame.fields, split_states(frame.tensors, ["bottom", "teacher"])
        self._plan = SplitRound(
            fields["round"],
            (self._member.client,),
            fields["steps"],
            fields["lr"],
            states["bottom"],
            states["teacher"] or states["bottom"],
            teacher_for=None if states["teacher"] else frozenset(),
            teacher_decay=fields["decay"] if fields["ema"] else None,
        )
        self._step = 0
        self._member.block.start_round(self._plan)
        device.expect_round(gradients=self._member.schemas.gradients)

    @property
    def over(self) -> bool:
        """Return whether every step of the round is done."""
        return self._step >= self._plan.steps

    def send_features(self, received: Received) -> None:
        """Answer ``received`` with both views' features [batch, features] of the current step."""
        wire = self._member.config.wire
        with self._member.hardware.step():
            features = self._member.block.forward()
        self._sent = features.cleared.tensors["student"]
        self._device.answer(
            received,
            "features",
            {"round": self._plan.index, "step": self._step},
            features.cleared,
            {"student": wire.student_features, "teacher": wire.teacher_features},
        )

    def descend(self, frame: Frame) -> None:
        """Train with the gradients of the current step.

        Raises `PolicyBreach` if they are of another step, or longer than any honest server's.
        """
        if (frame.fields["round"], frame.fields["step"]) != (self._plan.index, self._step):
            raise PolicyBreach("the server sends gradients of another step")
        gradients = frame.tensors["gradients"]
        check_gradients(gradients, self._sent)
        with self._member.hardware.step():
            self._member.block.backward(gradients.to(self._member.hardware.device))
        self._step += 1

    def send_bottom(self, received: Received) -> None:
        """Answer the last gradients with the trained bottom, which ends the round."""
        (bottom,) = self._member.block.bottoms().values()
        about, codec = {"round": self._plan.index}, self._member.config.wire.models
        self._device.answer(received, "bottom", about, bottom.under("bottom"), codec)

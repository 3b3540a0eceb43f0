"""Run a client's side of a split round: features at every step, the bottom after the last one."""

from semisfl.fleet.base import SplitRound
from semisfl.fleet.packing import separated
from semisfl.net.client.frame_io import FrameIO
from semisfl.net.client.gradient_checks import gradient_excess
from semisfl.net.client.lines import brief_logger
from semisfl.net.client.stream import Received
from semisfl.net.frames import Frame
from semisfl.settings.policy import PolicyBreach

log = brief_logger(__name__)


class ClientSplitRounds:
    """Train with a server's gradients."""

    def __init__(self, frames: FrameIO) -> None:
        self._frames = frames

    def begin(self, received: Received, frame: Frame) -> None:
        """Take the weights of a round and send the features of its first step."""
        member, fields = self._frames.member, frame.fields
        states = separated(frame.tensors, ["bottom", "teacher"])
        member.plan = SplitRound(
            fields["round"],
            (member.client,),
            fields["steps"],
            fields["lr"],
            states["bottom"],
            states["teacher"] or states["bottom"],
            teacher_for=None if states["teacher"] else frozenset(),
            teacher_decay=fields["decay"] if fields["ema"] else None,
        )
        member.step = 0
        member.block.start_round(member.plan)
        self._frames.expect_round(gradients=member.schemas.gradients)
        self._send_features(received)

    def _send_features(self, received: Received) -> None:
        member = self._frames.member
        wire = member.config.wire
        with member.hardware.step():
            features = member.block.forward()
        self._sent = features.cleared.tensors["student"]
        self._frames.answer(
            received,
            "features",
            {"round": member.plan.index, "step": member.step},
            features.cleared,
            {"student": wire.student_features, "teacher": wire.teacher_features},
            copy=False,
        )

    def step(self, received: Received, frame: Frame) -> bool:
        """Apply the gradients of one step and send the next features; return whether it was the last."""
        member = self._frames.member
        if (frame.fields["round"], frame.fields["step"]) != (member.plan.index, member.step):
            log.warning("gradients of another step were ignored")
            return False
        gradients = frame.tensors["gradients"]
        if (excess := gradient_excess(gradients, self._sent)) is not None:
            raise PolicyBreach(excess)
        with member.hardware.step():
            member.block.backward(gradients.to(member.hardware.device))
        member.step += 1
        if member.step < member.plan.steps:
            self._send_features(received)
            return False
        return True

    def send_bottom(self, received: Received) -> None:
        """Send the trained bottom, which ends the round."""
        member = self._frames.member
        (bottom,) = member.block.bottoms().values()
        about, codec = {"round": member.plan.index}, member.config.wire.models
        self._frames.answer(received, "bottom", about, bottom.under("bottom"), codec)

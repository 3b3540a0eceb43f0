"""The server's side of a split round: what each client is sent and must answer, step by step.

One step of a client is one question and one answer:

    weights of the round         ->  features of step 0
    gradients of step 0          ->  features of step 1
    gradients of the last step   ->  the trained bottom
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from semisfl.fleet.base import SplitRound
from semisfl.fleet.byte_counts import Kind
from semisfl.fleet.packing import join_states
from semisfl.net.frames import encode, payload_bytes
from semisfl.net.messages import Schemas
from semisfl.net.server.questions import Due, Questions

Message = tuple[bytes, dict[Kind, int]]
"""A frame, and the bytes of its tensors by kind."""


class ServerSplitRound:
    """Send the frames of a split round to each client: see `semisfl.net.messages`.

    The weights of the round are the question for the first features; the gradients of one step are the question for
    the features of the next step, or for the trained bottom after the last.
    """

    def __init__(self, schemas: Schemas, plan: SplitRound) -> None:
        self.plan = plan
        self._schemas, self._wire = schemas, schemas.config.wire
        self._step = 0
        with_teacher, alone = self._opening(teacher=True), self._opening(teacher=False)
        self._messages = {
            client: with_teacher
            if plan.teacher_for is None or client in plan.teacher_for
            else alone
            for client in plan.active
        }

    def _opening(self, *, teacher: bool) -> Message:
        """Return the frame that begins the round, with or without the teacher's bottom."""
        plan, schemas = self.plan, self._schemas
        fields: dict[str, Any] = {
            "round": plan.index,
            "steps": plan.steps,
            "lr": float(plan.lr),
            "ema": plan.teacher_decay is not None,
            "decay": float(plan.teacher_decay or 0.0),
        }
        states = {"bottom": plan.bottom}
        sizes: dict[Kind, int] = {"model": payload_bytes(schemas.split_alone)}
        if teacher:
            states["teacher"] = plan.teacher_bottom
            sizes["teacher"] = payload_bytes(schemas.bottom_frame)
        kind = "split" if teacher else "split_alone"
        return b"".join(encode(kind, fields, join_states(states), self._wire.models)), sizes

    def backward(self, clients: Sequence[int], gradients: Tensor) -> None:
        """Take the ``gradients`` [rows, features] of this step, for ``clients`` in their order; `ask` sends them."""
        fields = {"round": self.plan.index, "step": self._step}
        sizes: dict[Kind, int] = {"gradients": payload_bytes(self._schemas.gradients)}
        self._step += 1
        self._messages = {}
        for client, rows in zip(clients, gradients.chunk(len(clients)), strict=True):
            frame = encode("gradients", fields, {"gradients": rows}, self._wire.gradients)
            self._messages[client] = b"".join(frame), sizes

    def ask(self, questions: Questions) -> None:
        """Ask each client for its next features, or for the bottom after the last step."""
        about: dict[str, Any] = {"round": self.plan.index}
        if self._step < self.plan.steps:
            due = Due({"features": self._schemas.features_frame}, {**about, "step": self._step})
        else:
            due = Due({"bottom": self._schemas.bottom_frame}, about)
        for client, (frame, sizes) in self._messages.items():
            questions.ask(client, [frame], sizes, due)

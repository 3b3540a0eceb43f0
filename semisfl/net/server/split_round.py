"""Run the server's side of a split round: what each client is sent and must answer, step by step."""

from collections.abc import Sequence

from torch import Tensor

from semisfl.fleet.base import SplitRound
from semisfl.fleet.byte_counts import Kind
from semisfl.fleet.packing import joined
from semisfl.net.frames import encode, payload_bytes
from semisfl.net.messages import Schemas
from semisfl.net.server.full_round import Ask, Due


class ServerSplitRound:
    """Send the frames of a split round to each client: see `semisfl.net.messages`."""

    def __init__(self, schemas: Schemas, plan: SplitRound, ask: Ask) -> None:
        self.plan = plan
        self._schemas, self._config, self._ask = schemas, schemas.config, ask
        self._step = 0

    def begin(self) -> None:
        plan = self.plan
        fields = {
            "round": plan.index,
            "steps": plan.steps,
            "lr": float(plan.lr),
            "ema": plan.teacher_decay is not None,
            "decay": float(plan.teacher_decay or 0.0),
        }
        for teacher in (False, True):
            clients = [
                c
                for c in plan.active
                if (plan.teacher_for is None or c in plan.teacher_for) == teacher
            ]
            if not clients:
                continue
            states = {"bottom": plan.bottom} | ({"teacher": plan.teacher_bottom} if teacher else {})
            kind, codec = "split" if teacher else "split_alone", self._config.wire.models
            frame = (b"".join(encode(kind, fields, joined(states), codec)),)
            sizes: dict[Kind, int] = {"model": payload_bytes(self._schemas.split_alone)}
            if teacher:
                sizes["teacher"] = payload_bytes(self._schemas.bottom_frame)
            for client in clients:
                self._ask(client, frame, sizes, self._due())

    def send_gradients(self, clients: Sequence[int], gradients: Tensor) -> None:
        """Send the gradients of one step to the ``clients`` that took part, in their order."""
        fields = {"round": self.plan.index, "step": self._step}
        rows = gradients.chunk(len(clients))
        self._step += 1
        for client, share in zip(clients, rows, strict=True):
            codec = self._config.wire.gradients
            frame = encode("gradients", fields, {"gradients": share}, codec)
            sizes: dict[Kind, int] = {"gradients": payload_bytes(self._schemas.gradients)}
            self._ask(client, frame, sizes, self._due())

    def _due(self) -> Due:
        """Return the expected answer: features, or the bottom after the last step."""
        about, step = {"round": self.plan.index}, self._step
        if step == self.plan.steps:
            return Due({"bottom": self._schemas.bottom_frame}, about)
        return Due({"features": self._schemas.features_frame}, {**about, "step": step})

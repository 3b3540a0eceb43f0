"""Clients on other machines, as a method sees them.

Torch work stays in the caller's thread; streams live on a loop in another. Whoever does not
answer, or answers with something that cannot be, is left out of the rest of the round: what comes
back names those who did answer.
"""

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch
from torch import Tensor

from semisfl.config import ConfigError
from semisfl.fleet.base import (
    ClientResult,
    ClientWork,
    Features,
    FullRound,
    Kind,
    RoundAborted,
    SplitRound,
    State,
    Traffic,
    mean_state,
)
from semisfl.fleet.setup import FleetSetup
from semisfl.net.chunks import LoopThread, Parts
from semisfl.net.frames import Frame, WireError, decode, encode, payload_bytes
from semisfl.net.messages import Schemas, Terms, joined, separated
from semisfl.net.server.admission import HANDSHAKE_SECONDS
from semisfl.net.server.full_round import Due, ServerFullRound
from semisfl.net.server.listener import Listener
from semisfl.net.server.plausible import unbelievable
from semisfl.net.server.roster import Roster
from semisfl.net.server.session import Session
from semisfl.stopping import Stopped

log = logging.getLogger(__name__)

STOP_SECONDS = 4.0
"""How long an iteration may still take to finish once the server is asked to stop."""
REMIND_SECONDS = 30.0


@dataclass
class Parcel:
    """Payload on its way to a client; counted once, when it was sent in full."""

    client: int
    sizes: Mapping[Kind, int]
    counted: bool = False


@dataclass(frozen=True)
class Awaited:
    """What one client owes."""

    session: Session
    ticket: int
    parcel: Parcel
    due: Due


class NetworkFleet:
    """The server's side of a run over the network."""

    capturable = False

    def __init__(
        self,
        setup: FleetSetup,
        *,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        thread: LoopThread | None = None,
    ) -> None:
        """Takes its port, so that a wrong one is found; clients come in once it is opened."""
        if setup.network is None:
            raise ConfigError(
                "fleet.kind = 'network': clients come to `semisfl serve`; use it, or fleet.kind = local"
            )
        self._stop = setup.stop
        self.traffic = Traffic()
        self.config = setup.config
        self.roster = Roster(setup.config.clients.total)
        self._hardware = setup.hardware
        self._shapes = Schemas.of(setup.config, setup.model)
        self._inbox: queue.SimpleQueue[tuple[Session, int, bytearray | None]] = queue.SimpleQueue()
        self._crossed: deque[Parcel] = deque()
        self._awaited: dict[int, Awaited] = {}
        self._settled = False
        self._listener = Listener(
            Terms(setup.config, setup.shape, setup.classes, setup.mean, setup.std),
            self._shapes,
            self.roster,
            lambda session, ticket, data: self._inbox.put((session, ticket, data)),
            lambda session: self._inbox.put((session, 0, None)),
            network=setup.network,
            handshake_seconds=handshake_seconds,
            thread=thread,
        )
        self.port = self._listener.port

    def open(self, directory: Path | None) -> None:
        if directory is not None:
            self.roster.keep_in(directory / "roster.json")
        self._listener.start()

    # --- who is there ----------------------------------------------------------------------------

    def present(self) -> Sequence[int]:
        with self._listener.changed:
            return sorted(self._listener.sessions)

    def image_counts(self) -> Mapping[int, int]:
        return dict(self.roster.images)

    def wait_ready(self) -> None:
        """Until a round can be started: a quorum is there.

        After a start or restart everyone who is enrolled, and as many as a round draws, get one
        deadline to arrive, so that a restarted run goes on with the same clients.
        """
        network, clients = self.config.network, self.config.clients
        if not self._settled:
            self._wait(max(clients.active, len(self.roster.index)), network.deadline)
            self._settled = True
        self._listener.check_certificates()
        self._wait(network.quorum, None)

    def wait_for(self, count: int, seconds: float | None = None) -> bool:
        """Until ``count`` clients are there, or ``seconds`` have passed; whether they are."""
        return self._wait(count, seconds)

    def _wait(self, count: int, seconds: float | None) -> bool:
        started = reminded = time.monotonic()
        told = False
        while True:
            with self._listener.changed:
                there = len(self._listener.sessions)
                if there >= count:
                    break
                self._listener.changed.wait(0.2)
            now = time.monotonic()
            self._stop.check()
            if seconds is not None and now - started > seconds:
                return False
            if now - started > 1 and (not told or now - reminded > REMIND_SECONDS):
                told, reminded = True, now
                log.warning(
                    "paused: %d of the %d clients needed are here; missing: %s",
                    there,
                    count,
                    self._missing(),
                )
        if told:
            log.warning("going on: %d clients are here", there)
        return True

    def _missing(self) -> str:
        there = set(self.present())
        absent = [name for name, index in self.roster.index.items() if index not in there]
        unknown = self.roster.total - len(self.roster.index)
        if unknown:
            absent.append(f"{unknown} that never came")
        return ", ".join(absent) or "nobody"

    # --- a split round ---------------------------------------------------------------------------

    def start_round(self, plan: SplitRound) -> None:
        self._plan, self._step = plan, 0
        self._awaited.clear()
        codec = self.config.wire.models
        fields = {
            "round": plan.index,
            "steps": plan.steps,
            "lr": float(plan.lr),
            "ema": plan.teacher_decay is not None,
            "decay": float(plan.teacher_decay or 0.0),
        }
        bottom = payload_bytes(self._shapes.bottom_frame)
        for teacher in (False, True):
            clients = [
                c
                for c in plan.active
                if (plan.teacher_for is None or c in plan.teacher_for) == teacher
            ]
            if not clients:
                continue
            states = {"bottom": plan.bottom} | ({"teacher": plan.teacher_bottom} if teacher else {})
            frame = (
                b"".join(
                    encode("split" if teacher else "split_alone", fields, joined(states), codec)
                ),
            )
            sizes: dict[Kind, int] = {"model": bottom}
            if teacher:
                sizes["teacher"] = bottom
            for client in clients:
                self._ask(client, frame, sizes, self._features_due())
        self._check_quorum(len(self._awaited))

    def _features_due(self) -> Due:
        about = {"round": self._plan.index}
        if self._step < self._plan.steps:
            return Due({"features": self._shapes.features_frame}, {**about, "step": self._step})
        return Due({"bottom": self._shapes.bottom_frame}, about)

    def forward(self) -> Features:
        answers: dict[int, Frame] = {}
        self._collect("features", answers.__setitem__)
        self._check_quorum(len(answers))
        clients = tuple(sorted(answers))
        student, teacher = (
            torch.cat([answers[client].tensors[name] for client in clients]).to(
                self._hardware.device
            )
            for name in ("student", "teacher")
        )
        self._participants = clients
        return Features(student.requires_grad_(), teacher, clients)

    def backward(self, gradients: Tensor) -> None:
        fields = {"round": self._plan.index, "step": self._step}
        rows = gradients.detach().float().cpu().chunk(len(self._participants))
        sizes: dict[Kind, int] = {"gradients": payload_bytes(self._shapes.gradients)}
        self._step += 1
        due = self._features_due()
        for client, share in zip(self._participants, rows, strict=True):
            frame = encode("gradients", fields, {"gradients": share}, self.config.wire.gradients)
            self._ask(client, frame, sizes, due)

    def finish_round(self) -> State:
        answers: dict[int, Frame] = {}
        self._collect("model", answers.__setitem__)
        self._check_quorum(len(answers))
        states = [
            separated(answers[client].tensors, ["bottom"])["bottom"] for client in sorted(answers)
        ]
        return {
            name: tensor.to(self._hardware.device) for name, tensor in mean_state(states).items()
        }

    # --- a full-model round ----------------------------------------------------------------------

    def train(self, work: ClientWork, plan: FullRound) -> list[ClientResult]:
        self._awaited.clear()
        full_round = ServerFullRound(self._shapes, work, plan, self._hardware.device, self._ask)
        for client in plan.active:
            full_round.begin(client)
        self._collect("model", full_round.go_on)
        self._check_quorum(len(full_round.results))
        return [full_round.results[client] for client in sorted(full_round.results)]

    # --- asking and being answered ---------------------------------------------------------------

    def _ask(
        self,
        client: int,
        frame: Parts,
        sizes: Mapping[Kind, int],
        due: Due,
    ) -> None:
        """Send ``frame`` to ``client`` and await what is ``due``; who is not there is left out."""
        session = self._listener.sessions.get(client)
        before = self._awaited.pop(client, None)
        if session is None or (before is not None and before.session is not session):
            log.warning("%s is not here and is left out of this round", self.roster.name(client))
            return
        parcel = Parcel(client, sizes)
        ticket = session.ask(
            frame,
            max(schema.limit for schema in due.frames.values()),
            lambda: self._crossed.append(parcel),
            copy=len(frame) > 1 or not isinstance(frame[0], bytes),
            deadline=self.config.network.deadline,
            steps=due.steps,
        )
        self._awaited[client] = Awaited(session, ticket, parcel, due)

    def _collect(self, kind: Kind, take: Callable[[int, Frame], None]) -> None:
        """Every awaited client's answer, as they come, until nobody is awaited any more.

        ``take`` is given each, and may ask its client for more. What it, or the frame's schema,
        does not accept (WireError) costs that client its place in the round, and a strike.
        """
        stop_at: float | None = None
        while self._awaited:
            if self._stop.requested:
                stop_at = stop_at or time.monotonic() + STOP_SECONDS
                if time.monotonic() > stop_at:
                    raise Stopped
            overdue = min(item.session.patience.ends for item in self._awaited.values())
            try:
                wait = min(0.5, max(0.0, overdue - time.monotonic()))
                session, ticket, data = self._inbox.get(timeout=wait)
            except queue.Empty:
                self._leave_out_overdue()
                continue
            item = self._awaited.get(session.client)
            if item is None or item.session is not session:
                continue
            if data is None:
                self._leave_out(session.client, "its connection was lost")
            elif ticket == item.ticket:
                self._take(item, data, kind, take)
            self._leave_out_overdue()
        while self._crossed:
            self._count(self._crossed.popleft())

    def _leave_out_overdue(self) -> None:
        now = time.monotonic()
        for client, item in list(self._awaited.items()):
            if now >= item.session.patience.ends:
                item.session.abandon()
                self._leave_out(client, item.session.patience.reason())

    def _leave_out(self, client: int, reason: str) -> None:
        self._awaited.pop(client, None)
        log.warning("%s is left out of this round: %s", self.roster.name(client), reason)

    def _take(
        self, item: Awaited, data: bytearray, kind: Kind, take: Callable[[int, Frame], None]
    ) -> None:
        """Hand an answer on if it may be used. Its client is no longer awaited either way."""
        client, due = item.session.client, item.due
        self._awaited.pop(client)
        try:
            # Features are put together, so copied, before this client is asked anything else.
            frame = decode(data, due.frames, copy=kind != "features")
            for name, value in due.fields.items():
                if frame.fields[name] != value:
                    raise WireError(
                        f"{frame.kind} says {name} = {frame.fields[name]}, it is {value}"
                    )
            self._count(item.parcel)
            if frame.tensors:
                self.traffic.add(kind, "up", client, payload_bytes(due.frames[frame.kind]))
            fault = unbelievable(frame.tensors)
            if fault is None:
                take(client, frame)
        except WireError as error:
            self._leave_out(client, str(error))
            self._listener.offend(item.session, str(error))
            return
        if fault is not None:
            self._leave_out(client, fault)
            self._listener.strike(item.session, fault)

    def _count(self, parcel: Parcel) -> None:
        """An answer proves that what it answers has crossed, even if the loop did not say so yet."""
        if not parcel.counted:
            parcel.counted = True
            for kind, size in parcel.sizes.items():
                self.traffic.add(kind, "down", parcel.client, size)

    def _check_quorum(self, answered: int) -> None:
        quorum = self.config.network.quorum
        if answered < quorum:
            for item in self._awaited.values():
                item.session.abandon()
            self._awaited.clear()
            raise RoundAborted(
                f"{answered} clients answered, network.quorum = {quorum} are needed; missing: {self._missing()}"
            )

    # --- lasting and ending ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"roster": self.roster.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "roster" in state:
            self.roster.load_state_dict(state["roster"])

    def stream_bytes(self) -> tuple[int, int]:
        """Bytes sent and received on all streams, framing included: what the overhead is measured by."""
        return self._listener.bytes_moved()

    def close(self, finished: bool) -> None:
        """Say goodbye. Clients of a finished run end; others wait for the server to come back."""
        code = grpc.StatusCode.OK if finished else grpc.StatusCode.UNAVAILABLE
        self._listener.close(
            code, "the run is finished" if finished else "the server stops; it may come back"
        )

    def kill(self) -> None:
        """Vanish without a word, as a crash would; for tests."""
        self._listener.kill()

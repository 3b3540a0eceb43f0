"""Give a method access to clients on other machines.

Torch work stays in the caller's thread; streams live on a loop in another. A client that does not
answer, or sends impossible values, is left out of the rest of the round. Results name the clients
that did answer.
"""

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import torch
from torch import Tensor

from semisfl.fleet.aggregate import combine
from semisfl.fleet.base import (
    ClientResult,
    ClientWork,
    Features,
    FullRound,
    RoundAborted,
    SplitRound,
    State,
)
from semisfl.fleet.byte_counts import Kind, Traffic
from semisfl.fleet.held_back import HeldBack
from semisfl.fleet.packing import joined, separated
from semisfl.fleet.setup import FleetSetup
from semisfl.net.chunks import LoopThread
from semisfl.net.frames import Frame
from semisfl.net.messages import Schemas
from semisfl.net.server.administration import Actions, Administration
from semisfl.net.server.admission import HANDSHAKE_SECONDS
from semisfl.net.server.context import ServerContext
from semisfl.net.server.device_log import DeviceStatus
from semisfl.net.server.fleet_status import FleetStatus
from semisfl.net.server.full_round import ServerFullRound
from semisfl.net.server.listener import Listener
from semisfl.net.server.penalties import STRIKES
from semisfl.net.server.questions import Questions, Take
from semisfl.net.server.roster import Roster
from semisfl.net.server.split_round import ServerSplitRound
from semisfl.net.server.trials import Trials, limits_on_one_client
from semisfl.net.server.waiting import Waiting, some_of
from semisfl.net.terms import Terms
from semisfl.settings.counts import counted
from semisfl.settings.robust import FEWEST

log = logging.getLogger(__name__)

LARGEST_CLAIM = 10
"""Images of one client that count, in medians of all clients."""


class NetworkFleet:
    """Run the server's side over the network."""

    capturable = False

    def __init__(
        self,
        setup: FleetSetup,
        *,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        thread: LoopThread | None = None,
    ) -> None:
        """Take the port now, so that a wrong one fails early; clients come in after `open`."""
        assert setup.network is not None
        self._stop = setup.stop
        self.traffic = Traffic()
        self.held_back = HeldBack(self._tell_held_back)
        self.config = setup.config
        self.roster = Roster(setup.config.clients.total)
        self._hardware = setup.hardware
        self._schemas = Schemas.of(setup.config, setup.model)
        self.terms = Terms(setup.config, setup.shape, setup.classes, setup.mean, setup.std)
        """The terms that devices are asked to accept."""
        context = ServerContext(
            self.terms, self._schemas, self.roster, self.traffic, self.held_back, setup.stop
        )
        self.device_log = context.device_log
        self._listener = Listener(
            context, setup.network, handshake_seconds=handshake_seconds, thread=thread
        )
        self._questions = Questions(context, self._listener)
        self._administration: Administration | None = None
        quorum = setup.config.network.quorum
        self._trials = Trials(self._questions, self.roster, self._listener, quorum)
        self.waiting = Waiting(context, self._listener, self.present)
        answers = self._questions.answer_seconds
        self._status = FleetStatus(self.roster, self._listener.table, self.traffic, answers)
        self.port = self._listener.port

    def open(self, directory: Path | None) -> None:
        if directory is not None:
            self.roster.keep_in(directory / "roster.json")
            self._status.resume(directory)
            self.device_log.open(directory, self.devices, lambda: self.waiting.state)
            self._administration = Administration(directory, self._actions(), self._listener.thread)
        log.log(*limits_on_one_client(self.config))
        self._listener.start()

    def _actions(self) -> Actions:
        """Return what `semisfl fleet` may ask for; each function runs on the loop."""

        def done(act: Callable[[], None]) -> dict[str, Any]:
            act()
            return {"done": True}

        return {
            "list": lambda name: self._status.as_dict(self.waiting.state),
            "remove": lambda name: done(lambda: self._listener.penalties.remove(name)),
            "pause": lambda name: done(self.waiting.pause),
            "resume": lambda name: done(self.waiting.resume),
            "drain": lambda name: done(self.waiting.drain),
        }

    # --- who is there ----------------------------------------------------------------------------

    def present(self) -> Sequence[int]:
        return self._trials.present()

    def members(self) -> Mapping[int, str]:
        strikes = self._listener.penalties.strikes
        return {place: name for name, place in self.roster.index.items() if strikes[name] < STRIKES}

    def image_counts(self) -> Mapping[int, int]:
        """Return how many images each client says it has; from three clients on, with a limit.

        One client's claim must not decide |D_l| / |D|, and with it how long the server trains.
        """
        counts = dict(self.roster.images)
        if len(counts) < FEWEST:
            return counts
        most = int(LARGEST_CLAIM * statistics.median(counts.values()))
        return {client: min(count, most) for client, count in counts.items()}

    def devices(self) -> list[DeviceStatus]:
        return self._status.devices()

    def wait_ready(self) -> None:
        self._trials.end_if_needed()
        self.waiting.until_ready()

    def wait_for(self, count: int, seconds: float | None = None) -> bool:
        """Wait for ``count`` clients or ``seconds``; return whether the clients are there."""
        return self.waiting.wait(count, seconds)

    # --- a split round ---------------------------------------------------------------------------

    def start_round(self, plan: SplitRound) -> None:
        self.device_log.round = plan.index
        self._questions.start_round()
        self._check_sent(joined({"bottom": plan.bottom, "teacher bottom": plan.teacher_bottom}))
        self._split_round = ServerSplitRound(self._schemas, plan, self._questions.ask)
        self._split_round.begin()
        self._check_quorum(len(self._questions))

    def _collected(self, kind: Kind, take: Take) -> set[int]:
        """Collect answers as `Questions` does; clients that are far too slow are not drawn for a while."""
        refused = self._questions.collect(kind, take)
        self._trials.pass_over(self._questions.too_slow)
        return refused

    def _answers(self, kind: Kind) -> dict[int, Frame]:
        """Return one frame of every client that still takes part; abort the round if they are too few."""
        answers: dict[int, Frame] = {}
        for client in self._collected(kind, answers.__setitem__):
            del answers[client]
        self._check_quorum(len(answers))
        return answers

    def forward(self) -> Features:
        answers = self._answers("features")
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
        gradients = gradients.detach().float().cpu()
        self._check_sent({"gradients": gradients})
        self._split_round.send_gradients(self._participants, gradients)

    def finish_round(self) -> State:
        answers = self._answers("model")
        states = {
            client: separated(answers[client].tensors, ["bottom"])["bottom"]
            for client in sorted(answers)
        }
        before = self._split_round.plan.bottom
        uploads = [ClientResult(client, {"bottom": state}, {}) for client, state in states.items()]
        for client in self._questions.refuse_far(uploads, lambda _: {"bottom": before}):
            del states[client]
        self._check_quorum(len(states))
        bottom = combine(self.config.robust, states, before, self.held_back)
        return {name: tensor.to(self._hardware.device) for name, tensor in bottom.items()}

    # --- a full-model round ----------------------------------------------------------------------

    def train(self, work: ClientWork, plan: FullRound) -> list[ClientResult]:
        self.device_log.round = plan.index
        self._questions.start_round()
        self._check_sent(joined(plan.send))
        full_round = ServerFullRound(
            self._schemas, work, plan, self._hardware.device, self._questions.ask
        )
        for client in plan.active:
            full_round.begin(client)
        for client in self._collected("model", full_round.go_on):
            full_round.results.pop(client, None)
        results = full_round.results
        for client in self._questions.refuse_far(results.values(), plan.known_to):
            del results[client]
        self._check_quorum(len(results))
        return [results[client] for client in sorted(results)]

    def _tell_held_back(self, client: int, why: str) -> None:
        name = self._questions.name(client)
        log.warning("%s is held back: %s", name, why)
        self._listener.penalties.audit_held_back(name, why)

    # --- good and bad rounds ---------------------------------------------------------------------

    def settle(self, good: bool) -> str | None:
        self._status.count_bytes()
        self._questions.answer_seconds.end_round()
        if good:
            out = map(self._questions.name, self._questions.left_out)
            answered = self._questions.answer_seconds.last.keys() - out
            self._listener.penalties.note_good_round(answered)
        self.waiting.after_round(aborted=False)
        return self._trials.settle(good)

    def _check_sent(self, sent: Mapping[str, Tensor]) -> None:
        self._trials.check_sent(sent, self._questions.give_up)

    def _check_quorum(self, answered: int) -> None:
        quorum = self.config.network.quorum
        if answered < quorum:
            self._questions.give_up()
            self._trials.pass_over(self._questions.left_out)
            self.waiting.after_round(aborted=True)
            out = some_of(list(map(self._questions.name, sorted(self._questions.left_out))))
            raise RoundAborted(
                f"{counted(answered, 'client')} answered, network.quorum = {quorum}; "
                f"left out: {', '.join(out) or 'nobody'}; missing: {self.waiting.missing()}"
            )

    # --- lasting and ending ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "roster": self.roster.state_dict(),
            "usual": dict(self._questions.size_checks.usual),
            "round": self.device_log.round,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "roster" in state:
            self.roster.load_state_dict(state["roster"])
        # Older checkpoints have none of these.
        self.device_log.round = state.get("round")
        self._questions.size_checks.usual = dict(state.get("usual", {}))

    def close(self, finished: bool) -> None:
        """Say goodbye. Clients of a finished run end; others wait for the server to come back."""
        if self._administration is not None:
            self._administration.close()
        code = grpc.StatusCode.OK if finished else grpc.StatusCode.UNAVAILABLE
        self._listener.close(
            code, "the run is finished" if finished else "the server stops; it may come back"
        )
        self.device_log.close()

    def kill(self) -> None:
        """Stop without a goodbye, as a crash would; for tests."""
        self._listener.kill()
        self.device_log.close()

"""Give a method access to clients on other machines: the `Fleet` of a network run.

Two threads meet here. Torch work, and all waiting for answers, stays in the caller's thread; the devices' streams
live on an asyncio loop in another. The parts:

- `Listener` and `Sessions` (on the loop): who connects, who may come in, who has which place;
- `Questions` (caller's thread): one question per client at a time, its deadline, and the checks of its answer;
- `ServerSplitRound`, `ServerFullRound`: which frames a round consists of;
- `Waiting`: who is drawn for the next round, and the wait until a quorum is there.

A client that does not answer, or sends impossible values, is left out of the rest of the round. Results name the
clients that did answer.
"""

import logging
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import torch
from torch import Tensor

from semisfl.fleet.aggregate import combine
from semisfl.fleet.base import (
    AbnormalValues,
    ClientResult,
    ClientWork,
    Features,
    FullRound,
    HeldBack,
    RoundAborted,
    SplitRound,
    State,
)
from semisfl.fleet.byte_counts import Kind, Traffic
from semisfl.fleet.packing import join_states, split_states
from semisfl.fleet.setup import FleetSetup
from semisfl.net import hostport
from semisfl.net.chunks import LoopThread
from semisfl.net.frames import Frame
from semisfl.net.messages import Schemas
from semisfl.net.server.admission import HANDSHAKE_SECONDS
from semisfl.net.server.device_log import DeviceLog
from semisfl.net.server.fleet_status import FleetStatus
from semisfl.net.server.full_round import ServerFullRound
from semisfl.net.server.listener import Listener
from semisfl.net.server.questions import Questions, Take
from semisfl.net.server.roster import Roster
from semisfl.net.server.sessions import STRIKES, Sessions
from semisfl.net.server.split_round import ServerSplitRound
from semisfl.net.server.trust import Trust
from semisfl.net.server.value_checks import (
    impossible,
    limits_on_one_client,
    stands_out,
    update_size,
)
from semisfl.net.server.waiting import Waiting, some_of
from semisfl.net.terms import Terms, bottom_digest
from semisfl.settings.counts import plural
from semisfl.settings.robust import FEWEST

log = logging.getLogger(__name__)

LARGEST_CLAIM = 10
"""Images of one client that count, in medians of all clients."""


class NetworkFleet:
    """The server's side of a network run; see `semisfl.fleet.base.Fleet`."""

    capturable = False

    def __init__(
        self,
        setup: FleetSetup,
        *,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        thread: LoopThread | None = None,
    ) -> None:
        """Take the port now, so that a wrong one fails early; devices come in after `open`.

        ``thread`` runs the connections; None: a new one.
        """
        config, network = setup.config, setup.network
        assert network is not None
        hostport.check_listen(network)
        self.config = config
        self.traffic = Traffic()
        self.held_back = HeldBack(self._tell_held_back)
        self.roster = Roster(config.clients.total)
        self.device_log = DeviceLog()
        frozen = bottom_digest(config, setup.model)
        self.terms = Terms(config, setup.shape, setup.classes, setup.mean, setup.std, frozen)
        """The terms that devices are asked to accept."""
        self._hardware = setup.hardware
        self._schemas = Schemas.of(config, setup.model)
        certificates = None if network.insecure_loopback else network.certificates
        trust = None if certificates is None else Trust(certificates)
        self.sessions = Sessions(self.terms, self._schemas, self.roster, self.device_log, trust)
        self._questions = Questions(config, self.sessions, self.traffic, self.held_back, setup.stop)
        self.waiting = Waiting(config, self.sessions, setup.stop)
        self._status = FleetStatus(self.sessions, self.traffic, self._questions)
        self._listener = Listener(
            self.sessions,
            network.listen,
            trust,
            handshake_seconds=handshake_seconds,
            thread=thread,
        )
        self.port = self._listener.port

    def open(self, directory: Path | None) -> None:
        """Let devices in. The roster, the devices' events and their status are kept in ``directory``."""
        if directory is not None:
            self.roster.keep_in(directory / "roster.json")
            self.sessions.keep_in(directory)
            self._status.resume(directory)
            self.device_log.open(directory, self.status)
        log.log(*limits_on_one_client(self.config))
        self._listener.start()

    # --- who is there ----------------------------------------------------------------------------

    def present(self) -> Sequence[int]:
        """Return the clients that may be drawn."""
        return self.waiting.present()

    def members(self) -> Mapping[int, str]:
        """Return the clients that have a place and are not in quarantine, each with its device's name."""
        strikes, index = self.sessions.strikes, self.roster.index
        return {place: name for name, place in index.items() if strikes[name] < STRIKES}

    def image_counts(self) -> Mapping[int, int]:
        """Return how many images each client says it has; from three clients on, with a limit.

        One client's claim must not decide |D_l| / |D|, and with it how long the server trains.
        """
        counts = dict(self.roster.images)
        if len(counts) < FEWEST:
            return counts
        most = int(LARGEST_CLAIM * statistics.median(counts.values()))
        return {client: min(count, most) for client, count in counts.items()}

    def status(self) -> dict[str, Any]:
        """Return what the run waits for, how many places it has, and the status of each device."""
        status = {"total": self.roster.total, "clients": self._status.devices()}
        waiting = self.waiting.state
        return status if waiting is None else {"waiting": waiting, **status}

    def wait_ready(self) -> None:
        """Return once enough clients are there for a round."""
        self.waiting.until_ready()

    # --- a split round ---------------------------------------------------------------------------

    def start_round(self, plan: SplitRound) -> None:
        """Take the plan of a round; the first `forward` sends its weights."""
        self.device_log.round = plan.index
        self._questions.start_round()
        self._check_sent(
            join_states({"bottom": plan.bottom, "teacher bottom": plan.teacher_bottom})
        )
        self._split_round = ServerSplitRound(self._schemas, plan)

    def forward(self) -> Features:
        """Ask every client of the round for its next features; return those of the clients that answered."""
        answers = self._answers("features")
        clients = tuple(answers)
        student, teacher = (
            torch.cat([answers[client].tensors[name] for client in clients])
            for name in ("student", "teacher")
        )
        self._participants = clients
        device = self._hardware.device
        return Features(student.to(device).requires_grad_(), teacher.to(device), clients)

    def backward(self, gradients: Tensor) -> None:
        """Take the gradients of the last features; the next `forward` or `finish_round` sends them."""
        gradients = gradients.detach().float().cpu()
        self._check_sent({"gradients": gradients})
        self._split_round.backward(self._participants, gradients)

    def finish_round(self) -> State:
        """Ask every client for its bottom; return them as one, by the rule of ``robust.aggregate``."""
        before, states = self._split_round.plan.bottom, {}
        for client, frame in self._answers("model").items():
            states[client] = split_states(frame.tensors, ["bottom"])["bottom"]
            self._questions.note_size("update", client, update_size(states[client], before))
        bottom = combine(self.config.robust, states, before, self.held_back)
        return {name: tensor.to(self._hardware.device) for name, tensor in bottom.items()}

    def _answers(self, kind: Kind) -> dict[int, Frame]:
        """Return the answer of every client that still takes part; abort the round if they are too few."""
        answers: dict[int, Frame] = {}
        self._split_round.ask(self._questions)
        self._collect(kind, answers.__setitem__)
        self._check_quorum(len(answers))
        return dict(sorted(answers.items()))

    def _collect(self, kind: Kind, take: Take) -> None:
        """Collect answers; devices that are far too slow are not drawn for a while."""
        self._questions.collect(kind, take)
        self.waiting.pass_over(map(self._questions.name, self._questions.too_slow))

    # --- a full-model round ----------------------------------------------------------------------

    def train(self, work: ClientWork, plan: FullRound) -> list[ClientResult]:
        """Let every client of the round do ``work``; return the results of those that answered."""
        self.device_log.round = plan.index
        self._questions.start_round()
        self._check_sent(join_states(plan.send))
        device = self._hardware.device
        full_round = ServerFullRound(self._schemas, work, plan, device, self._questions)
        for client in plan.active:
            full_round.begin(client)
        self._collect("model", full_round.go_on)
        results = full_round.results
        for client, result in results.items():
            sent = plan.known_to(client)
            for name in result.states.keys() & sent.keys():
                size = update_size(result.states[name], sent[name])
                self._questions.note_size("update", client, size)
        self._check_quorum(len(results))
        return [results[client] for client in sorted(results)]

    # --- good and bad rounds ---------------------------------------------------------------------

    def settle(self, good: bool) -> str | None:
        """End a round. If it was not ``good``, return the device to repeat it without; None: nobody stands out."""
        self._status.count_bytes()
        self._questions.end_round()
        self.waiting.after_round(good=good)
        worst = None if good else stands_out(self._questions.sizes)
        if worst is None:
            return None
        name, quorum = self._questions.name(worst), self.config.network.quorum
        if len(self.present()) <= quorum:
            log.warning(
                "%s stands out; the round cannot be repeated without it: network.quorum = %d",
                name,
                quorum,
            )
            return None
        self.waiting.pass_over([name])
        return name

    def _tell_held_back(self, client: int, why: str) -> None:
        """Log that a robust rule gave a client less than its full weight, and record it as an event."""
        name = self._questions.name(client)
        log.warning("%s is held back: %s", name, why)
        self.device_log.note("held_back", name, client=client, reason=why)

    def _check_sent(self, sent: Mapping[str, Tensor]) -> None:
        """Abort the round before values are sent that no device can use."""
        if (fault := impossible(sent)) is not None:
            self._questions.give_up()
            raise AbnormalValues(f"the values that the server computed are impossible: {fault}")

    def _check_quorum(self, answered: int) -> None:
        """Abort the round if fewer clients than the quorum ``answered``; those left out are passed over."""
        quorum, out = self.config.network.quorum, self._questions.left_out
        if answered < quorum:
            names = [self._questions.name(client) for client in sorted(out)]
            self.waiting.pass_over(names)
            self.waiting.after_round(aborted=True)
            raise RoundAborted(
                f"{plural(answered, 'client')} answered, network.quorum = {quorum}; "
                f"left out: {', '.join(some_of(names)) or 'nobody'}; missing: {self.waiting.missing()}"
            )

    # --- lasting and ending ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return who has which place, and the last round that began."""
        return {"roster": self.roster.state_dict(), "round": self.device_log.round}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state; a simulation's is empty."""
        if "roster" in state:
            self.roster.load_state_dict(state["roster"])
        self.device_log.round = state.get("round")

    def close(self, finished: bool) -> None:
        """Say goodbye. Devices of a finished run end; others wait for the server to come back."""
        code = grpc.StatusCode.OK if finished else grpc.StatusCode.UNAVAILABLE
        self._listener.close(
            code, "the run is finished" if finished else "the server stops; it may come back"
        )
        self.device_log.close()

    def kill(self) -> None:
        """Stop without a goodbye, as a crash would; for tests."""
        self._listener.kill()
        self.device_log.close()

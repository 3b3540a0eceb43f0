"""The simulation: all clients in this process, each taking part until its policy's quotas are used up."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from semisfl.fleet.aggregate import combine
from semisfl.fleet.base import (
    ClientResult,
    ClientWork,
    Features,
    FullRound,
    HeldBack,
    SplitRound,
    State,
)
from semisfl.fleet.block import ClientBlock, ClientsHere
from semisfl.fleet.caps import RoundUse, Spent
from semisfl.fleet.outgoing import Cleared
from semisfl.fleet.setup import FleetSetup


def as_states(bottoms: Mapping[int, Cleared]) -> dict[int, State]:
    """Return what the server holds of clients' bottoms."""
    return {client: cleared.tensors for client, cleared in bottoms.items()}


class Simulation:
    """Base of the fleets whose clients live in the run's own processes."""

    def __init__(self, clients: ClientsHere) -> None:
        """Take the ``clients`` of this process, who know the images of every client."""
        self.clients = clients
        self.config = clients.config
        self.traffic = clients.traffic
        self.held_back = HeldBack()
        self._policy = clients.outgoing.policy
        self._spent = [Spent() for _ in clients.shards]

    def open(self, directory: Path | None) -> None:
        """Do nothing: all clients are there from the start."""

    def close(self, finished: bool) -> None:
        """Do nothing: clients end with their process."""

    def state_dict(self) -> dict[str, Any]:
        """Return what clients have used of their quotas; draws follow from the round's number."""
        if not self._policy.capped:
            return {}
        bits = self._policy.bits_per_image is not None  # else it may be infinite
        return {
            "spent": [[one.rounds, one.uses, *([one.bits] if bits else [])] for one in self._spent]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state.keys() <= {"spent"}, "the state of another kind of fleet"
        self._spent = [Spent(*item) for item in state.get("spent", ())] or self._spent

    def image_counts(self) -> Mapping[int, int]:
        """Return how many images each client holds."""
        return {client: len(shard) for client, shard in enumerate(self.clients.shards)}

    def present(self) -> Sequence[int]:
        """Return the clients whose quotas allow another round; all of them without quotas."""
        clients = range(len(self._spent))
        return [c for c in clients if self._refusal(c) is None] if self._policy.capped else clients

    def members(self) -> Mapping[int, str]:
        """Return every client, named by its number."""
        return {client: str(client) for client in range(len(self._spent))}

    def wait_ready(self) -> None:
        """Raise `ValueError` if the policies' quotas leave no client."""
        if not self.present():
            raise ValueError(f"no client is left: {self._refusal(0)}; ask for fewer rounds")

    def settle(self, good: bool) -> str | None:
        """Return None: no simulated client is suspected."""
        return None

    def spend(self, clients: Sequence[int]) -> None:
        """Take one round from these clients' quotas."""
        for client in clients if self._policy.capped else ():
            self._spent[client] = self._spent[client].plus(self._round_use(client))

    def _round_use(self, client: int) -> RoundUse:
        sizes = replace(self.clients.sizes, images=len(self.clients.shards[client]))
        return RoundUse.of_split(self._policy, self.config.clients.steps, sizes)

    def _refusal(self, client: int) -> str | None:
        return self._spent[client].plus(self._round_use(client)).excess(self._policy)


class LocalFleet(Simulation):
    """All active clients are one `ClientBlock`, on one device."""

    def __init__(
        self, setup: FleetSetup, make_block: Callable[[FleetSetup], ClientBlock] = ClientBlock
    ) -> None:
        """Make the block with ``make_block``; an attack brings a block of its own."""
        self.block = make_block(setup)
        super().__init__(self.block)
        # Clients whose quotas are used up leave, and a captured step has a fixed number of slots.
        self.capturable = not self._policy.capped

    def state_dict(self) -> dict[str, Any]:
        """Return what clients have used of their quotas, and the momentum that they keep."""
        momenta = self.block.momenta.state_dict()
        return super().state_dict() | ({"momenta": momenta} if momenta else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.block.momenta.load_state_dict(state.get("momenta", {}))
        super().load_state_dict({key: state[key] for key in state if key != "momenta"})

    def start_round(self, plan: SplitRound) -> None:
        """Charge the clients' quotas and let the block begin."""
        self.spend(plan.active)
        self._plan = plan
        self.block.start_round(plan)

    def forward(self) -> Features:
        """Return the block's features."""
        return self.block.forward().features(self._plan.active)

    def backward(self, gradients: Tensor) -> None:
        """Let the block take its step."""
        self.block.backward(gradients)

    def finish_round(self) -> State:
        """Return the bottoms as one; their plain mean in one operation if nothing changes a single one."""
        robust = self.config.robust
        plain = self.config.wire.models == "fp32" and robust.aggregate == "mean"
        if plain and self._policy.update_clip is None:
            return self.block.mean()
        bottoms = as_states(self.block.bottoms())
        return combine(robust, bottoms, self._plan.bottom, self.held_back)

    def train(self, work: ClientWork, plan: FullRound) -> list[ClientResult]:
        """Charge the clients' quotas and run the round in the block."""
        self.spend(plan.active)
        return self.block.train(work, plan)

"""The simulation: every client in this process."""

from collections.abc import Callable

from torch import Tensor

from semisfl.fleet.aggregate import combine
from semisfl.fleet.base import ClientResult, ClientWork, Features, FullRound, SplitRound, State
from semisfl.fleet.block import ClientBlock
from semisfl.fleet.setup import FleetSetup
from semisfl.fleet.simulation import Simulation, as_states


class LocalFleet(Simulation):
    """All active clients are one `ClientBlock`."""

    def __init__(
        self, setup: FleetSetup, make_block: Callable[[FleetSetup], ClientBlock] = ClientBlock
    ) -> None:
        super().__init__(make_block(setup))
        # Clients whose caps are used up leave, and a captured step has a fixed number of slots.
        self.capturable = not self._policy.capped

    def start_round(self, plan: SplitRound) -> None:
        self.spend(plan.active)
        self._plan = plan
        self.block.start_round(plan)

    def forward(self) -> Features:
        return self.block.forward().features(self._plan.active)

    def backward(self, gradients: Tensor) -> None:
        self.block.backward(gradients)

    def finish_round(self) -> State:
        robust = self.config.robust
        plain = self.config.wire.models == "fp32" and robust.aggregate == "mean"
        if plain and self._policy.update_clip is None:
            return self.block.mean()
        bottoms = as_states(self.block.bottoms())
        return combine(robust, bottoms, self._plan.bottom, self.held_back)

    def train(self, work: ClientWork, plan: FullRound) -> list[ClientResult]:
        self.spend(plan.active)
        return self.block.train(work, plan)

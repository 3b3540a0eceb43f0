"""Spread a run over several GPUs or machines: each rank of torchrun has a block of active clients.

Rank 0 runs the method and has a block of its own; the others obey it (`rank_worker`). Every rank
computes its block with the engine of a single process, so losses and byte counts are those of one
process: on CPUs with one thread to the last bit (with more, `Streams.a_core_each` gives a block's last
client several). A lost rank ends all of them; torchrun's restart goes on from the last checkpoint.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from semisfl.fleet.aggregate import combine
from semisfl.fleet.base import ClientResult, ClientWork, Features, FullRound, SplitRound, State
from semisfl.fleet.block import ClientBlock
from semisfl.fleet.byte_counts import Traffic
from semisfl.fleet.cluster import plans
from semisfl.fleet.cluster.ranks import RankLost, Ranks, Transfer, launch
from semisfl.fleet.frozen import FrozenFleet, Piece
from semisfl.fleet.local import Simulation, as_states
from semisfl.fleet.packing import outline, pack, room_for, unpack
from semisfl.fleet.setup import FleetSetup
from semisfl.settings.config import ConfigError
from semisfl.stopping import Stopped


class Crew:
    """The other ranks of torchrun, as rank 0 begins and ends them."""

    def __init__(self, setup: FleetSetup, ranks: Ranks | None = None) -> None:
        """Join torchrun's ranks, unless ``ranks`` is passed."""
        if ranks is None and launch() is None:
            raise ConfigError(
                "fleet.kind = 'cluster' needs the ranks of torchrun: start it with "
                "torchrun --nproc-per-node N -m semisfl run ..., or use fleet.kind = local"
            )
        self._setup, self._joined, self._ended = setup, ranks is None, False
        self.ranks = ranks or Ranks.join(setup.hardware.device)
        assert self.ranks.rank == 0, "the other ranks obey this one"

    def begin(self) -> None:
        """Let every rank load its images; raise `ConfigError` if a rank cannot, or if its images differ from rank 0's."""
        self.ranks.send_command(
            "begin", config=self._setup.config.model_dump(mode="json"), images=self._setup.digest()
        )
        for rank in self.ranks.others:
            if problem := self.ranks.reply_of(rank).get("problem"):
                raise ConfigError(f"rank {rank}: {problem}")

    def end(self, before: Callable[[], None] = lambda: None) -> None:
        """End the other ranks after ``before``, once. Ignore a lost rank."""
        if self._ended:
            return
        self._ended = True
        if not self.ranks.lost:
            with suppress(RankLost):
                before()
                self.ranks.send_command("end")
        if self._joined:
            self.ranks.leave()


class ClusterFleet(Simulation):
    """The fleet of rank 0: the clients of all ranks, its own block among them.

    Commands and plans go out to all ranks, features and results come back. While rank 0 computes its own
    block, the others' features are on their way.
    """

    # A CUDA graph cannot contain messages.
    capturable = False

    def __init__(self, setup: FleetSetup, ranks: Ranks | None = None) -> None:
        """Join torchrun's ranks, unless ``ranks`` is passed."""
        self._crew = Crew(setup, ranks)
        self._setup, self.block, self._ranks = setup, ClientBlock(setup), self._crew.ranks
        super().__init__(self.block)
        self._coming: Transfer | None = None
        """Features that the other ranks are computing or sending."""
        self._owing: list[int] = []
        """Ranks whose results of a full-model round are still to come."""

    # --- beginning and ending --------------------------------------------------------------------

    def open(self, directory: Path | None) -> None:
        """Let every rank load its images; raise `ConfigError` if a rank cannot, or if its images differ from rank 0's."""
        self._crew.begin()

    def close(self, finished: bool) -> None:
        """End the other ranks too. Ignore a lost rank."""
        self._crew.end(self._drop_late_messages)

    def _drop_late_messages(self) -> None:
        """Receive and drop what the other ranks still send for an abandoned round."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
        while self._owing:
            plans.receive_results(self._ranks, self._owing.pop(0), Traffic())

    # --- a split round ---------------------------------------------------------------------------

    def start_round(self, plan: SplitRound) -> None:
        """Share out the active clients, send every rank its plan and begin with rank 0's own block."""
        self._drop_late_messages()
        self.spend(plan.active)
        self._plan, self._step = plan, 0
        self._blocks = plans.blocks_of(plan.active, self._ranks.count)
        plans.send_split(self._ranks, plan, self._blocks)
        self._expect_features()
        if self._blocks[0]:
            ahead = plans.blocks_of(plan.next_active, self._ranks.count)[0]
            self.block.start_round(replace(plan, active=self._blocks[0], next_active=ahead))

    def _expect_features(self) -> None:
        """Allocate the whole fleet's features and start receiving the other ranks' rows into them.

        They arrive while rank 0 computes; `forward` waits for them.
        """
        if self._step == self._plan.steps:
            return
        rows, width = (
            len(self._plan.active) * self._setup.config.clients.batch,
            self._setup.model.features,
        )
        device = self._ranks.device
        self._features = Features(
            torch.empty(rows, width, device=device),
            torch.empty(rows, width, device=device),
            self._plan.active,
            torch.empty(rows, dtype=torch.long, device=device),
        )
        self._coming = self._ranks.receive(
            {rank: self._rows(self._features, rank) for rank in self._ranks.others}
        )

    def _rows(self, features: Features, rank: int) -> list[Tensor]:
        """Return the views of student, teacher and truth that belong to a rank's clients."""
        assert features.truth is not None
        return [
            tensor[self._place(rank)]
            for tensor in (features.student, features.teacher, features.truth)
        ]

    def _place(self, rank: int) -> slice:
        """Return which rows of the whole fleet's features are those of a rank."""
        batch = self._setup.config.clients.batch
        first = sum(len(block) for block in self._blocks[:rank])
        return slice(first * batch, (first + len(self._blocks[rank])) * batch)

    def forward(self) -> Features:
        """Return the features of all ranks, in the order of the active clients."""
        assert self._coming is not None, "one forward per backward"
        features = self._features
        if self._blocks[0]:
            own = self.block.forward()
            tensors = own.tensors()
            for room, tensor in zip(self._rows(features, 0), tensors, strict=True):
                room.copy_(tensor)
        self._coming.wait()
        self._coming = None
        features.student.requires_grad_()
        return features

    def backward(self, gradients: Tensor) -> None:
        """Send each rank the gradients of its rows, and take the step of rank 0's own block."""
        gradients = gradients.detach().contiguous()
        self._ranks.send_command("backward")
        sent = self._ranks.send(
            {rank: [gradients[self._place(rank)]] for rank in self._ranks.others}
        )
        if self._blocks[0]:
            self.block.backward(gradients[self._place(0)])
        sent.wait()
        self._step += 1
        self._expect_features()

    def finish_round(self) -> State:
        """Collect the bottoms and byte counts of all ranks; return the bottoms as one."""
        self._ranks.send_command("finish")
        bottoms = as_states(self.block.bottoms()) if self._blocks[0] else {}
        for rank in self._ranks.others:
            reply = self._ranks.reply_of(rank)
            outlines = reply["outlines"]
            room = room_for(outlines, self._ranks.device)
            self._ranks.receive({rank: room}).wait()
            bottoms |= zip(self._blocks[rank], unpack(outlines, room), strict=True)
            self.traffic.merge(reply["traffic"])
            if reply["stop"]:
                self._setup.stop.request()
        return combine(self._setup.config.robust, bottoms, self._plan.bottom, self.held_back)

    # --- a full-model round ----------------------------------------------------------------------

    def train(self, work: ClientWork, plan: FullRound) -> list[ClientResult]:
        """Let all ranks run the round and return all results; raise `Stopped` if a rank was stopped."""
        self._drop_late_messages()
        self.spend(plan.active)
        blocks = plans.blocks_of(plan.active, self._ranks.count)
        plans.send_full(self._ranks, work, plan, blocks)
        self._owing = list(self._ranks.others)
        results = self.block.train(work, replace(plan, active=blocks[0])) if blocks[0] else []
        stopped = False
        while self._owing:
            received = plans.receive_results(self._ranks, self._owing.pop(0), self.traffic)
            stopped = stopped or received is None
            results += received or []
        if stopped:
            self._setup.stop.request()
            raise Stopped
        return results


class FrozenClusterFleet(FrozenFleet):
    """The fleet of rank 0 with a frozen bottom: the encoding of images, most of the work, is spread over the ranks.

    Every rank encodes some images of a client at a time, and rank 0 writes all files, which are those of one process.
    Then the other ranks end, and rank 0 trains on the rows alone.
    """

    def __init__(self, setup: FleetSetup, ranks: Ranks | None = None) -> None:
        """Join torchrun's ranks, unless ``ranks`` is passed."""
        super().__init__(setup)
        self._crew = Crew(setup, ranks)

    def open(self, directory: Path | None) -> None:
        """Let every rank load its images too, unless the rows are there already."""
        super().open(directory)
        if self.config.data.features is None:
            self._crew.begin()
        else:
            self._crew.end()

    def close(self, finished: bool) -> None:
        """End the other ranks, if they are still there."""
        self._crew.end()
        super().close(finished)

    def _rows(self, pieces: Sequence[Piece]) -> Iterator[Tensor]:
        """Yield the packed rows of each piece in order, encoded by all ranks in turn; then end the other ranks."""
        ranks, bottom = self._crew.ranks, self.clients.bottom.state_dict()
        if pieces:
            ranks.send_command("bottom", outline=outline(bottom))
            ranks.broadcast(pack([bottom]))
        for first in range(0, len(pieces), ranks.count):
            self._stop.check()  # between two commands, when nothing is on its way
            shares = pieces[first : first + ranks.count]
            ranks.send_command("encode", pieces=shares)
            size, device = self._form.size, ranks.device
            arriving = {
                rank: [torch.empty(len(digests), size, dtype=torch.uint8, device=device)]
                for rank, (*_, digests) in enumerate(shares)
                if rank > 0
            }
            transfer = ranks.receive(arriving)
            own = self.clients.encode(shares[0])
            transfer.wait()
            yield own
            yield from (rows for (rows,) in arriving.values())
        self._crew.end()

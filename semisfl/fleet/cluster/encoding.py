"""Spread the encoding of simulated clients with a frozen bottom over the ranks of `torchrun`.

Encoding is most of such a run's work. Every rank encodes some images of a client at a time, and rank 0 writes all
files, which are those of one process. Then the other ranks end, and rank 0 trains on the rows alone.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from semisfl.fleet.cluster.cluster_fleet import Crew
from semisfl.fleet.cluster.ranks import Ranks
from semisfl.fleet.frozen import FrozenFleet, Piece
from semisfl.fleet.packing import outline, pack
from semisfl.fleet.setup import FleetSetup


class FrozenClusterFleet(FrozenFleet):
    """The fleet of rank 0."""

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

"""Do what rank 0 commands, on every other rank, with a block of the clients."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from semisfl.fleet.block import ClientBlock
from semisfl.fleet.cluster import plans
from semisfl.fleet.cluster.ranks import Ranks
from semisfl.fleet.frozen import EncodingClients
from semisfl.fleet.local import as_states
from semisfl.fleet.packing import outline, pack, room_for, unpack
from semisfl.fleet.setup import FleetSetup
from semisfl.settings import lookup
from semisfl.settings.config import Config, parse
from semisfl.stopping import Stopped


class RankWorker:
    """One rank's side of a run: it obeys rank 0 from ``begin`` to ``end``.

    Commands are ``begin`` (load images), ``split`` (begin a split round and send features), ``backward``
    (take a step and send the next features), ``finish`` (send bottoms) and ``train`` (a full-model round). With a frozen
    bottom they are ``bottom`` (load its weights) and ``encode`` (send the rows of some images).
    """

    def __init__(self, ranks: Ranks, prepare: Callable[[Config], FleetSetup]) -> None:
        """Take ``prepare``, which loads on this machine what a configuration names, and the ranks to obey."""
        self._ranks, self._prepare = ranks, prepare
        self._steps: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
            "begin": self._begin,
            "split": self._split,
            "backward": self._backward,
            "finish": self._finish,
            "train": self._train,
            "bottom": self._load_bottom,
            "encode": self._encode,
        }

    def serve(self) -> None:
        """Return when rank 0 ends the run; raise `RankLost` if rank 0 is gone."""
        while (message := self._ranks.next_command())["do"] != "end":
            self._steps[message["do"]](message)

    def _begin(self, message: Mapping[str, Any]) -> None:
        """Load images and make the block; reply what is wrong, if anything is, instead of raising it here."""
        try:
            config = parse(message["config"])
            self._setup = self._prepare(config)
            if self._setup.digest() != message["images"]:
                raise ValueError(
                    f"{config.data.name!r} holds other images here than for rank 0; "
                    "make it the same on every machine"
                )
            self._works = lookup.works(lookup.method(config.method))
        except (ValueError, OSError, ImportError) as error:
            self._ranks.reply(problem=str(error))
            return
        if config.clients.bottom == "frozen":
            self._encoding = EncodingClients(self._setup)
        else:
            self._block = ClientBlock(self._setup)
        self._ranks.reply()

    # --- a split round ---------------------------------------------------------------------------

    def _split(self, message: Mapping[str, Any]) -> None:
        """Begin a split round and send the first features."""
        self._plan, self._step = plans.receive_split(self._ranks, message), 0
        self._counts()  # drops those of an abandoned round
        if self._plan.active:
            self._block.start_round(self._plan)
            self._send_features()

    def _send_features(self) -> None:
        """Compute and send the next step's features, labels of their images included; nothing after the last step."""
        if self._step == self._plan.steps:
            return
        with self._setup.hardware.step():
            own = self._block.forward()
        tensors = own.tensors()
        self._ranks.send({0: [tensor.contiguous() for tensor in tensors]}).wait()

    def _backward(self, message: Mapping[str, Any]) -> None:
        """Take the step with rank 0's gradients, then compute the next features at once."""
        if not self._plan.active:
            return
        rows = len(self._plan.active) * self._setup.config.clients.batch
        gradients = torch.empty(rows, self._setup.model.features, device=self._ranks.device)
        self._ranks.receive({0: [gradients]}).wait()
        with self._setup.hardware.step():
            self._block.backward(gradients)
        self._step += 1
        self._send_features()

    def _finish(self, message: Mapping[str, Any]) -> None:
        """Reply with byte counts and outlines, then send the trained bottoms."""
        bottoms = list(as_states(self._block.bottoms()).values()) if self._plan.active else []
        self._ranks.reply(
            traffic=self._counts(),
            stop=self._setup.stop.requested,
            outlines=[outline(bottom) for bottom in bottoms],
        )
        self._ranks.send({0: pack(bottoms)}).wait()

    def _counts(self) -> dict[str, int]:
        """Return the bytes since the last call; rank 0 adds them up."""
        counts = self._block.traffic.state_dict()
        self._block.traffic.load_state_dict({})
        return counts

    # --- a full-model round ----------------------------------------------------------------------

    def _train(self, message: Mapping[str, Any]) -> None:
        """Run a full-model round for this rank's clients and send their results."""
        plan = plans.receive_full(self._ranks, message)
        self._counts()
        try:
            work = self._works[message["work"]]
            results = self._block.train(work, plan) if plan.active else []
        except Stopped:
            self._ranks.reply(stopped=True)
            return
        plans.send_results(self._ranks, results, self._counts())

    # --- a frozen bottom -------------------------------------------------------------------------

    def _load_bottom(self, message: Mapping[str, Any]) -> None:
        """Receive the bottom's weights."""
        room = room_for([message["outline"]], self._ranks.device)
        self._ranks.broadcast(room)
        self._encoding.bottom.load_state_dict(unpack([message["outline"]], room)[0])

    def _encode(self, message: Mapping[str, Any]) -> None:
        """Encode this rank's share of the images, if it has one, and send the rows."""
        for piece in message["pieces"][self._ranks.rank :][:1]:
            rows = self._encoding.encode(piece)
            self._ranks.send({0: [rows.contiguous()]}).wait()

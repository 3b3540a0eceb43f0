"""Let the processes that torchrun started exchange messages: plain values as JSON, tensors raw.

Rank 0 broadcasts commands to all others, and they reply to rank 0 only. Messages go through host
memory (gloo); tensors go from device to device (NCCL between GPUs, gloo between CPUs).
"""

import json
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed as dist
from torch.distributed.rendezvous import rendezvous

PATIENCE = timedelta(hours=1)
"""How long other ranks wait for rank 0, which loads its images first."""
KEPT = 16
"""Message parts to keep alive. A gloo thread releases a part some time after it was sent. If that is the
last reference, the thread waits for the interpreter, which may be waiting for the thread: a deadlock."""


class RankLost(ConnectionError):
    """Raised when another rank is gone or no longer replies."""


@dataclass(frozen=True)
class Launch:
    """Hold what torchrun passes to this process in its environment."""

    rank: int
    local_rank: int
    """Among the ranks of this machine."""
    max_restarts: int

    def device(self, option: str) -> str:
        """Return the device of this rank for ``--device``: a GPU of its own, ``cuda:LOCAL_RANK``, if there are any."""
        several = option in ("auto", "cuda") and torch.cuda.is_available()
        return f"cuda:{self.local_rank}" if several else option


def launch() -> Launch | None:
    """Return torchrun's values from the environment; None if torchrun did not start this process."""
    environment = os.environ
    if "TORCHELASTIC_RESTART_COUNT" not in environment or "RANK" not in environment:
        return None
    return Launch(
        int(environment["RANK"]),
        int(environment["LOCAL_RANK"]),
        int(environment.get("TORCHELASTIC_MAX_RESTARTS", 0)),
    )


class Ranks:
    """This process's place in a group of processes, and messages to and from the others.

    Any failure of the group is raised as `RankLost`; after it only `leave` and exit make sense.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """Take the process ``group`` (None: all processes) and the ``device`` that tensors are sent from and to."""
        self.device = device
        self._group = group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.others = range(1, self.count)
        self.lost = False
        self._kept: deque[Tensor] = deque(maxlen=KEPT)

    @classmethod
    def join(cls, device: torch.device) -> "Ranks":
        """Meet the others that torchrun started, and return this process's place among them."""
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store, rank, world = next(rendezvous("env://"))
        own = dist.PrefixStore(  # type: ignore[attr-defined]
            _meet(store, rank, world), store
        )
        dist.init_process_group(backend, store=own, rank=rank, world_size=world)
        return cls(device)

    def leave(self) -> None:
        """Leave the group that `join` entered."""
        if not self.lost:
            dist.destroy_process_group()

    @contextmanager
    def noticing_loss(self) -> Iterator[None]:
        """Raise `RankLost` if an operation of the block fails."""
        try:
            yield
        except RuntimeError as error:
            self.lost = True
            raise RankLost(
                "another rank is gone; torchrun --max-restarts N would start all again and go on "
                f"from the last checkpoint ({str(error).splitlines()[0]})"
            ) from error

    # --- plain values ----------------------------------------------------------------------------

    def send_command(self, what: str, **values: Any) -> None:
        """Send a command from rank 0 to all others; ``values`` come with it."""
        with self.noticing_loss():
            for part in _message_parts({"do": what, **values}):
                dist.broadcast(self._keep(part), group_src=0, group=self._group)

    def next_command(self) -> dict[str, Any]:
        """Receive rank 0's next command; ``do`` is its name."""
        return self._message(partial(dist.broadcast, group_src=0, group=self._group))

    def reply(self, **values: Any) -> None:
        """Send a reply to rank 0."""
        with self.noticing_loss():
            for part in _message_parts(values):
                dist.send(self._keep(part), group_dst=0, group=self._group)

    def reply_of(self, rank: int) -> dict[str, Any]:
        """Receive the next reply of ``rank``."""
        return self._message(partial(dist.recv, group_src=rank, group=self._group))

    def _message(self, receive: Callable[[Tensor], object]) -> dict[str, Any]:
        """Receive the length of a message, then its JSON."""
        with self.noticing_loss():
            length = self._keep(torch.empty(1, dtype=torch.long))
            receive(length)
            body = self._keep(torch.empty(int(length), dtype=torch.uint8))
            receive(body)
        values: dict[str, Any] = json.loads(body.numpy().tobytes())
        return values

    def _keep(self, part: Tensor) -> Tensor:
        self._kept.append(part)
        return part

    # --- tensors ---------------------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Copy rank 0's ``tensors`` into those of all others, which have the same shapes and dtypes."""
        with self.noticing_loss():
            for tensor in tensors:
                dist.broadcast(tensor, group_src=0, group=self._group)

    def send(self, tensors: Mapping[int, Sequence[Tensor]]) -> "Transfer":
        """Send contiguous tensors to each rank; they must not change until they have arrived."""
        return self._move(dist.isend, tensors)

    def receive(self, tensors: Mapping[int, Sequence[Tensor]]) -> "Transfer":
        """Receive from each rank into contiguous tensors; they hold the values once `Transfer.wait` returns."""
        return self._move(dist.irecv, tensors)

    def _move(self, operation: Any, tensors: Mapping[int, Sequence[Tensor]]) -> "Transfer":
        with self.noticing_loss():
            operations = [
                dist.P2POp(operation, tensor, group=self._group, group_peer=rank)
                for rank, several in tensors.items()
                for tensor in several
                if tensor.numel()
            ]
            return Transfer(self, dist.batch_isend_irecv(operations) if operations else [])


@dataclass(frozen=True)
class Transfer:
    """Hold tensors that are being sent or received."""

    ranks: Ranks
    works: Sequence[dist.Work]

    def wait(self) -> None:
        """Return when all tensors have arrived or may be changed again; raise `RankLost` if a rank is gone."""
        with self.ranks.noticing_loss():
            for work in self.works:
                work.wait()


def _meet(store: Any, rank: int, world: int) -> str:
    """Return a name that the ranks of this attempt share and that no earlier attempt had.

    torchrun's store outlives its restarts, and gloo would find there the addresses of processes
    that are gone. Its count of restarts is no such name: machines count their own.
    """
    mine = secrets.token_hex(8)
    if rank > 0:
        store.set(f"here/{rank}", mine)
        store.wait([f"meet/{mine}"], PATIENCE)
        name = store.get(f"meet/{mine}").decode()
        store.set(f"came/{name}/{rank}", "")
        return name
    answered: dict[int, bytes] = {}
    missing = set(range(1, world))
    while missing:
        for other in sorted(missing):
            if store.check([f"came/{mine}/{other}"]):
                missing.remove(other)
            elif store.check([f"here/{other}"]):
                # This may be a rank of an earlier attempt. It is gone, and its successor will come.
                name = store.get(f"here/{other}")
                if name != answered.get(other):
                    answered[other] = name
                    store.set(f"meet/{name.decode()}", mine)
        time.sleep(0.01)
    return mine


def _message_parts(values: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return a message as its length [1] and the bytes of its JSON."""
    body = bytearray(json.dumps(values).encode())
    return torch.tensor([len(body)]), torch.frombuffer(body, dtype=torch.uint8)

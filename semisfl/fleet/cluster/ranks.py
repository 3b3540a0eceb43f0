"""The processes that torchrun started, and how they talk: plain values as JSON, tensors as they are.

Rank 0 says what is to be done, to all at once; the others answer it alone. What is said goes over
the hosts' memory (gloo); tensors go from device to device (NCCL between GPUs, gloo between CPUs).
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
from torch import Tensor
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from semisfl.settings.config import ConfigError

HEAD = 256
"""Bytes of a message's first part, which most messages fit into."""
LENGTH = 8
PATIENCE = timedelta(hours=1)
"""For rank 0, which loads its images before it meets the others."""
KEPT = 16
"""Parts of messages. A thread of gloo lets go of a part some time after it has crossed; if that leaves
nobody who holds it, the thread waits for the interpreter, which may be waiting for the thread to end."""


class RankLost(ConnectionError):
    """Another rank is gone, or does not answer any more."""


@dataclass(frozen=True)
class Launch:
    """What torchrun told this process."""

    rank: int
    local_rank: int
    """Among the ranks of this machine."""
    world: int
    max_restarts: int

    def device(self, asked: str) -> str:
        """``--device`` as this rank has it: a GPU of its own where there are any."""
        if asked not in ("auto", "cuda") or not (count := torch.cuda.device_count()):
            return asked
        if self.local_rank >= count:
            raise ConfigError(
                f"rank {self.rank} is the {self.local_rank + 1}. on a machine with {count} GPUs; "
                f"use torchrun --nproc-per-node {count}, or --device cpu"
            )
        return f"cuda:{self.local_rank}"


def launch() -> Launch | None:
    """None: this process was not started by torchrun."""
    told = os.environ
    if "TORCHELASTIC_RESTART_COUNT" not in told or "RANK" not in told:
        return None
    return Launch(
        int(told["RANK"]),
        int(told["LOCAL_RANK"]),
        int(told["WORLD_SIZE"]),
        int(told.get("TORCHELASTIC_MAX_RESTARTS", 0)),
    )


class Ranks:
    """This process among the others of a process group."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.device = device
        self._group = group
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.others = range(1, self.count)
        self.lost = False
        self._kept: deque[Tensor] = deque(maxlen=KEPT)

    @classmethod
    def join(cls, device: torch.device) -> "Ranks":
        """Meet the others that torchrun started."""
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store, rank, world = next(rendezvous("env://"))
        own = dist.PrefixStore(  # type: ignore[attr-defined]
            _meet(store, rank, world), store
        )
        dist.init_process_group(backend, store=own, rank=rank, world_size=world)
        return cls(device)

    def leave(self) -> None:
        """The end of what `join` began."""
        if not self.lost:
            dist.destroy_process_group()

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self.lost = True
            raise RankLost(
                "another rank is gone; torchrun --max-restarts N would start all again and go on "
                f"from the last checkpoint ({str(error).splitlines()[0]})"
            ) from error

    # --- plain values ----------------------------------------------------------------------------

    def say(self, what: str, **values: Any) -> None:
        """Rank 0 to all others."""
        with self._talking():
            for part in _encoded({"do": what, **values}):
                dist.broadcast(self._keep(part), group_src=0, group=self._group)

    def hear(self) -> dict[str, Any]:
        """What rank 0 says; ``do`` is what it is about."""
        return self._message(partial(dist.broadcast, group_src=0, group=self._group))

    def answer(self, **values: Any) -> None:
        """To rank 0."""
        with self._talking():
            for part in _encoded(values):
                dist.send(self._keep(part), group_dst=0, group=self._group)

    def answer_of(self, rank: int) -> dict[str, Any]:
        return self._message(partial(dist.recv, group_src=rank, group=self._group))

    def _message(self, receive: Callable[[Tensor], object]) -> dict[str, Any]:
        with self._talking():
            head = self._keep(torch.empty(HEAD, dtype=torch.uint8))
            receive(head)
            rest = self._keep(torch.empty(_length_after(head), dtype=torch.uint8))
            if len(rest):
                receive(rest)
            return _decoded(head, rest)

    def _keep(self, part: Tensor) -> Tensor:
        self._kept.append(part)
        return part

    # --- tensors ---------------------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """From rank 0, into the ``tensors`` of all others."""
        with self._talking():
            for tensor in tensors:
                dist.broadcast(tensor, group_src=0, group=self._group)

    def send(self, tensors: Mapping[int, Sequence[Tensor]]) -> "Moving":
        """Contiguous tensors by the rank that gets them; they must not change until it has them."""
        return self._move(dist.isend, tensors)

    def receive(self, tensors: Mapping[int, Sequence[Tensor]]) -> "Moving":
        """Into contiguous tensors, by the rank they come from."""
        return self._move(dist.irecv, tensors)

    def _move(self, operation: Any, tensors: Mapping[int, Sequence[Tensor]]) -> "Moving":
        with self._talking():
            operations = [
                dist.P2POp(operation, tensor, group=self._group, group_peer=rank)
                for rank, several in tensors.items()
                for tensor in several
                if tensor.numel()
            ]
            return Moving(self, dist.batch_isend_irecv(operations) if operations else [])

    def wait(self, works: Sequence[dist.Work]) -> None:
        with self._talking():
            for work in works:
                work.wait()


@dataclass(frozen=True)
class Moving:
    """Tensors on their way."""

    ranks: Ranks
    works: Sequence[dist.Work]

    def wait(self) -> None:
        self.ranks.wait(self.works)


def _meet(store: Any, rank: int, world: int) -> str:
    """A name that the ranks of this attempt share, and no earlier attempt had.

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
    told: dict[int, bytes] = {}
    missing = set(range(1, world))
    while missing:
        for other in sorted(missing):
            if store.check([f"came/{mine}/{other}"]):
                missing.remove(other)
            elif store.check([f"here/{other}"]):
                # One of an earlier attempt may be answered too: it is gone, and its successor comes.
                name = store.get(f"here/{other}")
                if name != told.get(other):
                    told[other] = name
                    store.set(f"meet/{name.decode()}", mine)
        time.sleep(0.01)
    return mine


def _encoded(values: Mapping[str, Any]) -> list[Tensor]:
    body = json.dumps(values).encode()
    body = len(body).to_bytes(LENGTH, "little") + body.ljust(HEAD - LENGTH)
    whole = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    return [part for part in (whole[:HEAD], whole[HEAD:]) if len(part)]


def _length_after(head: Tensor) -> int:
    length = int.from_bytes(bytes(head[:LENGTH].tolist()), "little")
    return max(0, length - (HEAD - LENGTH))


def _decoded(head: Tensor, rest: Tensor) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(torch.cat([head[LENGTH:], rest]).numpy().tobytes())
    return values

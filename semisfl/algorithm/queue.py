"""The memory queue Q of recent teacher keys.

``two_level`` is the paper's. Labelled keys live in a ring of their own, filled only in the supervised
phase, so that the many unlabelled keys never push them out. They are always eligible as positives.
Empty slots are no references. ``single`` is the published code's: one ring for both, cleared after
every round to zero vectors that still count in every denominator. Labelled keys are never positives
of unlabelled anchors.

Everything is updated in place, and no value on the device decides what runs (`Hardware.make_step`).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from semisfl.algorithm.losses import References


class Ring:
    """The latest ``capacity`` rows pushed, in tensors of fixed shape and address.

    A row has a key [width], a label (-1: empty slot), a flag (it may be a positive) and whether the slot
    is filled. ``next`` is the slot that the next row takes.
    """

    def __init__(self, capacity: int, width: int, device: torch.device) -> None:
        self.keys = torch.zeros(capacity, width, device=device)
        self.labels = torch.full((capacity,), -1, dtype=torch.long, device=device)
        self.flags = torch.zeros(capacity, dtype=torch.bool, device=device)
        self.filled = torch.zeros(capacity, dtype=torch.bool, device=device)
        self.next = torch.zeros(1, dtype=torch.long, device=device)

    def push(self, keys: Tensor, labels: Tensor, flags: Tensor) -> None:
        """Store keys [n, width] with labels and flags [n] in place of the oldest; of more than ``capacity`` rows the last."""
        capacity = self.keys.shape[0]
        count = min(keys.shape[0], capacity)
        if count == 0:
            return
        slots = (self.next + torch.arange(count, device=keys.device)) % capacity
        self.keys.index_copy_(0, slots, keys[-count:].to(self.keys.dtype))
        self.labels.index_copy_(0, slots, labels[-count:])
        self.flags.index_copy_(0, slots, flags[-count:])
        self.filled.index_fill_(0, slots, True)
        self.next.add_(count).remainder_(capacity)

    def order(self) -> Tensor:
        """Return when each slot was pushed, counted back from the next push: -1 the latest."""
        slots = torch.arange(len(self.keys), device=self.keys.device)
        return (slots - self.next) % max(1, len(self.keys)) - len(self.keys)

    def clear(self) -> None:
        """Make every slot empty: zero keys and labels of -1."""
        self.keys.zero_()
        self.labels.fill_(-1)
        self.flags.zero_()
        self.filled.zero_()
        self.next.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Return keys, labels and the place of the next key."""
        return {name: getattr(self, name) for name in ("keys", "labels", "flags", "filled", "next")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from the keys of a checkpoint."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


def _join(
    keys: Tensor, labels: Tensor, positive: Tensor, *rings: tuple[Ring, Tensor, Tensor]
) -> References:
    """Return copies of the current keys, then of each ring with its (positive, present) masks."""
    return References(
        torch.cat([keys.float(), *(ring.keys for ring, _, _ in rings)]),
        torch.cat([labels, *(ring.labels for ring, _, _ in rings)]),
        torch.cat([positive, *(mask for _, mask, _ in rings)]),
        torch.cat([torch.ones_like(positive), *(present for _, _, present in rings)]),
    )


def _in_turn_mask(ring: Ring, owner: Tensor, batch: int, kept: int = 0) -> Tensor:
    """Return the mask [n, references] that serves clients one after the other.

    Each sees its own keys and what ``ring`` holds once those served before it were pushed. ``kept``
    references are always seen.
    """
    first = (owner * batch).unsqueeze(1)
    order = torch.cat([torch.arange(len(owner), device=owner.device), ring.order()]).unsqueeze(0)
    seen = (order < first + batch) & (order >= first - len(ring.keys))
    always = seen.new_ones(len(owner), kept)
    rows = len(owner)
    return ~torch.cat([seen[:, :rows], always, seen[:, rows:]], dim=1)


class TwoLevelQueue:
    """The paper's queue: a ring of labelled keys and a ring of pseudo-labelled ones, both kept over rounds.

    Its two `push_*` methods return what a batch is compared with, and only then store the batch.
    """

    def __init__(self, capacity: int, width: int, device: torch.device, seed: int = 0) -> None:
        self.labeled = Ring(capacity, width, device)
        self.pseudo = Ring(capacity, width, device)

    def push_labeled(self, keys: Tensor, labels: Tensor) -> References:
        """Return the references of a labelled batch: its own keys and the labelled level before them."""
        true = torch.ones_like(labels, dtype=torch.bool)
        level = self.labeled
        references = _join(keys, labels, true, (level, level.filled, level.filled))
        level.push(keys, labels, true)
        return references

    def push_pseudo(self, keys: Tensor, labels: Tensor, confident: Tensor) -> References:
        """Return the references of an unlabelled batch: its own keys and both levels before them."""
        references = _join(
            keys,
            labels,
            confident,
            (self.labeled, self.labeled.filled, self.labeled.filled),
            (self.pseudo, self.pseudo.flags, self.pseudo.filled),
        )
        self.pseudo.push(keys, labels, confident)
        return references

    def mask_in_turn(self, owner: Tensor, batch: int) -> Tensor:
        """Return the mask [rows, references] for the next `push_pseudo`; True: not a reference of this row.

        ``owner`` [rows]: the position of each row's client in the step. ``batch``: rows per client.
        """
        return _in_turn_mask(self.pseudo, owner, batch, kept=len(self.labeled.keys))

    def end_round(self) -> None:
        """Keep both levels."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return both rings, for a checkpoint."""
        return {
            f"{level}.{name}": tensor
            for level, ring in (("labeled", self.labeled), ("pseudo", self.pseudo))
            for name, tensor in ring.state_dict().items()
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from the rings of a checkpoint."""
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


class SingleQueue:
    """The published code's queue: one ring for labelled and pseudo-labelled keys, emptied after every round.

    It begins with random unit vectors drawn from ``seed``. Empty slots count in every denominator.
    """

    def __init__(self, capacity: int, width: int, device: torch.device, seed: int = 0) -> None:
        self.ring = Ring(capacity, width, device)
        random = torch.randn(capacity, width, generator=torch.Generator().manual_seed(seed))
        self.ring.keys.copy_(F.normalize(random, dim=1))

    def push_labeled(self, keys: Tensor, labels: Tensor) -> References:
        """Return the references of a labelled batch: its own keys and every slot, empty or not."""
        every = torch.ones_like(self.ring.filled)
        references = _join(
            keys, labels, torch.ones_like(labels, dtype=torch.bool), (self.ring, every, every)
        )
        self.ring.push(keys, labels, torch.zeros_like(labels, dtype=torch.bool))
        return references

    def push_pseudo(self, keys: Tensor, labels: Tensor, confident: Tensor) -> References:
        """Return the references of an unlabelled batch: its own keys and every slot; those pushed as confident may be positives."""
        every = torch.ones_like(self.ring.filled)
        references = _join(keys, labels, confident, (self.ring, self.ring.flags, every))
        self.ring.push(keys, labels, confident)
        return references

    def mask_in_turn(self, owner: Tensor, batch: int) -> Tensor:
        """Return the mask as `TwoLevelQueue.mask_in_turn` does."""
        return _in_turn_mask(self.ring, owner, batch)

    def end_round(self) -> None:
        """Empty the ring."""
        self.ring.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the ring, for a checkpoint."""
        return self.ring.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from the ring of a checkpoint."""
        self.ring.load_state_dict(state)


QUEUES: dict[str, type[TwoLevelQueue] | type[SingleQueue]] = {
    "two_level": TwoLevelQueue,
    "single": SingleQueue,
}

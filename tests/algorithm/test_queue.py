"""Test the memory queue: references, positives, and when keys leave it."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from semisfl.algorithm.losses import References, contrastive
from semisfl.algorithm.queue import QUEUES, Ring, SingleQueue, TwoLevelQueue

CPU = torch.device("cpu")
WIDTH = 2


def keys(*numbers: float) -> Tensor:
    return torch.tensor([[float(number), -float(number)] for number in numbers])


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.long)


def flags(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.bool)


def held(ring: Ring) -> list[float]:
    return sorted(ring.keys[ring.filled][:, 0].tolist())


def seen(references: References) -> list[tuple[float, int, bool]]:
    """(first number of the key, label, may be positive) of the present references."""
    rows = zip(*(part.tolist() for part in references), strict=True)
    return [(key[0], label, positive) for key, label, positive, present in rows if present]


def test_ring_keeps_the_latest_rows_across_the_wrap() -> None:
    ring = Ring(5, WIDTH, CPU)
    pushed: list[float] = []
    for start, count in ((0, 3), (3, 4), (7, 1), (8, 5), (13, 2)):
        numbers = list(range(start, start + count))
        ring.push(keys(*numbers), ints(*numbers), flags(*[1] * count))
        pushed += numbers
        assert held(ring) == sorted(pushed[-5:])
        assert sorted(ring.labels[ring.filled].tolist()) == sorted(int(n) for n in pushed[-5:])


def test_ring_rows_stay_together() -> None:
    ring = Ring(3, WIDTH, CPU)
    ring.push(keys(0, 1, 2, 3), ints(0, 1, 2, 3), flags(0, 1, 0, 1))
    for key, label, flag in zip(
        ring.keys.tolist(), ring.labels.tolist(), ring.flags.tolist(), strict=True
    ):
        assert key == [label, -label] and flag == bool(label % 2)


def test_batch_larger_than_the_capacity_leaves_its_last_rows() -> None:
    ring = Ring(4, WIDTH, CPU)
    ring.push(keys(1, 2), ints(1, 2), flags(1, 1))
    ring.push(keys(*range(10, 20)), ints(*range(10, 20)), flags(*[1] * 10))
    assert held(ring) == [16, 17, 18, 19]
    ring.push(keys(20), ints(20), flags(1))
    assert held(ring) == [17, 18, 19, 20]


@pytest.mark.parametrize("kind", QUEUES)
def test_capacity_zero_leaves_the_current_keys(kind: str) -> None:
    queue = QUEUES[kind](0, WIDTH, CPU)
    assert seen(queue.push_labeled(keys(1, 2), ints(0, 1))) == [(1, 0, True), (2, 1, True)]
    assert seen(queue.push_pseudo(keys(3), ints(1), flags(0))) == [(3, 1, False)]
    queue.end_round()


def test_two_level_empty_slots_are_no_references() -> None:
    queue = TwoLevelQueue(4, WIDTH, CPU)
    assert seen(queue.push_pseudo(keys(1), ints(0), flags(1))) == [(1, 0, True)]
    assert seen(queue.push_labeled(keys(2), ints(0))) == [(2, 0, True)]


def test_two_level_unlabelled_keys_never_replace_labelled_ones() -> None:
    queue = TwoLevelQueue(2, WIDTH, CPU)
    queue.push_labeled(keys(1, 2), ints(0, 1))
    for number in range(10, 15):
        queue.push_pseudo(keys(number, number + 100), ints(0, 1), flags(1, 0))
    references = seen(queue.push_pseudo(keys(50), ints(1), flags(0)))
    # Its own keys first, both labelled ones, then the latest unlabelled ones with their flags.
    assert references[0] == (50, 1, False)
    assert sorted(references[1:3]) == [(1, 0, True), (2, 1, True)]
    assert sorted(references[3:]) == [(14, 0, True), (114, 1, False)]


def test_two_level_labelled_batches_see_labelled_keys_only() -> None:
    queue = TwoLevelQueue(3, WIDTH, CPU)
    queue.push_labeled(keys(1), ints(0))
    queue.push_pseudo(keys(10), ints(0), flags(1))
    assert sorted(seen(queue.push_labeled(keys(2), ints(1)))) == [(1, 0, True), (2, 1, True)]


def test_two_level_survives_the_round() -> None:
    queue = TwoLevelQueue(3, WIDTH, CPU)
    queue.push_labeled(keys(1), ints(0))
    queue.push_pseudo(keys(10), ints(1), flags(1))
    queue.end_round()
    assert held(queue.labeled) == [1] and held(queue.pseudo) == [10]


def test_single_labelled_keys_are_positives_in_the_supervised_phase_only() -> None:
    queue = SingleQueue(4, WIDTH, CPU)
    queue.push_labeled(keys(1, 2), ints(0, 1))
    supervised = seen(queue.push_labeled(keys(3), ints(0)))
    assert (
        (1, 0, True) in supervised and (2, 1, True) in supervised and supervised[0] == (3, 0, True)
    )
    semi = seen(queue.push_pseudo(keys(10), ints(0), flags(1)))
    assert semi[0] == (10, 0, True)
    assert {(number, label) for number, label, _ in semi[1:]} >= {(1, 0), (2, 1), (3, 0)}
    assert not any(positive for _, _, positive in semi[1:])
    assert (10, 0, True) in seen(queue.push_pseudo(keys(11), ints(0), flags(0)))


def test_single_unlabelled_keys_replace_labelled_ones() -> None:
    queue = SingleQueue(3, WIDTH, CPU)
    queue.push_labeled(keys(1, 2, 3), ints(0, 1, 2))
    queue.push_pseudo(keys(10, 11), ints(0, 1), flags(1, 1))
    assert held(queue.ring) == [3, 10, 11]


def test_single_starts_with_seeded_random_unit_vectors_without_label() -> None:
    queue = SingleQueue(6, 16, CPU, seed=3)
    torch.testing.assert_close(queue.ring.keys.norm(dim=1), torch.ones(6))
    assert torch.equal(queue.ring.keys, SingleQueue(6, 16, CPU, seed=3).ring.keys)
    assert not torch.equal(queue.ring.keys, SingleQueue(6, 16, CPU, seed=4).ring.keys)
    references = queue.push_pseudo(torch.zeros(1, 16), ints(0), flags(1))
    assert references.present.all() and references.positive.tolist() == [True] + [False] * 6
    assert references.labels.tolist() == [0] + [-1] * 6


def test_single_cleared_slots_count_one_each_in_the_denominator() -> None:
    queue = SingleQueue(5, WIDTH, CPU)
    queue.push_pseudo(keys(1, 2, 3), ints(0, 0, 0), flags(1, 1, 1))
    queue.end_round()
    z = F.normalize(torch.tensor([[1.0, 2.0]]), dim=1)
    key = F.normalize(torch.tensor([[2.0, 1.0]]), dim=1)
    loss = contrastive(z, ints(0), queue.push_pseudo(key, ints(0), flags(1)), 0.2)
    similarity = math.exp(float(z @ key.T) / 0.2)
    assert float(loss) == pytest.approx(
        -math.log(similarity / (similarity + 5 * math.exp(0))), rel=1e-5
    )


def test_single_cleared_slots_are_never_positives() -> None:
    """Every slot with an anchor's label is a positive in the next supervised phase; cleared slots have no label."""
    queue = SingleQueue(3, WIDTH, CPU)
    queue.push_pseudo(keys(1, 2), ints(0, 1), flags(1, 1))
    queue.end_round()
    references = queue.push_labeled(keys(5), ints(0))
    assert references.labels.tolist() == [0, -1, -1, -1]
    assert not references.keys[1:].any() and bool(references.present.all())


def test_references_do_not_change_with_later_pushes() -> None:
    for queue in (TwoLevelQueue(2, WIDTH, CPU), SingleQueue(2, WIDTH, CPU)):
        queue.push_labeled(keys(1, 2), ints(0, 1))
        references = queue.push_pseudo(keys(3), ints(0), flags(1))
        before = [part.clone() for part in references]
        queue.push_pseudo(keys(8, 9), ints(1, 1), flags(0, 0))
        queue.push_labeled(keys(6, 7), ints(1, 1))
        assert all(torch.equal(old, new) for old, new in zip(before, references, strict=True))


@pytest.mark.parametrize("kind", ["two_level", "single"])
@pytest.mark.parametrize("before", [0, 3, 9])
@pytest.mark.parametrize("capacity", [0, 1, 3, 4, 7, 20])
def test_in_turn_each_client_sees_what_a_queue_pushed_in_turn_holds(
    kind: str, capacity: int, before: int
) -> None:
    """Three clients of two rows: rings smaller than a client's rows, than a step's, half filled, wrapped."""
    joint, in_turn = (QUEUES[kind](capacity, WIDTH, CPU, seed=1) for _ in range(2))
    for queue in (joint, in_turn):
        queue.push_labeled(keys(100, 101), ints(0, 1))
        for number in range(before):
            queue.push_pseudo(keys(200 + number), ints(number % 2), flags(number % 3 == 0))
    new, labels, confident = keys(*range(1, 7)), ints(0, 1, 1, 0, 0, 1), flags(1, 0, 1, 1, 0, 1)
    owner = ints(0, 0, 1, 1, 2, 2)
    mask = joint.mask_in_turn(owner, 2)
    references = joint.push_pseudo(new, labels, confident)
    assert mask.shape == (6, len(references.keys))
    for client in range(3):
        rows = slice(2 * client, 2 * client + 2)
        expected = in_turn.push_pseudo(new[rows], labels[rows], confident[rows])
        for row in range(6)[rows]:
            left = references._replace(present=references.present & ~mask[row])
            assert sorted(seen(left)) == sorted(seen(expected))
    # Both forget the same keys from now on, whichever slots these lie in.
    for number in (7, 8, 9):
        both = [q.push_pseudo(keys(number), ints(0), flags(1)) for q in (joint, in_turn)]
        assert sorted(seen(both[0])) == sorted(seen(both[1]))


def test_in_turn_the_last_client_sees_those_served_before_it() -> None:
    queue = TwoLevelQueue(4, WIDTH, CPU)
    mask = queue.mask_in_turn(ints(0, 1, 2), 1)
    references = queue.push_pseudo(keys(1, 2, 3), ints(0, 0, 0), flags(1, 1, 1))
    views = [references._replace(present=references.present & ~row) for row in mask]
    assert [[key for key, _, _ in seen(view)] for view in views] == [[1], [1, 2], [1, 2, 3]]


@pytest.mark.parametrize("kind", QUEUES)
def test_a_restored_queue_continues_where_it_was(kind: str) -> None:
    queue, other = (QUEUES[kind](3, WIDTH, CPU, seed) for seed in (1, 2))
    queue.push_labeled(keys(1, 2), ints(0, 1))
    queue.push_pseudo(keys(3, 4), ints(0, 1), flags(1, 0))
    other.load_state_dict({name: tensor.clone() for name, tensor in queue.state_dict().items()})
    for pair in zip(
        queue.push_pseudo(keys(5), ints(1), flags(1)),
        other.push_pseudo(keys(5), ints(1), flags(1)),
        strict=True,
    ):
        assert torch.equal(*pair)
    assert all(
        torch.equal(tensor, other.state_dict()[name]) for name, tensor in queue.state_dict().items()
    )

"""A round's batches: functions of (seed, round, client, purpose), however they are made."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from semisfl import seeds
from semisfl.data.augment import Augmentation, Normalizer
from semisfl.data.batches import (
    DrawnView,
    RoundBatches,
    Views,
    draw_view,
    join_views,
    make_view,
    split_views,
)
from semisfl.data.labeled import LabeledImages
from semisfl.data.positions import draw_batches, draw_passes
from semisfl.fleet.base import draw_active
from semisfl.settings.config import parse
from tests import toy

AUGMENTATION = Augmentation(flip=True, pad=None, num_ops=2, cutout=6)
NORMALIZER = Normalizer.of((0.4,), (0.2,))
SIZE = (16, 16)


def images(count: int = 40) -> torch.Tensor:
    return torch.from_numpy(
        seeds.generator(0, "images").integers(0, 256, (count, 1, *SIZE), dtype=np.uint8)
    )


def views(
    seed: int = 1, round_index: int = 2, client: int = 3, steps: int = 5
) -> dict[str, DrawnView]:
    return split_views(AUGMENTATION, np.arange(3, 33), SIZE, steps, 4, seed, round_index, client)


def same(one: Mapping[str, DrawnView], other: Mapping[str, DrawnView]) -> bool:
    made = [[make_view(images(), item) for item in group.values()] for group in (one, other)]
    return all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@given(
    count=st.integers(1, 60),
    steps=st.integers(1, 8),
    batch=st.integers(1, 20),
    least=st.integers(0, 300),
)
@settings(max_examples=60, deadline=None)
def test_draw_batches(count: int, steps: int, batch: int, least: int) -> None:
    drawn = draw_batches(seeds.generator(0, "draw"), count, steps, batch, least)
    assert drawn.shape == (steps, batch)
    assert drawn.min() >= 0 and drawn.max() < count
    # The list is repeated only until it suffices: nothing can come more often than it was repeated.
    repeats = -(-max(steps * batch, least) // count)
    assert np.bincount(drawn.reshape(-1)).max() <= repeats
    if least <= steps * batch and steps * batch % count == 0:
        assert (np.bincount(drawn.reshape(-1), minlength=count) == repeats).all()
    again = draw_batches(seeds.generator(0, "draw"), count, steps, batch, least)
    assert np.array_equal(drawn, again)


@given(count=st.integers(1, 60), steps=st.integers(1, 8), batch=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_a_pass_shows_every_image_before_the_next_one_begins(
    count: int, steps: int, batch: int
) -> None:
    drawn = draw_passes(seeds.generator(0, "draw"), count, steps, batch)
    assert drawn.shape == (steps, batch)
    per_pass = -(-count // batch)
    for first in range(0, steps - per_pass + 1, per_pass):
        shown = np.bincount(drawn[first : first + per_pass].reshape(-1), minlength=count)
        assert shown.min() == per_pass * batch // count and shown.max() - shown.min() <= 1


def test_batches_come_in_an_order_of_their_own() -> None:
    orders = {draw_batches(seeds.generator(n, "draw"), 30, 3, 10).tobytes() for n in range(4)}
    orders |= {
        one.tobytes() for one in draw_passes(seeds.generator(9, "draw"), 30, 6, 10).reshape(2, 30)
    }
    assert len(orders) == 6 and np.arange(30).tobytes() not in orders


def test_prefetched_batches_are_used_only_in_their_own_round() -> None:
    batches = RoundBatches(images(), AUGMENTATION, NORMALIZER, torch.float32, whole=True)
    made: list[int] = []

    def make(round_index: int) -> Views:
        made.append(round_index)
        return views(round_index=round_index), {}

    def first() -> torch.Tensor:
        return batches.get("strong").clone()

    expected = {}
    for round_index in (5, 6, 7):
        batches.start(views(round_index=round_index))
        expected[round_index] = first()
    batches.start_from((5,), make)
    batches.ahead((6,), make)
    assert torch.equal(first(), expected[5]), "the round in use is left alone"
    batches.start_from((6,), make)
    assert torch.equal(first(), expected[6]) and made == [5, 6]
    batches.ahead((7,), make)
    batches.start_from((5,), make)
    assert torch.equal(first(), expected[5]) and made == [5, 6, 7, 5]


def test_views_are_functions_of_seed_round_and_client() -> None:
    assert same(views(), views())
    for other in (views(seed=2), views(round_index=3), views(client=4)):
        assert not same(views(), other)
        assert not np.array_equal(views()["strong"].indices, other["strong"].indices)


def test_views_share_their_images_and_stay_in_the_shard() -> None:
    both = views()
    assert np.array_equal(both["strong"].indices, both["weak"].indices)
    assert set(both["weak"].indices.reshape(-1)) <= set(range(3, 33))
    weak, strong = (make_view(images(), both[name]) for name in ("weak", "strong"))
    assert not torch.equal(weak, strong)


def test_draws_for_different_purposes_are_independent() -> None:
    indices = np.zeros((3, 8), dtype=np.int64)
    one, same_purpose, other = (
        make_view(images(), draw_view(AUGMENTATION, "weak", indices, SIZE, 0, purpose, 1))
        for purpose in ("labeled-view1", "labeled-view1", "labeled-view2")
    )
    assert torch.equal(one, same_purpose) and not torch.equal(one, other)


def test_the_two_views_of_an_image_are_cropped_and_flipped_independently() -> None:
    strong, weak = (views()[name].draws for name in ("strong", "weak"))
    for part in ("flip", "shift_y", "shift_x"):
        assert not np.array_equal(getattr(strong, part), getattr(weak, part)), part


def test_plain_view_is_the_image_itself() -> None:
    planned = draw_view(AUGMENTATION, "plain", np.array([[4, 5], [6, 4]]), SIZE, 0, "plain")
    assert torch.equal(make_view(images(), planned), images()[[4, 5, 6, 4]])


def read(batches: RoundBatches, plans: Mapping[str, DrawnView], steps: int) -> list[torch.Tensor]:
    extras = torch.arange(steps * 3).view(steps, 3)
    batches.start(plans, {"number": extras})
    out = []
    for _ in range(steps):
        out += [batches.get(name).clone() for name in plans] + [batches.extra("number").clone()]
        batches.advance()
    return out


@pytest.mark.parametrize("budget", [1, 3000, 256 * 2**20])
def test_whole_and_chunked_give_the_same_batches(budget: int) -> None:
    whole = RoundBatches(images(), AUGMENTATION, NORMALIZER, torch.float32, whole=True)
    chunked = RoundBatches(
        images(), AUGMENTATION, NORMALIZER, torch.float32, whole=False, budget=budget
    )
    # Later rounds are shorter and longer than the first: buffers are reused where they fit.
    for round_index, steps in enumerate((5, 3, 7)):
        plans = views(round_index=round_index, steps=steps)
        for one, other in zip(read(whole, plans, steps), read(chunked, plans, steps), strict=True):
            assert torch.equal(one, other)


def test_a_step_is_what_was_planned_for_it() -> None:
    plans = views()
    batches = RoundBatches(images(), AUGMENTATION, NORMALIZER, torch.float32, whole=False)
    batches.start(plans)
    for step in range(5):
        expected = NORMALIZER(make_view(images(), plans["strong"][step : step + 1]))
        assert torch.equal(batches.get("strong"), expected)
        assert torch.equal(batches.get("strong"), expected)  # reading does not move on
        batches.advance()


def test_side_by_side_keeps_each_clients_rows_together() -> None:
    clients = [views(client=client) for client in (0, 1, 2)]
    together = join_views([client["strong"] for client in clients])
    assert together.indices.shape == (5, 12)
    made = make_view(images(), together).view(5, 3, 4, 1, *SIZE)
    for position, client in enumerate(clients):
        alone = make_view(images(), client["strong"]).view(5, 4, 1, *SIZE)
        assert torch.equal(made[:, position], alone)


def test_labelled_images_come_as_two_independent_views_with_their_labels() -> None:
    labeled = toy.numbered(6)
    labeled.start(0, 3, "weak")
    for _ in range(3):
        one, (own, *_), two, labels = labeled.next_two()
        assert torch.equal(own, labels)
        assert torch.equal(one, two)  # nothing to draw: both views show the images of these labels
        assert one[:, 0, 0, 0].round().long().tolist() == labels.tolist()

    moving = RoundBatches(images(30), AUGMENTATION, NORMALIZER, torch.float32, whole=False)
    labeled = LabeledImages(moving, torch.arange(30), parse({"server": {"batch": 6}, "seed": 4}))
    labeled.start(0, 1, "strong")
    first = labeled.next_two()
    assert not torch.equal(first[0], first[2])
    labeled.start(0, 1, "strong")
    assert torch.equal(first[0], labeled.next_two()[0])
    labeled.start(1, 1, "strong")
    assert not torch.equal(first[0], labeled.next_two()[0])


def test_active_clients_are_drawn_uniformly_without_replacement() -> None:
    counts = np.zeros(12)
    for round_index in range(1200):
        active = draw_active(5, round_index, 12, range(12), 4)
        assert len(set(active)) == 4 and list(active) == sorted(active)
        counts[list(active)] += 1
    # 400 each, standard deviation 16.
    assert counts.min() > 330 and counts.max() < 470
    assert draw_active(5, 7, 12, range(12), 4) == draw_active(5, 7, 12, range(12), 4)
    assert draw_active(5, 7, 12, range(12), 4) != draw_active(6, 7, 12, range(12), 4)


def test_absent_clients_are_replaced_by_the_next_in_line() -> None:
    usual = draw_active(5, 7, 12, range(12), 4)
    without = draw_active(5, 7, 12, [c for c in range(12) if c != usual[0]], 4)
    assert usual[0] not in without and set(usual[1:]) <= set(without) and len(without) == 4
    assert draw_active(5, 7, 12, usual[:2], 4) == usual[:2]


@pytest.mark.parametrize("budget", [1, 3 * 16 * 256 * 5, 256 * 2**20])
def test_parts_are_the_batches_of_clients_side_by_side(budget: int) -> None:
    """The budget holds one step at a time, three of five, or all."""
    clients = [views(client=client) for client in (0, 1)]
    batches, alone = (
        RoundBatches(images(), AUGMENTATION, NORMALIZER, torch.float32, whole=False, budget=budget)
        for _ in range(2)
    )
    steps = 0
    batches.start({name: join_views([view[name] for view in clients]) for name in clients[0]})
    for parts in batches.stretches(2):
        for part, client in zip(parts, clients, strict=True):
            alone.start(client)
            for _ in range(steps):
                alone.advance()
            for step in part.steps:
                for name in client:
                    assert torch.equal(part.get(name), alone.get(name))
                    assert part.get(name).stride() == alone.get(name).stride()
                assert int(part.row_of(torch.arange(5))) == step
                part.advance()
                alone.advance()
        steps += len(parts[0].steps)
    assert steps == 5

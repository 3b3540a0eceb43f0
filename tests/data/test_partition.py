"""Test partitions: the rule for IID and Dirichlet shards, and its promises for any input."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from matplotlib.text import Text

from semisfl.data.dataset import Dataset
from semisfl.data.holdings import count, picture
from semisfl.data.partition import Partition, split, split_by_folder
from tests.pictures import cut_off

CIFAR = np.repeat(np.arange(10), 5000)
# Class sizes of the SVHN training images and the labels §6 gives for 1,000 of them.
SVHN_SIZES = (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659)
SVHN_LABELS = (68, 189, 144, 116, 102, 94, 78, 76, 69, 64)


def cut(labels=CIFAR, *, labeled=4000, clients=30, kind="iid", alpha=None, seed=1, classes=10):
    return split(
        labels,
        labeled=labeled,
        clients=clients,
        kind=kind,
        alpha=alpha,
        seed=seed,
        classes=classes,
    )


def same(one: Partition, other: Partition) -> bool:
    pairs = zip((one.labeled, *one.clients), (other.labeled, *other.clients), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=2, max_size=8),
    unknown=st.integers(0, 30),
    clients=st.integers(1, 12),
    extra=st.integers(0, 20),
    alpha=st.none() | st.sampled_from([0.01, 0.1, 1.0, 100.0]),
    seed=st.integers(0, 2**40),
)
def test_disjoint_complete_and_nobody_empty(sizes, unknown, clients, extra, alpha, seed):
    classes, labeled = len(sizes), len(sizes) + extra
    assume(sum(sizes) >= labeled and sum(sizes) + unknown - labeled >= clients)
    labels = np.concatenate([np.repeat(np.arange(classes), sizes), np.full(unknown, -1)])
    labels = np.random.default_rng(seed).permutation(labels)
    result = cut(
        labels,
        labeled=labeled,
        clients=clients,
        kind="dirichlet" if alpha else "iid",
        alpha=alpha,
        seed=seed,
        classes=classes,
    )
    held = np.concatenate([result.labeled, *result.clients])
    assert np.array_equal(np.sort(held), np.arange(len(labels)))
    assert len(result.labeled) == labeled
    assert (labels[result.labeled] >= 0).all()
    assert len(result.clients) == clients
    assert all(len(rows) for rows in result.clients)
    assert all(rows.dtype == np.int64 for rows in (result.labeled, *result.clients))
    # The server's share of a class is its quota, rounded, but at least one of each class present.
    counts = np.bincount(labels[result.labeled], minlength=classes)
    assert (counts[np.array(sizes) > 0] >= 1).all()
    if min(sizes) * labeled >= sum(sizes):
        quota = np.array(sizes) * labeled / sum(sizes)
        assert (abs(counts - quota) < 1).all()


@pytest.mark.parametrize(("kind", "alpha"), [("iid", None), ("dirichlet", 0.1)])
def test_the_seed_decides(kind, alpha):
    assert same(cut(kind=kind, alpha=alpha), cut(kind=kind, alpha=alpha))
    assert not same(cut(kind=kind, alpha=alpha), cut(kind=kind, alpha=alpha, seed=2))


def test_labels_are_shared_by_runs_that_differ_in_clients_and_skew():
    assert np.array_equal(cut().labeled, cut(clients=7, kind="dirichlet", alpha=0.05).labeled)


def test_labels_are_stratified_not_balanced():
    labels = np.repeat(np.arange(10), SVHN_SIZES)
    result = cut(labels, labeled=1000)
    assert tuple(np.bincount(labels[result.labeled])) == SVHN_LABELS
    assert tuple(np.bincount(CIFAR[cut().labeled])) == (400,) * 10


def test_iid_sizes_on_cifar():
    result = cut()
    sizes = np.array([len(rows) for rows in result.clients])
    assert sizes.sum() == 46_000
    assert abs(sizes - 46_000 / 30).max() < 6
    mixes = np.stack([np.bincount(CIFAR[rows], minlength=10) for rows in result.clients])
    assert abs(mixes - 4600 / 30).max() < 1


def mean_divergence(result: Partition, labels: np.ndarray) -> float:
    """Mean over clients of KL(class mix || uniform)."""
    mixes = np.stack([np.bincount(labels[rows], minlength=10) for rows in result.clients])
    shares = mixes / mixes.sum(axis=1, keepdims=True)
    logs = np.log(np.where(shares > 0, shares * 10, 1))
    return float((shares * logs).sum(axis=1).mean())


@pytest.mark.parametrize(
    ("kind", "alpha", "stated"),
    [
        ("iid", None, 0.00),
        ("dirichlet", 1.0, 0.36),
        ("dirichlet", 0.5, 0.61),
        ("dirichlet", 0.1, 1.42),
        ("dirichlet", 0.05, 1.74),
    ],
)
def test_skew_is_as_stated(kind, alpha, stated):
    result = [cut(kind=kind, alpha=alpha, seed=seed) for seed in range(15)]
    measured = np.mean([mean_divergence(partition, CIFAR) for partition in result])
    assert measured == pytest.approx(stated, abs=0.04)


def test_dirichlet_sizes_vary():
    sizes = [
        sorted(len(rows) for rows in cut(kind="dirichlet", alpha=0.05, seed=seed).clients)
        for seed in range(15)
    ]
    smallest, largest = np.median([(s[0], s[-1]) for s in sizes], axis=0)
    assert 600 < smallest < 1200  # §6: typically 0.9k
    assert 2700 < largest < 3900  # §6: typically 3.3k


def test_a_class_without_a_share_is_still_dealt_to_clients():
    # At this alpha most of the draws are exactly 0.
    labels = np.repeat(np.arange(50), 20)
    result = cut(labels, labeled=50, clients=3, kind="dirichlet", alpha=1e-4, classes=50)
    mixes = np.stack([np.bincount(labels[rows], minlength=50) for rows in result.clients])
    assert mixes.sum() == 950
    assert (mixes.max(axis=0) <= 7).sum() > 40  # 19 images over 3 clients


def test_a_client_without_images_takes_one_from_the_largest():
    # These draws leave three clients without images, and one with four.
    labels = np.repeat(np.arange(5), 6)
    result = cut(labels, labeled=5, clients=20, kind="dirichlet", alpha=1.0, seed=2, classes=5)
    assert sorted(map(len, result.clients)) == [1] * 15 + [2] * 5


def test_images_of_unknown_label_are_spread_evenly():
    labels = np.concatenate([np.repeat([0, 1], 50), np.full(900, -1)])
    result = cut(labels, labeled=100, clients=9, kind="dirichlet", alpha=0.1, classes=2)
    assert [len(rows) for rows in result.clients] == [100] * 9
    # Shuffled first: no client holds a run of neighbours.
    assert all(np.ptp(rows) > 500 for rows in result.clients)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labeled": 50_001}, "data.labeled = 50001 exceeds the 50000 training images"),
        ({"labeled": 9}, "data.labeled = 9 is below the 10 classes; use 10 or more"),
        ({"clients": 46_001}, "clients.total = 46001 exceeds the 46000 images left"),
        ({"labeled": 50_000}, "clients.total = 30 exceeds the 0 images left"),
    ],
)
def test_errors_name_value_and_limit(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        cut(**change)
    assert "\n" not in str(caught.value)


def folders(clients) -> Dataset:
    labels = torch.cat([torch.arange(3).repeat_interleave(20), torch.full((40,), -1)])
    return Dataset(
        name="folders",
        classes=("a", "b", "c"),
        images=torch.zeros(100, 1, 4, 4, dtype=torch.uint8),
        labels=labels,
        test_images=torch.zeros(1, 1, 4, 4, dtype=torch.uint8),
        test_labels=torch.zeros(1, dtype=torch.int64),
        mean=(0.5,),
        std=(0.5,),
        clients=clients,
    )


def test_by_folder_keeps_the_folders_and_draws_labels_from_the_rest():
    clients = {"ann": np.arange(60, 70), "bob": np.array([99, 70, 5, 6])}
    result = split_by_folder(folders(clients), labeled=30, seed=3)
    assert [rows.tolist() for rows in result.clients] == [list(range(60, 70)), [5, 6, 70, 99]]
    assert len(result.labeled) == 30
    assert not set(result.labeled.tolist()) & {5, 6}
    counts = np.bincount(np.repeat(np.arange(3), 20)[result.labeled])
    assert counts.tolist() == [9, 11, 10]  # 30 of 18, 20 and 20: quotas 9.3, 10.3 and 10.3
    assert same(result, split_by_folder(folders(clients), labeled=30, seed=3))
    assert not same(result, split_by_folder(folders(clients), labeled=30, seed=4))


@pytest.mark.parametrize("word", ["", " of an unusually long class name"])
@pytest.mark.parametrize(
    "clients",
    [2, pytest.param(10, marks=pytest.mark.slow), pytest.param(30, marks=pytest.mark.slow), 100],
)
def test_the_picture_shows_all_its_text(clients, word):
    labels = np.concatenate([CIFAR, np.full(100, -1)])
    names = [f"class {number}{word}" for number in range(10)]
    figure = picture(count(cut(labels, clients=clients), labels, names))
    assert cut_off(figure) == 0
    texts = {text.get_text() for text in figure.findobj(Text)}
    assert {"images", "server", "unknown"} <= texts
    assert any(name.startswith("class 7") for name in texts)


def test_a_partition_takes_lists_and_tensors() -> None:
    made = Partition([0, 2], [(1,), torch.tensor([3])])  # type: ignore[arg-type]
    for images in (made.labeled, made.validation, *made.clients):
        assert images.dtype == np.int64
    assert [held.tolist() for held in made.clients] == [[1], [3]]


@pytest.mark.parametrize("wrong", [[0.0, 1.0], np.array([True, False]), [[0, 1]], 3])
def test_a_partition_takes_image_numbers_only(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"labeled of the partition is .* a list of image numbers"):
        Partition(wrong, ())  # type: ignore[arg-type]

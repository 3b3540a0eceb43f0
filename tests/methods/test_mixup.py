"""The labelled view "mixed": images are blended in pairs (mixup), and their labels with the same shares."""

import pytest
import torch
import torch.nn.functional as F

from semisfl.algorithm.losses import cross_entropy
from tests import toy

BATCH, STEPS = 6, 4


@pytest.mark.parametrize("whole", [False, True])
def test_images_and_labels_are_mixed_with_the_same_shares(whole: bool) -> None:
    labeled = toy.numbered(BATCH, whole)
    labeled.start(0, STEPS, "mixed")
    shares = []
    for _ in range(STEPS):
        images, (own, others, share), second, plain = labeled.next_two()
        assert others is not None and share is not None
        assert len(images) == len(own) == len(second) == BATCH
        expected = share * own + (1 - share) * others
        assert torch.allclose(images.amax((1, 2, 3)), expected, atol=1e-4)
        assert torch.allclose(images.amin((1, 2, 3)), expected, atol=1e-4)
        # Every image is mixed into one other, of the same batch.
        assert sorted(others.tolist()) == sorted(own.tolist())
        assert second[:, 0, 0, 0].round().long().tolist() == plain.tolist()
        shares.append(share)
    drawn = torch.cat(shares)
    assert 0.5 <= float(drawn.min()) < 0.6 and 0.9 < float(drawn.max()) <= 1


def test_every_round_draws_its_own_mixture_and_repeats_it() -> None:
    labeled = toy.numbered(BATCH)
    drawn = []
    for round_index in (0, 1, 0):
        labeled.start(round_index, 1, "mixed", views=1)
        images, labels = labeled.next()
        drawn.append((images, labels.share))
    assert torch.equal(drawn[0][0], drawn[2][0])
    assert not torch.equal(drawn[0][1], drawn[1][1])  # type: ignore[arg-type]


def test_each_label_counts_by_its_share() -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    own, others = torch.tensor([0, 1, 2, 3, 0]), torch.tensor([1, 1, 0, 2, 3])
    share = torch.tensor([1.0, 0.9, 0.5, 0.6, 0.75])
    targets = share[:, None] * F.one_hot(own, 4) + (1 - share)[:, None] * F.one_hot(others, 4)
    expected = -(targets * logits.log_softmax(1)).sum(1).mean()
    assert torch.allclose(cross_entropy(logits, own, others, share), expected)
    assert torch.allclose(
        cross_entropy(logits, own, others, torch.ones(5)), cross_entropy(logits, own)
    )


def test_supervised_only_tests_the_average_of_its_weights_too() -> None:
    method, resumed = (toy.assemble("supervised").method for _ in range(2))
    method.round(0)
    assert list(method.tested()) == ["student", "teacher"]
    student, teacher = (list(model.parameters()) for model in method.tested().values())
    assert any(not torch.equal(one, other) for one, other in zip(student, teacher, strict=True))
    resumed.load_state_dict(method.state_dict())
    assert resumed.round(1).loss_supervised == method.round(1).loss_supervised
    for one, other in zip(resumed.tested()["teacher"].parameters(), teacher, strict=True):
        assert torch.equal(one, other)

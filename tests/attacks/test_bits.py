"""The bound on bits, against servers that know it: planted codes, impossible values, noise, rounding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from semisfl.fleet.noise import GRID, secret_normal
from semisfl.fleet.outgoing import Outgoing
from semisfl.settings.config import parse
from semisfl.settings.policy import DevicePolicy, Policy, round_bits, row_bits

SIDE = 16


def device(noise: float, clip: float = 1.0) -> Outgoing:
    policy = Policy(clip=clip, noise=noise, update_clip=1.0, update_noise=0.01)
    outgoing = Outgoing(policy, unpredictable=True)
    outgoing.agree(parse({}))
    return outgoing


def learned(received: Tensor, pixels: Tensor, decode: Callable[[Tensor], Tensor]) -> float:
    """Return bits per image that ``decode`` proves to be in ``received``, for random black and white pixels.

    I(pixels; received) >= H(pixels) - cross-entropy of any decoder, summed over the pixels.
    """
    entropy = pixels.shape[1]
    missing = F.binary_cross_entropy_with_logits(decode(received), pixels, reduction="sum")
    return entropy - float(missing) / len(pixels) / torch.log(torch.tensor(2.0)).item()


def random_pixels(count: int, seed: int) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return (torch.rand(count, SIDE * SIDE, generator=draws) < 0.5).float()


@pytest.mark.parametrize("noise", [0.05, 0.14, 0.3])
def test_the_best_planted_bottom_stays_below_the_bound_and_comes_close(noise: float) -> None:
    """Each pixel has a value of its own, +-1/sqrt(d): no code for a Gaussian channel of this power is better."""
    pixels, outgoing = random_pixels(2000, 0), device(noise)
    planted = (2 * pixels - 1) * 10  # any scale: the clip makes all rows of norm 1
    received = outgoing.clip_and_noise(planted, 1)
    # The log-odds of a pixel are known: 2 x y / variance.
    size = SIDE**-1.0
    bits = learned(received, pixels, lambda rows: 2 * size * rows / noise**2)
    bound = row_bits(SIDE * SIDE, noise)
    assert 0.8 * bound < bits <= bound


def test_a_bottom_trained_against_the_noise_stays_below_the_bound_too() -> None:
    """An encoder and a decoder learn together, through the clip and the noise of the policy."""
    torch.manual_seed(0)
    noise, width = 0.14, 64
    outgoing = device(noise)
    encoder = torch.nn.Sequential(
        torch.nn.Linear(SIDE * SIDE, 128), torch.nn.ReLU(), torch.nn.Linear(128, width)
    )
    decoder = torch.nn.Linear(width, SIDE * SIDE)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 3e-3)
    for step in range(200):
        pixels = random_pixels(256, step)
        clipped = outgoing.clip_rows(encoder(pixels))
        sent = clipped + noise * torch.randn(clipped.shape)
        optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(decoder(sent), pixels).backward()
        optimizer.step()
    fresh = random_pixels(2000, 10_000)
    with torch.no_grad():
        bits = learned(outgoing.clip_and_noise(encoder(fresh), 1), fresh, decoder)
    assert 2 < bits <= row_bits(width, noise)


def test_impossible_values_show_nothing() -> None:
    """A planted bottom may overflow where a pixel is white: the clip made NaN of it, without noise."""
    pixels = random_pixels(8, 0)
    for huge in (float("inf"), float("-inf"), float("nan"), 3e38):
        rows = torch.where(pixels > 0, torch.tensor(huge), torch.tensor(1.0))
        received = device(0.14).clip_and_noise(rows, 1)
        assert received.isfinite().all()
        assert received.norm(dim=1).max() < 1 + 0.14 * SIDE * 1.5


def test_impossible_changes_of_the_bottom_show_nothing() -> None:
    pixels = random_pixels(1, 0)[0]
    outgoing = device(0.14)
    for huge in (float("inf"), float("nan"), 3e38):
        sent = {"weight": torch.zeros(len(pixels)), "bn.running_mean": torch.zeros(3)}
        trained = {"weight": torch.where(pixels > 0, torch.tensor(huge), torch.tensor(0.5))}
        trained["bn.running_mean"] = torch.full((3,), huge)
        leaving = outgoing.bottom(sent, trained).tensors
        assert all(tensor.isfinite().all() for tensor in leaving.values())
        assert torch.cat(list(leaving.values())).norm() < 1 + 0.01 * SIDE * 1.5


def test_all_that_is_sent_lies_on_one_grid_whatever_the_features() -> None:
    """Otherwise the last bits of a float would tell features from noise."""
    outgoing, step = device(0.14, clip=3.0), 0.14 * 3.0 / GRID
    for rows in (torch.zeros(4, 50), torch.rand(4, 50) / 7, torch.rand(4, 50) * 1e4):
        steps = outgoing.clip_and_noise(rows, 1).double() / step
        assert (steps - steps.round()).abs().max() < 1e-3
        assert steps.abs().max() > GRID / 2


def test_rounding_makes_no_row_longer() -> None:
    outgoing = device(0.14)
    outgoing._normal = lambda like, slot: torch.zeros_like(like)  # type: ignore[method-assign]
    rows = torch.full((1, 400), 1.9 * 0.14 / GRID)
    assert outgoing.clip_and_noise(rows, 1).norm() < rows.norm()


def test_noise_is_normal_and_never_that_of_a_seed() -> None:
    torch.manual_seed(0)
    one = secret_normal((400, 501), torch.device("cpu"))
    torch.manual_seed(0)
    other = secret_normal((400, 501), torch.device("cpu"))
    for draws in (one, other):
        assert abs(draws.mean()) < 0.01 and abs(draws.std() - 1) < 0.01
        assert abs((draws.abs() < 1).float().mean() - 0.6827) < 0.006
        assert abs((draws.abs() > 3).float().mean() - 0.0027) < 0.0006
    assert abs(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]) < 0.01
    assert abs(torch.corrcoef(torch.stack((one.flatten()[1:], one.flatten()[:-1])))[0, 1]) < 0.01


def test_both_views_and_the_upload_have_noise_of_their_own() -> None:
    """A teacher of zeros shows its noise, which must not be the student's as well."""
    outgoing, rows = device(0.14), torch.zeros(8, 64)
    cleared, _ = outgoing.features(rows, rows, 1)
    student, teacher = cleared.tensors["student"], cleared.tensors["teacher"]
    upload = outgoing.bottom({"w": rows}, {"w": rows}).tensors["w"]
    drawn = torch.stack([part.flatten() for part in (student, teacher, upload)])
    assert torch.corrcoef(drawn).fill_diagonal_(0).abs().max() < 0.25


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_the_sign_of_zero_shows_nothing(zero: float) -> None:
    """Values far below the noise have no norm to speak of. A negative one made -0 of a noise of -0."""
    outgoing, signs = device(0.14), (1e-12, -1e-12)
    for sign in signs:
        rows = torch.full((4, 20_000), sign)
        cleared, _ = outgoing.features(rows, rows, 1)
        sent = {"w": torch.full_like(rows, zero)}
        upload = outgoing.bottom(sent, {"w": rows}).tensors["w"]
        for received in (*cleared.tensors.values(), upload):
            assert (received == 0).any()
            assert not (received[received == 0]).signbit().any()


def test_many_small_values_do_not_hide_beside_large_ones() -> None:
    """A sum of squares in float32 loses each that is below half of its last bit."""
    outgoing, many = device(0.14), 4_000_000
    outgoing._normal = lambda like, slot: torch.zeros_like(like)  # type: ignore[method-assign]
    row = torch.full((1, many), 2.9e-8**0.5)
    row[:, :16] = 1.0
    assert float(outgoing.clip_rows(row).double().norm()) < 1 + 1e-6
    leaving = outgoing._limit_change({"w": torch.zeros_like(row)}, {"w": 100 * row}, 0)["w"]
    assert float(leaving.double().norm()) < 1 + 1e-6


@pytest.mark.parametrize("size", [1e19, 1e30, 3e37, 2e38, 3e38])
def test_huge_values_are_clipped_exactly_too(size: float) -> None:
    """The factor left the range in which floats are exact: rows were up to 1.8 times as long as the clip."""
    outgoing = Outgoing(DevicePolicy(clip=1e-4, noise=1, update_clip=1e-4, update_noise=1))
    outgoing._normal = lambda like, slot: torch.zeros_like(like)  # type: ignore[method-assign]
    row = torch.full((1, 1024), size)
    assert 0.99 < float(outgoing.clip_rows(row).double().norm()) / 1e-4 < 1 + 1e-6
    leaving = outgoing._limit_change({"w": torch.zeros_like(row)}, {"w": row}, 0)["w"]
    assert float(leaving.double().norm()) / 1e-4 < 1 + 1e-6


def asked(**lines: float) -> Outgoing:
    """Return a strict device in a run that asks for more protection."""
    strict = {"clip": 30.0, "noise": 0.14, "update_clip": 0.3, "update_noise": 0.03}
    outgoing = Outgoing(DevicePolicy(**strict), unpredictable=True)
    outgoing.agree(parse({"policy": {**strict, **lines}}))
    return outgoing


@pytest.mark.parametrize("tiny", [1e-40, 1e-50, 1e-300])
def test_a_clip_that_no_float_can_hold_shows_nothing(tiny: float) -> None:
    """Rows of zeros became NaN and others did not: a bit of each row, counted as none."""
    outgoing = asked(clip=tiny, update_clip=tiny)
    rows = torch.zeros(4, 8)
    rows[0] = 1.0
    assert outgoing.clip_and_noise(rows, 1).isfinite().all()
    for change in (0.0, 1.0):
        trained = {"w": torch.full((8,), change)}
        assert outgoing.bottom({"w": torch.zeros(8)}, trained).tensors["w"].isfinite().all()


@pytest.mark.parametrize("lines", [{"clip": 1e-300}, {"noise": 1e300}, {"update_noise": 1e300}])
def test_the_bits_of_any_policy_can_be_counted(lines: dict[str, float]) -> None:
    policy = asked(**lines).policy
    assert 0 <= round_bits(policy, 100, 64, 1000) < float("inf")
    assert row_bits(0, 0.1) == 0  # layers without weights


@pytest.mark.parametrize("noise", [1e-150, 1e-200])
def test_noise_that_a_server_made_next_to_nothing_has_no_bound(noise: float) -> None:
    """Its square is 0: a device without a policy of its own ended with a ZeroDivisionError."""
    run = {"clip": 1.0, "noise": noise, "update_clip": 1.0, "update_noise": noise}
    outgoing = Outgoing(DevicePolicy(), unpredictable=True)
    outgoing.agree(parse({"policy": run}))
    assert round_bits(outgoing.policy, 100, 64, 1000) > 1e5
    assert row_bits(64, 1e-200) == float("inf")

"""The estimate of a device's memory: above what real processes take, and not far above.

It was 1.4 times the memory taken for the cnn, and 2.1 and 2.5 times for alexnet with batches of 32 and
64. An honest round holds one message of the four that the estimate counts.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from semisfl.engine.hardware import Hardware
from semisfl.models.build import build, build_model
from semisfl.models.zoo import MODELS
from semisfl.net.client.budget import Budget
from semisfl.net.terms import Terms
from semisfl.settings.config import Config
from semisfl.settings.policy import PolicyBreach
from tests.net.harness import CLASSES, SIDE, tiny
from tests.net.rogue_server import Peer, attacked, folder_of_images, terms
from tests.net.rogues import BUDGET, MB, MOST, REFUSALS, enrolled

STEPS = 3


def device_memory(name: str, batch: int, folder: Path) -> tuple[int, float]:
    """Return the peak of a device's process in a round, and its own estimate beforehand."""
    known = MODELS[name]
    shape, classes = known.shape, known.classes
    config = tiny(model={"name": name}, clients={"batch": batch, "steps": STEPS})
    halves = [0.5] * shape[0]
    text = terms(config, shape=list(shape), classes=classes, mean=halves, std=halves)
    features = build(name, shape, classes, projector="none").features

    async def script(peer: Peer) -> None:
        await peer.welcome(text)
        await peer.say("enrolled", {"client": 0})
        await peer.split(text)
        for step in range(STEPS):
            assert (await peer.hears()).kind == "features"
            tensors = {"gradients": torch.full((batch, features), 1e-4)}
            await peer.say("gradients", {"round": 0, "step": step}, tensors=tensors)
        assert (await peer.hears()).kind == "bottom"

    images = folder_of_images(folder, 64, shape[1])
    ended, server = attacked(script, images, "--memory", "4GB", most=3 * 10**9)
    assert "bottom" in [item.kind for item in server.received], ended
    ((number, unit),) = re.findall(r"needs up to ([\d.]+) (MB|GB) of memory", ended.output)
    return ended.peak, float(number) * {"MB": 1e6, "GB": 1e9}[unit]


def test_predictions_of_all_images_are_counted_if_whole_models_are_trained() -> None:
    config = tiny(1, method="fl2")
    run = Terms(config, (1, SIDE, SIDE), 65_536, (0.5,), (0.5,))
    hardware = Hardware("cpu", config.runtime)
    budget = Budget(4 * 10**9)
    budget.begin(run, hardware, full_model=True)
    with pytest.raises(PolicyBreach, match=r"predictions 4\.33 GB"):
        budget.images(4000 * SIDE * SIDE)
    budget.begin(replace(run, classes=10), hardware, full_model=True)
    budget.images(4000 * SIDE * SIDE)


def begun(config: Config, side: int, layers: list[dict[str, Any]], total: int) -> Budget:
    """Return a budget of ``total`` bytes after the terms of a device that holds all but the last layer."""
    changes = {"config__model": {"layers": layers, "cut": len(layers) - 1}}
    run = Terms.from_json(terms(config, shape=[1, side, side], **changes), [config.method])
    budget = Budget(total)
    budget.begin(run, Hardware("cpu", config.runtime), full_model=config.method != "semisfl")
    return budget


LAST = [{"kind": "pool", "size": 16}, {"kind": "flatten"}, {"kind": "linear"}]
ONE = {"kind": "conv", "channels": 1}


@pytest.mark.parametrize(
    ("layers", "side", "batch", "taken"),
    [
        (
            [
                {"kind": "conv", "channels": 64, "kernel": 1},
                {"kind": "conv", "channels": 4, "kernel": 11, "groups": 2},
            ],
            *(128, 15, 424 * MB),
        ),
        ([{**ONE, "kernel": 33, "padding": 16}], 128, 32, 85 * MB),
        ([{**ONE, "kernel": 1}], 128, 32, 76 * MB),
        ([{"kind": "conv", "channels": 2, "kernel": 3, "padding": 1}], 96, 256, 252 * MB),
        ([ONE, *[{"kind": "pool", "size": 3, "stride": 1, "padding": 1}] * 8], 130, 32, 82 * MB),
    ],
    ids=["windows", "blocks of a large kernel", "blocks", "blocks of two channels", "positions"],
)
def test_what_layers_need_besides_is_counted(
    layers: list[dict[str, Any]], side: int, batch: int, taken: int
) -> None:
    """A process took so much for its two passes, on two cores; the estimate was 201, 6, 6, 57 and 57 MB."""
    config = tiny(1, clients={"batch": batch})
    reserved = begun(config, side, [*layers, *LAST], 10**9)._reserved
    assert reserved["batch"] + reserved["workspace"] > taken


DROPS = {"kind": "dropout"}
POOLS = {"kind": "pool", "size": 1}
NORMS = {"kind": "groupnorm", "groups": 4}


@pytest.mark.parametrize(
    ("method", "layer", "taken"),
    [
        ("semisfl", DROPS, 855 * MB),
        ("fl2", DROPS, 1070 * MB),
        ("fl2", POOLS, 1573 * MB),
        ("fedmatch", POOLS, 1624 * MB),
        ("fedmatch", NORMS, 1030 * MB),
    ],
)
def test_what_methods_keep_of_layers_is_counted(
    method: str, layer: dict[str, Any], taken: int
) -> None:
    """A device took so much; the estimate was 822, 832, 1300, 1300 and 833 MB."""
    config = tiny(1, method=method, clients={"batch": 32})
    first = {"kind": "conv", "channels": 16, "kernel": 1}
    budget = begun(config, 64, [first, *[layer] * 30, *LAST], 4 * 10**9)
    assert sum(budget._reserved.values()) > taken


def test_the_networks_of_fedmatch_are_counted() -> None:
    """A server that kept the inbox full made a device take 21 times its model; the estimate was 17."""
    layers = [{"kind": "flatten"}, {"kind": "linear", "features": 40_000}, {"kind": "linear"}]
    budget = begun(tiny(1, method="fedmatch"), SIDE, layers, 4 * 10**9)
    model = 4 * (SIDE * SIDE + 1 + CLASSES) * 40_000
    budget.frames(2 * model)  # sigma and psi
    assert sum(budget._reserved.values()) > 21 * model


def test_a_pass_over_many_images_is_counted_if_whole_models_are_trained() -> None:
    """A full-model method predicts for 512 images at a time: a device took 1.2 GB where it had estimated 32 MB."""
    layers = [{"kind": "conv", "channels": 64, "kernel": 1}, {"kind": "relu"}, *LAST]
    budget = begun(tiny(1, method="fl2"), 64, layers, 300 * MB)
    budget.images(12 * 64 * 64)
    with pytest.raises(PolicyBreach, match=r"predictions 1\.24 GB"):
        budget.images(600 * 64 * 64)


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_convolution_of_one_channel_stays_within_the_memory(kernel: int, tmp_path: Path) -> None:
    """Copied into blocks of channels it takes 32 times the memory of what it gives."""
    layers = [{**ONE, "kernel": kernel, "padding": kernel // 2}, *LAST]
    config = tiny(1, clients={"batch": 32})
    text = terms(config, shape=[1, 256, 256], config__model={"layers": layers, "cut": 3})

    async def script(peer: Peer) -> None:
        await enrolled(peer, text)
        await peer.split(text)
        await peer.hears()

    ended, server = attacked(script, folder_of_images(tmp_path), "--memory", BUDGET, most=MOST)
    assert ended.status in REFUSALS and "workspace" in ended.output, ended
    assert server.received[-1].kind == "refusal"


def test_large_images_are_augmented_within_the_memory(tmp_path: Path) -> None:
    """Tables of the operations that move pixels took 1.1 GB for images of this size."""
    layers = [
        {"kind": "pool", "size": 23},
        {"kind": "conv", "channels": 4, "kernel": 8, "stride": 8},
        *({"kind": "flatten"}, {"kind": "linear"}),
    ]
    side, steps = 1150, 8
    text = terms(
        tiny(1, clients={"steps": steps}),
        shape=[1, side, side],
        config__model={"layers": layers, "cut": 3},
    )
    run = Terms.from_json(text, ["semisfl"])
    features = build_model(run.config, run.shape, run.classes, projector="none").features

    async def script(peer: Peer) -> None:
        await enrolled(peer, text)
        await peer.split(text)
        for step in range(steps):
            assert (await peer.hears()).kind == "features"
            tensors = {"gradients": torch.zeros(4, features)}
            await peer.say("gradients", {"round": 0, "step": step}, tensors=tensors)
        assert (await peer.hears()).kind == "bottom"

    ended, server = attacked(script, folder_of_images(tmp_path), "--memory", BUDGET, most=MOST)
    assert "bottom" in [item.kind for item in server.received], ended
    assert ended.peak < MOST


def test_images_that_are_augmented_ahead_stay_within_the_estimate(tmp_path: Path) -> None:
    """A device took 1 GB where it had estimated 0.4: as it made a stretch of steps, it held the one before."""
    layers = [{"kind": "pool", "size": 32}, {"kind": "flatten"}, {"kind": "linear", "features": 8}]
    config = tiny(1, clients={"batch": 64, "steps": 20})
    model = {"layers": [*layers, {"kind": "relu"}, {"kind": "linear"}], "cut": 4}
    text = terms(config, shape=[1, 256, 256], config__model=model)

    async def script(peer: Peer) -> None:
        await enrolled(peer, text)
        await peer.split(text)
        for step in range(20):
            assert (await peer.hears()).kind == "features"
            tensors = {"gradients": torch.zeros(64, 8)}
            await peer.say("gradients", {"round": 0, "step": step}, tensors=tensors)
        assert (await peer.hears()).kind == "bottom"

    ended, server = attacked(
        script, folder_of_images(tmp_path, 12, 256), "--memory", "1GB", most=2 * 10**9
    )
    assert "bottom" in [item.kind for item in server.received], ended
    ((number,),) = [re.findall(r"needs up to ([\d.]+) MB of memory", ended.output)]
    assert ended.peak < float(number) * 1e6 + 100 * MB


@pytest.mark.slow
@pytest.mark.parametrize("batch", [32, 64])
@pytest.mark.parametrize("name", ["cnn", "alexnet"])
def test_the_estimate_is_above_the_peak_and_not_far_above(
    name: str, batch: int, tmp_path: Path
) -> None:
    # What torch and gRPC load in their first round is not the server's to choose.
    fixed, least = device_memory("cnn", 4, tmp_path)
    peak, estimate = device_memory(name, batch, tmp_path)
    own = peak - fixed + least
    print(f"{name}, batch {batch}: {own / 1e6:.0f} MB taken, {estimate / 1e6:.0f} MB estimated")
    assert own <= estimate <= 3 * own

"""Measure attacks by a server that sends valid frames: a planted bottom, and feature-space hijacking.

    python -m benchmarks.hijacking [--steps 300]

One simulated client (the code of a device's own) with the digits, a small bottom, no augmentation: an
easy victim. Prints as JSON what is rebuilt, and how aligned the gradients are that the client gets to see,
beside those of an honest server of the digits preset.
"""

import argparse
import json
from typing import Any

import torch

from benchmarks.malicious_server import Hijacker, Public, hijack, plant
from semisfl import parse
from semisfl.attacks.likeness import likeness
from semisfl.data.augment import Augmentation
from semisfl.engine.weights import clone
from semisfl.fleet.base import Features
from semisfl.fleet.local import LocalFleet
from semisfl.fleet.outgoing import Outgoing
from semisfl.methods.semisfl import SemiSFL
from semisfl.net.client.gradient_checks import alignment
from semisfl.runs.experiment import Experiment, assemble
from semisfl.runs.run_data import load_data
from semisfl.settings import presets
from semisfl.settings.policy import Policy

LAYERS: list[dict[str, Any]] = [
    {"kind": "conv", "channels": 8, "kernel": 5, "stride": 2},
    *({"kind": "relu"}, {"kind": "flatten"}, {"kind": "linear", "features": 64}),
    *({"kind": "relu"}, {"kind": "linear"}),
]
WARMUP, VICTIMS, SCALE, CLIP = 300, 300, 20.0, 1.0


def victim() -> tuple[Experiment, SemiSFL, Public, torch.Tensor]:
    values = presets.merge(
        presets.digits(),
        {
            "model": {"layers": LAYERS},
            "clients": {"active": 1, "batch": 64, "steps": 20},
        },
    )
    config = parse(values)
    data, partition = load_data(config)
    experiment = assemble(config, data, partition, device="cpu")
    assert isinstance(experiment.fleet, LocalFleet)
    experiment.fleet.block.batches.augmentation = Augmentation(False, pad=0, num_ops=0, cutout=0)
    scale, offset = (p.view(-1, 1, 1) for p in vars(experiment.normalizer).values())
    public = Public(
        data.test_images.float() / 255,
        lambda pixels: pixels * 255 * scale + offset,
        torch.Generator().manual_seed(0),
    )
    assert isinstance(experiment.method, SemiSFL)
    return (
        experiment,
        experiment.method,
        public,
        data.images[torch.from_numpy(partition.clients[0])],
    )


def planted(noise: float) -> dict[str, Any]:
    experiment, method, public, held = victim()
    policy = Policy(clip=CLIP, noise=noise, update_clip=1.0, update_noise=0.01)
    outgoing = Outgoing(policy if noise else Policy())
    outgoing.draw_from(experiment.config, [torch.Generator().manual_seed(1)])
    torch.manual_seed(0)
    student = method.student
    state, decoder = plant(
        student.bottom,
        student.features,
        public,
        # The gradient goes through the clip; a sum on a grid has none.
        lambda x: outgoing.clipped(x) + (outgoing.guarded(x, 1) - outgoing.clipped(x)).detach(),
    )
    bottom = clone(student.bottom)
    bottom.load_state_dict(state)
    pixels = held[:VICTIMS].float() / 255
    with torch.no_grad():
        rebuilt = decoder(outgoing.guarded(bottom(public.prepare(pixels)), 1))
    return {"attack": "planted bottom", "noise": noise, **likeness(rebuilt, pixels)}


def hijacked(steps: int) -> dict[str, Any]:
    experiment, method, public, _ = victim()
    torch.manual_seed(0)
    student, fleet = method.student, experiment.fleet
    assert isinstance(fleet, LocalFleet)
    attacker = Hijacker(student.bottom, student.features, public)
    attacker.practise(WARMUP, 64)
    aligned: list[float] = []
    last: tuple[Features, torch.Tensor] | None = None
    views: list[torch.Tensor] = []
    forward = fleet.forward

    def watched() -> Features:
        views[:] = [fleet.block.batches.get("strong")]
        return forward()

    fleet.forward = watched  # type: ignore[method-assign]
    for last in hijack(
        fleet,
        attacker,
        student.bottom.state_dict(),
        active=(0,),
        rounds=steps // 20,
        steps=20,
        lr=0.02,
        scale=SCALE,
    ):
        aligned.append(alignment(last[1]) or 0.0)
    assert last is not None
    scale, offset = (p.view(-1, 1, 1) for p in vars(experiment.normalizer).values())
    pixels = (views[0] - offset) / scale / 255
    mean = public.pixels.mean(0, keepdim=True).expand_as(pixels)
    return {
        "attack": "feature-space hijacking",
        "steps": len(aligned),
        **likeness(attacker.rebuild(last[0].student), pixels),
        "mean_image_ssim": likeness(mean, pixels)["ssim"],
        "chance_identified": 1 / len(pixels),
        "alignment": _spread(aligned),
    }


def honest(rounds: int) -> dict[str, Any]:
    """Return the gradients that an honest server sends to clients of the digits preset."""
    experiment = assemble(parse(presets.digits()), device="cpu")
    fleet, alignments = experiment.fleet, list[float]()
    backward = fleet.backward

    def watched(gradients: torch.Tensor) -> None:
        shares = gradients.chunk(experiment.config.clients.active)
        alignments.extend(value for share in shares if (value := alignment(share)) is not None)
        backward(gradients)

    fleet.backward = watched  # type: ignore[method-assign]
    for index in range(rounds):
        experiment.method.round(index)
    return {"attack": "none: an honest server", "rounds": rounds, "alignment": _spread(alignments)}


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    places = {"least": 0.0, "median": 0.5, "share_95": 0.95, "greatest": 1.0}
    return {name: ordered[int(place * (len(ordered) - 1))] for name, place in places.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=6, help="of the honest server")
    options = parser.parse_args()
    for row in (planted(0.0), planted(0.14), hijacked(options.steps), honest(options.rounds)):
        print(json.dumps(row))


if __name__ == "__main__":
    main()

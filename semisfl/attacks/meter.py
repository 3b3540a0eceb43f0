"""The leakage meter: runs every attack on one trained model, by cut and defence.

Four questions are asked of what a device sends. Can its images be rebuilt from features (`measure`)? Do
features tell the classes of its images, or whether an image is among them (`_about_clients`)? Can inputs be
solved from the bottom that it sends back (`measure_uploads`)? Can images be rebuilt from one step's update
(`measure_updates`)? Each number stands beside what an attacker reaches without the device's data.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semisfl.attacks import guesses, inversion, uploads
from semisfl.attacks.decoder import train_decoder
from semisfl.attacks.likeness import likeness
from semisfl.attacks.scene import Scene, layers_of
from semisfl.engine.inference import outputs
from semisfl.engine.weights import clone
from semisfl.fleet.codec import Codec, codec_named
from semisfl.fleet.outgoing import Outgoing
from semisfl.runs.report import judged_on
from semisfl.settings.config import Config
from semisfl.settings.policy import Policy, feature_bits

RANDOM = "random"
"""A control in place of a defence: random features, on which every attack must fail."""
OPTIMISED, FEWEST = 16, 8
"""Images that are rebuilt by optimising their pixels, and the images that a client needs for class guesses."""


@dataclass(frozen=True)
class Measured:
    """The numbers for one cut and defence, and some images with their reconstructions."""

    numbers: dict[str, Any]
    originals: Tensor
    """The attacked images, float [n, C, H, W] in 0..1, and what the decoder rebuilt of them."""
    rebuilt: Tensor


def guard_of(
    defence: Policy | str, config: Config, generator: torch.Generator
) -> inversion.Transmission:
    """Return the function from a bottom's features to those that the server receives under a defence.

    It clips, adds noise from ``generator`` and encodes as a device with that policy does.
    """
    if defence == RANDOM:
        return lambda rows: torch.randn(rows.shape, generator=generator, device=rows.device)
    assert isinstance(defence, Policy)
    outgoing = Outgoing(defence)
    outgoing.draw_from(config, [generator])
    codec = _codec(defence, config)
    return torch.no_grad()(lambda rows: codec.roundtrip(outgoing.clip_and_noise(rows, 1)))


def _codec(defence: Policy | str, config: Config) -> Codec:
    own = defence.codec if isinstance(defence, Policy) else None
    return codec_named(own or config.wire.teacher_features)


def mean_of_uses(transmit: inversion.Transmission, uses: int) -> inversion.Transmission:
    """Return the mean of ``uses`` transmissions of the same features, each with new noise.

    A server that receives an image often can take this mean, which has less noise.
    """
    return lambda rows: torch.stack([transmit(rows) for _ in range(uses)]).mean(0)


def measure(
    scene: Scene, cut: int, name: str, defence: Policy | str, quick: bool, uses: int = 1
) -> Measured:
    """Run every attack on features, and return the numbers for one cut and defence.

    ``cut`` counts the layers on the device. ``name`` is what the table calls the ``defence``, a policy or
    `RANDOM`. ``quick`` trains the attackers less. ``uses`` is how often the server receives each image.
    """
    layers = layers_of(scene.model)
    bottom = nn.Sequential(*(layer for _, layer in layers[:cut]), nn.Flatten()).eval()
    transmit = mean_of_uses(
        guard_of(defence, scene.config, scene.device_seed("guard", name, cut)), uses
    )

    def features(images: Tensor) -> Tensor:
        return torch.cat(
            list(outputs(bottom, images, lambda x: scene.normalizer(x, torch.float32)))
        )

    shapes = _shapes(layers[:cut], scene)
    decode = train_decoder(
        lambda epoch: scene.weakly(scene.public, "decoder", epoch),
        lambda views: transmit(features(views)),
        # Where a layer has flattened a picture, the attacker undoes it.
        next(
            (one for one in reversed(shapes) if len(one) == 3 and prod(one) == prod(shapes[-1])),
            shapes[-1],
        ),
        scene.seed("decoder", name, cut),
        epochs=4 if quick else 20,
    )
    chosen = scene.victims()
    views = scene.weakly(scene.images[chosen], "victims")
    received, originals = transmit(features(views)), views.float() / 255
    rebuilt, public = decode(received), scene.weakly(scene.public, "decoder", 0).float() / 255
    mean = public.mean(0, keepdim=True).expand_as(originals)
    optimised = inversion.optimise_images(
        bottom,
        scene.prepare,
        received[:OPTIMISED],
        mean[:OPTIMISED],
        steps=20 if quick else 150,
    )
    numbers: dict[str, Any] = {
        "cut": layers[cut - 1][0],
        "layers": cut,
        "defence": name,
        "uses": uses,
        "features": received.shape[1],
        "bytes_per_image": _codec(defence, scene.config).size((1, received.shape[1])),
        "bits_per_image": _bits(defence, received.shape[1], uses),
        "norm": round(float(features(scene.public[:500]).norm(dim=1).median()), 2),
        "accuracy": scene.accuracy,
        "decoder": likeness(rebuilt, originals),
        "optimised": likeness(optimised, originals[:OPTIMISED]),
        "mean_image": likeness(mean, originals),
        "chance_identified": {"decoder": 1 / len(chosen), "optimised": 1 / len(optimised)},
        **_about_clients(scene, features, transmit, (name, cut), 6 if quick else 20),
    }
    return Measured(numbers, originals, rebuilt)


def _bits(defence: Policy | str, features: int, uses: int) -> float | None:
    """Return the most bits that so many uses of an image's features carry; None without a bound."""
    bits = uses * feature_bits(defence, features) if isinstance(defence, Policy) else 0.0
    return round(bits, 1) if bits < float("inf") else None


@torch.no_grad()
def _shapes(layers: Sequence[tuple[str, nn.Module]], scene: Scene) -> list[tuple[int, ...]]:
    """Return the shape of one image's features after each layer."""
    one, modules = scene.normalizer(scene.images[:1]), [layer.eval() for _, layer in layers]
    counts = range(1, len(layers) + 1)
    return [tuple(nn.Sequential(*modules[:count])(one).shape[1:]) for count in counts]


def _about_clients(
    scene: Scene,
    features: Callable[[Tensor], Tensor],
    transmit: inversion.Transmission,
    purpose: tuple[str, int],
    epochs: int,
) -> dict[str, Any]:
    """Return class shares and membership, inferred from one weak view of every image of some clients.

    Class shares need labelled images of the attacker; membership compares a client's images with those of other
    clients. A value is None where the scene lacks them.
    """
    some = [np.asarray(shard)[:200] for shard in scene.shards if len(shard) >= FEWEST][:5]

    def seen(images: Tensor, place: int) -> Tensor:
        """Return the received features of weak views; the attacker can draw such views too."""
        return transmit(features(scene.weakly(images, place)))

    observed = [
        seen(scene.images[torch.from_numpy(shard).to(scene.device)], place)
        for place, shard in enumerate(some)
    ]
    truth = [scene.labels[torch.from_numpy(shard).to(scene.device)] for shard in some]
    known, mix = scene.public_labels >= 0, None
    if int(known.sum()) >= scene.classes:
        mix = guesses.guess_classes(
            seen(scene.public[known], len(some)),
            scene.public_labels[known],
            observed,
            truth,
            scene.classes,
            scene.seed("probe", *purpose),
            epochs,
        )
    scores = []
    for place, shard in enumerate(some):
        others = _same_classes(scene, shard, [s for i, s in enumerate(some) if i != place])
        if len(others):
            members = features(scene.images[torch.from_numpy(shard).to(scene.device)])
            strangers = features(scene.images[torch.from_numpy(others).to(scene.device)])
            scores.append(guesses.membership_auc(observed[place], members, strangers))
    return {
        "class_mix": mix and vars(mix),
        "membership_auc": sum(scores) / len(scores) if scores else None,
    }


def _same_classes(scene: Scene, shard: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    """Return non-members of the members' classes, so that the class alone does not reveal membership."""
    labels = scene.labels.cpu().numpy()
    pool = np.concatenate(others) if others else np.empty(0, dtype=np.int64)
    return pool[np.isin(labels[pool], np.unique(labels[shard]))]


def measure_uploads(scene: Scene, cut: int, name: str, defence: Policy) -> list[dict[str, Any]]:
    """Solve for inputs of the bottom's last layer, as a curious and as a malicious server could.

    Returns one entry per server, with how many inputs it rebuilt and the most bits that the upload carries; none
    for a bottom without a linear layer or ordinary convolution.
    """
    layers = layers_of(clone(scene.model).requires_grad_())
    bottom = nn.Sequential(*(layer for _, layer in layers[:cut]))
    if uploads.last_weighted(bottom) is None:
        return []
    config = scene.config
    outgoing = Outgoing(defence, unpredictable=True)
    outgoing.draw_from(config, ())
    rows = config.clients.batch * config.clients.steps
    images = scene.normalizer(scene.images[scene.victims()[:rows]], torch.float32)
    top = nn.Sequential(*(layer for _, layer in layers[cut:])).eval()
    client = uploads.Client(
        bottom, top, images.split(config.clients.batch), config.optimizer, outgoing
    )
    public = scene.normalizer(scene.public[:200], torch.float32)
    common = {
        "cut": layers[cut - 1][0],
        "defence": name,
        "bits": uploads.bits_of(defence, bottom),
    }
    return [common | attack(client, public) for attack in (uploads.curious, uploads.malicious)]


def measure_updates(scene: Scene, quick: bool) -> list[dict[str, Any]]:
    """Invert gradients of one client's update and of the mean of several, and return the likeness.

    Both the whole model's update and the bottom's are attacked, of 1 client with 1 and 8 images and of 4 with 8
    each: a mean over clients hides more.
    """
    model = scene.model.eval().requires_grad_()
    layers = layers_of(model)
    all_parameters = [p for _, layer in layers for p in layer.parameters()]
    bottom_parameters = [p for _, layer in layers[: scene.cut] for p in layer.parameters()]
    chosen = scene.victims()
    results = []
    for sent, parameters in (("whole model", all_parameters), ("bottom", bottom_parameters)):
        for clients, images in ((1, 1), (1, 8), (4, 8)):
            pixels = scene.images[chosen[: clients * images]].float() / 255
            # The pseudo-labels that the client trains on.
            labels = model(scene.prepare(pixels)).argmax(1)
            gradient = inversion.mean_gradient(
                [
                    inversion.gradient_of(model, parameters, scene.prepare(part), label)
                    for part, label in zip(pixels.split(images), labels.split(images), strict=True)
                ]
            )
            start = torch.rand(pixels.shape, generator=scene.seed("update", sent, clients, images))
            rebuilt = inversion.invert_gradient(
                model,
                parameters,
                gradient,
                labels,
                scene.prepare,
                start.to(pixels.device),
                steps=10 if quick else 150,
            )
            results.append(
                {
                    "sent": sent,
                    "clients": clients,
                    "images_each": images,
                    **likeness(rebuilt, pixels),
                    "chance_identified": 1 / len(pixels),
                }
            )
    return results


def measure_all(
    scene: Scene,
    cuts: Sequence[int],
    defences: Mapping[str, Policy | str],
    *,
    quick: bool,
    updates: bool,
    progress: Callable[[str], None],
    uses: int,
) -> tuple[dict[str, Any], list[Measured]]:
    """Return all results as plain values, and the measurements with their pictures.

    ``defences`` are policies, or `RANDOM`, by their name in the table. With ``updates`` the uploads of models are
    attacked too, if there are any. ``progress`` is called with a line before each measurement.
    """
    measured, uploads = [], []
    updates = updates and scene.config.clients.bottom == "trained"
    for cut in cuts:
        for name, defence in defences.items():
            progress(f"cut after layer {cut}, defence {name}")
            measured.append(measure(scene, cut, name, defence, quick, uses))
            if updates and isinstance(defence, Policy):
                uploads += measure_uploads(scene, cut, name, defence)
    if updates:
        progress("gradient inversion of updates")
    results = {
        "method": scene.config.method,
        "seed": scene.config.seed,
        "rounds": scene.config.rounds,
        "accuracy": scene.accuracy,
        "judged_on": judged_on(scene.config.model_dump()),
        "public_images": len(scene.public),
        "image_bits": 8 * scene.images[0].numel(),
        "features": [item.numbers for item in measured],
        "uploads": uploads,
        "updates": measure_updates(scene, quick) if updates else [],
    }
    return results, measured


def save(results: Mapping[str, Any], command: str, out: Path) -> None:
    """Write the results and the command that made them to ``out/leakage.json``."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "leakage.json").write_text(json.dumps({"command": command, **results}, indent=1) + "\n")

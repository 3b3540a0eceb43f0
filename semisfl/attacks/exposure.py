"""Measure what leaks from a run, or from a preset that is first trained for a few rounds."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from semisfl.attacks import meter
from semisfl.attacks.meter import Measured
from semisfl.attacks.scene import PUBLIC, Scene, layers_of, stage_ends
from semisfl.data.dataset import Dataset
from semisfl.models.layers import cut_layers
from semisfl.models.split import SplitModel
from semisfl.runs import checkpoint
from semisfl.runs.directory import RunDirectory
from semisfl.runs.experiment import Experiment, assemble
from semisfl.runs.grouping import judged_on
from semisfl.runs.loop import run_rounds
from semisfl.runs.portable import check_images
from semisfl.runs.run_data import load_data, load_images
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.plain_values import words_of
from semisfl.settings.policy import Policy


def of_run(path: Path, device: str, public: str | None) -> Scene:
    """Return the scene of a finished or stopped run, from its last good checkpoint."""
    config = RunDirectory.open(path).config()
    if config.fleet.kind == "network":
        raise ConfigError(
            f"{path} was trained over a network, so its clients' images are not here; use a simulated run"
        )
    config = config.in_fleet("local")
    last = checkpoint.to_continue(path)
    if last is None:
        raise ConfigError(f"{path} has no checkpoint yet; train it first, or name a preset")
    try:
        data, partition = load_data(config)
        experiment = assemble(config, data, partition, device=device, resumed=last[1])
        before = last[1]["model"]["description"]
        check_images(before, experiment.description.as_dict(), may_grow=False)
    except ValueError as error:
        raise ConfigError(
            f"{path} cannot be attacked without the images and the model it had: {error}"
        ) from error
    experiment.load_state_dict(last[1])
    return _scene(experiment, data, partition.clients, public)


def of_preset(config: Config, device: str, public: str | None, cuts: str) -> Scene:
    """Train ``config.rounds`` rounds, and return the scene. ``cuts`` are checked before the training."""
    data, partition = load_data(config)
    experiment = assemble(config, data, partition, device=device)
    cuts_of(_network(experiment), cuts)
    run_rounds(experiment)
    return _scene(experiment, data, partition.clients, public)


def _scene(experiment: Experiment, data: Dataset, shards: Any, public: str | None) -> Scene:
    config, device = experiment.config, experiment.hardware.device
    network = _network(experiment)
    images, labels = data.test_images, data.test_labels
    if public is not None:
        other = load_images(public, config)
        images, labels = other.images, torch.full((len(other.images),), -1)
    return Scene(
        config,
        network.float(),
        _cut_of(network),
        experiment.normalizer,
        images[:PUBLIC].to(device),
        labels[:PUBLIC].to(device),
        data.images.to(device),
        data.labels.to(device),
        shards,
        len(data.classes),
        next(iter(experiment.evaluate().values())).accuracy,
    )


def _network(experiment: Experiment) -> nn.Module:
    """Return the network that the run is judged by, with its two halves."""
    model = experiment.model
    return model.whole() if isinstance(model, SplitModel) else model


def _cut_of(network: nn.Module) -> int:
    """Return the number of layers that clients hold."""
    return len(cut_layers(network)[0])


def cuts_of(network: nn.Module, cuts: str) -> list[int]:
    """Return the run's own cut (``default``), every stage's end (``all``), or layers by name or number."""
    names = [name for name, _ in layers_of(network)]
    cuts = cuts.strip()
    if cuts == "default":
        return [_cut_of(network)]
    if cuts == "all":
        return sorted({*stage_ends(network), _cut_of(network)})
    chosen = []
    for word in words_of(cuts) or [cuts]:
        if word not in names and not (word.isdecimal() and 1 <= int(word) < len(names)):
            raise ConfigError(
                f"--cuts {word!r} is no layer of the model; its layers: {', '.join(names)}; or all"
            )
        chosen.append(int(word) if word.isdecimal() else names.index(word) + 1)
    return list(dict.fromkeys(chosen))


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
    """Return all results as plain values, and the measurements with their pictures."""
    measured, uploads = [], []
    for cut in cuts:
        for name, defence in defences.items():
            progress(f"cut after layer {cut}, defence {name}")
            measured.append(meter.measure(scene, cut, name, defence, quick, uses))
            if updates and isinstance(defence, Policy):
                uploads += meter.measure_uploads(scene, cut, name, defence)
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
        "updates": meter.measure_updates(scene, quick) if updates else [],
    }
    return results, measured


def save(results: Mapping[str, Any], command: str, out: Path) -> None:
    """Write the results and the command that made them to ``out/leakage.json``."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"command": command, **results}, indent=1)
    (out / "leakage.json").write_text(text + "\n", encoding="utf-8")

"""Load a model from a run or a file: ``load("runs/first")``, ``load("best.safetensors")``."""

import os
import shlex
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from semisfl.metrics import RoundMetrics
from semisfl.models.build import build, check_same
from semisfl.models.own import Own, feature_shape, globally_seeded, own_copy
from semisfl.models.shapes import MAX_OUTPUT
from semisfl.models.split import split
from semisfl.runs import checkpoint
from semisfl.runs.checkpoint import CheckpointError
from semisfl.runs.portable import PARTS, Description
from semisfl.runs.reading import read_rounds
from semisfl.settings import lookup
from semisfl.settings.layer_kinds import parse_layers
from semisfl.settings.run import CODE
from semisfl.use.classifier import Classifier

SUFFIX = ".safetensors"


def load(
    path: str | os.PathLike[str], *, device: str = "cpu", model: Own | None = None
) -> Classifier:
    """Return the model of a run (its best, else its latest) or of a ``.safetensors`` file.

    ``model`` is needed for networks that were given to `train` as code that no layer table describes. It stays as it is.
    """
    file = find(Path(path))
    try:
        state = checkpoint.read(file)
    except CheckpointError as error:
        if file.suffix == SUFFIX:
            raise
        raise CheckpointError(
            f"{file} holds no model; name a run's directory, or a {SUFFIX} file of a model"
        ) from error
    described, weights, digest = _model_in(file, state)
    table = described.layers
    if table is None and model is None:
        raise ValueError(
            f"{file}: its network was given as code that no layer table describes; give it again, "
            "load(path, model=...)"
        )
    shape, classes, cut = described.shape, len(described.classes), described.cut
    if prod(shape) > MAX_OUTPUT or min(shape) < 1:
        raise CheckpointError(
            f"{file}: images of {shape} are not used; at most {MAX_OUTPUT} values"
        )
    try:
        if model is not None:
            stages = own_copy(model, shape)
            name = described.settings.get("model", {}).get("name", CODE)
            if table is None:
                check_same(stages, name, None)
            with globally_seeded(0):
                # Lazy layers make their weights here, and become others.
                feature_shape(stages, shape)
            if table is not None:
                check_same(stages, name, parse_layers(table))
            network = split(stages, shape, cut, "none")
        else:
            assert table is not None
            # Tensors on "meta" take no memory: the layers may say what they like, the weights must fit.
            with torch.device("meta"):
                network = build(parse_layers(table), shape, classes, cut=cut, projector="none")
        network.float()  # torch's default type may be another one
        parts = [part for part in PARTS if any(name.startswith(f"{part}.") for name in weights)]
        for part in parts:
            own = {k.removeprefix(f"{part}."): v for k, v in weights.items() if k.startswith(part)}
            _load(getattr(network, part), own)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: the weights do not fit the network it describes: {' '.join(str(error).split())}"
        ) from error
    loaded = Classifier(described, network, digest, file, parts)
    loaded.rounds = state.get("round")
    return loaded.to(device)


def _load(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Make ``weights`` those of a module without weights of its own; `RuntimeError` if they do not fit."""
    like = module.state_dict()
    same = {k: v.to(like[k].dtype) if k in like else v for k, v in weights.items()}
    module.load_state_dict(same, assign=True)


def find(path: Path) -> Path:
    """Return the model's file: the one named, or a run's best, or its latest."""
    if path.suffix == SUFFIX or path.is_file():
        if not path.is_file():
            raise CheckpointError(f"there is no file {path}; name one, or a run's directory")
        return path
    for name in ("best", "latest"):
        if (path / f"{name}{SUFFIX}").is_file():
            return path / f"{name}{SUFFIX}"
    if (path / "config.toml").is_file():
        rounds = read_rounds(path, RoundMetrics.from_dict)
        if rounds and rounds[-1].diverged:
            raise CheckpointError(
                f"{path} has no checkpoint: the run diverged; start again with the change that its "
                "run.log names"
            )
        raise CheckpointError(
            f"{path} has no checkpoint yet; wait for its first, or go on with: "
            f"semisfl run --resume {shlex.quote(str(path))}"
        )
    if lookup.DATA.find(str(path)):
        raise ValueError(
            f"{path} is a data set, no run; semisfl.load_data({str(path)!r}) loads its images"
        )
    raise ValueError(
        f"{path} is neither a run's directory nor a {SUFFIX} file of a model; name one of them"
    )


def _model_in(file: Path, state: dict[str, Any]) -> tuple[Description, dict[str, Tensor], str]:
    try:
        model = state["model"]
        described, weights = Description.of(model["description"]), model["weights"]
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{file} does not describe its model: {error!r}") from error
    # A file of one half holds the digest of the whole model.
    content = {"classes": list(described.classes), "weights": weights}
    return described, weights, model.get("digest") or checkpoint.digest(content)

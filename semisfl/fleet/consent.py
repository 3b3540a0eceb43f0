"""Compare a run's terms with a device's policy: what the device would have to refuse."""

from collections.abc import Sequence

from semisfl.fleet.codec import codec_named
from semisfl.models.zoo import MODELS
from semisfl.settings import lookup
from semisfl.settings.config import Config
from semisfl.settings.layer_kinds import Flatten, named
from semisfl.settings.policy import Policy
from semisfl.settings.run import ModelConfig

MEASURED = (64, 1024)
"""Shape of the features whose encoded size compares codecs."""


def objections(policy: Policy, config: Config) -> list[str]:
    """Return one line for every term that breaks ``policy``: the value, the limit and the fix."""
    whole_models = bool(lookup.method(config.method).works)
    if whole_models:
        return _about_methods(policy, config.method)
    return _about_features(policy, config)


def _about_methods(policy: Policy, method: str) -> list[str]:
    if not policy.full_models:
        return [
            f"method = {method!r} sends whole models, the policy has full_models = false; "
            "choose a split method"
        ]
    for name in ("update_clip", "clip", "bits_per_image"):
        if getattr(policy, name) is not None:
            return [
                f"method = {method!r} sends whole models, the policy's {name} is for split methods "
                f"only; choose one, or leave {name} out"
            ]
    return []


def _about_features(policy: Policy, config: Config) -> list[str]:
    lines = []
    for name in ("student_features", "teacher_features"):
        used = getattr(config.wire, name)
        if policy.codec is not None and _size(used) > _size(policy.codec):
            lines.append(
                f"wire.{name} = {used!r} is finer than the policy's codec = {policy.codec!r}; "
                f"set wire.{name} = {policy.codec!r}"
            )
    if policy.layers is not None:
        lines += _about_cut(policy.layers, config.model)
    return lines


def _size(codec: str) -> int:
    return codec_named(codec).size(MEASURED)


def _about_cut(wanted: int | str, model: ModelConfig) -> list[str]:
    table = model.table
    layers = named(MODELS[table].table() if isinstance(table, str) else table)
    names = [name for name, _ in layers]
    if isinstance(wanted, str) and wanted not in names:
        return [
            f"the policy's layers = {wanted!r} is no layer of the model ({', '.join(names)}); "
            "name one of them, or give a number"
        ]
    least = names.index(wanted) + 1 if isinstance(wanted, str) else wanted
    held = _held(model.cut, names, [isinstance(layer, Flatten) for _, layer in layers])
    if held >= least:
        return []
    return [
        f"model.cut leaves the device {held} layers, the policy wants layers = {wanted!r} "
        f"({least}) or more; set model.cut = {least}"
    ]


def _held(cut: int | str | None, names: Sequence[str], flat: Sequence[bool]) -> int:
    """Return how many layers a cut gives to clients, as `semisfl.models.split` counts them."""
    if cut is None:
        return flat.index(True) + 1 if True in flat else 0
    return names.index(cut) + 1 if isinstance(cut, str) else cut

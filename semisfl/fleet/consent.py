"""Compare a run's terms with a device's policy: what the device would have to refuse."""

from semisfl.fleet.codec import codec_named
from semisfl.settings import lookup
from semisfl.settings.config import Config
from semisfl.settings.policy import DevicePolicy, Policy

MEASURED = (64, 1024)
"""Shape of the features whose encoded size compares codecs."""


def objections(policy: Policy, config: Config) -> list[str]:
    """Return one line for every term of the run ``config`` that breaks ``policy``: the value, the limit and the fix.

    A method that sends whole models breaks a device's policy unless it has full_models = true, and any policy with a
    line that would do nothing for whole models. Other methods break it by a codec that is finer than the policy's, and
    by a trained bottom, which is sent back, where the policy has no noise for it or wants a frozen one.
    """
    whole_models = bool(lookup.method(config.method).works)
    if whole_models:
        return [*_about_bottom(policy, config), *_about_methods(policy, config.method)]
    uploads = policy.about_uploads(config.clients.bottom)
    return [*_about_bottom(policy, config), *uploads, *_about_features(policy, config)]


def _about_bottom(policy: Policy, config: Config) -> list[str]:
    frozen = config.clients.bottom == "frozen"
    if frozen or not isinstance(policy, DevicePolicy) or policy.trained_bottom:
        return []
    return [
        "clients.bottom = 'trained' sends a bottom back that shows images, and this device takes part with a frozen one "
        "alone; set clients.bottom = 'frozen', or join with trained_bottom = true in the file of --policy"
    ]


def _about_methods(policy: Policy, method: str) -> list[str]:
    lines = []
    if isinstance(policy, DevicePolicy) and policy.full_models is False:
        lines.append(
            f"method = {method!r} sends whole models, which this device keeps; choose a split method, or "
            "join with full_models = true in the file of --policy"
        )
    if useless := policy.for_features:
        lines.append(
            f"method = {method!r} sends whole models, for which the policy's {', '.join(useless)} "
            "would do nothing; choose a split method, or leave them out of the policy"
        )
    return lines


def _about_features(policy: Policy, config: Config) -> list[str]:
    names = ("student_features", "teacher_features")
    used = {f"wire.{name}": getattr(config.wire, name) for name in names}
    return [line for name, codec in used.items() for line in about_codec(policy, name, codec)]


def about_codec(policy: Policy, name: str, used: str) -> list[str]:
    """Return a line if the codec ``used`` under this ``name`` has more bytes than the policy wants."""
    if policy.codec is None or _size(used) <= _size(policy.codec):
        return []
    return [
        f"{name} = {used!r} is finer than the policy's codec = {policy.codec!r}; "
        f"set {name} = {policy.codec!r}"
    ]


def about_batch(policy: DevicePolicy, batch: int) -> list[str]:
    """Return a line if a step would use fewer images than the policy wants."""
    if batch >= policy.smallest_batch:
        return []
    return [
        f"clients.batch = {batch} is below the policy's smallest_batch = {policy.smallest_batch}; "
        f"set clients.batch = {policy.smallest_batch} or more"
    ]


def _size(codec: str) -> int:
    return codec_named(codec).size(MEASURED)

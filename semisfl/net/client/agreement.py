"""Hold every round to the terms that the device agreed to: a server may ask for less, never for more."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from semisfl.fleet.base import ClientWork
from semisfl.net.client.member import Member
from semisfl.net.headers import WireError
from semisfl.net.messages import Schemas
from semisfl.net.ranges import Range
from semisfl.settings import lookup
from semisfl.settings.config import Config
from semisfl.settings.policy import PolicyBreach

ROUNDING = 1e-9
"""Relative error of a learning rate that the server computed."""
REPEATS, MORE_REPEATS = 4, 20
"""A device begins at most REPEATS times the rounds of its terms, and MORE_REPEATS more. A server repeats rounds
after a restart or a loss of devices, and a round of some methods is begun twice."""


def most_begun(config: Config) -> int:
    """Return how many rounds a device begins under the same terms, repeats included."""
    return REPEATS * config.rounds + MORE_REPEATS


class BegunRounds:
    """Count the rounds that this process has begun, by the digest of their terms."""

    def __init__(self) -> None:
        self._count = Counter[str]()

    def add(self, member: Member) -> None:
        """Count one more round; raise `PolicyBreach` if it is one too many."""
        most = most_begun(member.config)
        if self._count[member.digest] >= most:
            raise PolicyBreach(
                f"the server began {most} rounds of a run of {member.config.rounds}, repeats included; "
                "start the device again if it shall go on"
            )
        self._count[member.digest] += 1


def check_split(config: Config, fields: Mapping[str, Any], *, with_teacher: bool) -> None:
    """Raise `PolicyBreach` if a split round differs from the terms in its numbers or its teacher."""
    _check_numbers(config, fields, least_steps=1)
    own = method_settings(config)
    # A method without this setting decides for each client and round who labels.
    if (teacher := own.get("client_teacher")) is not None:
        _check_equal("ema", fields["ema"], teacher == "ema")
        _check_equal("teacher", with_teacher, True)
    if fields["ema"]:
        _check_equal("decay", fields["decay"], config.teacher.ema_decay)


def check_full(member: Member, work: ClientWork, fields: Mapping[str, Any]) -> None:
    """Raise `PolicyBreach` for a full-model round that differs from the terms or cannot be done."""
    whole = member.model.whole()
    answers = work.answers.outline(whole.state_dict())
    if empty := [name for name, tensors in answers.items() if not tensors]:
        raise PolicyBreach(
            f"the server asks for {work.name:.40}, which answers {empty[0]:.40}; this model has no tensor of it"
        )
    weights = {name for name, _ in whole.named_parameters()}
    trains = any(not weights.isdisjoint(tensors) for tensors in answers.values())
    # Work that only computes statistics takes no step.
    _check_numbers(member.config, fields, least_steps=int(trains))
    agreed = full_settings(member.config)
    for name, value in fields["settings"].items():
        if name not in agreed:
            raise PolicyBreach(
                f"the server sends settings.{name:.40} for a round, which the agreed terms do not have; "
                "it must be a setting of the method, or ema_decay"
            )
        _check_equal(name, value, agreed[name])
    for states in (fields["states"], fields["on_request"]):
        _check_states(member.schemas, states)


def full_settings(config: Config) -> dict[str, Any]:
    """Return the settings of a full-model round, all from the terms: a server need not send them."""
    return {"ema_decay": config.teacher.ema_decay, **method_settings(config)}


def _check_states(schemas: Schemas, states: Mapping[str, Any]) -> None:
    try:
        schemas.states(states)
    except WireError as error:
        raise PolicyBreach(f"the server's round cannot be done: {error}") from error
    for name, tensors in states.items():
        if not tensors:
            raise PolicyBreach(f"the server sends {name:.40} without any tensor for a round")


def check_weights(tensors: Mapping[str, Tensor]) -> None:
    """Raise `PolicyBreach` for weights that are not finite: no honest server sends them."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise PolicyBreach(f"the server sends {name:.80} with NaN or Inf; it must be finite")


def method_settings(config: Config) -> dict[str, Any]:
    """Return the settings of the run's method by name; none if it has no section."""
    section = lookup.method(config.method).section
    settings = getattr(config, section, None) if section else None
    return {} if settings is None else settings.model_dump(mode="json")


def _check_numbers(config: Config, fields: Mapping[str, Any], least_steps: int) -> None:
    rate = config.optimizer
    lowest = rate.lr_min / (1 + ROUNDING) if least_steps else 0.0
    agreed = {
        "round": Range(0, config.rounds - 1),
        "steps": Range(least_steps, config.clients.steps),
        "lr": Range(lowest, rate.lr * (1 + ROUNDING)),
    }
    for name, allowed in agreed.items():
        if not allowed.allows(fields[name]):
            raise PolicyBreach(
                f"the server sends {name} = {fields[name]:g} for a round; the agreed terms allow {allowed}"
            )


def _check_equal(name: str, value: Any, agreed: Any) -> None:
    if type(value) is not type(agreed) or value != agreed:
        raise PolicyBreach(
            f"the server sends {name} = {value!r:.40} for a round; the agreed terms have {agreed!r:.40}"
        )

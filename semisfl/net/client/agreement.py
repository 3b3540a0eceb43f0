"""Hold every round to the terms that the device agreed to: a server may ask for less, never for more.

The terms of a run are fixed when a device joins; their digest is what its owner accepts. What comes later are the
numbers of a round (its index, steps and learning rate), weights and gradients. The numbers are checked against the
terms here, and so is the length of gradients.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from semisfl.fleet.base import ClientWork
from semisfl.net.client.member import Member
from semisfl.net.frames import Frame
from semisfl.net.ranges import Range
from semisfl.settings import lookup
from semisfl.settings.config import Config
from semisfl.settings.policy import PolicyBreach

ROUNDING = 1e-9
"""Relative error of a learning rate that the server computed."""
ROW, BATCH = 10.0, 2.5
"""Most that the norm of a row of gradients, and of a batch, may be of the features' typical norm. Longer ones
make one image's part of the bottom that goes back as large as the server likes. Honest ones of the digits
reach 0.01 for a row and 0.001 for a batch."""


def check_split(config: Config, frame: Frame) -> None:
    """Raise `PolicyBreach` if the ``frame`` that begins a split round differs from the terms' ``config``.

    Checked are the round's index, steps and learning rate, whether a teacher comes with it, and how the device is to
    move that teacher (`ema`, `decay`).
    """
    fields = frame.fields
    _check_numbers(config, fields, least_steps=1)
    # A method without this setting decides for each client and round who labels.
    if (teacher := method_settings(config).get("client_teacher")) is not None:
        _check_equal("ema", fields["ema"], teacher == "ema")
        _check_equal("teacher", frame.kind == "split", True)
    if fields["ema"]:
        _check_equal("decay", fields["decay"], config.teacher.ema_decay)


def check_full(
    member: Member, works: Mapping[str, ClientWork], fields: Mapping[str, Any]
) -> ClientWork:
    """Return the work that a full-model round asks for.

    Args:
        member: the device's part in the run, with its model and the terms' settings.
        works: what the method's clients can be asked to do, by name.
        fields: the fields of the frame that begins the round.

    Raises `PolicyBreach` if the round differs from the terms, and `KeyError` if it asks for other work.
    """
    work = works[fields["work"]]
    whole = member.model.whole()
    answers = work.answers.outline(whole.state_dict())
    weights = {name for name, _ in whole.named_parameters()}
    trains = any(not weights.isdisjoint(tensors) for tensors in answers.values())
    # Work that only computes statistics takes no step.
    _check_numbers(member.config, fields, least_steps=int(trains))
    agreed = full_settings(member.config)
    for name, value in fields["settings"].items():
        _check_equal(name, value, agreed.get(name))
    return work


def full_settings(config: Config) -> dict[str, Any]:
    """Return the settings of a full-model round, all from the terms: a server need not send them."""
    return {"ema_decay": config.teacher.ema_decay, **method_settings(config)}


def method_settings(config: Config) -> dict[str, Any]:
    """Return the settings of the run's method by name; none if it has no section."""
    section = lookup.method(config.method).section
    settings = getattr(config, section, None) if section else None
    return {} if settings is None else settings.model_dump(mode="json")


@torch.no_grad()
def check_gradients(gradients: Tensor, features: Tensor) -> None:
    """Raise `PolicyBreach` if the ``gradients`` [batch, features] of a step are too long, or NaN.

    ``features`` [batch, features] are those that the device sent for this step, clipped and with noise. The server
    knows both, so a refusal tells it nothing.
    """
    # A small clip makes features short, and gradients shrink on their way through it.
    typical = max(1.0, float(features.float().pow(2).sum(1).mean().sqrt()))
    rows = gradients.float().norm(dim=1)
    longest, together = float(rows.max()), float(rows.pow(2).mean().sqrt())
    for words, norm, limit in (("a row", longest, ROW), ("a batch", together, BATCH)):
        if not norm <= limit * typical:
            raise PolicyBreach(
                f"gradients of {words} have norm {norm:.3g}, their features {typical:.3g}; "
                f"at most {limit:g} times as long is accepted"
            )


def _check_numbers(config: Config, fields: Mapping[str, Any], least_steps: int) -> None:
    """Raise `PolicyBreach` if a round's index, steps or learning rate is outside the terms' range."""
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

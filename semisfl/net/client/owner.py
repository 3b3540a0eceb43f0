"""Gather what the owner of a device allows: a policy, what is left of its caps, terms and memory."""

import shlex
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from semisfl.net.client.allowance import Allowance, beside
from semisfl.net.client.approval import Approval, Ask, NotAccepted
from semisfl.net.client.budget import Budget
from semisfl.settings.config import with_known_codec
from semisfl.settings.policy import DevicePolicy, read_policy


@dataclass(frozen=True)
class Owner:
    """Hold what `join` and `classify` obey, whatever a server asks for. The default accepts no terms."""

    policy: DevicePolicy = field(default_factory=DevicePolicy)
    allowance: Allowance = field(default_factory=Allowance)
    approval: Approval = field(default_factory=Approval)
    budget: Budget = field(default_factory=Budget)

    @classmethod
    def of_device(
        cls,
        policy: Path | None,
        certificates: Path | None,
        budget: Budget,
        accept: Collection[str] = (),
        ask: Ask | None = None,
    ) -> "Owner":
        """Read the policy's file and what was spent; raise `ConfigError` if caps cannot be written down."""
        demands = DevicePolicy()
        if policy is not None:
            demands = with_known_codec(read_policy(policy), str(policy))
        allowance = Allowance(beside(policy) if policy is not None else None)
        if demands.capped:
            allowance.check_writable()
        approval = Approval(accept, accepted_file(certificates, policy), ask)
        if demands.model:  # a policy says all that it accepts
            approval = Approval(demands.model)
        return cls(demands, allowance, approval, budget)


def accepted_file(certificates: Path | None, policy: Path | None) -> Path | None:
    """Return where accepted terms are remembered: with the device's certificate, or beside its policy."""
    if certificates is not None:
        return certificates / "accepted.txt"
    return policy.with_suffix(".accepted.txt") if policy is not None else None


def how_to_accept(
    refused: NotAccepted, command: str, address: str, certificates: Path | None, policy: Path | None
) -> str:
    """Return one line: which terms were not accepted, how to see them, and how to accept them."""
    digest = refused.digest
    option = f" --certs {shlex.quote(str(certificates))}" if certificates else ""
    how = f"--accept {digest}"
    if policy is not None and read_policy(policy).model:
        how = f'model = "{digest}" in {policy}'
    return (
        f"the terms of {address} are {digest}, which this device has not accepted; "
        f"`semisfl inspect {address}{option}` shows them, {command} with {how} accepts them"
    )

"""What the owner of a device allows, whatever a server asks: the policy, its quotas, the accepted terms."""

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from semisfl.files import append_whole
from semisfl.net.client.allowance import Allowance, beside
from semisfl.settings.policy import DevicePolicy, PolicyBreach, read_policy


class Approval:
    """The digests of terms that the owner accepts."""

    def __init__(self, accepted: Collection[str] = (), file: Path | None = None) -> None:
        """Accept the digests ``accepted``, or those in ``file`` if there are none.

        A digest of ``accepted`` is added to ``file`` once a server has shown its terms, so that the owner
        names it once.
        """
        known = set(file.read_text().split()) if file is not None and file.exists() else set()
        self._file, self._new = file, set(accepted) - known
        self._accepted = set(accepted) or known

    def check(self, digest: str) -> None:
        """Raise `PolicyBreach` unless the owner accepts the terms with this digest."""
        if digest not in self._accepted:
            raise PolicyBreach(
                f"this device has not accepted the terms {digest}; `semisfl inspect` shows them, and "
                f'--accept {digest} accepts them, or model = "{digest}" in the policy',
                f"its owner has not accepted the terms {digest}",
            )
        if self._file is not None and digest in self._new:
            self._new.remove(digest)
            # A service may not write to its folder; it names the digest at every start.
            with contextlib.suppress(OSError):
                append_whole(self._file, f"{digest}\n".encode(), private=True)


@dataclass(frozen=True)
class Owner:
    """The limits of a device's owner, which `join` and `classify` obey. The default accepts no terms."""

    policy: DevicePolicy = field(default_factory=DevicePolicy)
    allowance: Allowance = field(default_factory=Allowance)
    approval: Approval = field(default_factory=Approval)

    @classmethod
    def of_device(
        cls, policy: Path | None, certificates: Path | None, accept: Collection[str] = ()
    ) -> "Owner":
        """Read the limits from a device's files.

        Args:
            policy: the policy file; what was spent of its quotas is counted in a file beside it.
            certificates: the device's folder; accepted digests are remembered there in accepted.txt, or
                beside the policy if there is none.
            accept: digests of terms. A policy with ``model`` replaces them.

        Raises `ConfigError` for a bad policy, or if quotas could not be written down.
        """
        limits = DevicePolicy()
        remembered = None if certificates is None else certificates / "accepted.txt"
        if policy is not None:
            limits = read_policy(policy)
            remembered = remembered or policy.with_suffix(".accepted.txt")
        allowance = Allowance(beside(policy) if policy is not None else None)
        with allowance.counting(limits):  # fail now, not in the first round
            pass
        if limits.model:
            return cls(limits, allowance, Approval(limits.model))
        return cls(limits, allowance, Approval(accept, remembered))

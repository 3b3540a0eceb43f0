"""Keep what a device has spent of its caps on disk: a restart must not lift them."""

import json
from pathlib import Path

from semisfl.files import write_whole
from semisfl.fleet.caps import Spent
from semisfl.settings.policy import Policy, PolicyBreach
from semisfl.settings.sections import ConfigError


class Allowance:
    """Count what was spent, in ``file``; None: not on disk, for policies without caps."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self.spent = Spent()
        if file is not None and file.exists():
            self.spent = self._read(file)

    @staticmethod
    def _read(file: Path) -> Spent:
        """Return what was spent; raise `ConfigError` if that is unknown, never start from 0."""
        try:
            plain = json.loads(file.read_text(encoding="utf-8"))
            return Spent(int(plain["rounds"]), int(plain["uses"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{file} cannot be read: {error}; it counts what this device has sent: restore it, or "
                "remove it to count from 0 again"
            ) from error

    def check_writable(self) -> None:
        """Raise `ConfigError` now, not in the first round, if the file cannot be written."""
        if self._file is not None:
            try:
                self._write(self._file)
            except OSError as error:
                raise ConfigError(
                    f"{self._file} cannot be written ({error.strerror or error}), where this device counts "
                    "what the policy's caps allow; keep the policy in a folder that it may write to"
                ) from error

    def _write(self, file: Path) -> None:
        write_whole(file, json.dumps(vars(self.spent)).encode(), private=True)

    def check(self, policy: Policy, uses: int) -> None:
        """Raise `PolicyBreach` if one more round with ``uses`` of an image exceeds the caps."""
        if (reason := self.spent.refusal(policy, uses)) is not None:
            raise PolicyBreach(reason)

    def take(self, policy: Policy, uses: int) -> None:
        """Spend one round, on disk before anything is sent; raise `PolicyBreach` beyond the caps."""
        if not policy.capped:
            return
        self.check(policy, uses)
        self.spent.take(uses)
        if self._file is not None:
            self._write(self._file)


def beside(policy: Path) -> Path:
    """Return the file that counts what was spent under a policy's file."""
    return policy.with_suffix(".spent.json")

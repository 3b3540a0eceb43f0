"""A device's caps, which must outlast its process: else whoever can make it restart lifts them."""

import json
from pathlib import Path

from semisfl.files import write_whole
from semisfl.fleet.caps import Spent
from semisfl.settings.policy import Policy, PolicyBreach
from semisfl.settings.sections import ConfigError


class Allowance:
    """``file``: where it is written down what was spent; None: nowhere, for policies without caps."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self.spent = Spent()
        if file is not None and file.exists():
            self.spent = self._read(file)

    @staticmethod
    def _read(file: Path) -> Spent:
        """A file that cannot be read must not become a fresh start."""
        try:
            plain = json.loads(file.read_text(encoding="utf-8"))
            return Spent(int(plain["rounds"]), int(plain["uses"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{file} cannot be read: {error}; it counts what this device has sent: restore it, or "
                "remove it to count from 0 again"
            ) from error

    def check_writable(self) -> None:
        """Say now, not in the first round, that what is spent cannot be written down."""
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
        """`PolicyBreach` if one more round, with so many ``uses`` of an image, would be too much."""
        if (reason := self.spent.refusal(policy, uses)) is not None:
            raise PolicyBreach(reason)

    def take(self, policy: Policy, uses: int) -> None:
        """Spend one round, written down before anything is sent; `PolicyBreach` if that is too much."""
        if not policy.capped:
            return
        self.check(policy, uses)
        self.spent.take(uses)
        if self._file is not None:
            self._write(self._file)


def beside(policy: Path) -> Path:
    """Where a policy's file has what was spent of it."""
    return policy.with_suffix(".spent.json")

"""Keep what a device has spent of its caps on disk: a restart must not lift them."""

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

from semisfl.files import write_whole
from semisfl.fleet.caps import Price, Spent
from semisfl.settings.policy import DevicePolicy, PolicyBreach
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
            rounds, uses = int(plain["rounds"]), int(plain["uses"])
            # An earlier version did not count bits.
            bits = float(plain.get("bits", math.inf if rounds else 0.0))
            if min(rounds, uses, bits) < 0 or math.isnan(bits):
                raise ValueError(f"nobody spends {plain}")
            return Spent(rounds, uses, bits)
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
        """Write the count; it is on the disk, under its name, when this returns."""
        write_whole(file, json.dumps(vars(self.spent)).encode(), private=True)
        with _opened(file.parent, os.O_RDONLY) as folder:
            os.fsync(folder)

    def check(self, policy: DevicePolicy, price: Price) -> None:
        """Raise `PolicyBreach` if one more round at this price exceeds the caps."""
        if (reason := self.spent.refusal(policy, price)) is not None:
            raise PolicyBreach(reason)

    def take(self, policy: DevicePolicy, price: Price) -> None:
        """Spend one round, on disk before anything is sent; raise `PolicyBreach` beyond the caps."""
        if self._file is None or not policy.capped:
            self.check(policy, price)
            self.spent = self.spent.plus(price)
            return
        # Another process may count in the same file.
        lock = self._file.with_suffix(".lock")
        with _opened(lock, os.O_RDWR | os.O_CREAT) as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if self._file.exists():
                self.spent = self._read(self._file)
            self.check(policy, price)
            self.spent = self.spent.plus(price)
            self._write(self._file)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    handle = os.open(path, flags, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)


def beside(policy: Path) -> Path:
    """Return the file that counts what was spent under a policy's file."""
    return policy.with_suffix(".spent.json")

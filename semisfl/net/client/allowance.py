"""Keep what a device has spent of its caps on disk: a restart must not lift them.

Training and `classify` count in one file, and each counts what the other one sent.
"""

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from semisfl.files import write_whole
from semisfl.fleet.caps import Classified, Price, Spent
from semisfl.settings.policy import DevicePolicy, PolicyBreach
from semisfl.settings.sections import ConfigError

USED_UP = "what its owner's caps allow is used up"
"""All that a server hears: the counts are also those of other servers."""


class Allowance:
    """Count what was spent, in ``file``; None: not on disk, for policies without caps."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self.spent = Spent()
        """Sums over the rounds of training so far."""
        self.classified = Classified()
        if file is not None and file.exists():
            self._read(file)

    def _read(self, file: Path) -> None:
        """Read what was spent; raise `ConfigError` if that is unknown, never start from 0."""
        try:
            plain = json.loads(file.read_text(encoding="utf-8"))
            rounds, uses = int(plain["rounds"]), int(plain["uses"])
            # An earlier version did not count bits.
            bits = float(plain.get("bits", math.inf if rounds else 0.0))
            if min(rounds, uses, bits) < 0 or math.isnan(bits):
                raise ValueError(f"nobody spends {plain}")
            self.spent = Spent(rounds, uses, bits)
            self.classified = Classified.of(plain.get("classified", {}), int(plain.get("held", 0)))
        except Exception as error:  # JSON of any other form raises nearly anything
            raise ConfigError(
                f"{file} cannot be read: {error}; it counts what this device has sent: restore it, or "
                "remove it to count from 0 again"
            ) from error

    def check_writable(self) -> None:
        """Raise `ConfigError` now, not in the first round, if the file cannot be written."""
        if self._file is not None:
            with self._locked(self._file):
                pass

    def _write(self, file: Path) -> None:
        """Write the count; it is on the disk, under its name, when this returns."""
        plain = {
            **vars(self.spent),
            "held": self.classified.held,
            "classified": self.classified.images,
        }
        write_whole(file, json.dumps(plain).encode(), private=True)
        with _opened(file.parent, os.O_RDONLY) as folder:
            os.fsync(folder)

    @property
    def total(self) -> Spent:
        """Return what training and `classify` have spent together."""
        return self.classified.beside(self.spent)

    def check(self, policy: DevicePolicy, price: Price) -> None:
        """Raise `PolicyBreach` if one more round at this price exceeds the caps."""
        if (reason := self.total.refusal(policy, price)) is not None:
            raise PolicyBreach(reason, USED_UP)

    def take(self, policy: DevicePolicy, price: Price) -> None:
        """Spend one round, on disk before anything is sent; raise `PolicyBreach` beyond the caps."""
        with self._counting(policy):
            self.check(policy, price)
            self.spent = self.spent.plus(price)
            self.classified = replace(self.classified, held=price.images)

    def take_answers(self, policy: DevicePolicy, images: Sequence[str], bits: float) -> None:
        """Spend one use of ``bits`` for each image to classify, by its digest; as `take` does."""
        with self._counting(policy):
            after = self.classified.plus(images, bits)
            if (reason := after.refusal(policy, self.spent, images)) is not None:
                raise PolicyBreach(reason, USED_UP)
            self.classified = after

    @contextlib.contextmanager
    def _counting(self, policy: DevicePolicy) -> Iterator[None]:
        """Count in the block, on disk if the policy has caps."""
        if self._file is None or not policy.capped:
            yield
            return
        with self._locked(self._file):
            yield

    @contextlib.contextmanager
    def _locked(self, file: Path) -> Iterator[None]:
        """Read what was spent before the block, and write it after; another process may count too.

        Raises `ConfigError` if it cannot be written: nothing may be sent then.
        """
        try:
            with _opened(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT) as handle:
                fcntl.flock(handle, fcntl.LOCK_EX)
                if file.exists():
                    self._read(file)
                yield
                self._write(file)
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be written ({error.strerror or error}), where this device counts what "
                "the policy's caps allow; keep the policy in a folder with room that it may write to"
            ) from error


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

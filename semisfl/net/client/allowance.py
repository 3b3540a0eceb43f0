"""What a device has used of its policy's quotas, kept on disk: a restart must not lift them.

Training and `classify` count in one file, and each counts what the other one sent. A use is written down, and is on
the disk, before anything of it is sent: a device that is killed in between has counted too much, never too little.
"""

import contextlib
import fcntl
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from semisfl.files import write_whole
from semisfl.fleet.caps import Classified, RoundUse, Spent
from semisfl.settings.policy import DevicePolicy, PolicyBreach
from semisfl.settings.sections import ConfigError

USED_UP = "its owner's quotas are used up"
"""All that a server hears: the counts are also those of other servers."""


class Allowance:
    """Count rounds, uses and bits, in ``file``; None: in memory alone, for policies without quotas."""

    def __init__(self, file: Path | None = None) -> None:
        """Read the file if it exists; raise `ConfigError` if it is damaged: no count starts from 0 by mistake."""
        self._file = file
        self.spent = Spent()
        """Sums over the rounds of training so far."""
        self.classified = Classified()
        self.encoded: Mapping[str, Sequence[str]] = {}
        """The images whose rows of a frozen bottom are counted, by what the rows follow from."""
        self.secret = secrets.token_bytes(32)
        """Makes the noise on such rows: the same after a restart, and known to nobody else."""
        if file is not None and file.exists():
            self._read(file)

    @property
    def total(self) -> Spent:
        """Return what training and `classify` have used together."""
        return self.classified.beside(self.spent)

    def check(self, policy: DevicePolicy, use: RoundUse) -> None:
        """Raise `PolicyBreach` if one more round with this ``use`` exceeds the quotas."""
        _refuse_excess(policy, self.classified.beside(self.spent.plus(use)))

    def take(self, policy: DevicePolicy, use: RoundUse) -> None:
        """Count one round, on disk before anything is sent; raise `PolicyBreach` beyond the quotas."""
        with self.counting(policy):
            self.check(policy, use)
            self.spent = self.spent.plus(use)

    def take_answers(self, policy: DevicePolicy, images: Sequence[str], bits: float) -> None:
        """Count one use of ``bits`` for each image to classify, by the digest of its content; as `take` does."""
        with self.counting(policy):
            after = self.classified.plus(images, bits)
            _refuse_excess(policy, after.beside(self.spent, images))
            self.classified = after

    def take_views(
        self, policy: DevicePolicy, about: str, images: Sequence[str], views: int, bits: float
    ) -> None:
        """Count ``views`` uses of ``bits`` each for every image, by the digest of its content; as `take` does.

        Rows that are sent again say nothing new: with the same ``about``, which they follow from, an image counts once.
        """
        with self.counting(policy):
            known = self.encoded.get(about, ())
            new = set(images).difference(known)
            after = self.classified.plus([*new] * views, bits)
            _refuse_excess(policy, after.beside(self.spent, [*new]))
            self.classified = after
            self.encoded = {**self.encoded, about: sorted(new.union(known))}

    @contextlib.contextmanager
    def counting(self, policy: DevicePolicy) -> Iterator[None]:
        """Read the file before the block, and write it after, if the policy has quotas; another process may count too.

        Raises `ConfigError` if it cannot be written: nothing may be sent then.
        """
        if (file := self._file) is None or not policy.capped:
            yield
            return
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
                "the policy's quotas allow; keep the policy in a folder with room that it may write to"
            ) from error

    def _read(self, file: Path) -> None:
        """Read the counts; raise `ConfigError` for a file that is damaged."""
        try:
            plain = json.loads(file.read_text(encoding="utf-8"))
            spent = Spent(int(plain["rounds"]), int(plain["uses"]), float(plain["bits"]))
            if min(vars(spent).values()) < 0 or math.isnan(spent.bits):
                raise ValueError(f"nobody spends {plain}")
            self.spent, self.classified = spent, Classified.of(plain.get("classified", {}))
            self.encoded = plain.get("encoded", {})
            self.secret = bytes.fromhex(plain.get("secret", "")) or self.secret
        except Exception as error:  # JSON of any other form raises nearly anything
            raise ConfigError(
                f"{file} cannot be read: {error}; it counts what this device has sent: restore it, or "
                "remove it to count from 0 again"
            ) from error

    def _write(self, file: Path) -> None:
        """Write the count; it is on the disk, under its name, when this returns."""
        plain = {
            **vars(self.spent),
            "classified": self.classified.images,
            "encoded": self.encoded,
            "secret": self.secret.hex(),
        }
        write_whole(file, json.dumps(plain).encode(), private=True)
        with _opened(file.parent, os.O_RDONLY) as folder:
            os.fsync(folder)


def beside(policy: Path) -> Path:
    """Return the file that counts what was used under a policy's file."""
    return policy.with_suffix(".spent.json")


def _refuse_excess(policy: DevicePolicy, spent: Spent) -> None:
    """Raise `PolicyBreach` if ``spent`` exceeds the policy. The server hears no numbers."""
    if (reason := spent.excess(policy)) is not None:
        raise PolicyBreach(reason, USED_UP)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    handle = os.open(path, flags, 0o600)
    try:
        yield handle
    finally:
        os.close(handle)

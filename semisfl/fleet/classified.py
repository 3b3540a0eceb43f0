"""Count what a device has sent of each image to have it classified.

The bottom is fixed then, and a row depends on one image alone. So these bits bound what the server
knows about that image, and not only an average.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan

from semisfl.fleet.caps import Spent
from semisfl.settings.policy import DevicePolicy


@dataclass(frozen=True)
class Classified:
    """Hold uses and bits of every image by the digest of its content."""

    images: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    held: int = 0
    """Images that the device had in its last round of training."""

    @classmethod
    def of(cls, plain: Mapping[str, Sequence[float]], held: int) -> "Classified":
        """Return the counts of a file; raise `ValueError` for any that nobody can have spent."""
        images = {name: (int(uses), float(bits)) for name, (uses, bits) in plain.items()}
        if held < 0 or any(uses < 0 or bits < 0 or isnan(bits) for uses, bits in images.values()):
            raise ValueError("a count is negative")
        return cls(images, held)

    def plus(self, images: Sequence[str], bits: float) -> "Classified":
        """Return the counts after one row of ``bits`` for each of ``images``; one may occur twice."""
        after = dict(self.images)
        for name, times in Counter(images).items():
            uses, before = after.get(name, (0, 0.0))
            after[name] = uses + times, before + times * bits
        return replace(self, images=after)

    def beside(self, trained: Spent) -> Spent:
        """Return what training and classification have spent together."""
        uses = max((uses for uses, _ in self.images.values()), default=0)
        bits = sum(bits for _, bits in self.images.values())
        return Spent(trained.rounds, trained.uses + uses, trained.bits + bits)

    def refusal(self, policy: DevicePolicy, trained: Spent, images: Sequence[str]) -> str | None:
        """Return why ``images`` have exceeded the caps beside what was ``trained``, or None."""
        before = trained.bits / max(self.held, 1) if trained.bits else 0.0
        uses = trained.uses + max((self.images[name][0] for name in images), default=0)
        bits = before + max((self.images[name][1] for name in images), default=0.0)
        if policy.uses_per_image is not None and uses > policy.uses_per_image:
            return (
                f"an image would be used {uses} times, the policy has "
                f"uses_per_image = {policy.uses_per_image}"
            )
        if policy.bits_per_image is not None and not bits <= policy.bits_per_image:
            return (
                f"all that was sent of an image would carry {bits:,.1f} bits, the policy has "
                f"bits_per_image = {policy.bits_per_image:g}"
            )
        return None

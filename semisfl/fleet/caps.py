"""Count how much of its policy's caps a client has used up."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isnan

from semisfl.models.split import SplitModel
from semisfl.settings.bits import round_bits
from semisfl.settings.policy import DevicePolicy, Policy, PolicyBreach


def most_uses(steps: int, batch: int, count: int) -> int:
    """Return how often one of ``count`` images is used at most in a split round.

    Batches come from the list of images, repeated until it suffices."""
    return -(-steps * batch // max(count, 1))


@dataclass(frozen=True)
class Held:
    """Sizes that decide what a round of a client costs."""

    images: int
    batch: int
    features: int
    """Values of one row."""
    weights: int
    """Values of a bottom that are no counters: weights, and BatchNorm's statistics."""

    @classmethod
    def of(cls, model: SplitModel, batch: int, images: int) -> "Held":
        state = model.bottom.state_dict().values()
        weights = sum(tensor.numel() for tensor in state if tensor.is_floating_point())
        return cls(images, batch, model.features, weights)


@dataclass(frozen=True)
class Price:
    """The price of a round: its part of the caps."""

    images: int
    uses: int = 0
    """Most uses of one image's features."""
    bits: float = inf
    """Most bits that all of it carries; whole models have no bound."""

    @classmethod
    def of_split(cls, policy: Policy, steps: int, held: Held) -> "Price":
        """Return the price of a whole split round, also of one that ends early."""
        bits = round_bits(policy, steps * held.batch, held.features, held.weights)
        return cls(held.images, most_uses(steps, held.batch, held.images), bits)


@dataclass(frozen=True)
class Spent:
    """The part of its caps that a client has used up; it only grows."""

    rounds: int = 0
    uses: int = 0
    """No image was used more often than this."""
    bits: float = 0.0
    """All that was sent carries no more than this about all images together."""

    def plus(self, price: Price) -> "Spent":
        """Return the sum; raise `PolicyBreach` for a negative price."""
        if not (price.uses >= 0 and price.bits >= 0):
            raise PolicyBreach(f"a round of {price.uses} uses would give back what was spent")
        return Spent(self.rounds + 1, self.uses + price.uses, self.bits + price.bits)

    def refusal(self, policy: DevicePolicy, price: Price) -> str | None:
        """Return why one more round at this price is too much, or None."""
        after = self.plus(price)
        if policy.rounds is not None and after.rounds > policy.rounds:
            return f"round {after.rounds} of this client would exceed the policy's rounds = {policy.rounds}"
        if policy.uses_per_image is not None and after.uses > policy.uses_per_image:
            return (
                f"an image would be used {after.uses} times, the policy has "
                f"uses_per_image = {policy.uses_per_image}"
            )
        per_image = after.bits / max(price.images, 1)
        if policy.bits_per_image is not None and not per_image <= policy.bits_per_image:
            return (
                f"all that was sent would carry {per_image:,.1f} bits per image, the policy has "
                f"bits_per_image = {policy.bits_per_image:g}"
            )
        return None

    def words(self, policy: Policy, images: int) -> str:
        """Return a line for the log of a device that holds ``images``."""
        if self.bits == inf:
            return (
                "what this device sends has no bound in bits: its policy has no noise on all of it"
            )
        limit = policy.bits_per_image
        cap = "" if limit is None else f"; the policy ends this device's part at {limit:g}"
        return (
            f"all that this device sent by the end of this round carries at most {self.bits:,.0f} bits "
            f"about its {images:,} images, {self.bits / max(images, 1):,.1f} per image on average{cap}"
        )


@dataclass(frozen=True)
class Classified:
    """Hold uses and bits of every image that was sent to be classified, by the digest of its content.

    The bottom is fixed then, and a row depends on one image alone. So these bits bound what the server
    knows about that image, and not only an average.
    """

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

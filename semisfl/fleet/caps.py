"""How much of its policy's quotas (rounds, uses and bits per image) a client has used.

Bits are a bound for *each image*. Rows and uploads carry noise, so each carries at most so many bits
(`semisfl.settings.policy`), and a server that aims makes them carry all of these about one image. Against each
image count the rows made of it, both views at every use, and the **whole upload of every round**: a trained bottom
depends on every image of its round, and the server decides on which most.

Not counted: what rows of other images show of an image, through BatchNorm's batch statistics or through weights
that the same round trained on it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isnan

from semisfl.models.split import SplitModel
from semisfl.settings.policy import DevicePolicy, Policy, PolicyBreach, feature_bits, round_bits
from semisfl.settings.run import ClientsConfig


def most_uses(steps: int, batch: int, count: int) -> int:
    """Return how often one of ``count`` images is used at most in a split round.

    Batches come from the list of images, repeated until it suffices.
    """
    return -(-steps * batch // max(count, 1))


@dataclass(frozen=True)
class RoundSizes:
    """Sizes that decide what a round of a client uses of its quotas."""

    images: int
    batch: int
    features: int
    """Values of one row."""
    weights: int
    """Values of a bottom that are no counters: weights, and BatchNorm's statistics."""

    @classmethod
    def of(cls, model: SplitModel, batch: int, images: int) -> "RoundSizes":
        """Return the sizes of a client with ``images`` that trains the bottom of ``model``."""
        state = model.bottom.state_dict().values()
        weights = sum(tensor.numel() for tensor in state if tensor.is_floating_point())
        return cls(images, batch, model.features, weights)


@dataclass(frozen=True)
class RoundUse:
    """The uses and bits that one round takes from a client's quotas."""

    uses: int = 0
    """Most uses of one image's features."""
    bits: float = inf
    """Most bits about one image; whole models have no bound."""

    @classmethod
    def of_split(cls, policy: Policy, steps: int, sizes: RoundSizes) -> "RoundUse":
        """Return what a split round of ``steps`` uses, whole also if it ends early."""
        uses = most_uses(steps, sizes.batch, sizes.images)
        return cls(uses, round_bits(policy, uses, sizes.features, sizes.weights))


@dataclass(frozen=True)
class Spent:
    """What a client has used of its quotas; it only grows."""

    rounds: int = 0
    uses: int = 0
    """No image was used more often than this."""
    bits: float = 0.0
    """All that was sent carries no more than this about any one image."""

    def plus(self, use: RoundUse) -> "Spent":
        """Return the sum with one more round; raise `PolicyBreach` for a negative use."""
        if not (use.uses >= 0 and use.bits >= 0):
            raise PolicyBreach(f"a round of {use.uses} uses would give back what was spent")
        return Spent(self.rounds + 1, self.uses + use.uses, self.bits + use.bits)

    def excess(self, policy: DevicePolicy) -> str | None:
        """Return which quota of the policy this exceeds, in one line; None if it fits."""
        if policy.rounds is not None and self.rounds > policy.rounds:
            return f"round {self.rounds} of this client would exceed the policy's rounds = {policy.rounds}"
        if policy.uses_per_image is not None and self.uses > policy.uses_per_image:
            return (
                f"an image would be used {self.uses} times, the policy has "
                f"uses_per_image = {policy.uses_per_image}"
            )
        if policy.bits_per_image is not None and not self.bits <= policy.bits_per_image:
            return (
                f"all that was sent would carry {self.bits:,.1f} bits about an image, the policy has "
                f"bits_per_image = {policy.bits_per_image:g}"
            )
        return None

    def words(self, policy: Policy) -> str:
        """Return a line for the log of a device with this ``policy``."""
        if self.bits == inf:
            return (
                "what this device sends has no bound in bits: its policy has no noise on all of it"
            )
        limit = policy.bits_per_image
        cap = "" if limit is None else f"; the policy ends this device's part at {limit:g}"
        return (
            "all that this device sent by the end of this round carries at most "
            f"{self.bits:,.1f} bits about any one image{cap}"
        )


def refuse_views(policy: DevicePolicy, clients: ClientsConfig, features: int) -> None:
    """Raise `PolicyBreach` if a frozen bottom's views of one image, with ``features`` values each, exceed a quota."""
    views = sum(clients.views.values())
    use = RoundUse(views, views * feature_bits(policy, features))
    if excess := Spent().plus(use).excess(policy):
        raise PolicyBreach(
            f"{excess}; lower clients.weak_views = {clients.weak_views} or "
            f"clients.strong_views = {clients.strong_views}, or raise the limit"
        )


@dataclass(frozen=True)
class Classified:
    """Uses and bits of every image that was sent to be classified, by the digest of its content.

    The bottom is fixed then, and a row depends on one image alone. So each image has its own count.
    """

    images: Mapping[str, tuple[int, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, plain: Mapping[str, Sequence[float]]) -> "Classified":
        """Return the counts of a file; raise `ValueError` for any that nobody can have spent."""
        images = {name: (int(uses), float(bits)) for name, (uses, bits) in plain.items()}
        if any(uses < 0 or bits < 0 or isnan(bits) for uses, bits in images.values()):
            raise ValueError("a count is negative")
        return cls(images)

    def plus(self, images: Sequence[str], bits: float) -> "Classified":
        """Return the counts after one row of ``bits`` for each of ``images``; one may occur twice."""
        after = dict(self.images)
        for name, times in Counter(images).items():
            uses, before = after.get(name, (0, 0.0))
            after[name] = uses + times, before + times * bits
        return Classified(after)

    def beside(self, trained: Spent, images: Sequence[str] | None = None) -> Spent:
        """Return what training and classification have used together, of ``images`` at most; None: of all."""
        counts = [self.images[name] for name in (self.images if images is None else images)]
        uses = max((uses for uses, _ in counts), default=0)
        bits = max((bits for _, bits in counts), default=0.0)
        return Spent(trained.rounds, trained.uses + uses, trained.bits + bits)

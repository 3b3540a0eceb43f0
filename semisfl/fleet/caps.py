"""Count how much of its policy's caps a client has used up."""

from dataclasses import dataclass

from semisfl.settings.policy import Policy


def most_uses(steps: int, batch: int, count: int) -> int:
    """Return how often one of ``count`` images is used at most in a split round.

    Batches come from the list of images, repeated until it suffices."""
    return -(-steps * batch // max(count, 1))


@dataclass
class Spent:
    rounds: int = 0
    uses: int = 0
    """No image was used more often than this."""

    def refusal(self, policy: Policy, uses: int) -> str | None:
        """Return why one more round with so many ``uses`` of an image is too much, or None."""
        rounds, uses = self.rounds + 1, self.uses + uses
        if policy.rounds is not None and rounds > policy.rounds:
            return (
                f"round {rounds} of this client would exceed the policy's rounds = {policy.rounds}"
            )
        if policy.uses_per_image is not None and uses > policy.uses_per_image:
            return (
                f"an image would be used {uses} times, the policy has "
                f"uses_per_image = {policy.uses_per_image}"
            )
        return None

    def take(self, uses: int) -> None:
        """Add a round; what is spent never decreases."""
        if uses < 0:
            raise ValueError(f"a round uses an image {uses} times; 0 is the least")
        self.rounds += 1
        self.uses += uses

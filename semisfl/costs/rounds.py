"""Convert the bytes of a round to the clock's input: what each client sends and computes, in order."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from semisfl.costs.about_images import AboutImages
from semisfl.costs.clock import RoundWork, Share
from semisfl.costs.cuts import Cut, cut_of
from semisfl.fleet.codec import codec_named
from semisfl.methods.sizes import Cost, Sizes
from semisfl.models.shapes import Shape
from semisfl.settings import lookup
from semisfl.settings.config import Config, capped
from semisfl.settings.entries import NamedMethod

Bytes = Mapping[str, int]
"""Bytes by kind and direction, with a run's names: ``model_down``, ``features_up``, ..."""

# Messages of a full round: full, accept, states, done, upload, states. A fetch and its answer are two more.
FULL_MESSAGES, FETCH_MESSAGES = 6, 2


def cost_of(entry: NamedMethod, sizes: Sizes, config: Config) -> Cost | None:
    """Return the cost of a method's usual round, or None if its catalog entry has no formula."""
    if entry.cost is None:
        return None
    kind = lookup.settings_class(entry)
    # The configuration has no section for a method of another package unless it is chosen.
    settings = getattr(config, entry.section or "", None) or (kind() if kind else None)
    cost: Cost = lookup.load(entry.cost)(sizes, settings)
    return cost


def _as_held(config: Config, held: AboutImages) -> Config:
    """Return the configuration with the batch that clients use.

    In a simulation that is at most the images of the largest client; devices fill the batch that is set.
    """
    if not held.each or config.fleet.kind == "network":
        return config
    return capped(config, max(held.each.values()))


@dataclass(frozen=True)
class Priced:
    """A method with its settings, model and cut; computes what its rounds send and compute."""

    config: Config
    entry: NamedMethod
    cut: Cut
    held: AboutImages

    @classmethod
    def of(cls, config: Config, held: AboutImages) -> "Priced":
        cut = cut_of(config, held.shape, held.classes)
        return cls(_as_held(config, held), lookup.method(config.method), cut, held)

    def by(self, entry: NamedMethod, config: Config) -> "Priced":
        """Return the same with another method and its settings."""
        return replace(self, entry=entry, config=_as_held(config, self.held))

    def at(self, index: int) -> "Priced":
        """Return the same with another cut."""
        return replace(self, cut=replace(self.cut, index=index))

    @cached_property
    def sizes(self) -> Sizes:
        clients, elsewhere = self.config.clients, self.config.fleet.kind == "network"
        return self.cut.sizes(clients.batch, clients.steps, self.config.wire, resent=elsewhere)

    @cached_property
    def usual(self) -> Cost | None:
        """Return the cost of one active client's usual round, or None if the method has no formula."""
        return cost_of(self.entry, self.sizes, self.config)

    def usual_work(self, active: Iterable[int]) -> RoundWork:
        """Return the work of a usual round with these active clients."""
        cost = self.usual
        assert cost is not None, "only methods with a formula have a usual round"
        by_client = dict.fromkeys(active, cost.by_kind()) if cost.total else {}
        return self.work(by_client, self.config.server.steps)

    def work(self, by_client: Mapping[int, Bytes], supervised_steps: int) -> RoundWork:
        """Return the work of a round in which these bytes went to and from each client."""
        cost = self.usual
        passes = (cost or Cost(0, 0)).work
        head = self._head_flops if passes.head else 0
        images = supervised_steps * self.config.server.batch
        # A teacher that only computes keys runs its bottom and head, not its top.
        top = self.cut.flops - self.cut.bottom_flops
        # A second view of each labelled image is trained on as well: 3 passes.
        supervised = passes.supervised + 3.0 * (self.config.labeled_view == "both")
        passes_of_top = supervised - passes.head
        server = images * (supervised * (self.cut.bottom_flops + head) + passes_of_top * top)
        if not by_client:
            return RoundWork(server)
        if (cost is not None and cost.features) or any(
            "features_up" in one for one in by_client.values()
        ):
            return RoundWork(server, [[self._split(*item) for item in by_client.items()]])
        pairs = [self._full(client, sizes) for client, sizes in by_client.items()]
        return RoundWork(
            server, [[one for pair in pairs for one in pair[place]] for place in (0, 1)]
        )

    @cached_property
    def _head_flops(self) -> int:
        model = self.config.model
        return self.cut.head_flops(model.projector, model.projection)

    def _split(self, client: int, sizes: Bytes) -> Share:
        """Return a client's share of a split round; a client that left answered fewer steps."""
        config, passes = self.config, (self.usual or Cost(0, 0)).work
        rows, wire = (config.clients.batch, self.cut.features), config.wire
        step_up: float = sum(
            codec_named(codec).size(rows)
            for codec in (wire.student_features, wire.teacher_features)
        )
        steps = int(sizes.get("features_up", 0) // step_up)
        top = self.cut.flops - self.cut.bottom_flops + (self._head_flops if passes.head else 0)
        # Two of the passes are the backward pass, which waits for the gradients.
        bottom = config.clients.batch * self.cut.bottom_flops
        return Share(
            client,
            down=sizes.get("model_down", 0) + sizes.get("teacher_down", 0),
            up=sizes.get("model_up", 0),
            steps=steps,
            forward=(passes.client - 2) * bottom,
            step_up=step_up,
            step_down=sizes.get("gradients_down", 0) / max(steps, 1),
            backward=2 * bottom,
            server=config.clients.batch * passes.server * top,
        )

    def _full(self, client: int, sizes: Bytes) -> tuple[list[Share], list[Share]]:
        """Return a client's shares of a full round: training, then BatchNorm's statistics.

        The statistics, if a method gathers them, are a phase that ends with its own slowest client.
        """
        clients, passes = self.config.clients, (self.usual or Cost(0, 0)).work
        down = sizes.get("model_down", 0) + sizes.get("teacher_down", 0)
        up = sizes.get("model_up", 0)
        look = self.held.of(client) * self.cut.flops
        training, statistics = [], []
        if times := self._statistics_in(down, up):
            sent, gathered = times * self.sizes.full, times * self.sizes.statistics
            messages = times * FULL_MESSAGES
            statistics.append(Share(client, sent, gathered, times * look, messages=messages))
            down, up = down - sent, up - gathered
        if down or up:
            # A client without a usable label looks at its images but takes no step.
            steps = clients.steps if up else 0
            batches = steps * clients.batch * passes.client * self.cut.flops
            messages = FULL_MESSAGES + (FETCH_MESSAGES if sizes.get("teacher_down") else 0)
            computes = batches + passes.look * look
            training.append(Share(client, down, up, computes, messages=messages))
        return training, statistics

    def _statistics_in(self, down: int, up: int) -> int:
        """Return how often a client received the model only to compute its statistics."""
        sizes = self.sizes
        if not sizes.statistics:
            return 0
        times, rest = divmod(up % sizes.full, sizes.statistics)
        return 0 if rest or times * sizes.full > down else times


def round_operations(config: Config, shape: Shape, classes: int, images: int) -> float:
    """Return the floating-point operations of a usual round; ``images`` are those of all clients."""
    held = AboutImages(shape, classes, images / config.clients.total)
    return Priced.of(config, held).usual_work(range(config.clients.active)).operations

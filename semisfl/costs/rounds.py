"""The bytes and operations of one round of a method, for each client and the server.

`ImageFacts` are the facts about a run's images that this depends on. `RoundCosts` combines them with a method's
settings, its cost formula and a cut of its model, and gives the virtual clock its input.
"""

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from semisfl.costs.clock import RoundWork, Share
from semisfl.costs.cuts import Cut, cut_of
from semisfl.data import sources
from semisfl.files import read_json
from semisfl.fleet.base import draw_active
from semisfl.fleet.codec import codec_named
from semisfl.methods.sizes import Cost, Sizes
from semisfl.models.shapes import Shape
from semisfl.runs import reading
from semisfl.settings import lookup
from semisfl.settings.catalog import NamedMethod
from semisfl.settings.config import Config, cap_batch


@dataclass(frozen=True)
class ImageFacts:
    """Shape, classes and counts of a run's images."""

    shape: Shape
    """Channels, height and width."""
    classes: int
    mean: float
    """Mean number of images per client."""
    each: Mapping[int, int] = field(default_factory=dict)
    """Images by client, if known."""

    @classmethod
    def of_each(cls, shape: Shape, classes: int, each: Mapping[int, int]) -> "ImageFacts":
        """Return the facts if every client's number of images is known."""
        return cls(shape, classes, sum(each.values()) / max(1, len(each)), each)

    def of(self, client: int) -> float:
        """Return the number of a client's images, or the mean if it is unknown."""
        return self.each.get(client, self.mean)


def planned_images(config: Config) -> ImageFacts:
    """Return the facts for a run that has not begun; images are loaded only if the catalog lacks them."""
    name, side = config.data.name, config.data.size
    folders: Mapping[str, Sized] | None = None
    if (known := lookup.data(name)) and known.images is not None:
        shape, classes, images = known.shape, known.classes, known.images
    else:
        data = sources.load(name, size=side)
        shape, classes, images = data.shape, len(data.classes), len(data.images)
        folders = data.clients
    shape = (shape[0], side, side) if side else shape
    if config.data.unlabeled is None and folders:
        each = {client: len(rows) for client, rows in enumerate(folders.values())}
        return ImageFacts.of_each(shape, classes, each)
    set_aside = round(images * (config.data.validation or 0.0))
    left = max(0, images - set_aside - config.data.labeled)
    if (elsewhere := config.data.unlabeled) is not None:
        left = _images_of(elsewhere)
    return ImageFacts(shape, classes, left / config.clients.total)


def _images_of(name: str) -> int:
    """Return the number of training images of a named set, or at a path."""
    if (known := lookup.data(name)) and known.images is not None:
        return known.images
    return len(sources.load(name, size=8, tested=False).images)


def recorded_images(config: Config, path: Path) -> ImageFacts:
    """Return the facts that the run directory ``path`` holds, and for the rest those of `planned_images`.

    A simulation records each client's images in ``holdings.json``; devices of a network report theirs.
    """
    if clients := reading.read_holdings(path).get("clients", []):
        each = {client: sum(counts) for client, counts in enumerate(clients)}
    else:
        devices = read_json(path / "fleet.json").get("clients", [])
        each = {device["client"]: device["images"] for device in devices if device.get("images")}
    return images_of_run(config, reading.read_images(path), each)


def images_of_run(
    config: Config, described: Mapping[str, Any] | None, each: Mapping[int, int]
) -> ImageFacts:
    """Return the facts about a run's images from what is known of them.

    ``described`` has ``shape`` (channels, height, width), ``classes`` and ``unlabeled`` (images of all clients),
    or is None; ``each`` has the images by client and may be empty. The rest is as `planned_images` says.
    """
    if described is None:
        images = planned_images(config)
    else:
        channels, height, width = described["shape"]
        shape, classes = (channels, height, width), len(described["classes"])
        images = ImageFacts(shape, classes, (described["unlabeled"] or 0) / config.clients.total)
    return ImageFacts.of_each(images.shape, images.classes, each) if each else images


# --- rounds ----------------------------------------------------------------------------------------

Bytes = Mapping[str, int]
"""Bytes by kind and direction, with a run's names: ``model_down``, ``features_up``, ..."""

# Messages of a full round: full, accept, states, done, upload, states. A fetch and its answer are two more.
FULL_MESSAGES, FETCH_MESSAGES = 6, 2


def drawn(config: Config, index: int) -> Sequence[int]:
    """Return the clients that are drawn for a round, if all are there."""
    clients = config.clients
    return draw_active(config.seed, index, clients.total, range(clients.total), clients.active)


def cost_of(entry: NamedMethod, sizes: Sizes, config: Config) -> Cost | None:
    """Return what one active client sends and computes in a usual round, or None without a formula.

    ``sizes`` are in bytes. The formula is the one that the method's catalog entry names.
    """
    if entry.cost is None:
        return None
    kind = lookup.settings_class(entry)
    # The configuration has no section for a method of another package unless it is chosen.
    settings = getattr(config, entry.section or "", None) or (kind() if kind else None)
    return lookup.load(entry.cost)(sizes, settings)


def _as_clients_use(config: Config, images: ImageFacts) -> Config:
    """Return the configuration with the batch that clients use.

    In a simulation that is at most the images of the largest client; devices fill the batch that is set.
    """
    if not images.each or config.fleet.kind == "network":
        return config
    return cap_batch(config, max(images.each.values()))


@dataclass(frozen=True)
class RoundCosts:
    """A method with its settings, its model cut in two, and its images: what its rounds send and compute."""

    config: Config
    entry: NamedMethod
    cut: Cut
    images: ImageFacts

    @classmethod
    def of(cls, config: Config, images: ImageFacts) -> "RoundCosts":
        """Return the costs of the configured method, model and cut; no weights are allocated."""
        cut = cut_of(config, images.shape, images.classes)
        return cls(_as_clients_use(config, images), lookup.method(config.method), cut, images)

    def by(self, entry: NamedMethod, config: Config) -> "RoundCosts":
        """Return the same with another method and its settings."""
        return replace(self, entry=entry, config=_as_clients_use(config, self.images))

    def at(self, index: int) -> "RoundCosts":
        """Return the same with another cut."""
        return replace(self, cut=replace(self.cut, index=index))

    @cached_property
    def sizes(self) -> Sizes:
        """Return the bytes of each tensor that one client's round exchanges."""
        clients, elsewhere = self.config.clients, self.config.fleet.kind == "network"
        return self.cut.sizes(clients.batch, clients.steps, self.config.wire, resent=elsewhere)

    @cached_property
    def usual(self) -> Cost | None:
        """Return the cost of one active client's usual round, or None if the method has no formula.

        With a frozen bottom it is what a client with the mean number of images sends and computes in the whole run.
        """
        cost, clients = cost_of(self.entry, self.sizes, self.config), self.config.clients
        if cost is None or not cost.features or clients.bottom == "trained":
            return cost
        # The bottom down and the rows up, once.
        rows = round(self.images.mean * self.image_bytes())
        work = replace(cost.work, client=float(sum(clients.views.values())), copies=1, kept=0)
        return Cost(self.sizes.bottom, rows, features=rows, work=work)

    @property
    def once(self) -> bool:
        """Return whether clients encode their images once, with a frozen bottom, and then have nothing to send."""
        return self.config.clients.bottom == "frozen" and bool((self.usual or Cost(0, 0)).features)

    def image_bytes(self, codec: str | None = None) -> int:
        """Return the bytes of the rows that a frozen bottom makes of one image, all views together.

        ``codec`` replaces the run's codecs.
        """
        wire, views = self.config.wire, self.config.clients.views
        codecs = {"weak": codec or wire.teacher_features, "strong": codec or wire.student_features}
        row = (1, self.cut.features)
        return sum(views[kind] * codec_named(codecs[kind]).size(row) for kind in views)

    def usual_work(self, active: Iterable[int]) -> RoundWork:
        """Return the work of a usual round with these active clients; if they send once, of the round in which they do."""
        cost = self.usual
        assert cost is not None, "only methods with a formula have a usual round"
        by_client = dict.fromkeys(active, cost.by_kind()) if cost.total else {}
        return self.work(by_client, self.config.server.steps, self.config.clients.active)

    def work(
        self, by_client: Mapping[int, Bytes], supervised_steps: int, stored: int = 0
    ) -> RoundWork:
        """Return the work of a round in which these bytes went to and from each client.

        ``stored`` counts the clients of which the server trains on stored rows, where they send once.
        """
        cost, clients = self.usual, self.config.clients
        passes = (cost or Cost(0, 0)).work
        head = self._head_flops if passes.head else 0
        images = supervised_steps * self.config.server.batch
        top = self.cut.flops - self.cut.bottom_flops
        # A second view of each labelled image is trained on as well: 3 passes.
        both = self.config.labeled_view == "both"
        supervised = passes.supervised + 3.0 * both
        frozen = clients.bottom == "frozen"
        # A teacher that only computes keys runs its top only if the head reads what the top's last layer reads.
        passes_of_top = supervised - passes.head * (not frozen)
        # A frozen bottom has no backward passes.
        of_bottom = supervised - 2.0 * (1 + both) * frozen
        server = images * (
            of_bottom * self.cut.bottom_flops + supervised * head + passes_of_top * top
        )
        if self.once:
            rows = stored * clients.steps * clients.batch
            encoding = [self._encoding(*item) for item in by_client.items()]
            return RoundWork(server + rows * passes.server * (top + head), [encoding])
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
        frozen = self.config.clients.bottom == "frozen"
        return self.cut.head_flops(model.projector, model.projection, frozen)

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

    def _encoding(self, client: int, sizes: Bytes) -> Share:
        """Return the share of a client that encodes its images."""
        views = self.images.of(client) * sum(self.config.clients.views.values())
        return Share(
            client,
            down=sizes.get("model_down", 0),
            up=sizes.get("features_up", 0),
            before=views * self.cut.bottom_flops,
        )

    def _full(self, client: int, sizes: Bytes) -> tuple[list[Share], list[Share]]:
        """Return a client's shares of a full round: training, then BatchNorm's statistics.

        The statistics, if a method gathers them, are a phase that ends with its own slowest client.
        """
        clients, passes = self.config.clients, (self.usual or Cost(0, 0)).work
        down = sizes.get("model_down", 0) + sizes.get("teacher_down", 0)
        up = sizes.get("model_up", 0)
        look = self.images.of(client) * self.cut.flops
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

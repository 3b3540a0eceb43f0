"""What a split round's steps and uploads count as in a simulation: as much as would cross a network."""

from collections.abc import Sequence

import numpy as np

from semisfl.data.batches import draw_positions
from semisfl.fleet.base import SplitRound
from semisfl.fleet.byte_counts import Traffic
from semisfl.fleet.codec import codec_named
from semisfl.fleet.savings import bitmap_bytes, update_bytes
from semisfl.settings.config import Config


def count_steps(
    traffic: Traffic,
    config: Config,
    plan: SplitRound,
    width: int,
    used_rows: Sequence[int] | None,
    images: Sequence[int] | None,
) -> None:
    """Features of ``width``, gradients and trained bottoms of every active client.

    ``used_rows``: of gradients, by slot, where others do not cross. ``images``: how many each client
    holds, where its teacher features cross once for each.
    """
    wire, rows = config.wire, (config.clients.batch, width)
    for slot, client in enumerate(plan.active):
        features = plan.steps * codec_named(wire.student_features).size(rows)
        if images is None:
            features += plan.steps * codec_named(wire.teacher_features).size(rows)
        else:
            shown = _shown(config, plan, client, images[client])
            features += codec_named(wire.teacher_features).size((shown, width))
        traffic.add("features", "up", client, features)
        gradients = codec_named(wire.gradients)
        if used_rows is None:
            down = plan.steps * gradients.size(rows)
        else:
            down = plan.steps * bitmap_bytes(rows[0]) + gradients.size((used_rows[slot], width))
        traffic.add("gradients", "down", client, down)
        traffic.add("model", "up", client, update_bytes(plan.bottom, wire))


def _shown(config: Config, plan: SplitRound, client: int, images: int) -> int:
    """How many different images the client shows in the round."""
    batch = config.clients.batch
    drawn = draw_positions(config.seed, plan.index, client, images, plan.steps, batch)
    return len(np.unique(drawn))

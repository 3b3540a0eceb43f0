"""Count a simulated split round's bytes: as many as would cross a network."""

from collections.abc import Sequence

import numpy as np

from semisfl.data.positions import draw_positions
from semisfl.fleet.base import SplitRound
from semisfl.fleet.byte_counts import Traffic
from semisfl.fleet.codec import codec_named, state_bytes
from semisfl.settings.config import Config


def count_steps(
    traffic: Traffic,
    config: Config,
    plan: SplitRound,
    width: int,
    images: Sequence[int] | None,
) -> None:
    """Count features of ``width``, gradients and trained bottoms of every active client.

    ``images``: how many each client holds, if its teacher features cross once for each.
    """
    wire, rows = config.wire, (config.clients.batch, width)
    for client in plan.active:
        features = plan.steps * codec_named(wire.student_features).size(rows)
        if images is None:
            features += plan.steps * codec_named(wire.teacher_features).size(rows)
        else:
            distinct = _distinct_images(config, plan, client, images[client])
            features += codec_named(wire.teacher_features).size((distinct, width))
        traffic.add("features", "up", client, features)
        gradients = plan.steps * codec_named(wire.gradients).size(rows)
        traffic.add("gradients", "down", client, gradients)
        traffic.add("model", "up", client, state_bytes(plan.bottom, wire.models))


def _distinct_images(config: Config, plan: SplitRound, client: int, images: int) -> int:
    """Return how many different images the client uses in the round."""
    batch = config.clients.batch
    drawn = draw_positions(config.seed, plan.index, client, images, plan.steps, batch)
    return len(np.unique(drawn))

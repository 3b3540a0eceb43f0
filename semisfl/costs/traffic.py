"""What a round costs in bytes, before anything is trained: each method's own formula, in fp32."""

from typing import Any

from semisfl import lookup
from semisfl.catalog import NamedMethod
from semisfl.config import Config
from semisfl.engine.weights import batchnorms
from semisfl.fleet.codec import state_bytes
from semisfl.methods.sizes import Cost, Sizes
from semisfl.models import Shape, SplitModel, build


def sizes_of(model: SplitModel, batch: int, steps: int) -> Sizes:
    """Of what a round of so many steps sends."""
    bottom, top = (state_bytes(part.state_dict(), "fp32") for part in (model.bottom, model.top))
    layers = [*batchnorms(model.bottom), *batchnorms(model.top)]
    statistics = sum(state_bytes(dict(layer.named_buffers()), "fp32") for layer in layers)
    return Sizes(bottom, bottom + top, statistics, 4 * batch * model.features * steps)


def cost_of(row: NamedMethod, sizes: Sizes, config: Config) -> Cost | None:
    """A usual round of a method; None: its row has no formula."""
    if row.cost is None:
        return None
    kind = lookup.settings_class(row)
    # A method that was not chosen has no section here if it comes from another package.
    settings = getattr(config, row.section or "", None) or (kind() if kind else None)
    cost: Cost = lookup.load(row.cost)(sizes, settings)
    return cost


def method_costs(
    config: Config, shape: Shape, classes: int, up: float, down: float
) -> list[dict[str, Any]]:
    """Every method's bytes for ``config``, and hours on the wire at ``up`` and ``down`` Mbit/s.

    Active clients transfer side by side; what they compute is not counted.
    """
    settings, clients = config.model, config.clients
    model = build(
        settings.table,
        shape,
        classes,
        cut=settings.cut,
        projector="none",
        projection=settings.projection,
    )
    sizes = sizes_of(model, clients.batch, clients.steps)
    methods = lookup.methods()
    methods.setdefault(config.method, lookup.method(config.method))
    rows = []
    for name, row in methods.items():
        cost = cost_of(row, sizes, config)
        if cost is None:
            continue
        seconds = 8e-6 * (cost.down / down + cost.up / up)
        rows.append(
            {
                "method": name,
                "down_bytes": cost.down,
                "up_bytes": cost.up,
                "round_seconds": seconds,
                "run_bytes": cost.total * clients.active * config.rounds,
                "run_hours": seconds * config.rounds / 3600,
            }
        )
    return rows

"""``semisfl plan --devices``: what one server carries."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from semisfl.cli import console

if TYPE_CHECKING:
    from semisfl.costs.about_images import AboutImages
    from semisfl.costs.clock import World
    from semisfl.costs.server_size import ServerSize
    from semisfl.settings.config import Config


def tell(config: "Config", held: "AboutImages", world: "World", as_json: bool) -> None:
    """Print what a server of ``clients.total`` devices needs, of which ``clients.active`` take part in a round."""
    from semisfl.costs import plan
    from semisfl.costs.server_size import Work, size_server

    line = plan.of_method(config, held, world)
    if line is None or not line.total:
        raise ValueError(
            f"method = {config.method!r} asks nothing of devices, or has no cost formula; use another method"
        )
    work = Work(
        steps=config.clients.steps if line.split else 1,
        up=line.up,
        down=line.down,
        held=line.bottom_bytes + line.features_per_step + line.gradients_per_step,
        seconds=line.seconds,
    )
    size = size_server(config.clients.total, config.clients.active, work)
    if as_json:
        values = {"memory": size.memory, "round_seconds": size.round_seconds}
        print(json.dumps({"method": line.method, "cut": line.cut, **asdict(size), **values}))
        return
    _print(size, f"{line.title}, {config.model.name} at cut {line.cut}")


def _print(size: "ServerSize", title: str) -> None:
    from semisfl.costs.server_size import ALONE, CONNECTED

    amount = console.amount
    each = size.memory_active / size.active
    rows = {
        "memory": (
            f"{amount(size.memory)}: {amount(ALONE)} alone, {CONNECTED / 1024:.0f} KiB per connected device, "
            f"{amount(each)} per active one"
        ),
        "open files": f"{size.devices:,}; raise LimitNOFILE of the unit above that",
        "all devices back after a restart": f"{size.back_seconds:,.0f} s",
        "CPU": f"{1000 * size.cpu_per_device:,.1f} ms per active device and round",
        "bandwidth": f"{size.up / 1e6:,.1f} Mbit/s in, {size.down / 1e6:,.1f} Mbit/s out",
        "seconds per round": (
            f"{size.round_seconds:,.1f}: the devices need {size.device_seconds:,.1f}, the server's process "
            f"{size.server_seconds:,.1f}"
        ),
    }
    print(f"One server, {size.devices:,} devices, {size.active:,} active: {title}")
    for size_name, needed in rows.items():
        print(f"  {size_name}: {needed}")
    print(
        f"From about {size.most_active:,.0f} active devices on, the server's one process is the limit. Beyond 5,000 "
        "connected or 1,000 active devices these numbers are extrapolated, not measured: docs/sizing.md."
    )

"""Define the attacks of a malicious server on a device, by name, for tests and `make chaos`."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch

from semisfl.fleet.packing import joined
from semisfl.models.build import build_model
from semisfl.net.frames import encode
from semisfl.net.terms import Terms
from tests.net.rogue_server import Peer, RogueServer, Script, attacked, split_frame, terms

REFUSALS = (4, 6)
"""Exit codes of a device that does not take part, as docs/deploy.md lists them."""
IMAGES = ("features", "bottom", "states")
"""Frames that say something about images."""
WIDE = [{"kind": "conv", "channels": 64, "kernel": 1}, {"kind": "flatten"}, {"kind": "linear"}]


def greeting(text: str) -> Script:
    """Send terms, then nothing."""

    async def script(peer: Peer) -> None:
        await peer.welcome(text)
        await asyncio.sleep(60)

    return script


async def enrolled(peer: Peer, text: str, client: int = 0) -> None:
    await peer.welcome(text)
    await peer.say("enrolled", {"client": client})


def asking(text: str, client: int = 0, **changes: Any) -> Script:
    """Begin a split round with changed fields."""

    async def script(peer: Peer) -> None:
        await enrolled(peer, text, client)
        await peer.split(text, **changes)
        await peer.hears()
        await asyncio.sleep(60)

    return script


def poisoned_weights(value: float) -> Script:
    """Begin a round with one weight replaced in every tensor."""
    text = terms()
    plain = Terms.from_json(text, ["semisfl"])
    bottom = build_model(plain.config, plain.shape, plain.classes, projector="none").bottom
    state = {name: tensor.detach().clone() for name, tensor in bottom.state_dict().items()}
    for tensor in state.values():
        if tensor.is_floating_point():
            tensor.view(-1)[0] = value
    fields = {"round": 0, "steps": 2, "lr": plain.config.optimizer.lr, "ema": False, "decay": 0.0}
    frame = b"".join(encode("split", fields, joined({"bottom": state, "teacher": state})))

    async def script(peer: Peer) -> None:
        await enrolled(peer, text)
        await peer.say_bytes(frame)
        await peer.hears()
        await asyncio.sleep(60)

    return script


def gradients(make: Callable[[torch.Tensor], torch.Tensor]) -> Script:
    """Answer the first features with planted gradients."""
    text = terms()
    plain = Terms.from_json(text, ["semisfl"])
    model = build_model(plain.config, plain.shape, plain.classes, projector="none")
    with torch.no_grad():
        rows = model.bottom(torch.zeros(plain.config.clients.batch, *plain.shape))

    async def script(peer: Peer) -> None:
        await enrolled(peer, text)
        await peer.say_bytes(split_frame(text))
        assert (await peer.hears()).kind == "features"
        fields = {"round": 0, "step": 0}
        await peer.say("gradients", fields, tensors={"gradients": make(rows)})
        await peer.hears()
        await asyncio.sleep(60)

    return script


def one_hot(rows: torch.Tensor) -> torch.Tensor:
    """Give row i the gradient e_i, so that row i of the uploaded weight is image i."""
    return torch.eye(rows[0].numel())[: len(rows)].reshape(rows.shape) * 1e4


def changed_terms() -> Script:
    """Let the device join, end the stream, and show other terms when it comes back."""
    calls: list[int] = []

    async def script(peer: Peer) -> None:
        calls.append(1)
        text = terms() if len(calls) == 1 else terms(config__model__cut=1)
        await enrolled(peer, text)
        if len(calls) == 1:
            await peer.context.abort(grpc.StatusCode.UNAVAILABLE, "back soon")
        await peer.say_bytes(split_frame(text))
        await peer.hears()
        await asyncio.sleep(60)

    return script


@dataclass(frozen=True)
class Rogue:
    script: Callable[[], Script]
    reason: str
    """Part of the device's last line."""
    shown: int = 0
    """Frames about images that the device sends before it notices."""
    accepts: bool = True
    """Whether the owner accepts any terms."""


ROGUES = {
    "impossible layers": Rogue(
        lambda: greeting(terms(config__model__layers=[{"kind": "linear"}, *WIDE])),
        "cannot be built",
    ),
    "impossible cut": Rogue(lambda: greeting(terms(config__model__cut=99)), "cannot be cut at 99"),
    "giant image": Rogue(lambda: greeting(terms(shape=[1, 16384, 16384])), "height = 16384"),
    "giant batch": Rogue(
        lambda: greeting(terms(config__clients__batch=3_000_000)), "clients.batch = 3e+06"
    ),
    "huge steps": Rogue(lambda: asking(terms(), steps=20_000_000), "steps = 2e+07"),
    "negative steps": Rogue(lambda: asking(terms(), steps=-1000), "steps = -1000"),
    "huge index": Rogue(
        lambda: asking(terms(config__clients__total=2 * 10**8), 10**8), "client = 1e+08"
    ),
    "high rate": Rogue(lambda: asking(terms(), lr=1e9), "lr = 1e+09"),
    "NaN weights": Rogue(lambda: poisoned_weights(float("nan")), "with NaN or Inf"),
    "long gradients": Rogue(lambda: gradients(one_hot), "gradient", shown=1),
    "NaN gradients": Rogue(
        lambda: gradients(lambda rows: torch.full_like(rows, torch.nan)), "gradient", shown=1
    ),
    "changed terms": Rogue(changed_terms, "terms", accepts=False),
}


def against(rogue: Rogue, images: Path) -> tuple[Any, RogueServer]:
    """Let a real `semisfl join` meet the rogue; return how it ended, and the server."""
    words = []
    if not rogue.accepts:
        words = ["--accept", Terms.from_json(terms(), ["semisfl"]).digest]
    return attacked(rogue.script(), images, *words, approves=rogue.accepts)


def wrong(rogue: Rogue, images: Path) -> list[str]:
    """Return what a device did that it should not have done."""
    ended, server = against(rogue, images)
    last = (ended.output.splitlines() or [""])[-1]
    sent = [item.kind for item in server.received if item.kind in IMAGES]
    faults = []
    if ended.status not in REFUSALS:
        faults.append(f"it ended with {ended.status}: {ended.output[-500:]}")
    if not (last.startswith("error: ") and rogue.reason in last):
        faults.append(f"its last line does not say {rogue.reason!r}: {last}")
    if len(sent) > rogue.shown:
        faults.append(f"it sent {sent}; at most {rogue.shown} frames about images are due")
    return faults

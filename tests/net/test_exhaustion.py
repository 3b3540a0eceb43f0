"""A server cannot exhaust a device: real processes, and how much memory they take under attack."""

import asyncio
import contextlib
import itertools
import logging
import time
import weakref
from pathlib import Path

import grpc
import pytest
import torch

from semisfl.fleet.packing import joined, tensor_names
from semisfl.models.build import build_model
from semisfl.net import chunks, links
from semisfl.net.chunks import cut
from semisfl.net.client.inspect import read_terms
from semisfl.net.terms import Terms
from tests.net.floods import crumbs_taken
from tests.net.harness import Client, network, tiny, until
from tests.net.rogue_server import (
    EPOCH,
    Peer,
    attacked,
    folder_of_images,
    rogue,
    split_frame,
    terms,
)
from tests.net.rogues import BUDGET, MB, MOST, enrolled

REFUSED, BY_POLICY = 4, 6
"""Exit status of a device that its server refuses, and of one that its own limits keep out."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of_images(tmp_path_factory.mktemp("images"))


def test_frames_that_nobody_reads_wait_at_the_server(images: Path) -> None:
    """The device computes while its server sends; what it has not looked at must not pile up."""
    wide = [{"kind": "flatten"}, {"kind": "linear", "features": 4096}, {"kind": "linear"}]
    text = terms(config__model__layers=wide, config__model__cut=2, config__rounds=60)
    frame = split_frame(text)
    assert len(frame) > 8 * MB

    async def script(peer: Peer) -> None:
        await peer.welcome(text)
        await peer.say("enrolled", {"client": 0})

        left = list(range(60))

        async def flood() -> None:
            while left:
                left.pop()
                await peer.say_bytes(frame)

        flooding = asyncio.create_task(flood())
        await asyncio.sleep(5)
        assert not flooding.done(), "the device takes no more than it can hold"
        # Every frame has an answer, so that no read is given up, which would break the stream.
        while left:
            await peer.hears()
        await flooding
        await peer.context.abort(grpc.StatusCode.PERMISSION_DENIED, "enough")

    ended, _ = attacked(script, images, "--memory", "120MB", most=300 * MB)
    assert ended.status == REFUSED and ended.peak < 300 * MB, ended
    assert "refuses this client: enough" in ended.output.splitlines()[-1]


def test_a_long_way_to_the_server_does_not_let_frames_pile_up(images: Path) -> None:
    """gRPC's window grew with delay times rate, and filled once the device did not read for a while."""
    wide = [{"kind": "flatten"}, {"kind": "linear", "features": 4096}, {"kind": "linear"}]
    text = terms(config__model__layers=wide, config__model__cut=2, config__rounds=60)
    frame, skipped, earlier = split_frame(text), bytes(4 * MB), 7

    async def script(peer: Peer) -> None:
        await peer.welcome(text)
        await peer.say("enrolled", {"client": 0})

        began = time.monotonic()
        while time.monotonic() < began + 8:
            for chunk in chunks.cut([skipped], earlier, 1):
                await peer.context.write(chunk)
        enough = asyncio.Event()

        async def flood() -> None:
            for ticket in itertools.count(1):
                for chunk in chunks.cut([frame], EPOCH, ticket):
                    if enough.is_set():
                        return
                    await peer.context.write(chunk)

        async def read() -> None:
            with contextlib.suppress(Exception):  # it ends with the stream
                while True:
                    await peer.hears()

        flooding = asyncio.create_task(flood())
        await asyncio.sleep(8)
        enough.set()
        # The device takes the last chunk once its answers are taken.
        reading = asyncio.create_task(read())
        await flooding
        assert not reading.done(), "the device has gone"
        await peer.context.abort(grpc.StatusCode.PERMISSION_DENIED, "enough")

    ended, _ = attacked(script, images, "--memory", "120MB", most=300 * MB, delay=0.25)
    assert ended.status == REFUSED and ended.peak < 300 * MB, ended


def test_a_server_that_keeps_a_device_busy_with_nothing_is_left(images: Path) -> None:
    """Heartbeats, frames that are skipped and frames that are ignored cost a server nothing."""
    text, kinds = terms(), itertools.count()

    def useless(kind: int) -> bytes:
        if kind == 0:
            return chunks.PREFIX.pack(chunks.MAGIC, EPOCH, 0, 0)
        if kind == 1:
            return chunks.PREFIX.pack(chunks.MAGIC, EPOCH + 1, 9, 1) + b"x"
        return next(cut([b"nonsense"], EPOCH, 0))

    async def script(peer: Peer) -> None:
        message = useless(next(kinds))
        await enrolled(peer, text)
        reading = asyncio.create_task(forget(peer))
        for _ in range(3000):
            await peer.context.write(message)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reading, 5)  # until it has gone
        await peer.context.abort(grpc.StatusCode.PERMISSION_DENIED, "enough")

    async def forget(peer: Peer) -> None:
        while (await peer.context.read()) is not grpc.aio.EOF:
            pass

    ended, server = attacked(script, images, most=MOST)
    assert ended.status == REFUSED and server.calls == 3, ended
    assert "3 times: the server broke the protocol: over 100 messages" in ended.output, ended


def test_frames_around_an_unfinished_message_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC keeps 8 KB for 24 bytes of a message, if it came between other frames."""
    monkeypatch.setattr(links, "BESIDE_BYTES", 500_000)
    port, serving, taken = crumbs_taken(300 * MB)
    client = Client(f"127.0.0.1:{port}", torch.zeros(0), "one")
    serving.join()
    client.kill()
    assert taken[0] < 300 * MB, "the device takes all of it"


def test_frames_after_the_terms_do_not_pile_up_at_a_device_that_looks() -> None:
    port, _, _ = crumbs_taken(100 * MB, size=8)
    with pytest.raises(Exception, match="overflows local window"):
        read_terms(f"127.0.0.1:{port}", None, insecure_loopback=True)


def test_states_count_as_large_as_they_are_once_decoded(images: Path, tmp_path: Path) -> None:
    """In int4 a model crosses in an eighth of its memory; a server may announce 16 of them for a round."""
    wide = [{"kind": "flatten"}, *[{"kind": "linear", "features": 2048}] * 2, {"kind": "linear"}]
    config = tiny(method="fedmatch", wire={"models": "int4"})
    text = terms(config, config__model__layers=wide, config__model__cut=2)
    run = Terms.from_json(text, ["fedmatch"])
    whole = build_model(run.config, run.shape, run.classes, projector="none").whole().state_dict()
    states = dict.fromkeys(("sigma", "psi", *(f"more{number}" for number in range(14))), whole)
    fields = {"round": 0, "steps": 2, "lr": run.config.optimizer.lr, "work": "fedmatch"}
    fields |= {"settings": {}, "states": tensor_names(states), "on_request": {}}

    async def script(peer: Peer) -> None:
        await enrolled(peer, text)
        await peer.say("full", fields)
        if (await peer.hears()).kind == "accept":
            await peer.say("states", {"round": 0}, tensors=joined(states), codecs="int4")
            await peer.hears()

    policy = tmp_path / "policy.toml"
    policy.write_text("full_models = true\n")
    words = ("--memory", BUDGET, "--policy", str(policy))
    ended, server = attacked(script, images, *words, most=MOST)
    assert ended.status == BY_POLICY and ended.peak < MOST, ended
    assert "messages 1.22 GB" in ended.output.splitlines()[-1]
    assert server.received[-1].kind == "refusal"


def test_images_of_earlier_terms_are_gone_before_those_of_new_terms_come() -> None:
    loaded: list[weakref.ref[torch.Tensor]] = []
    left: list[bool] = []

    def load(shape: tuple[int, ...]) -> tuple[torch.Tensor, int]:
        left.extend(one() is not None for one in loaded)
        images = torch.zeros((12, *shape), dtype=torch.uint8)
        loaded.append(weakref.ref(images))
        return images, 0

    async def script(peer: Peer) -> None:
        text = terms(tiny(1, seed=len(loaded)))
        await enrolled(peer, text)
        await peer.split(text)
        await peer.hears()
        if len(loaded) < 3:
            await peer.context.abort(grpc.StatusCode.UNAVAILABLE, "back soon")

    with rogue(script) as server:
        client = Client(f"127.0.0.1:{server.port}", torch.zeros(0), "one", load=load)
        until(lambda: len(loaded) == 3)
        client.device.stop()
        client.join(30)
    assert not any(left)


def test_the_name_of_a_device_does_not_fill_the_log_or_reach_the_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "semisfl")
    with network(tiny(1)) as net:
        net.fleet.roster.load_state_dict({"index": {}, "images": {}})
        name = "\x1b]0;owned\x07\u202e" + "x" * 30_000
        client = Client(net.address, net.data.images[net.partition.clients[0]], name)
        net.clients[0] = client
        assert net.fleet.wait_for(1, 30)
        assert all(name.isprintable() and len(name) < 500 for name in net.fleet.roster.index)
    lines = [record.getMessage() for record in caplog.records]
    assert any("is here as client 0" in line for line in lines)
    assert all(line.isprintable() and len(line) < 1000 for line in lines)


def test_names_of_a_server_do_not_fill_the_log_or_reach_the_terminal(
    images: Path, tmp_path: Path
) -> None:
    text = terms(tiny(method="fedswitch"))
    name = "\x1b]0;owned\x07\x1b[2J" + "x" * 200_000

    async def script(peer: Peer) -> None:
        await peer.welcome(text)
        await peer.say("enrolled", {"client": 0})
        for index in range(500):
            fields = {"round": index, "steps": 1, "lr": 0.1, "work": name, "settings": {}}
            await peer.say("full", {**fields, "states": {}, "on_request": {}})
            await peer.say(name[:100], {})
        await asyncio.sleep(1)
        await peer.context.abort(
            grpc.StatusCode.PERMISSION_DENIED, "no \x1b[31m\u202e" + "y" * 3000
        )

    policy = tmp_path / "policy.toml"
    policy.write_text("full_models = true\n")
    words = ("--memory", BUDGET, "--policy", str(policy))
    ended, _ = attacked(script, images, *words, most=MOST)
    assert ended.status == REFUSED, ended
    assert "\x1b" not in ended.output and "\x07" not in ended.output
    assert "\u202e" not in ended.output
    assert len(ended.output) < 40_000
    assert max(map(len, ended.output.splitlines())) < 700
    assert "asks for work" in ended.output

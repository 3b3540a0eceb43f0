"""Test runs whose network, devices or server fail."""

import os
import random
import re
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from semisfl.net import chunks
from semisfl.net.client.connection import Stream
from semisfl.net.client.rejection import Rejected
from semisfl.net.client.shown_terms import read_terms
from semisfl.net.frames import Frame
from semisfl.net.tls import certs
from semisfl.runs.directory import RunDirectory
from semisfl.runs.loop import run_rounds
from semisfl.runs.reading import read_rounds
from tests.cli.test_deploy import TINY, labeled, served, start
from tests.net.harness import (
    Client,
    Leaving,
    Network,
    Proxy,
    assert_same,
    certificates,
    network,
    oracle,
    tiny,
    toy_data,
    undisturbed,
    until,
)

__all__ = ["labeled"]  # a fixture
PHASES = ["broadcast", "forward", "gradients", "upload"]


# --- clients that die -----------------------------------------------------------------------------


def dying(phase: str, round_index: int, step: int) -> Callable[[Client, Frame], None]:
    """Break a client at ``phase``; ``gradients`` is done from outside, once its features are in."""

    def at(client: Client, frame: Frame) -> None:
        if frame.fields.get("round") != round_index or frame.kind not in ("split", "gradients"):
            return
        block = client.device.member.block
        if phase == "broadcast" and frame.kind == "split":
            client.die()
        if phase == "upload" and frame.kind == "gradients":
            block.bottoms = client.die  # type: ignore[method-assign]
        due = 0 if frame.kind == "split" else frame.fields["step"] + 1
        if phase == "forward" and due == step:
            block.forward = client.die  # type: ignore[method-assign]

    return at


def run_with_a_death(phase: str, seed: int) -> None:
    rng = random.Random(f"{phase}{seed}")
    config = tiny(3, seed=seed, clients={"steps": 3})
    victim, round_index, step = rng.randrange(3), rng.randrange(2), rng.randrange(3)
    with network(config) as net:
        for client in range(3):
            net.join(client, break_at=dying(phase, round_index, step) if client == victim else None)
        net.wait_for(3)
        if phase == "gradients":
            kill_before_gradients(net, victim, round_index, step)
        run_rounds(net.experiment)
        assert net.fleet.present() == [client for client in range(3) if client != victim]
        first_missing = {"broadcast": 0, "forward": step, "gradients": step + 1, "upload": 3}[phase]
        assert_same(net.experiment, oracle(config, Leaving(victim, round_index, first_missing)))


def kill_before_gradients(net: Network, victim: int, round_index: int, step: int) -> None:
    original, calls = net.fleet.backward, iter(range(1_000))

    def backward(gradients: torch.Tensor) -> None:
        if next(calls) == round_index * net.config.clients.steps + step:
            net.clients[victim].kill()
            until(lambda: victim not in net.fleet.present())
        original(gradients)

    net.fleet.backward = backward  # type: ignore[method-assign]


@pytest.mark.parametrize("phase", PHASES)
def test_a_client_dies_and_the_run_goes_on_without_it(phase: str) -> None:
    run_with_a_death(phase, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 26))
@pytest.mark.parametrize("phase", PHASES)
def test_a_hundred_deaths(phase: str, seed: int) -> None:
    run_with_a_death(phase, seed)


def test_a_dead_client_comes_back_in_the_next_round() -> None:
    config = tiny(3, rounds=3)
    with network(config) as net:
        for client in range(3):
            net.join(client, break_at=dying("forward", 0, 1) if client == 1 else None)
        net.wait_for(3)
        original = net.fleet.wait_ready

        def wait_ready() -> None:
            if 1 not in net.fleet.present() and not net.clients[1].is_alive():
                net.join(1)
                net.wait_for(3)
            original()

        net.experiment.fleet.wait_ready = wait_ready  # type: ignore[method-assign]
        run_rounds(net.experiment)
        assert_same(net.experiment, oracle(config, Leaving(1, 0, 1, back=1)))
        # Its bytes count on after it is back: two rounds, and one of the two steps of the first.
        counts = net.fleet.traffic.counts
        for (kind, way, client), size in counts.items():
            of_three_rounds = counts[kind, way, 0]
            missing = {
                ("features", "up"): 1 / 6,
                ("gradients", "down"): 2 / 6,
                ("model", "up"): 1 / 3,
            }
            if client == 1:
                assert size == pytest.approx((1 - missing.get((kind, way), 0)) * of_three_rounds)


def test_one_that_answered_and_is_back_before_the_next_step_is_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its new process knows nothing of the round, so gradients would find nobody to take them."""
    config = tiny(3)
    with network(config) as net:
        net.join_all()
        original, calls = net.fleet.backward, iter(range(1_000))

        def backward(gradients: torch.Tensor) -> None:
            if next(calls) == 0:
                net.clients[1].kill()
                until(lambda: 1 not in net.fleet.present())
                net.join(1)
                net.wait_for(3)
            original(gradients)

        net.fleet.backward = backward  # type: ignore[method-assign]
        run_rounds(net.experiment)
        assert_same(net.experiment, oracle(config, Leaving(1, 0, 1, back=1)))
    assert "client-1 is left out of this round: it is not here" in caplog.text
    assert "no progress" not in caplog.text


def test_a_death_in_a_full_model_round() -> None:
    """Those who answered make the round; the bytes of the dead are not counted as crossed."""
    config = tiny(3, method="fedswitch", rounds=1)

    def at(client: Client, frame: Frame) -> None:
        if frame.kind == "states":
            client.die()

    with network(config) as net:
        for client in range(3):
            net.join(client, break_at=at if client == 2 else None)
        net.wait_for(3)
        run_rounds(net.experiment)
        sent = {client for kind, way, client in net.fleet.traffic.counts if way == "up"}
        assert sent == {0, 1}


# --- servers that die -----------------------------------------------------------------------------


class Crash(BaseException):
    """The server's power cut."""


def crash_after(net: Network, calls: int) -> None:
    """Let the server die at one of the fleet's calls."""
    left = [calls]

    def guarded(function: Callable) -> Callable:
        def call(*arguments: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise Crash
            return function(*arguments)

        return call

    for name in ("wait_ready", "start_round", "forward", "backward", "finish_round"):
        setattr(net.fleet, name, guarded(getattr(net.fleet, name)))


def run_with_server_kills(seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    config = tiny(2, seed=seed, rounds=3)
    data, partition = toy_data(2)
    expected = undisturbed(config)
    directory = RunDirectory.create(folder / str(seed), config)
    moments = 3 * (2 + 2 * config.clients.steps + 1)
    net = Network(config, data, partition)
    net.join_all()
    try:
        crash_after(net, rng.randrange(moments))
        if rng.random() < 0.3:
            monkeypatch.setattr(os, "replace", _crash_once(os.replace))
        try:
            run_rounds(net.experiment, directory)
        except Crash:
            port = net.port
            net.fleet.kill()
            monkeypatch.undo()
            net.start_server(port)
            go_on(net, directory)
        assert_same(net.experiment, expected)
        assert net.fleet.traffic.counts == expected.fleet.traffic.counts
        assert [row["round"] for row in read_rounds(directory.path, dict)] == [0, 1, 2]
    finally:
        monkeypatch.undo()
        net.close()


def go_on(net: Network, directory: RunDirectory) -> None:
    if not (directory.path / "latest.safetensors").exists():
        run_rounds(net.experiment, directory)
        return
    state = directory.load()
    net.experiment.load_state_dict(state)
    run_rounds(net.experiment, directory, first=state["round"])


def _crash_once(function: Callable) -> Callable:
    def call(source: object, target: object) -> None:
        if str(target).endswith("latest.safetensors"):
            raise Crash
        function(source, target)

    return call


@pytest.mark.parametrize("seed", range(6))
def test_a_killed_server_resumes_bit_for_bit(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_with_server_kills(seed, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 106))
def test_a_hundred_server_kills(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_with_server_kills(seed, tmp_path, monkeypatch)


# --- slow, silent, doubled, confused --------------------------------------------------------------


def sleeping(round_index: int, seconds: float) -> Callable[[Client, Frame], None]:
    def at(client: Client, frame: Frame) -> None:
        if frame.kind == "gradients" and (frame.fields["round"], frame.fields["step"]) == (
            round_index,
            0,
        ):
            time.sleep(seconds)

    return at


def test_a_straggler_is_left_out_at_the_deadline_and_its_late_frames_are_ignored() -> None:
    """With two devices it comes back in the next round; with more it would be passed over for a while."""
    config = tiny(2, network={"deadline": 2.0})
    with network(config) as net:
        for client in range(2):
            net.join(client, break_at=sleeping(0, 3.0) if client == 0 else None)
        net.wait_for(2)
        run_rounds(net.experiment)
        assert net.clients[0].device.rounds == 1
        assert_same(net.experiment, oracle(config, Leaving(0, 0, 1, back=1)))


@pytest.mark.parametrize(
    "beat, silence", [(0.6, 1.5), pytest.param(None, None, marks=pytest.mark.slow, id="as-is")]
)
def test_a_half_open_connection_is_noticed_on_both_sides(
    beat: float | None, silence: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 30 s as the defaults are; the ordinary suite runs the same at a tenth of them."""
    if beat is not None:
        monkeypatch.setattr(chunks, "BEAT_SECONDS", beat)
        monkeypatch.setattr(chunks, "SILENCE_SECONDS", silence)
    with network(tiny(1)) as net:
        proxy = Proxy(f"127.0.0.1:{net.port}")
        client = net.enrol(0, f"127.0.0.1:{proxy.port}")
        time.sleep(1.5 * chunks.SILENCE_SECONDS)
        assert net.fleet.present() == [0] and client.link.losses == 0, (
            "heartbeats keep an idle link"
        )
        proxy.silent = True
        noticed = until(lambda: not net.fleet.present() and client.link.losses > 0, 30)
        assert noticed < chunks.SILENCE_SECONDS + chunks.BEAT_SECONDS
        proxy.silent = False
        net.wait_for(1)
        proxy.close()


def test_the_newer_of_two_connections_with_one_identity_counts() -> None:
    """The older is fenced off in the middle of a round and never applied again."""
    config = tiny(2, rounds=2)
    entered: list[Client] = []

    def at(client: Client, frame: Frame) -> None:
        if frame.kind == "gradients" and not entered:
            session = net.fleet.sessions.enrolled[0]
            entered.append(net.join(0))
            until(lambda: entered[0].device.joined is not None and older.error is None)
            until(lambda: net.fleet.sessions._latest["plaintext:client-0"] is not session)

    with network(config) as net:
        older = net.enrol(0, break_at=at)
        net.enrol(1)
        run_rounds(net.experiment)
        older.join(30)
        assert isinstance(older.error, Rejected)
        assert "or another device has the same certificate; this older conn" in str(older.error)
        assert older.device.rounds == 0 and net.clients[0].device.rounds == 1
        assert_same(net.experiment, oracle(config, Leaving(0, 0, 1, back=1)))


def test_replayed_and_reordered_frames_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(2)
    expected = undisturbed(config)
    original = Stream.answer
    earlier: defaultdict[Stream, list[tuple[int, bytes]]] = defaultdict(list)

    def answer(self: Stream, ticket: int, frame: bytes) -> None:
        original(self, ticket + 1, frame)
        original(self, ticket, frame)
        original(self, ticket, frame)
        for old in earlier[self][-2:]:
            original(self, *old)
        earlier[self].append((ticket, frame))

    monkeypatch.setattr(Stream, "answer", answer)
    with network(config) as net:
        net.join_all()
        run_rounds(net.experiment)
        assert net.fleet.present() == [0, 1]
        assert_same(net.experiment, expected)


# --- too few, stopping, clocks --------------------------------------------------------------------


def _by_client(row: dict[str, Any]) -> list[int]:
    """Bytes of each client in a round."""
    return [
        sum(size for kind, size in group.items() if kind != "clients")
        for group in row["bytes_by_client"]
        for _ in group["clients"]
    ]


def test_below_quorum_the_round_waits_says_who_is_missing_and_is_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = tiny(3, network={"quorum": 3})
    expected = undisturbed(config)
    with network(config) as net:
        for client in range(3):
            net.join(client, break_at=dying("forward", 1, 1) if client == 2 else None)
        net.wait_for(3)
        caplog.clear()  # on a busy machine it has said that it waits for these three
        caplog.set_level("INFO", "semisfl")

        def come_back() -> None:
            until(lambda: "waiting for devices" in caplog.text, 20)
            net.join(2)

        helper = threading.Thread(target=come_back, daemon=True)
        helper.start()
        rows = run_rounds(net.experiment).rounds
        helper.join(5)
        assert_same(net.experiment, expected)
        on_the_wire = sum(net.stream_bytes())
    assert "round 2 is repeated" in caplog.text
    # What the undone attempt sent has crossed: all three had both bottoms, two sent features.
    crossed = [_by_client(row) for row in rows]
    wasted = rows[1]["bytes_repeated"]
    assert sum(map(sum, crossed)) == rows[1]["bytes_total"] + wasted < on_the_wire
    usual = rows[0]["bytes_by_client"][0]
    sent_before = usual["model_down"] + usual["teacher_down"]
    assert wasted >= 3 * sent_before + 2 * usual["features_up"] // config.clients.steps
    waited = "waiting for devices (2 here, 3 needed); missing: plaintext:client-2"
    assert waited in caplog.text
    assert "all 3 devices are here; training goes on" in caplog.text


def test_clock_steps_of_an_hour_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny(2, network={"deadline": 5.0})
    expected = undisturbed(config)
    real, rng = time.time, random.Random(1)
    monkeypatch.setattr(time, "time", lambda: real() + rng.choice([-3600, 0, 3600]))
    with network(config) as net:
        net.join_all()
        run_rounds(net.experiment)
        assert_same(net.experiment, expected)


# --- processes that are asked to stop -------------------------------------------------------------


def test_processes_over_tls_stop_when_asked_are_killed_and_resume(labeled: Path) -> None:
    """SIGTERM on either side ends it with status 0 within 10 s; SIGKILL of the server is survived."""
    place, out = certificates(Path("certs"), 2), Path("out")
    settings = [*TINY, "clients.total=2", "clients.active=2", "network.quorum=2", "rounds=1000000"]
    secured = ["serve", "--labeled", str(labeled), "--certs", str(place), "--device", "cpu"]

    def rounds() -> int:
        return len(read_rounds(out, dict)) if (out / "metrics.jsonl").exists() else 0

    devices = []
    try:
        new = ("--listen", "localhost:0", "--out", str(out), *settings)
        with served(*secured, *new) as (server, port):
            address = f"localhost:{port}"
            terms = read_terms(address, certs.load_client_credentials(place, "client-0"))
            for name in ("client-0", "client-1"):
                join = ["join", address, "--data", str(labeled / "train" / "a"), "--device", "cpu"]
                own = str(place / "clients" / name)
                devices.append(start(*join, "--certs", own, "--accept", terms.digest))
            until(lambda: rounds() > 3, 60)
        before = rounds()  # and `served` has killed the server
        again = ("--listen", address, "--resume", str(out))
        with served(*secured, *again) as (server, port):
            assert address == f"localhost:{port}"
            until(lambda: rounds() > before, 60)
            devices[0].send_signal(signal.SIGTERM)
            assert devices[0].wait(10) == 0
            server.send_signal(signal.SIGTERM)
            output, _ = server.communicate(timeout=10)
            assert server.returncode == 0 and "continue with: semisfl serve --resume" in output
        new_first, first = re.findall(r"rounds (\d+) to 1000000", (out / "run.log").read_text())
        assert new_first == "1" and int(first) > 3, "it goes on where it was"
        devices[1].send_signal(signal.SIGTERM)
        assert devices[1].wait(10) == 0
    finally:
        for device in devices:
            device.kill()

"""The virtual clock against rounds worked out by hand."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from semisfl.costs import clock
from semisfl.costs.clock import (
    ClientTime,
    DeviceKind,
    LinkSpeed,
    Profile,
    RoundWork,
    Share,
    World,
    time_round,
)
from semisfl.settings.sections import ConfigError

G = 1e9


@dataclass(frozen=True)
class Fixed(World):
    """Client 0 sends 1,000 bytes/s, receives 2,000 and computes 1 GFLOP/s; client 1 has half of each."""

    def rates(self, round_index: int, client: int) -> tuple[float, float]:
        return 1000 / (1 + client), 2000 / (1 + client)

    def device(self, client: int) -> DeviceKind:
        return DeviceKind(name="", gflops=1 / (1 + client))


def fixed(latency: float = 0.0) -> World:
    server = Profile(server_gflops=10, devices=(DeviceKind(name="unused"),))
    return Fixed(LinkSpeed(1, 1), LinkSpeed(1, 1), latency, server)


def split(client: int, steps: int = 3, **changes: float) -> Share:
    parts = {
        "down": 4000,
        "up": 1000,
        "forward": 2 * G,
        "backward": 1 * G,
        "step_up": 2000,
        "step_down": 1000,
        "server": 5 * G,
    }
    return Share(client, steps=steps, **parts | changes)  # type: ignore[arg-type]


def test_a_split_round_of_one_client() -> None:
    """
    server alone 20 GFLOP                               2
    down 4000 B 2, forward 2, features 2                6
    server 0.5, gradients 0.5, backward 1, forward 2, features 2    6 each, twice
    server 0.5, gradients 0.5, backward 1, bottom 1                 3
    """
    timing = time_round(0, RoundWork(20 * G, [[split(0)]]), fixed())
    assert timing.seconds == pytest.approx(2 + 6 + 2 * 6 + 3)
    assert timing.server == pytest.approx(2 + 3 * 0.5)
    # 3 forward and backward; 2 + 3 * 2.5 + 1 of bytes; the rest it waits for the server.
    assert timing.clients == {0: ClientTime(9.0, 10.5, pytest.approx(3.5))}


def test_an_iteration_ends_with_its_slowest_client() -> None:
    """Client 1 takes twice as long for everything, and the server computes for both.

    alone 2; first features 12; then (1 + 11) twice; at last 1 + gradients 1, backward 2, bottom 2
    """
    timing = time_round(0, RoundWork(20 * G, [[split(0), split(1)]]), fixed())
    assert timing.seconds == pytest.approx(2 + 12 + 2 * 12 + 6)
    assert timing.clients[1] == ClientTime(18.0, 21.0, pytest.approx(44 - 39))
    assert timing.clients[0] == ClientTime(9.0, 10.5, pytest.approx(44 - 19.5))


def test_two_clients_that_are_each_slowest_in_one_phase() -> None:
    """One client has the longer download, the other the longer steps. The round waits for both.

    client 0: first features at 20 + 2 + 2 = 24, then 0.5 + 1 + 2 + 2 = 5.5, at last 0.5 + 1 + 1
    client 1: first features at 4 + 4 + 4 = 12, then 1 + 2 + 4 + 4 = 11, at last 1 + 2 + 2
    """
    both = [split(0, down=40_000), split(1)]
    timing = time_round(0, RoundWork(0, [both]), fixed())
    assert timing.seconds == pytest.approx(24 + 2 * 11 + 5 + 3 * 1.0)


def test_a_client_that_left_delays_no_later_iteration() -> None:
    """Client 1 answers one step of three: the other two are client 0's alone, and the server's."""
    timing = time_round(0, RoundWork(0, [[split(0), split(1, steps=1, up=0)]]), fixed())
    assert timing.seconds == pytest.approx(12 + 2 * 5.5 + 2.5 + (1.0 + 0.5 + 0.5))


def test_every_message_takes_its_latency() -> None:
    """There and back at the start, in every step but the first, and at the end: 2 K_u + 2."""
    slow = time_round(0, RoundWork(0, [[split(0)]]), fixed(0.25))
    assert slow.seconds == pytest.approx(6 + 11 + 2.5 + 3 * 0.5 + 8 * 0.25)
    assert slow.clients[0].sending == pytest.approx(10.5 + 8 * 0.25)
    full = time_round(0, RoundWork(0, [[Share(0, 2000, 1000, 5 * G, messages=6)]]), fixed(0.25))
    assert full.seconds == pytest.approx(1 + 5 + 1 + 6 * 0.25)


def test_whole_models_end_with_the_slowest_client_of_each_phase() -> None:
    """Statistics are gathered after the training of all clients, so the two times add up."""
    training = [Share(0, 2000, 1000, 5 * G), Share(1, 2000, 1000, 1 * G)]
    timing = time_round(0, RoundWork(10 * G, [training, [Share(1, 2000, 0, 0)]]), fixed())
    assert timing.seconds == pytest.approx(1 + 7 + 2)
    assert timing.clients[0] == ClientTime(5.0, 2.0, pytest.approx(3.0))
    assert timing.clients[1] == ClientTime(2.0, 6.0, pytest.approx(2.0))


def test_a_round_without_clients_takes_the_servers_time() -> None:
    timing = time_round(3, RoundWork(20 * G), fixed())
    assert (timing.round, timing.seconds, timing.server, timing.clients) == (3, 2.0, 2.0, {})


def test_links_vary_by_round_and_client_and_draws_repeat() -> None:
    world = World(LinkSpeed(0.8, 8), LinkSpeed(10, 20), 0, clock.load_profile("jetson-mix"), seed=4)
    drawn = {(h, i): world.rates(h, i) for h in range(40) for i in range(5)}
    ups, downs = zip(*drawn.values(), strict=True)
    assert len(set(ups)) == len(set(downs)) == 200
    megabit = 1e6 / 8
    assert 0.8 <= min(ups) / megabit < 1.2 and 7.6 < max(ups) / megabit <= 8
    assert 10 <= min(downs) / megabit < 10.5 and 19.5 < max(downs) / megabit <= 20
    assert sum(ups) / 200 / megabit == pytest.approx(4.4, abs=0.4)
    again = World(LinkSpeed(0.8, 8), LinkSpeed(10, 20), 0, clock.load_profile("jetson-mix"), seed=4)
    assert again.rates(39, 4) == drawn[39, 4] and again.device(3) == world.device(3)
    other = World(LinkSpeed(0.8, 8), LinkSpeed(10, 20), 0, clock.load_profile("jetson-mix"), seed=5)
    assert other.rates(39, 4) != drawn[39, 4]


def test_every_draw_has_its_own_purpose() -> None:
    """Numbers of recorded tables follow from these draws, so they are pinned here."""
    world = World(LinkSpeed(0, 1), LinkSpeed(0, 1), 0, clock.load_profile("jetson-mix"), seed=3)
    kinds = Profile(devices=tuple(DeviceKind(name=str(n)) for n in range(100)))
    drawn = [int(replace(world, profile=kinds).device(client).name) for client in range(6)]
    up, down = (
        [round(8e-6 * world.rates(0, client)[way], 3) for client in range(3)] for way in (0, 1)
    )
    assert drawn == [60, 96, 66, 74, 34, 5]
    assert (up, down) == ([0.654, 0.578, 0.599], [0.222, 0.992, 0.957])


def test_devices_are_drawn_by_their_shares() -> None:
    profile = Profile(devices=(DeviceKind(name="a", share=3), DeviceKind(name="b", share=1)))
    world = World(LinkSpeed(1, 1), LinkSpeed(1, 1), 0, profile)
    names = [world.device(client).name for client in range(400)]
    assert 260 < names.count("a") < 340
    assert [profile.pick(at).name for at in (0, 0.749, 0.75, 0.999)] == ["a", "a", "b", "b"]


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[ours]\ndevices = [{name = "x", gflops = 7}]\n')
    assert clock.load_profile(str(file)).devices[0].flops == 7e9
    file.write_text(file.read_text() + '[other]\ndevices = [{name = "y", gflops = -1}]\n')
    with pytest.raises(ConfigError, match=r"mine.toml:ours, .*mine.toml:other"):
        clock.load_profile(str(file))
    with pytest.raises(ConfigError, match="gflops = -1"):
        clock.load_profile(f"{file}:other")
    with pytest.raises(ConfigError, match="jetson-mix"):
        clock.load_profile("cray")

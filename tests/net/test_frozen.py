"""A frozen bottom over the network: devices send the rows of their images once, and the server trains on its files."""

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from semisfl.cli.main import main
from semisfl.fleet.caps import Classified
from semisfl.fleet.frozen import FOLDER, FrozenFleet
from semisfl.fleet.rows import RowFile
from semisfl.net.client.allowance import Allowance
from semisfl.net.client.device import Device
from semisfl.net.client.rejection import Rejected
from semisfl.net.frames import Frame, encode
from semisfl.net.server import frozen as server_side, uploads
from semisfl.net.server.roster import REMOVED, remove_device
from semisfl.runs.checkpoint import snapshot
from semisfl.runs.experiment import Experiment, assemble
from semisfl.runs.loop import run_rounds
from semisfl.settings.config import Config
from semisfl.settings.policy import DevicePolicy, PolicyBreach, read_policy
from tests.cli.test_deploy import TINY, joined, labeled, serve_words, served
from tests.net.harness import (
    BATCHNORM,
    Client,
    Network,
    assert_same,
    network,
    tiny,
    toy_data,
    until,
)

__all__ = ["labeled"]  # a fixture
NOISY = {"clip": 4.0, "noise": 0.1}
STRICT = read_policy(Path(__file__).parents[2] / "policies" / "strict.toml")
CODECS = {"student_features": "int8", "teacher_features": "fp16", "models": "bf16"}


def frozen(count: int = 3, **changes: Any) -> Config:
    clients = {"bottom": "frozen", "weak_views": 2, "strong_views": 3}
    return tiny(count, **{**changes, "clients": clients | changes.get("clients", {})})


def simulated(config: Config, late: int = -1, first: int = 0) -> Experiment:
    """Return the run with simulated clients, done: client ``late`` is there from round ``first`` on."""

    class NamedClients(FrozenFleet):
        """Clients with the names of `Network`'s devices."""

        rounds = 0

        def members(self) -> dict[int, str]:
            return {client: f"plaintext:client-{client}" for client in super().members()}

        def present(self) -> Sequence[int]:
            return [one for one in super().present() if one != late or self.rounds >= first]

        def image_counts(self) -> dict[int, int]:
            return dict.fromkeys(self.present(), 12)

        def settle(self, good: bool) -> None:
            self.rounds += 1

    experiment = assemble(
        config, *toy_data(config.clients.total), device="cpu", make_fleet=NamedClients
    )
    experiment.fleet.open(None)
    run_rounds(experiment)
    return experiment


def sent(net: Network, *clients: int, **how: Any) -> list[Client]:
    """Let these clients send their rows, and wait until they have ended."""
    devices = [net.join(client, **how) for client in clients]
    for device in devices:
        device.join(30)
        assert device.error is None and device.device.finished
    return devices


def ended(client: Client) -> str:
    client.join(30)
    assert isinstance(client.error, Rejected), client.error
    return str(client.error)


def image_by_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers ask for the rows of one image at a time."""
    monkeypatch.setattr(uploads, "PART", 1)
    monkeypatch.setattr(uploads, "TOGETHER_CPU", 1)


def dying(after: int) -> Callable[[Client, Frame], None]:
    """Break a client at the question that follows ``after`` parts."""

    def at(client: Client, frame: Frame) -> None:
        if frame.kind == "encode" and client.device.upload.sent == after:  # type: ignore[union-attr]
            client.die()

    return at


# --- the same run as a simulated one ---------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{}, {"wire": CODECS, "model": {"layers": BATCHNORM}}, {"method": "fedswitch-sl"}],
    ids=str,
)
def test_a_run_is_the_simulated_one_and_needs_no_device(changes: dict[str, Any]) -> None:
    config = frozen(**changes)
    with network(config) as net:
        sent(net, 2, 0, 1)
        until(lambda: not net.fleet.sessions.enrolled)
        run_rounds(net.experiment)
        expected = simulated(config)
        assert_same(net.experiment, expected)
        assert net.fleet.traffic.counts == expected.fleet.traffic.counts
        up = sum(client.link.sent for client in net.clients.values())
        assert up > net.fleet.traffic.by_kind()["features_up"] > 0.5 * up


def test_a_device_that_is_killed_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    image_by_image(monkeypatch)
    config = frozen(2)
    with network(config) as net:
        net.join(0, break_at=dying(5)).join(30)
        assert net.fleet.contents().startswith("0 images of 0 of 2")
        (again, other) = sent(net, 0, 1)
        assert again.device.upload.sent == 7 and other.device.upload.sent == 12
        run_rounds(net.experiment)
        expected = simulated(config)
        assert_same(net.experiment, expected)
        # It downloaded the bottom twice, and sent each image once.
        counts = expected.fleet.traffic.counts
        counts["model", "down", 0] *= 2
        assert net.fleet.traffic.counts == counts


def test_a_late_client_takes_part_from_the_next_round_on() -> None:
    config = frozen(rounds=4)
    with network(config) as net:
        sent(net, 0, 1)
        original = net.fleet.start_round

        def start_round(plan: Any) -> None:
            if plan.index == 1:
                sent(net, 2)
            original(plan)

        net.fleet.start_round = start_round  # type: ignore[method-assign]
        run_rounds(net.experiment)
        assert_same(net.experiment, simulated(config, late=2, first=2))


@pytest.mark.parametrize("stopped_in", [0, 1])
def test_a_server_that_is_killed_repeats_its_round_with_the_same_images(
    stopped_in: int, tmp_path: Path
) -> None:
    """A client sends its rows after the round under way has begun: its next attempt does not draw from them."""
    config = frozen(rounds=4, network={"quorum": 2})
    data, partition = toy_data(3)
    net = Network(config, data, partition, directory=tmp_path)
    try:
        sent(net, 0, 1)
        for index in range(stopped_in):
            net.fleet.wait_ready()
            net.experiment.method.round(index)
            net.fleet.settle(True)
        state = snapshot(net.experiment.state_dict())
        net.fleet.wait_ready()
        net.experiment.method.round(stopped_in)
        sent(net, 2)
        net.fleet.kill()
        (tmp_path / FOLDER / "plaintext%3Aclient-2.rows").open("ab").write(b"half an image")
        net.start_server(state=state if stopped_in else None)
        (back,) = sent(net, 2)
        assert back.device.upload.sent == 0 and back.link.received < 10_000
        run_rounds(net.experiment, first=stopped_in)
        expected = simulated(config, late=2, first=stopped_in + 1)
        assert_same(net.experiment, expected)
        assert net.fleet.traffic.counts == expected.fleet.traffic.counts
    finally:
        net.close()


def test_rows_of_a_removed_device_are_not_drawn_any_more(tmp_path: Path) -> None:
    config = frozen(2, rounds=4)
    net = Network(config, *toy_data(2), directory=tmp_path)
    try:
        sent(net, 0, 1)
        for index, removed in enumerate(["client-0", "client-1", None]):
            net.fleet.wait_ready()
            net.experiment.method.round(index)
            assert len(net.fleet.present()) == 2 - index % 2
            if removed is not None:
                remove_device(tmp_path, f"plaintext:{removed}")
            net.fleet.settle(True)
            if removed == "client-1":  # nobody is left
                (tmp_path / REMOVED).unlink()
                net.fleet.sessions.free_places()
                sent(net, 0, 1)
        assert net.fleet.image_counts() == {0: 12, 1: 12}
    finally:
        net.close()


def test_a_file_that_somebody_removed_is_waited_for_whoever_else_is_there(tmp_path: Path) -> None:
    net = Network(frozen(rounds=1, network={"quorum": 2}), *toy_data(3), directory=tmp_path)
    try:
        sent(net, 0, 1)
        net.fleet.wait_ready()  # fixes the images of the first round
        net.fleet.kill()
        (tmp_path / FOLDER / "plaintext%3Aclient-0.rows").unlink()
        net.start_server()
        sent(net, 2)
        net.join(0)
        run_rounds(net.experiment)
        assert net.fleet.image_counts() == {0: 12, 1: 12, 2: 12}
    finally:
        net.close()


def test_images_that_come_later_are_sent_alone(tmp_path: Path) -> None:
    config = frozen(1)
    data, partition = toy_data(1)
    net = Network(config, data, partition, directory=tmp_path)
    try:
        images = data.images[partition.clients[0]]
        sent(net, 0, images=images[:7])
        (path,) = (tmp_path / FOLDER).glob("*.rows")
        before = path.read_bytes()
        twice = torch.cat([images[[11, 3]], images, images[:1]])
        (again,) = sent(net, 0, images=twice)
        assert again.device.upload.sent == 8 and path.read_bytes().startswith(before)
        assert RowFile(path).images == 15
        assert net.fleet.collect() and net.fleet.contents().startswith("15 images of 1 of 1 device")
    finally:
        net.close()


# --- what goes wrong -------------------------------------------------------------------------------


def test_a_bottom_that_the_terms_do_not_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_side, "weights_digest", lambda weights: "sha256:" + 64 * "0")
    with network(frozen(1)) as net:
        assert "no bottom with the weights that its terms name" in ended(net.join(0))
        assert not net.fleet.store.begin("plaintext:client-0")


def test_impossible_rows_are_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Device.answer

    def answer(self, received, kind, fields, cleared=None, codecs="fp32") -> None:  # type: ignore[no-untyped-def]
        if kind != "rows":
            return original(self, received, kind, fields, cleared, codecs)
        rows = torch.full_like(cleared.tensors["rows"], 127)
        received.stream.answer(received.ticket, b"".join(encode(kind, fields, {"rows": rows})))

    monkeypatch.setattr(Device, "answer", answer)
    with network(frozen(1)) as net:
        assert "are possible" in ended(net.join(0))
        assert list(net.strikes.values()) == [1]
        assert not net.fleet.store.begin("plaintext:client-0")


def test_a_device_waits_while_the_disk_is_full(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original, calls = uploads.append_whole, iter(range(100))

    def append(*what: Any) -> None:
        if next(calls) < 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(*what)

    monkeypatch.setattr(uploads, "append_whole", append)
    with network(frozen(1)) as net:
        (device,) = sent(net, 0)
        assert device.link.losses == 2 and not net.strikes
    assert "cannot write what it has to keep: No space left on device" in caplog.text


# --- quotas ----------------------------------------------------------------------------------------


def test_views_beyond_a_quota_refuse_the_terms_at_once() -> None:
    with network(frozen(1)) as net:
        reason = ended(net.join(0, policy=DevicePolicy(uses_per_image=4)))
        assert "uses_per_image = 4" in reason and "strong_views = 3" in reason
        assert not net.fleet.roster.images
    own = network(frozen(1, policy={"uses_per_image": 4}))
    with pytest.raises(PolicyBreach, match="strong_views = 3"), own:
        pass


def test_each_image_counts_once_also_over_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image_by_image(monkeypatch)
    policy, file = DevicePolicy(uses_per_image=9), tmp_path / "policy.spent.json"
    with network(frozen(1)) as net:
        dead = net.join(0, policy=policy, allowance=Allowance(file), break_at=dying(5))
        dead.join(30)
        assert len(Allowance(file).classified.images) == 12
        sent(net, 0, policy=policy, allowance=Allowance(file))
        sent(net, 0, policy=policy, allowance=Allowance(file))
        uses = {one for one, _ in Allowance(file).classified.images.values()}
        assert uses == {5} and len(Allowance(file).classified.images) == 12
    with network(frozen(1, seed=8)) as net:  # other views of the same images
        reason = ended(net.join(0, policy=policy, allowance=Allowance(file)))
        assert "an image would be used 10 times" in reason


def test_the_strict_policy_sends_the_usual_views_of_an_image_in_int8_and_no_more(
    tmp_path: Path,
) -> None:
    allowance = Allowance(tmp_path / "strict.spent.json")
    wire = {"student_features": "int8", "teacher_features": "int8"}
    with network(frozen(1, clients={"strong_views": 4}, wire=wire)) as net:
        sent(net, 0, policy=STRICT, allowance=allowance)
    assert {uses for uses, _ in allowance.classified.images.values()} == {6}
    with network(frozen(1, clients={"strong_views": 5}, wire=wire)) as net:
        assert "uses_per_image = 6" in ended(net.join(0, policy=STRICT))
    with network(frozen(1, clients={"bottom": "trained"}, wire=wire)) as net:
        assert "set clients.bottom = 'frozen'" in ended(net.join(0, policy=STRICT))


def test_rows_that_are_sent_again_have_the_same_noise(tmp_path: Path) -> None:
    """Other noise on the same rows would tell more than was counted. It follows from a secret beside the counts."""
    policy = DevicePolicy(**NOISY, bits_per_image=1e6)
    contents = []
    for place, device in enumerate(["one", "one", "two"]):
        (tmp_path / str(place)).mkdir()
        net = Network(frozen(1), *toy_data(1), directory=tmp_path / str(place))
        try:
            sent(net, 0, policy=policy, allowance=Allowance(tmp_path / device))
        finally:
            net.close()
        (path,) = (tmp_path / str(place) / FOLDER).iterdir()
        contents.append(path.read_bytes())
    assert contents[0] == contents[1] != contents[2]
    spent = {name: Allowance(tmp_path / name).classified for name in ("one", "two")}
    assert spent["one"] == spent["two"] != Classified()


# --- the commands ----------------------------------------------------------------------------------


def test_rows_are_collected_first_and_trained_on_later(labeled: Path) -> None:
    words = serve_words(labeled, "--out", "out", *TINY, "clients.bottom=frozen", "--collect-only")
    with served(*words) as (server, port):
        device = joined(port, labeled)
        assert device.returncode == 0 and "rows of 8 of 8 images sent now" in device.stderr
        out, _ = server.communicate(timeout=60)
        assert server.returncode == 0 and out.startswith("8 images of 1 of 1 device")
    with served(*serve_words(labeled, "--resume", "out")) as (server, _):
        out, _ = server.communicate(timeout=60)
        assert server.returncode == 0 and "(2 of 2;" in out
    assert main(serve_words(labeled, *TINY, "--collect-only")) == 2
    mistake = [*TINY, "clients.bottom=frozen", "--out", "other", "--watch", "0.0.0.0:0"]
    assert main(serve_words(labeled, *mistake)) == 2 and not Path("other").exists()

"""Quotas of a device: counted on disk before anything is sent, by every process, to the last round they allow."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from semisfl.fleet.base import RoundAborted
from semisfl.fleet.caps import Classified, RoundSizes, RoundUse, Spent
from semisfl.net.client.allowance import Allowance, beside
from semisfl.net.client.rejection import Rejected
from semisfl.runs.loop import run_rounds
from semisfl.settings.config import ConfigError
from semisfl.settings.policy import DevicePolicy, PolicyBreach, parse_policy
from tests.disk import largest_file
from tests.net.harness import Client, Network, audited, network, tiny, until

POLICIES = Path(__file__).parents[2] / "policies"
NOISY = {"clip": 1.0, "noise": 0.14, "update_clip": 1.0, "update_noise": 0.01}
ROUNDS = DevicePolicy(rounds=3)


def ended(client: Client) -> str:
    client.join(30)
    assert isinstance(client.error, Rejected), client.error
    return str(client.error)


def counted(net: Network, rounds: int) -> None:
    for index in range(rounds):
        net.experiment.method.round(index)


# --- the file ------------------------------------------------------------------------------------


def test_every_number_is_read_as_it_was_written(tmp_path: Path) -> None:
    file, policy = tmp_path / "policy.spent.json", DevicePolicy(rounds=9, uses_per_image=99)
    Allowance(file).take(policy, RoundUse(uses=7, bits=2.5))
    Allowance(file).take(policy, RoundUse(uses=4, bits=1.0))
    Allowance(file).take_answers(policy, ["one", "two", "one"], 0.5)
    again = Allowance(file)
    assert again.spent == Spent(rounds=2, uses=11, bits=3.5)
    assert again.classified == Classified({"one": (2, 1.0), "two": (1, 0.5)})
    assert again.total == Spent(rounds=2, uses=13, bits=4.5)
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", "[]", '{"rounds": [], "uses": 0, "bits": 0}', "[" * 100_000),
        *('{"rounds": -1, "uses": 0, "bits": 0}', '{"rounds": 0, "uses": 0, "bits": NaN}'),
        *('{"rounds": 2, "uses": 3}', '{"rounds": 1e999, "uses": 0, "bits": 0}'),
        '{"rounds": 0, "uses": 0, "bits": 0, "classified": {"a": [-1, 0]}}',
    ],
    ids=range(10),
)
def test_a_damaged_count_is_said_and_never_read_as_nothing(text: str, tmp_path: Path) -> None:
    file = tmp_path / "policy.spent.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"policy\.spent\.json cannot be read: .*restore it"):
        Allowance(file)
    assert file.read_text() == text


def test_nothing_is_sent_that_cannot_be_counted(tmp_path: Path) -> None:
    allowance = Allowance(tmp_path / "not there" / "policy.spent.json")
    with pytest.raises(ConfigError, match=r"spent\.json cannot be written \(No such file"):
        allowance.take(ROUNDS, RoundUse())
    file = tmp_path / "policy.spent.json"
    Allowance(file).take(ROUNDS, RoundUse())
    with (
        largest_file(4),
        pytest.raises(ConfigError, match=r"cannot be written \(.* in a folder with room"),
    ):
        Allowance(file).take(ROUNDS, RoundUse())
    assert Allowance(file).spent.rounds == 1


def test_processes_that_share_a_file_share_its_quotas(tmp_path: Path) -> None:
    file = beside(tmp_path / "policy.toml")
    one, other = Allowance(file), Allowance(file)
    for allowance in (one, other, one):
        allowance.take(ROUNDS, RoundUse())
    with pytest.raises(PolicyBreach, match="round 4"):
        other.take(ROUNDS, RoundUse())
    with one.counting(ROUNDS):  # as a process that starts: it gives back nothing
        pass
    assert Allowance(file).spent.rounds == 3


# --- over the network ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ({"rounds": 2}, "round 3 of this client would exceed the policy's rounds = 2"),
        ({**NOISY, "bits_per_image": 2.5}, "bits about an image, the policy has bits_per_image"),
    ],
    ids=["rounds", "bits"],
)
def test_a_quota_ends_the_part_before_anything_is_sent_and_outlasts_the_process(
    policy: dict[str, float],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = beside(tmp_path / "policy.toml")
    with network(tiny(1, rounds=3)) as net:
        held = RoundSizes.of(net.experiment.method.student, 4, 12)  # type: ignore[attr-defined]
        each = RoundUse.of_split(DevicePolicy(**NOISY), 2, held).bits
        if "bits_per_image" in policy:
            policy = {**policy, "bits_per_image": policy["bits_per_image"] * each}
        limits = DevicePolicy(**policy)
        for count in range(2):  # the second time as a new process, which must remember the first
            client = net.enrol(0, policy=limits, allowance=Allowance(file))
            net.experiment.method.round(count)
            if not count:
                client.device.stop()
                client.join(30)
                until(lambda: not net.fleet.present())
        before = {key: n for key, n in net.fleet.traffic.counts.items() if key[1] == "up"}
        with pytest.raises(RoundAborted):
            net.experiment.method.round(2)
        assert reason in ended(client)
        assert before == {k: n for k, n in net.fleet.traffic.counts.items() if k[1] == "up"}
        assert reason in ended(net.join(0, policy=limits, allowance=Allowance(file)))
    spent = Allowance(file).spent
    assert spent.rounds == 2 and (not limits.noise or spent.bits == pytest.approx(2 * each))
    assert audited(caplog)[-1].endswith("its owner's quotas are used up"), "and no numbers"


# A round of `tiny` uses each of a device's 12 images once at most: 2 steps of 4.
@pytest.mark.parametrize(
    ("method", "policy", "last", "reason"),
    [
        ("semisfl", ROUNDS, Spent(2, 9), "round 4 of this client would exceed"),
        ("semisfl", DevicePolicy(uses_per_image=3), Spent(9, 2), "an image would be used 4 times"),
        ("fedswitch", DevicePolicy(rounds=3, full_models=True), Spent(2, 3), "round 4 of this"),
    ],
)
def test_a_device_takes_part_to_the_last_round_of_its_quotas_and_no_more(
    method: str, policy: DevicePolicy, last: Spent, reason: str, tmp_path: Path
) -> None:
    allowance = Allowance()
    allowance.spent = last
    with network(tiny(1, method=method)) as net:
        client = net.enrol(0, policy=policy, allowance=allowance)
        net.experiment.method.round(0)
        assert client.error is None and net.fleet.present() == [0]
    with network(tiny(1, method=method)) as net:
        net.fleet.device_log.open(tmp_path, net.fleet.status)
        assert f"policy ends its part: {reason}" in ended(
            net.join(0, policy=policy, allowance=allowance)
        )
        until(lambda: (tmp_path / "fleet.jsonl").exists())
        assert net.fleet.roster.images == {} and not net.fleet.device_log.events["here"]
    assert json.loads((tmp_path / "fleet.jsonl").read_text())["by"] == "device"


def test_a_quick_run_logs_the_bits_of_every_round(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "semisfl")
    rounds = 70
    with network(tiny(1, rounds=rounds, clients={"steps": 1})) as net:
        net.enrol(0, policy=DevicePolicy(**NOISY))
        counted(net, rounds)
    assert caplog.text.count("bits about any one image") == rounds


# --- the policies that are shipped ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["open", "strict"])
def test_the_policies_that_are_shipped_say_who_takes_part(name: str, tmp_path: Path) -> None:
    policy = parse_policy(tomllib.loads((POLICIES / f"{name}.toml").read_text()))
    file = beside(Path(shutil.copy(POLICIES / f"{name}.toml", tmp_path)))
    with network(tiny(1, rounds=3)) as net:
        if name == "open":
            client = net.enrol(0, policy=policy, allowance=Allowance(file))
            net.experiment.method.round(0)
            assert client.device.allowance.total.bits == float("inf") and not file.exists()
            return
        reason = ended(net.join(0, policy=policy, allowance=Allowance(file)))
        assert "clients.bottom = 'trained' sends a bottom back" in reason


def test_a_device_with_noise_beside_others_is_not_shut_out() -> None:
    """Its noise is far larger than their features, which no fault of its own explains."""
    noisy = DevicePolicy(clip=30.0, noise=0.14, update_clip=0.3, update_noise=0.03)
    with network(tiny(3, rounds=2, robust={"aggregate": "clipped_mean"})) as net:
        net.enrol(0, policy=noisy)
        net.enrol(1)
        net.enrol(2)
        run_rounds(net.experiment)
        assert not net.strikes
        assert net.fleet.device_log.events["left_out"] == 0

"""One run over the ranks of torchrun: its files, its end, and a rank that dies in the middle."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from semisfl.attacks import scene as scenes
from semisfl.cli import runner
from semisfl.fleet.cluster.ranks import Launch
from semisfl.metrics import RoundMetrics
from semisfl.runs.directory import RunDirectory
from semisfl.runs.sinks import Callback
from semisfl.runs.start import resume, train
from semisfl.settings.config import ConfigError, parse
from tests.cli.test_signals import images as images
from tests.net.harness import until
from tests.processes import Forked
from tests.toy import but_for_time

PATIENCE = 200.0
SETTINGS = {
    "clients": {"total": 3, "active": 3, "batch": 4, "steps": 2},
    "server": {"batch": 4, "steps": 2},
    "data": {"labeled": 8, "validation": 0.2},
    "runtime": {"checkpoint_every": 1},
}


def words_of(images: Path, rounds: int, *more: str) -> list[str]:
    """Return the words of ``semisfl run`` with `SETTINGS`."""
    pairs = [
        f"{section}.{key}={value}"
        for section, row in SETTINGS.items()
        for key, value in row.items()
    ]
    return [
        "run",
        "--set",
        f"rounds={rounds}",
        f"data.name={images}",
        "data.augment.cutout=4",
        *pairs,
        *more,
    ]


def numbers(path: Path) -> list[dict[str, Any]]:
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return but_for_time([json.loads(line) for line in lines])


class OneRound(Callback):
    def on_round(self, metrics: RoundMetrics) -> bool:
        return True


def until_rounds(path: Path, count: int, process: "subprocess.Popen[str]") -> None:
    def over() -> bool:
        file = path / "metrics.jsonl"
        done = file.exists() and file.read_text().count("\n") >= count
        return done or process.poll() is not None

    until(over, PATIENCE)
    assert process.poll() is None, process.communicate()


def children(process: "subprocess.Popen[str]") -> dict[str, int]:
    """Return the processes by rank."""
    processes = {}
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
        processes |= {pair[5:]: int(pid) for pair in environment if pair.startswith("RANK=")}
    return processes


def ranks(*words: str, restart: int = 0) -> "list[subprocess.Popen[str]]":
    """Start two ranks as torchrun --max-restarts would, for the first time or once more."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"TORCHELASTIC_RESTART_COUNT": str(restart), "TORCHELASTIC_MAX_RESTARTS": "1"}
    environment |= {"OMP_NUM_THREADS": "1"}
    return [
        Forked(
            [sys.executable, "-m", "semisfl", *words],
            env={**os.environ, **environment, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]


def test_a_signal_ends_all_ranks_and_the_run_can_go_on(images: Path) -> None:
    """torchrun passes Ctrl-C on to every rank. The run continues without torchrun too."""
    out = images.parent / "out"
    first, second = ranks(*words_of(images, 1_000_000, "--out", str(out)))
    until_rounds(out, 1, first)
    for process in (second, first):
        process.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=PATIENCE)
    silent = second.communicate(timeout=PATIENCE)
    assert (first.returncode, second.returncode) == (0, 0)
    assert "stopped; continue with: semisfl run --resume" in output
    assert silent == ("", "")
    done = len(numbers(out))
    assert RunDirectory(out).load()["round"] == done
    assert len(resume(out, device="cpu", callbacks=[OneRound()]).rounds) == done + 1
    assert RunDirectory(out).config().fleet.kind == "cluster", "torchrun may take it over again"
    assert scenes.scene_of_run(out, "cpu", None).config.fleet.kind == "local"


def test_a_lost_rank_ends_all_and_the_restarted_run_goes_on(images: Path) -> None:
    """Rank 0 says in one line that rank 1 was killed. Started again, both do the rest of the rounds."""
    rounds = 6
    for attempt in range(3):
        out = images.parent / f"out{attempt}"
        words = words_of(images, rounds, "--out", str(out), "--quiet")
        first, second = ranks(*words)
        until_rounds(out, 2, first)
        second.kill()
        second.communicate()
        try:
            output, complained = first.communicate(timeout=60)
            break
        except subprocess.TimeoutExpired:
            # If a connection ends just as gloo sends, gloo waits for half an hour; torchrun would end this rank.
            first.kill()
            first.communicate()
    assert first.returncode == 1 and output == ""
    assert complained.startswith("error: another rank is gone; torchrun --max-restarts N")
    assert len(numbers(out)) < rounds, "it was over before the rank was killed"
    for rank in ranks(*words, restart=1):
        complained = rank.communicate(timeout=PATIENCE)[1]
        assert rank.returncode == 0, complained
    assert re.search(r"rounds [2-9] to 6", (out / "run.log").read_text()), "it began again"
    assert_as_alone(out)


def assert_as_alone(out: Path) -> None:
    """Assert that the numbers are those of one process that nobody disturbed."""
    config, alone = RunDirectory(out).config(), out.parent / "alone"
    assert config.fleet.kind == "cluster"
    train(config.in_fleet("local"), out=alone, device="cpu")
    assert numbers(out) == numbers(alone)


@pytest.mark.slow  # ranks of their own Python; what a lost rank leads to is tested above
def test_a_killed_rank_is_started_again_and_the_run_goes_on(images: Path) -> None:
    """torchrun itself starts the ranks, twice; only rank 0 writes and prints."""
    rounds, out = 16, images.parent / "out"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--max-restarts", "1", "--standalone", "--tee", "3", "-m", "semisfl"]
    run = Forked(
        [*launcher, *words_of(images, rounds, "--out", str(out))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until_rounds(out, 2, run)
    os.kill(children(run)["1"], signal.SIGKILL)
    output, complained = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0, complained
    assert "going on from" in (out / "run.log").read_text() or "going on from" in complained
    assert "[default1]" not in output and "[default1]:semisfl" not in complained
    assert output.count(f"after the last round ({rounds} of {rounds}; best ") == 1
    assert_as_alone(out)


def test_a_restarted_run_continues_only_in_its_own_directory(tmp_path: Path) -> None:
    config, out = parse({**SETTINGS, "rounds": 2}), tmp_path / "out"
    again = Launch(0, 0, max_restarts=3)
    with pytest.raises(ConfigError, match="--max-restarts needs --out DIR"):
        runner.lead(again, config, None)
    mine, resumed = runner.lead(again, config, out)
    assert mine.fleet.kind == "cluster" and resumed is None, "it had not begun"
    RunDirectory.create(out, mine).unlock()
    assert runner.lead(again, config, out) == (mine, out)
    assert runner.lead(Launch(0, 0, max_restarts=0), config, out)[1] is None, (
        "which is refused later"
    )
    other = config.model_copy(update={"seed": 7})
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        runner.lead(again, other, out)

"""Runs in processes, and on a Ray cluster of two machines: killed ones go on, finished ones stay."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
from PIL import Image

from semisfl.cli.main import main
from semisfl.runs import compare
from semisfl.runs.advice import DIVERGED
from semisfl.runs.compare import Job, Pool, Processes, rounds_of, run_in_pool
from semisfl.runs.directory import RunDirectory
from semisfl.runs.start import begin, train
from semisfl.settings.config import parse
from semisfl.settings.toml import to_toml
from semisfl.stopping import StopFlag
from tests.cli.test_torchrun import SETTINGS, numbers
from tests.processes import Forked

ROUNDS = 12


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the values of a small run on images of a folder."""
    folder = tmp_path_factory.mktemp("pools") / "images"
    rng = np.random.default_rng(0)
    for part in ("train", "test"):
        for name in ("a", "b"):
            (folder / part / name).mkdir(parents=True)
            for number in range(20):
                pixels = rng.integers(0, 256, (16, 16), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")
    return {**SETTINGS, "rounds": ROUNDS, "data": {"labeled": 8, "name": str(folder)}}


@pytest.fixture(scope="module")
def alone(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Train the same runs one after another in this process."""
    jobs = jobs_in(tmp_path_factory.mktemp("alone"), values)
    for job in jobs:
        train(job.config, out=job.path, device="cpu")
    return [numbers(job.path) for job in jobs]


def jobs_in(folder: Path, values: dict[str, Any]) -> list[Job]:
    return compare.list_jobs(values, ["supervised", "semisfl"], 1, folder)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pool's processes start at once, with torch imported."""
    monkeypatch.setattr(compare, "Popen", Forked)


@contextmanager
def processes() -> Iterator[Pool]:
    yield Processes(2, "cpu")


@contextmanager
def ray_of_two_machines() -> Iterator[Pool]:
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    from semisfl.runs.compare import RayPool

    cluster = cluster_utils.Cluster()
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
        yield RayPool(cluster.address, device="cpu")
    finally:
        cluster.shutdown()


def kill_once_under_way(job: Job, killed: list[int]) -> None:
    """Kill the process that holds the run's directory, once some of its rounds are done."""
    deadline = time.monotonic() + 150
    while rounds_of(job) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    killed.append(int((job.path / "run.lock").read_text().split()[1]))
    os.kill(killed[0], signal.SIGKILL)


POOLS = [
    pytest.param(processes, id="processes"),
    pytest.param(ray_of_two_machines, id="ray", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("make", POOLS)
def test_a_killed_run_goes_on_with_the_same_numbers(
    make: Callable[[], AbstractContextManager[Pool]],
    values: dict[str, Any],
    alone: list[Any],
    tmp_path: Path,
) -> None:
    jobs = jobs_in(tmp_path, values)
    killed: list[int] = []
    killer = threading.Thread(target=kill_once_under_way, args=(jobs[1], killed))
    progress: list[tuple[int, ...]] = []
    with make() as pool:
        killer.start()
        assert run_in_pool(jobs, pool, StopFlag(), lambda *done: progress.append(done))
    killer.join()
    assert killed and killed[0] != os.getpid()
    assert int((jobs[1].path / "run.lock").read_text().split()[1]) != killed[0], "somebody else did"
    assert [numbers(job.path) for job in jobs] == alone
    assert progress[-1] == (2, 2, 2 * ROUNDS, 2 * ROUNDS)
    assert [job.status for job in jobs] == ["finished"] * 2


class Here:
    """A pool that trains at once, in this process; the run of ``failing`` has a ``problem``."""

    def __init__(self, failing: Path | None = None, problem: Exception | None = None) -> None:
        self.started: list[Path] = []
        self._failing, self._problem = failing, problem
        self._ended: dict[Path, Exception | None] = {}

    def has_room(self) -> bool:
        return True

    def start(self, job: Job) -> None:
        self.started.append(job.path)
        self._ended[job.path] = self._problem if job.path == self._failing else None
        if job.path != self._failing:
            train(job.config, out=job.path, device="cpu")

    def ended(self) -> dict[Path, Exception | None]:
        ended, self._ended = self._ended, {}
        return ended

    def stop(self) -> None: ...


def test_finished_runs_are_not_repeated_and_failures_stop_no_other_run(
    values: dict[str, Any], tmp_path: Path
) -> None:
    first, second = jobs_in(tmp_path, values | {"rounds": 1})
    with pytest.raises(
        OSError, match=r"1 of 2 runs failed; .*supervised-seed0: no memory; `semisfl report "
    ):
        pool = Here(first.path, OSError("no memory"))
        run_in_pool([first, second], pool, StopFlag(), lambda *done: None)
    again = Here()
    assert run_in_pool([first, second], again, StopFlag(), lambda *done: None)
    assert again.started == [first.path]


@pytest.mark.parametrize("make", POOLS)
def test_runs_of_another_process_are_skipped_if_sharing_is_on(
    make: Callable[[], AbstractContextManager[Pool]], values: dict[str, Any], tmp_path: Path
) -> None:
    taken, free = jobs_in(tmp_path, values | {"rounds": 1})
    left: list[Path] = []
    progress: list[tuple[int, ...]] = []

    def tell(*done: int) -> None:
        progress.append(done)

    with begin(taken.config, out=taken.path, device="cpu"):
        with make() as pool:
            assert run_in_pool([taken, free], pool, StopFlag(), tell, left.append)
        assert left == [taken.path] and progress[-1] == (1, 2, 1, 2)
        assert [job.status for job in (taken, free)] == ["unfinished", "finished"]
        error = rf"1 of 2 runs failed; .*{taken.path.name} is in use by process {os.getpid()} on"
        with pytest.raises(OSError, match=error), make() as pool:
            run_in_pool([taken, free], pool, StopFlag(), tell)


def test_a_process_takes_only_runs_that_no_other_has(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grid.toml").write_text(to_toml(parse(values | {"rounds": 1})))
    command = ["compare", str(tmp_path / "grid.toml"), "--seeds", "1", "--out", str(tmp_path / "g")]
    command += ["--take", "--device", "cpu"]
    taken, free = jobs_in(tmp_path / "g", values | {"rounds": 1})
    holder = Forked([sys.executable, "-c", HOLD, str(taken.path)], stdout=PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "True\n"
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "1 of 2 runs are with other processes" in printed.out
    assert f"{taken.path} is skipped" in printed.err
    assert [job.status for job in (taken, free)] == ["new", "finished"]
    holder.kill()
    holder.wait()
    assert main(command) == 0  # the run of a process that died is free again
    assert "Supervised-only" in capsys.readouterr().out and taken.status == "finished"


HOLD = "import sys, time, pathlib; from semisfl.runs.compare import claim; "
HOLD += "print(claim(pathlib.Path(sys.argv[1])), flush=True); time.sleep(60)"


def test_the_output_of_a_failed_process_is_reported(values: dict[str, Any], tmp_path: Path) -> None:
    bad = jobs_in(tmp_path, values | {"data": {"labeled": 8, "name": "./nowhere"}})[0]
    with pytest.raises(OSError, match=r"1 of 1 runs failed; .*supervised-seed0: error: .*nowhere"):
        run_in_pool([bad], Processes(1, "cpu"), StopFlag(), lambda *done: None)


def instead(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Make the pool's processes run ``code``."""

    def popen(_: list[str], **options: Any) -> Forked:
        return Forked([sys.executable, "-c", code], **options)

    monkeypatch.setattr(compare, "Popen", popen)


def test_a_run_that_diverged_has_not_failed(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(monkeypatch, f"raise SystemExit({DIVERGED})")
    jobs = jobs_in(tmp_path, values)
    assert run_in_pool(jobs, Processes(2, "cpu"), StopFlag(), lambda *done: None)


def test_a_process_may_import_the_method_that_its_pool_was_asked_for(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = "semisfl.methods.supervised:Supervised"
    job = jobs_in(tmp_path, values)[0]
    job = replace(job, config=job.config.model_copy(update={"method": method}))
    RunDirectory.create(job.path, job.config).unlock()
    commands: list[list[str]] = []
    monkeypatch.setattr(compare, "Popen", lambda words, **_: commands.append(words))
    Processes(1, "cpu").start(job)
    assert commands[0][commands[0].index("--allow-method") + 1] == method


@pytest.mark.slow
def test_a_stop_ends_all_that_are_under_way(values: dict[str, Any], tmp_path: Path) -> None:
    jobs, stop = jobs_in(tmp_path, values | {"rounds": 100_000}), StopFlag()

    def stop_when_begun(*done: int) -> None:
        if all(rounds_of(job) for job in jobs):
            stop.request()

    assert not run_in_pool(jobs, Processes(2, "cpu"), stop, stop_when_begun)
    for job in jobs:
        assert job.status == "unfinished"
        assert (job.path / "latest.safetensors").exists()
        with pytest.raises(ProcessLookupError):
            os.kill(int((job.path / "run.lock").read_text().split()[1]), 0)

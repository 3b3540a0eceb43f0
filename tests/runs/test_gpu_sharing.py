"""CUDA's multi-process service is started for a pool and ended with it. A script stands in for its program."""

from pathlib import Path

import pytest

from semisfl.runs import gpu_sharing
from semisfl.runs.gpu_sharing import SharedGPU
from semisfl.runs.pools import Processes

PROGRAM = """#!/bin/sh
echo "$1 $(cat) $CUDA_MPS_PIPE_DIRECTORY" >> {log}
exit {status}
"""


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, status: int = 0) -> Path:
    log, program = folder / "log", folder / gpu_sharing.CONTROL
    program.write_text(PROGRAM.format(log=log, status=status))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return log


def test_a_pool_starts_the_daemon_and_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = install(tmp_path, monkeypatch)
    pool = Processes(2, "cuda")
    assert log.read_text().startswith("-d ")
    pool.stop()
    started, ended = (line.split() for line in log.read_text().splitlines())
    assert ended[0] == "quit" and ended[-1] == started[-1]
    assert not Path(ended[-1]).exists()


def test_processes_are_given_the_daemon_of_their_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch)
    shared = SharedGPU(tmp_path, "auto")
    assert Path(shared.environment["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_runs_on_a_cpu_or_beside_a_daemon_of_the_user_start_none(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = install(tmp_path, monkeypatch)
    if device == "cuda":
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/elsewhere")
    SharedGPU(tmp_path, device).stop()
    assert not log.exists()


def test_a_daemon_that_does_not_start_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, status=1)
    assert SharedGPU(tmp_path, "cuda").environment == {}

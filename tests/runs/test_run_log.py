"""Runs that share a process have a log each, and a program without a log sees the warnings."""

import logging
import sys
import threading
from pathlib import Path

import pytest

from semisfl.runs import run_log
from semisfl.runs.sinks import Callback
from semisfl.runs.start import train
from tests.net.harness import tiny, toy_data
from tests.processes import Forked

LOGGER = logging.getLogger("semisfl.data")


class Says(Callback):
    """A callback that logs while another run is active, also from a thread without a run."""

    def __init__(self, name: str, together: threading.Barrier) -> None:
        self.name, self.together = name, together

    def on_round(self, metrics: object) -> None:
        self.together.wait(60)
        LOGGER.info("round of %s", self.name)
        other = threading.Thread(target=LOGGER.info, args=("thread of %s", self.name))
        other.start()
        other.join()
        self.together.wait(60)


def test_runs_in_threads_have_a_log_each(tmp_path: Path) -> None:
    logger = logging.getLogger("semisfl")
    before, together = list(logger.handlers), threading.Barrier(2)

    def one(name: str) -> None:
        data, partition = toy_data(2)
        with run_log.collected():
            together.wait(60)
            LOGGER.warning("early of %s", name)
            train(
                tiny(2),
                data=data,
                partition=partition,
                device="cpu",
                out=tmp_path / name,
                callbacks=[Says(name, together)],
            )

    threads = [threading.Thread(target=one, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, other in (("first", "second"), ("second", "first")):
        log = (tmp_path / name / "run.log").read_text()
        assert log.count(f"early of {name}\n") == 1 and f"early of {other}\n" not in log
        assert log.count(f"round of {name}\n") == 2 and f"round of {other}\n" not in log
        assert log.count("rounds 1 to 2") == log.count("finished") == 1
        assert log.count(f"thread of {name}\n") == 2
    assert logger.handlers == before


@pytest.mark.parametrize("out", ["'run'", "None"])
def test_a_program_without_a_log_of_its_own_sees_the_warnings_of_a_run(
    tmp_path: Path, out: str
) -> None:
    lines = [
        "import logging",
        "from semisfl import Callback, train",
        "from tests.net.harness import tiny, toy_data",
        "class Warns(Callback):",
        "    def on_round(self, metrics):",
        "        logging.getLogger('semisfl.data').warning('look here')",
        "        logging.getLogger('semisfl.data').info('not here')",
        "images = dict(zip(('data', 'partition'), toy_data(2)))",
        f"train(tiny(2, rounds=1), device='cpu', callbacks=[Warns()], out={out}, **images)",
    ]
    script = [sys.executable, "-c", "\n".join(lines)]
    with Forked(script, stderr=-1, text=True, cwd=tmp_path) as process:
        assert process.communicate()[1] == "look here\n"
    assert process.returncode == 0

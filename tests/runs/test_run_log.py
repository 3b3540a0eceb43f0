"""A program without a log sees the warnings."""

import sys
from pathlib import Path

import pytest

from tests.processes import Forked


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

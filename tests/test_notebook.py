"""examples/first_steps.ipynb, as a reader runs it: every cell in its order, in a kernel of its own."""

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXTURES = """
import numpy as np

def texture(stripes):
    across = np.arange(512) // 4 % 8 < stripes
    noise = np.random.default_rng(0).normal(0, 20, (512, 512))
    return np.clip(120 + 60 * across[:, None] + noise, 0, 255).astype(np.uint8)

def brick(): return texture(1)
def grass(): return texture(4)
def gravel(): return texture(0)
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_trains_and_shows_a_table_and_two_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    path = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if importlib.util.find_spec("skimage") is None:
        (tmp_path / "packages" / "skimage").mkdir(parents=True)
        (tmp_path / "packages" / "skimage" / "data.py").write_text(TEXTURES)
        (tmp_path / "packages" / "skimage" / "__init__.py").write_text("")
        path.append(str(tmp_path / "packages"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    book = nbformat.read(ROOT / "examples" / "first_steps.ipynb", as_version=4)
    assert len(book.cells) == 10
    nbclient.NotebookClient(book, timeout=800, resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    shown = [kind for output in outputs for kind in output.get("data", {})]
    assert shown.count("image/png") == 2
    (table,) = [
        one["data"]["text/markdown"] for one in outputs if "text/markdown" in one.get("data", {})
    ]
    accuracies = [float(line.split("|")[2].split()[0]) for line in table.splitlines()[2:]]
    assert len(accuracies) == 3 and min(accuracies) > 50
    assert not any(
        output.get("name") == "stderr" and "Error" in output["text"] for output in outputs
    )

"""The package as strangers get it: built, and installed into an empty environment without a compiler."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from semisfl import __version__

ROOT = Path(__file__).parents[1]
SMALL = ["rounds=2", "clients.total=3", "clients.active=2", "clients.steps=2", "server.steps=2"]


def run(*words: str | Path, **options: object) -> str:
    done = subprocess.run(words, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def test_every_file_that_names_the_version_has_the_same() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.+)$", citation, re.M) == [__version__]
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## ([\d.]+)", log, re.M)[0] == __version__


def test_the_public_workflow_runs_the_script_that_must_pass() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    (script,) = re.findall(r"- run: (\S+)$", workflow, re.M)
    assert os.access(ROOT / script, os.X_OK)
    for file in re.findall(r"tests/\S+", workflow):
        assert (ROOT / file).is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_is_built_trains_in_an_empty_environment(tmp_path: Path) -> None:
    tracked = run("git", "ls-files", cwd=ROOT).splitlines()
    source, dist, home = tmp_path / "source", tmp_path / "dist", tmp_path / "home"
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--outdir", dist, source)  # the wheel from the sdist
    with tarfile.open(dist / f"semisfl-{__version__}.tar.gz") as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
    wheel = dist / f"semisfl-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == {name for name in tracked if name.startswith("semisfl/")}

    venv.create(tmp_path / "empty", with_pip=True)
    programs = tmp_path / "empty" / "bin"
    install = [programs / "python", "-m", "pip", "install", "--quiet"]
    run(*install, "--constraint", ROOT / "constraints.txt", wheel)
    home.mkdir()
    alone = {"PATH": str(programs), "HOME": str(home), "OMP_NUM_THREADS": "1"}
    assert not any(shutil.which(one, path=alone["PATH"]) for one in ("cc", "gcc", "c++", "clang"))

    def semisfl(*words: str) -> str:
        return run(programs / "semisfl", *words, env=alone, cwd=home)

    assert semisfl("--version") == f"semisfl {__version__}\n"
    assert "semisfl" in semisfl("list")
    trained = semisfl("run", "digits", "--quiet", "--out", "first", "--set", *SMALL)
    assert "SemiSFL: test accuracy" in trained
    assert "SemiSFL" in semisfl("report", "first")

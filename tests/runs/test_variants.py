"""Groups of settings from a file: which runs they are, what a table calls them, what is refused."""

from pathlib import Path
from typing import Any

import pytest

from semisfl.metrics import RoundMetrics
from semisfl.runs import compare
from semisfl.runs.compare import Variant, read_variants
from semisfl.runs.directory import RunDirectory
from semisfl.settings import config

VALUES: dict[str, Any] = {"rounds": 1, "seed": 5}
VARIANTS = [Variant("plain"), Variant("faster", ("optimizer.lr=0.05", "optimizer.lr_min=0.01"))]


def written(folder: Path, text: str) -> Path:
    path = folder / "variants.toml"
    path.write_text(text, encoding="utf-8")
    return path


def fake_training(job: compare.Job) -> bool:
    directory = RunDirectory.create(job.path, job.config)
    accuracy = 100 * job.config.optimizer.lr + job.config.seed
    directory.record.write(RoundMetrics(round=0, accuracy=accuracy, bytes_total=9, seconds=1.0))
    return True


def test_every_variant_has_every_seed_and_its_own_name(tmp_path: Path) -> None:
    jobs = compare.list_jobs(VALUES, ["semisfl"], 2, tmp_path, variants=VARIANTS)
    assert [(job.path.name, job.config.optimizer.lr) for job in jobs] == [
        ("semisfl-plain-seed5", 0.02),
        ("semisfl-faster-seed5", 0.05),
        ("semisfl-plain-seed6", 0.02),
        ("semisfl-faster-seed6", 0.05),
    ]
    assert compare.run_in_turn(jobs, fake_training)
    summaries = [summary for _, summary in compare.results(jobs)]
    assert [(s.label, s.accuracy.mean) for s in summaries] == [
        ("SemiSFL plain", 7.5),
        ("SemiSFL faster", 10.5),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('"a/b" = []', "with a name of letters"),
        ("quick = 'rounds=1'", "is not NAME = "),
        ("[quick]\nrounds = 1", "is not NAME = "),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(config.ConfigError) as error:
        read_variants(written(tmp_path, text))
    assert reason in str(error.value)

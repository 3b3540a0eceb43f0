"""Numbers of an evaluation against ones written out by hand, and both commands as a shell sees them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from semisfl import load
from semisfl.cli.main import main
from semisfl.use.evaluation import evaluate_on, judge, picture
from tests.pictures import cut_off
from tests.use.trained import Trained


def test_accuracy_precision_and_recall_by_hand() -> None:
    rows = [(0, [0.9, 0.1, 0.0]), (0, [0.2, 0.8, 0.0]), (1, [0.3, 0.7, 0.0]), (1, [0.0, 1.0, 0.0])]
    labels = torch.tensor([label for label, _ in rows])
    evaluation = judge(("a", "b", "c"), torch.tensor([row for _, row in rows]), labels)
    assert evaluation.confusion.tolist() == [[1, 1, 0], [0, 2, 0], [0, 0, 0]]
    assert evaluation.accuracy == 75
    assert evaluation.precision == [100, pytest.approx(200 / 3), None]
    assert evaluation.recall == [50, 100, None]
    # 0.9 and 1.0 right, 0.8 wrong, 0.7 right, each in an interval of its own.
    assert evaluation.calibration_error == pytest.approx(100 * (0.1 + 0.0 + 0.8 + 0.3) / 4)
    assert sum(bin.count for bin in evaluation.bins) == 4


@pytest.mark.parametrize("count", [2, 60])
@pytest.mark.parametrize("name", ["a class with a rather long name ", "c"])
def test_the_picture_holds_everything(name: str, count: int) -> None:
    rng = np.random.default_rng(0)
    probabilities = torch.from_numpy(rng.dirichlet(np.ones(count), 200)).float()
    names = ("$ or {$" if len(name) > 1 else name, *(f"{name}{n}" for n in range(1, count)))
    evaluation = judge(names, probabilities, torch.arange(200) % count)
    assert cut_off(picture(evaluation)) == 0


def test_evaluate_agrees_with_predict(
    trained: Trained,
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run = str(trained("fedswitch")[0])
    assert main(["evaluate", run, "--data", str(images), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    predictions = load(run).predict(images)
    pairs = [
        (Path(n).parent.name, label)
        for n, label in zip(predictions.names, predictions.labels, strict=True)
    ]
    right = sum(true == predicted for true, predicted in pairs)
    assert answer["images"] == 24 and answer["accuracy"] == pytest.approx(100 * right / 24)
    names = [row["name"] for row in answer["classes"]]
    for true, row in zip(names, answer["confusion"], strict=True):
        for predicted, count in zip(names, row, strict=True):
            assert count == pairs.count((true, predicted))
    assert answer["picture"] == "confusion.png" and Path("confusion.png").stat().st_size > 1000
    assert main(["evaluate", run, "--data", str(images), "--out", "other.png"]) == 0
    printed = capsys.readouterr().out
    assert f"accuracy {answer['accuracy']:.1f} % on 24 images" in printed and "colour3" in printed


def test_evaluate_finds_the_folder_test_and_names_what_it_skips(
    trained: Trained, images: Path, tmp_path: Path
) -> None:
    (tmp_path / "train" / "whatever").mkdir(parents=True)
    (tmp_path / "test").symlink_to(images)
    model = load(trained("supervised")[0])
    plain = evaluate_on(model, images)
    assert evaluate_on(model, tmp_path).confusion.tolist() == plain.confusion.tolist()
    bad = tmp_path / "few" / "colour1"
    bad.mkdir(parents=True)
    (bad / "bad.png").write_text("no image")
    with pytest.raises(ValueError, match=r"none of 1 image in .*few can be read"):
        evaluate_on(model, tmp_path / "few")
    (bad / "good.png").symlink_to(next((images / "colour1").iterdir()))
    evaluation = evaluate_on(model, tmp_path / "few")
    assert evaluation.images == 1 and [Path(s.image).name for s in evaluation.skipped] == [
        "bad.png"
    ]


def test_evaluate_takes_a_csv_file_as_it_takes_folders(
    trained: Trained, images: Path, tmp_path: Path
) -> None:
    """The file may have training images; an unreadable image is named, not left out silently."""
    model = load(trained("supervised")[0])
    plain = evaluate_on(model, images)
    files = sorted(images.rglob("*.png"))
    bad = tmp_path / "bad.png"
    bad.write_text("no image")
    lines = {
        "all": ["path,label", *(f"{file},{file.parent.name}" for file in files)],
        "test": ["path,label,split", *(f"{file},{file.parent.name},test" for file in files)],
    }
    lines["both"] = [*lines["test"], f"{bad},colour1,train"]
    lines["skips"] = [*lines["test"], f"{bad},colour1,test"]
    for name, text in lines.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(text))
        evaluation = evaluate_on(model, tmp_path / f"{name}.csv")
        assert evaluation.confusion.tolist() == plain.confusion.tolist()
        assert [s.image for s in evaluation.skipped] == ([str(bad)] if name == "skips" else [])
    for row, error in (
        (f"{files[0]},zebra,test", "has the class 'zebra', which is no"),
        (f"{bad},,train", "no test"),
    ):
        (tmp_path / "wrong.csv").write_text(f"path,label,split\n{row}")
        with pytest.raises(ValueError, match=error):
            evaluate_on(model, tmp_path / "wrong.csv")


def test_mistakes_are_one_line(
    trained: Trained, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(trained("supervised")[0])
    (tmp_path / "zebra").mkdir()
    (tmp_path / "empty").mkdir()
    file = str(next(images.rglob("*.png")))
    for words, error in (
        (
            ["evaluate", run, "--data", str(tmp_path)],
            "has the class 'empty', which is no class of the model",
        ),
        (["evaluate", run, "--data", str(tmp_path / "empty")], "has no class folders"),
        (["evaluate", run, "--data", "digits"], "has the class '0', which is no class"),
        (["evaluate", run, "--data", "nowhere"], "neither a known set"),
        (["predict", str(tmp_path), file], "is neither a run's directory nor"),
        (["predict", run, str(tmp_path / "empty")], "holds no images"),
        (["predict", run, file, "--json", "--csv"], "choose one"),
    ):
        capsys.readouterr()
        assert main(words) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("error: ") and error in line, line


def test_predict_prints_and_skips(
    trained: Trained, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, good, bad = (
        str(trained("supervised")[0]),
        str(next(images.rglob("000.png"))),
        tmp_path / "bad.png",
    )
    bad.write_text("no image")
    (((name, first), (second_name, second)),) = load(run).predict(good).top(2)
    words = ["predict", run, good, str(bad)]
    assert main([*words, "--top", "2"]) == 0
    printed = capsys.readouterr()
    answers = f"{name} {100 * first:.1f} %, {second_name} {100 * second:.1f} %"
    assert printed.out == f"{good}: {answers}\n" and f"skipped {bad}: it is no image" in printed.err
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["images"][0]["classes"][0] == {"name": name, "probability": pytest.approx(first)}
    assert [skipped["image"] for skipped in answer["skipped"]] == [str(bad)]
    assert main([*words, "--csv", "--top", "1"]) == 0
    assert capsys.readouterr().out == f"image,class1,probability1\n{good},{name},{first:.6f}\n"
    assert main(["predict", run, str(bad)]) == 2

"""Test plans; `test_equal` tests that runs send as many bytes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from semisfl.cli.main import main
from semisfl.costs import clock
from semisfl.costs.clock import LinkSpeed, World
from semisfl.costs.plan import Plan, make
from semisfl.costs.rounds import ImageFacts, RoundCosts, planned_images
from semisfl.settings import config, presets
from semisfl.settings.catalog import DATA

WIRE_ALONE = World(LinkSpeed(1, 1), LinkSpeed(1, 1), 0.0, clock.load_profile("wire-only"), 0)
"""Links of one speed, and devices that take no time."""


def test_a_plan_by_hand() -> None:
    """A round of the digits' CNN with numbers small enough to count: bottom, top, features."""
    bottom = 4 * ((5 * 5 * 1 * 32 + 32) + (5 * 5 * 32 * 64 + 64))
    full_model = bottom + 4 * ((1024 * 512 + 512) + (512 * 10 + 10))
    features = 4 * 16 * 1024 * 5
    expected = {
        "semisfl": (2 * bottom + features, bottom + 2 * features),
        "supervised": (0, 0),
        "probe": (0, 0),
        "semifl": (full_model, full_model),
        "fedmatch": (2 * full_model, full_model),
        "fedswitch": (2 * full_model, full_model),
        "fedswitch-sl": (2 * bottom + features, bottom + 2 * features),
        "fl2": (full_model, full_model),
    }
    settings = config.parse(
        {
            "rounds": 7,
            "data": {"name": "digits"},
            "model": {"name": "cnn"},
            "clients": {"total": 9, "active": 3, "batch": 16, "steps": 5},
        }
    )
    world = replace(WIRE_ALONE, up=LinkSpeed(2, 2), down=LinkSpeed(10, 10))
    made = make(settings, ImageFacts((1, 28, 28), 10, 0), world)
    assert {line.method: (line.down, line.up) for line in made.methods} == expected
    for line in made.methods:
        down, up = expected[line.method]
        # Mbit/s: a byte is eight bits.
        seconds = 8 * down / 10e6 + 8 * up / 2e6
        assert line.seconds == pytest.approx(seconds)
        assert made.run_hours(line) == pytest.approx(7 * seconds / 3600)
        assert made.run_bytes(line) == 7 * 3 * (down + up)


@pytest.mark.parametrize(("alone", "together"), [(2, 5), (9, 0)])
def test_rounds_without_clients_send_nothing_and_take_the_servers_time(
    alone: int, together: int
) -> None:
    settings = config.override(
        presets.values_of("digits"), ["rounds=7", f"server.pretrain_rounds={alone}"]
    )
    made = make(config.parse(settings), ImageFacts((1, 28, 28), 10, 100), WORLD)
    lines = {line.method: line for line in made.methods}
    # The CNN, per labelled image: three passes, and in SemiSFL the teacher's bottom and the head as well.
    bottom = 2 * (25 * 32 * 24 * 24 + 25 * 32 * 64 * 8 * 8)
    top, head = 2 * (1024 * 512 + 512 * 10), 2 * (1024 * 1024 + 1024 * 128)
    passes = {
        "semisfl": 4 * (bottom + head) + 3 * top,
        "fedswitch": 3 * (bottom + top),
        "supervised": 3 * (bottom + top),
    }
    for method, operations in passes.items():
        line = lines[method]
        assert made.run_bytes(line) == together * 5 * line.total
        server = 20 * 32 * operations / WORLD.profile.server_flops
        seconds = together * line.seconds + (7 - together) * server
        assert made.run_hours(line) == pytest.approx(seconds / 3600)


WORLD = World(LinkSpeed(0.8, 8), LinkSpeed(10, 20), 0.005, clock.load_profile("jetson-mix"), 0)


def plan(preset: str, *changes: str, world: World = WORLD) -> Plan:
    options = config.parse(config.override(presets.values_of(preset), list(changes)))
    row = DATA[preset]
    return make(options, ImageFacts(row.shape, row.classes, 1000), world)


@pytest.mark.parametrize(
    ("preset", "best"),
    [
        ("digits", "flatten"),
        # 512 features behind a small dense layer, in place of 1,600 before it.
        ("svhn", "fc1"),
        ("cifar10", "flatten"),
        ("stl10", "flatten"),
        ("image100", "flatten"),
    ],
)
def test_the_papers_models(preset: str, best: str) -> None:
    made = plan(preset)
    assert made.chosen.cut == "flatten" and made.best.cut == best
    assert made.best.seconds == min(line.seconds for line in made.cuts)
    assert made.smallest.total == min(line.total for line in made.cuts)
    for line in made.cuts:
        assert line.seconds == pytest.approx(line.computing + line.sending + line.waiting)
        assert line.computing > 0 and line.sending > 0 and line.waiting > 0
    assert {line.method for line in made.full} == {"semifl", "fedmatch", "fedswitch", "fl2"}


def test_whole_models_are_cheaper_for_a_small_model_alone() -> None:
    """The paper: on SVHN with the CNN, SemiSFL moves about six times more than FedSwitch."""
    small, large = plan("svhn"), plan("cifar10")
    fedswitch = next(line for line in small.full if line.method == "fedswitch")
    assert 5.5 < small.chosen.total / fedswitch.total < 6.5
    assert min(line.seconds for line in small.full) < small.best.seconds
    assert min(line.seconds for line in large.full) > large.best.seconds


def test_break_even_is_where_a_plan_with_so_many_steps_turns() -> None:
    made = plan("cifar10")
    rival = next(line for line in made.full if line.method == "semifl")
    steps = made.break_even_steps(made.chosen, rival)
    assert steps > 50 > made.break_even_steps(made.cuts[0], rival)
    before, after = (plan("cifar10", f"clients.steps={n}") for n in (steps - 1, steps))
    assert before.chosen.total <= rival.total < after.chosen.total


def test_a_better_cut_and_a_small_device_are_found() -> None:
    early = plan("cifar10", "model.cut=pool1")
    assert early.chosen.cut == "pool1" and early.best.cut == "pool5"
    assert early.best.seconds < early.chosen.seconds / 2
    tiny = clock.Profile(devices=(clock.DeviceKind(name="tiny", gflops=100, memory_gb=0.1),))
    made = plan("cifar10", world=replace(WORLD, profile=tiny))
    assert not made.chosen.fits and made.best.fits
    assert made.best.cut == "pool2"


def test_validation_images_belong_to_no_client() -> None:
    options = config.override(presets.values_of("digits"), ["data.validation=0.2"])
    assert planned_images(config.parse(options)).mean == (5000 - 1000 - 40) / 10


def test_clients_with_folders_have_the_images_in_them(tmp_path: Path) -> None:
    folders = {"train/a": 6, "train/b": 6, "test/a": 2, "test/b": 2, "clients/x": 3, "clients/y": 8}
    for name, count in folders.items():
        (tmp_path / name).mkdir(parents=True)
        for number in range(count):
            Image.new("L", (8, 8), number).save(tmp_path / name / f"{number}.png")
    chosen = [f"data.name={tmp_path}", "data.labeled=4", "clients.total=2", "clients.active=2"]
    held = planned_images(config.parse(config.override(presets.values_of("images"), chosen)))
    assert (held.mean, dict(held.each)) == (5.5, {0: 3, 1: 8})


def test_both_tables_have_the_batches_that_clients_can_fill() -> None:
    """A client with five images sends the features of five, whatever `clients.batch` is."""
    values = presets.values_of("digits")
    held = ImageFacts((1, 28, 28), 10, 4.5, {0: 4, 1: 5})
    made = make(
        config.parse(values), held, WORLD, lambda name: config.parse({**values, "method": name})
    )
    own = next(line for line in made.methods if line.method == "semisfl")
    assert own.kinds == made.chosen.kinds
    assert own.gradients_per_step == 4 * 5 * 1024


def test_devices_fill_the_batch_that_is_set() -> None:
    """A server does not know what its devices hold: unlike in a simulation, they show images twice."""
    values = config.override(presets.values_of("digits"), ["fleet.kind=network"])
    priced = RoundCosts.of(config.parse(values), ImageFacts((1, 28, 28), 10, 4.5, {0: 4, 1: 5}))
    cost = priced.usual
    assert cost is not None and cost.gradients == 4 * 32 * 1024 * 10
    ((share,),) = priced.work({1: cost.by_kind()}, 20).phases
    assert share.steps == 10 and share.step_down == 4 * 32 * 1024


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = str(tmp_path / "plan.png")
    words = ["plan", "digits", "--uplink", "2", "--profile", "wire-only", "--out", picture]
    assert main([*words, "--json", "--downlink", "10", "--latency", "0"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["best"] == answer["configured"] == "flatten" and len(answer["cuts"]) == 9
    semisfl = next(line for line in answer["methods"] if line["method"] == "semisfl")
    assert semisfl["seconds"] == pytest.approx(8 * semisfl["down"] / 10e6 + 8 * semisfl["up"] / 2e6)
    assert Path(answer["picture"]).stat().st_size > 10_000
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "Best cut for these connections and devices: flatten" in printed
    assert main(["plan", "--uplink", "8-0.8"]) == 2
    assert "lower one first" in capsys.readouterr().err
    assert main(["plan", "--profile", "cray"]) == 2
    assert "jetson-mix" in capsys.readouterr().err


def test_a_plan_of_a_frozen_bottom_by_hand() -> None:
    """Three clients at links of 1 Mbit/s: the bottom down once, the rows of 100 images up once, then the server alone."""
    changes = ["clients.bottom=frozen", "clients.total=3", "clients.active=2", "rounds=7"]
    changes += ["wire.student_features=int8", "wire.teacher_features=fp16"]
    world = replace(WIRE_ALONE, profile=clock.Profile(server_gflops=1, devices=(CAMERA,)))
    made = plan("digits", *changes, world=replace(world))
    images, (before, line) = 1000, (made.cuts[2], made.chosen)
    assert (before.cut, line.cut, line.once) == ("pool1", "flatten", True)
    for cut, d in ((before, 32 * 12 * 12), (line, 1024)):
        views = {"fp32": 24, "fp16": 12, "bf16": 12, "int8": 6}
        expected = {codec: size * d + 24 * (codec == "int8") for codec, size in views.items()}
        assert {**cut.image_bytes, "int4": 0} == {**expected, "int4": 0}
        assert cut.up == images * (2 * 2 * d + 4 * (d + 4))
        assert cut.down == cut.bottom_bytes and cut.kinds["features_up"] == cut.up
    bottom = 2 * (25 * 32 * 24 * 24 + 25 * 32 * 64 * 8 * 8)
    assert line.client_flops == 6 * bottom
    # Weights, and 128 views with what the first convolution reads and writes.
    first = 28 * 28 + 32 * 24 * 24
    assert line.client_memory == line.bottom_bytes + 4 * 128 * max(first, 2 * 32 * 24 * 24)
    assert line.computing == pytest.approx(images * 6 * bottom / 2e9)
    assert line.sending == pytest.approx(8e-6 * line.total)
    top, head = 2 * (1024 * 512 + 512 * 10), 2 * (512 * 512 + 512 * 128)
    # A labelled image passes the frozen bottom once for the student and once for the teacher.
    supervised = 20 * 32 * (2 * bottom + 4 * head + 4 * top)
    rows = 2 * 10 * 32 * 4 * (top + head)
    assert line.server_seconds == pytest.approx((supervised + rows) / 1e9)
    assert line.seconds == pytest.approx(line.server_seconds + line.computing + line.sending)
    assert made.run_hours(line) == pytest.approx((line.seconds + 6 * line.server_seconds) / 3600)
    assert made.run_bytes(line) == 3 * line.total
    assert {one.method for one in made.methods} >= {"semisfl", "supervised"} and not made.full
    trained = plan("digits", *changes, "clients.bottom=trained")
    assert made.trained_bytes == trained.run_bytes(trained.chosen)


CAMERA = clock.DeviceKind(name="camera", gflops=2)


def test_the_command_for_a_frozen_bottom(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plan", "digits", "--set", "clients.bottom=frozen", "--out", str(tmp_path / "p.png")]
    assert main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "fp32 bf16 int8 int4 sent seconds" in printed and "rounds a day" not in printed
    assert "A run that trains this bottom on the clients would send" in printed
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_every_method_is_priced_with_its_own_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """This holds for methods other than the run's, whose settings are not part of its configuration."""
    answers = []
    for kept in ("true", "false"):
        words = ["method=semisfl", "fleet.kind=network", f"fedmatch.keep_helpers={kept}"]
        assert main(["plan", "digits", "--methods", "fedmatch", "--json", "--set", *words]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] != answers[1]

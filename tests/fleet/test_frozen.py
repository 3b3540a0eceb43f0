"""Clients with a frozen bottom encode their images once; rounds draw from the rows they left."""

import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from semisfl import seeds
from semisfl.data import augment
from semisfl.data.augment import Augmentation, Normalizer
from semisfl.data.fixed_views import content_digest
from semisfl.data.partition import Partition
from semisfl.data.positions import draw_positions
from semisfl.engine.weights import State
from semisfl.fleet.base import SplitRound, draw_active
from semisfl.fleet.codec import codec_named, state_bytes
from semisfl.fleet.frozen import FOLDER, FrozenFleet
from semisfl.fleet.outgoing import Outgoing
from semisfl.fleet.rows import Encoder, RowFile
from semisfl.metrics import RoundMetrics
from semisfl.models.build import build_model
from semisfl.models.layers import named_layers
from semisfl.runs import checkpoint
from semisfl.runs.experiment import Experiment, assemble
from semisfl.runs.sinks import Callback
from semisfl.runs.start import resume, train
from semisfl.settings import presets
from semisfl.settings.config import Config, ConfigError, override, parse
from semisfl.settings.policy import PolicyBreach, row_bits
from tests.net.harness import BATCHNORM, tiny, toy_data
from tests.toy import but_for_time
from tests.twin import PlainTwin, largest_difference

VIEWS = {"weak": 2, "strong": 3}
NOISE = {"clip": 4.0, "noise": 0.1}


def frozen(count: int = 3, **changes: Any) -> Config:
    clients = {"bottom": "frozen", "weak_views": VIEWS["weak"], "strong_views": VIEWS["strong"]}
    clients |= changes.pop("clients", {})
    return tiny(count, clients=clients, **changes)


def here(config: Config) -> tuple[Experiment, FrozenFleet]:
    experiment = assemble(config, *toy_data(config.clients.total), device="cpu")
    fleet = experiment.fleet
    assert isinstance(fleet, FrozenFleet)
    fleet.open(None)
    return experiment, fleet


def plan(config: Config, bottom: State, index: int = 0) -> SplitRound:
    everyone = range(config.clients.total)
    active = draw_active(config.seed, index, len(everyone), everyone, config.clients.active)
    return SplitRound(index, active, config.clients.steps, 0.1, bottom, bottom)


# --- encoding --------------------------------------------------------------------------------------


def encoder(config: Config) -> Encoder:
    outgoing = Outgoing()
    outgoing.agree(config)
    return Encoder(
        build_model(config, (1, 16, 16), 4).bottom,
        Normalizer.of((0.5,), (0.5,)),
        outgoing,
        config,
    )


def rows_of(config: Config, images: Tensor, client: str = "0") -> dict[str, Tensor]:
    """Return the rows [images, views, d] of each kind."""
    digests = [content_digest(image) for image in images]
    rows = encoder(config).rows(images, client, digests).tensors
    return {kind: rows[kind].unflatten(0, (len(images), -1)) for kind in VIEWS}


@pytest.mark.parametrize(
    "changes", [{}, {"model": {"layers": BATCHNORM}}, {"policy": NOISE}], ids=str
)
def test_an_image_gives_the_same_rows_alone_and_among_any_others(changes: dict) -> None:
    config = frozen(**changes)
    data, _ = toy_data(60)  # more than one pass, and more than are augmented together
    whole = rows_of(config, data.images[:300])
    order = np.random.default_rng(0).permutation(300)
    shuffled = rows_of(config, data.images[order])
    for kind, views in VIEWS.items():
        assert whole[kind].shape[:2] == (300, views)
        assert torch.equal(shuffled[kind], whole[kind][order])
    for place in (0, 17, 299):
        alone = rows_of(config, data.images[place : place + 1])
        assert all(torch.equal(alone[kind][0], whole[kind][place]) for kind in VIEWS)


def test_views_differ_by_client_and_by_view() -> None:
    config = frozen()
    images = toy_data(3)[0].images[:4]
    rows, others = rows_of(config, images), rows_of(config, images, "1")
    for kind in VIEWS:
        assert not torch.equal(rows[kind], others[kind])
        assert not torch.equal(rows[kind][:, 0], rows[kind][:, 1])


def test_clients_with_the_same_images_draw_noise_of_their_own() -> None:
    images, noise = toy_data(3)[0].images[:4], []
    for client in ("0", "1"):
        noisy, clear = (
            rows_of(frozen(policy={"clip": NOISE["clip"], "noise": deviation}), images, client)
            for deviation in (NOISE["noise"], 0.0)
        )
        noise.append(noisy["weak"] - clear["weak"])
    # Rounding to the grid of the noise changes less than a tenth of its deviation.
    assert (noise[0] - noise[1]).abs().max() > NOISE["clip"] * NOISE["noise"]


def test_rows_are_those_of_augmented_images() -> None:
    config = frozen()
    image = toy_data(3)[0].images[5:6]
    made, own = rows_of(config, image), encoder(config)
    for kind, apply in (("weak", augment.weak), ("strong", augment.strong)):
        seed = seeds.derive(config.seed, "view", "0", content_digest(image[0]), kind)
        draws = getattr(Augmentation.of(config.data.augment), f"draw_{kind}")(
            seeds.Streams([seed]), (1, VIEWS[kind]), 16, 16
        )
        for view in range(VIEWS[kind]):
            features = own.bottom(own.normalizer(apply(image, draws[:, view])))
            assert torch.allclose(made[kind][0, view], features[0], atol=1e-5)


# --- rounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_a_step_gives_the_drawn_rows_as_the_codec_leaves_them(codec: str) -> None:
    config = frozen(wire={"student_features": codec, "teacher_features": "fp16"})
    experiment, fleet = here(config)
    data, partition = toy_data(3)
    bottom = experiment.method.student.bottom.state_dict()
    for index in range(2):
        asked = plan(config, bottom, index)
        fleet.start_round(asked)
        for step in range(config.clients.steps):
            features = fleet.forward()
            assert features.student.requires_grad
            assert not features.teacher.requires_grad
            for place, client in enumerate(asked.active):
                shard = partition.clients[client]
                rows = rows_of(config, data.images[shard], str(client))
                drawn = draw_positions(config.seed, index, client, len(shard), 2, 4)
                rng = seeds.generator(config.seed, "drawn-views", index, client)
                mine = slice(4 * place, 4 * place + 4)
                for kind, given, name in (
                    ("weak", features.teacher, "fp16"),
                    ("strong", features.student, codec),
                ):
                    view = rng.integers(VIEWS[kind], size=drawn.shape)
                    expected = rows[kind][drawn[step], view[step]]
                    assert torch.equal(given[mine], codec_named(name).roundtrip(expected))
                assert features.truth is not None
                assert torch.equal(features.truth[mine], data.labels[shard[drawn[step]]])
            fleet.backward(torch.ones_like(features.student))
        assert all(bottom[name].equal(tensor) for name, tensor in fleet.finish_round().items())
    fleet.close(finished=True)


@pytest.mark.parametrize("method", ["semisfl", "fedswitch-sl"])
def test_the_bottom_goes_down_once_and_the_rows_come_up_once(method: str) -> None:
    wire = {"student_features": "int8", "teacher_features": "fp16", "models": "bf16"}
    config = frozen(3, method=method, rounds=6, clients={"active": 2}, wire=wire)
    experiment, fleet = here(config)
    model, before = build_model(config, (1, 16, 16), 4), experiment.state_dict()
    for index in range(config.rounds):
        experiment.method.round(index)
        images, d = 12, model.features
        up = images * (VIEWS["weak"] * 2 * d + VIEWS["strong"] * (d + 4))
        down = state_bytes(model.bottom.state_dict(), "bf16")
        expected = {("model", "down", client): down for client in range(3)}
        expected |= {("features", "up", client): up for client in range(3)}
        assert dict(fleet.traffic.counts) == expected
    experiment.undo_round(before)
    assert dict(fleet.traffic.counts) == expected, "what was sent is sent"
    fleet.close(finished=True)


def test_only_top_and_head_are_trained() -> None:
    config = frozen(model={"layers": BATCHNORM}, rounds=2)
    experiment, fleet = here(config)
    start = build_model(config, (1, 16, 16), 4).state_dict()
    for index in range(2):
        experiment.method.round(index)
    for model in (experiment.method.student, experiment.method.teacher):
        after = model.state_dict()
        changed = {name.partition(".")[0] for name in start if not after[name].equal(start[name])}
        assert changed == {"top", "projector"}
    fleet.close(finished=True)


def test_clusters_teach_the_top() -> None:
    tops = []
    for clustering in (True, False):
        config = frozen(rounds=2, semisfl={"clustering": clustering, "supervised_contrast": False})
        experiment, fleet = here(config)
        for index in range(2):
            experiment.method.round(index)
        tops.append(experiment.method.student.top.state_dict())
        fleet.close(finished=True)
    body = [name for name in tops[0] if not torch.equal(tops[0][name], tops[1][name])]
    assert len({name.rpartition(".")[0] for name in body}) > 1


class StopAfterOne(Callback):
    def on_round(self, metrics: RoundMetrics) -> bool:
        return metrics.round == 0


@pytest.mark.parametrize("method", ["semisfl", "fedswitch-sl", "supervised"])
def test_a_resumed_run_is_the_uninterrupted_one(method: str, tmp_path: Path) -> None:
    data, partition = toy_data(3)
    config = frozen(method=method, rounds=4, clients={"active": 2})
    whole = train(config, data=data, partition=partition, device="cpu", out=tmp_path / "whole")
    out = tmp_path / "parts"
    train(
        config,
        data=data,
        partition=partition,
        device="cpu",
        out=out,
        callbacks=[StopAfterOne()],
    )
    written = {file.name: file.stat().st_ino for file in out.glob(f"{FOLDER}/*")}
    parts = resume(out, data=data, partition=partition, device="cpu")
    states = [checkpoint.read(one / "latest.safetensors") for one in (tmp_path / "whole", out)]
    for part in ("method", "fleet", "traffic"):
        assert checkpoint.digest(states[0][part]) == checkpoint.digest(states[1][part])
    assert whole.accuracy == parts.accuracy
    kept = {file.name: file.stat().st_ino for file in out.glob(f"{FOLDER}/*")}
    assert written.items() <= kept.items(), "images were encoded again"


@pytest.mark.parametrize(
    "changes", [{"data": {"augment": {"cutout": 8}}}, {"policy": NOISE}, {}], ids=str
)
def test_rows_of_other_settings_or_weights_are_not_used(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / FOLDER / "0.rows"

    def rows(config: Config, factor: float = 1.0) -> tuple[Tensor, int]:
        experiment, fleet = here(config)
        fleet.open(tmp_path)
        bottom = experiment.method.student.bottom.state_dict()
        bottom = {name: factor * tensor for name, tensor in bottom.items()}
        fleet.start_round(plan(config, bottom))
        return fleet.forward().student.detach(), file.stat().st_ino

    first, written = rows(frozen())
    again, same = rows(frozen())
    assert torch.equal(first, again) and same == written
    os.truncate(file, file.stat().st_size - 1)  # the rows of one image are not whole
    again, other = rows(frozen())
    assert torch.equal(first, again) and other != written
    others, _ = rows(frozen(**changes), 1.0 if changes else 2.0)
    assert not torch.equal(first, others)
    assert all(one.suffix == ".rows" for one in file.parent.iterdir())


# --- rows that are there already ------------------------------------------------------------------


FOUND = {"clients": {"active": 2}, "wire": {"student_features": "int8"}, "rounds": 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of a run's rows, and the metrics of its rounds."""
    out = tmp_path_factory.mktemp("made") / "run"
    data, partition = toy_data(3)
    result = train(frozen(**FOUND), data=data, partition=partition, device="cpu", out=out)
    return out / FOLDER, but_for_time(result.rounds)


def from_rows(folder: Path, *settings: str) -> Config:
    values = frozen(**FOUND).model_dump(exclude_none=True)
    labeled = len(toy_data(3)[1].labeled)
    found = [f"data.features={folder}", f"data.labeled={labeled}"]
    return parse(override(values, [*found, *settings]))


def test_rows_train_the_run_that_made_them_without_its_images(
    made: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    data, partition = toy_data(3)
    own = {"data": data, "partition": Partition(partition.labeled, ()), "device": "cpu"}
    config = from_rows(made[0])
    whole = train(config, **own)
    rounds = but_for_time(whole.rounds)
    for known, mine in zip(made[1], rounds, strict=True):
        unknown = {"impurity", "coverage_by_class"}
        assert unknown <= known.keys() and not unknown & mine.keys()
        assert mine == {key: value for key, value in known.items() if key not in unknown}
    out = tmp_path / "parts"
    train(config, **own, out=out, callbacks=[StopAfterOne()])
    assert but_for_time(resume(out, **own).rounds) == rounds
    assert not (out / FOLDER).exists()


def test_a_resumed_run_wants_the_rows_it_began_with(
    made: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    data, partition = toy_data(3)
    own = {"data": data, "partition": Partition(partition.labeled, ()), "device": "cpu"}
    folder, out = tmp_path / "rows", tmp_path / "run"
    shutil.copytree(made[0], folder)
    train(from_rows(folder), **own, out=out, callbacks=[StopAfterOne()])
    file = RowFile(folder / "1.rows")
    (folder / "1.rows").write_bytes(file.path.read_bytes()[: -(file.bytes // file.images + 16)])
    with pytest.raises(ConfigError, match=r"1\.rows are not those that the run began with"):
        resume(out, **own)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("clients.weak_views=1", "clients.weak_views"),
        ("wire.student_features=fp16", "wire.student_features"),
        ("seed=7", "seed"),
        ("clients.total=2", r"set clients\.total = 3"),
        ("model.cut=1", "model.cut"),
    ],
)
def test_rows_of_another_run_are_refused_with_the_setting(
    made: tuple[Path, list[dict[str, Any]]], setting: str, named: str, tmp_path: Path
) -> None:
    data, partition = toy_data(3)
    own = Partition(partition.labeled, ())
    out = tmp_path / "run"
    with pytest.raises(ConfigError, match=rf"(0\.rows|features).*{named}"):
        train(from_rows(made[0], setting), data=data, partition=own, device="cpu", out=out)
    assert not out.exists()


def test_rows_with_another_normalisation_and_damaged_rows_are_refused(
    made: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    data, partition = toy_data(3)
    own, folder = Partition(partition.labeled, ()), tmp_path / "rows"
    with pytest.raises(ConfigError, match=r"normalised by.*model\.weights"):
        train(from_rows(made[0]), data=replace(data, mean=(0.1,)), partition=own, device="cpu")
    for size, complaint in ((40, "damaged"), (3000, "copy it again"), (0, "damaged")):
        shutil.copytree(made[0], folder, dirs_exist_ok=True)
        (folder / "2.rows").write_bytes((folder / "2.rows").read_bytes()[:size])
        with pytest.raises(ValueError, match=rf"2\.rows.*{complaint}"):
            train(from_rows(folder), data=data, partition=own, device="cpu")


def test_all_clients_up_to_32_are_active_unless_a_number_is_set() -> None:
    for total, active in ((3, 3), (40, 32)):
        clients = {"bottom": "frozen", "total": total}
        assert parse({"clients": clients}).clients.active == active
        assert parse({"clients": {**clients, "active": 2}}).clients.active == 2


# --- the plain twin --------------------------------------------------------------------------------


class Still(nn.Sequential):
    """Layers that stay in eval mode."""

    def train(self, mode: bool = True) -> "Still":
        return super().train(False)


class FrozenTwin(PlainTwin):
    """A plain round with clients whose bottoms are not trained: every view passes alone, whenever it is drawn."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for model in (self.student, self.teacher):
            model.bottom = Still(*(layer for _, layer in named_layers(model.bottom))).eval()

    def _cross_entity(self, index: int, lr: float) -> dict[str, float]:
        config, sums = self.config, {"loss": 0.0, "kept": 0.0}
        steps, batch = config.clients.steps, config.clients.batch
        everyone = range(config.clients.total)
        active = draw_active(config.seed, index, len(everyone), everyone, config.clients.active)
        server = self._sgd(
            [*self.student.top.parameters(), *self.student.projector.parameters()], lr
        )
        drawn: dict[int, dict[str, Any]] = {}
        for client in active:
            shard = self.partition.clients[client]
            places = draw_positions(config.seed, index, client, len(shard), steps, batch)
            rng = seeds.generator(config.seed, "drawn-views", index, client)
            views = {kind: rng.integers(VIEWS[kind], size=places.shape) for kind in VIEWS}
            drawn[client] = {"images": shard[places], **views}
        for step in range(steps):
            taught, sent = [], []
            for client in active:
                for kind, features in (("weak", taught), ("strong", sent)):
                    rows = [
                        self._row(client, image, kind, view)
                        for image, view in zip(
                            drawn[client]["images"][step], drawn[client][kind][step], strict=True
                        )
                    ]
                    features.append(torch.cat(rows))
            self._server_step(sent, taught, server, sums)
        self.queue.end_round()
        rows = len(active) * batch * steps
        return {"loss_semi": sums["loss"] / steps, "mask_rate": 1 - sums["kept"] / rows}

    def _row(self, client: int, image: int, kind: str, view: int) -> Tensor:
        pixels = self.data.images[image : image + 1]
        seed = seeds.derive(self.config.seed, "view", str(client), content_digest(pixels[0]), kind)
        draw = getattr(self.augmentation, f"draw_{kind}")
        draws = draw(seeds.Streams([seed]), (1, VIEWS[kind]), *self.size)
        made = getattr(augment, kind)(pixels, draws[:, view])
        with torch.no_grad():
            return self.student.bottom(self.normalizer(made).contiguous())


@pytest.mark.parametrize(
    "changes", [{}, {"model": {"layers": BATCHNORM}}, {"semisfl": {"clustering": False}}], ids=str
)
def test_rounds_are_those_of_the_plain_twin(changes: dict) -> None:
    config = frozen(rounds=3, clients={"active": 2}, **changes)
    experiment, fleet = here(config)
    method = experiment.method
    twin = FrozenTwin(config, method.student, *toy_data(3))
    for index in range(config.rounds):
        ours, theirs = method.round(index), twin.round(index)
        for name, value in theirs.items():
            assert getattr(ours, name) == pytest.approx(value, abs=1e-4), name
    for part in ("top", "projector"):
        mine, plain = (getattr(one.student, part).state_dict() for one in (method, twin))
        assert largest_difference(mine, plain) < 1e-4
    fleet.close(finished=True)


def test_the_digits_are_learned_over_a_random_frozen_bottom() -> None:
    digits = presets.preset("digits").model_dump(exclude_none=True)
    settings = ["clients.bottom=frozen", "rounds=2", "clients.steps=20", "server.steps=60"]
    result = train(parse(override(digits, settings)), device="cpu")
    assert result.accuracy > 25  # chance is 10


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["semifl", "fedswitch", "fedmatch"])
def test_whole_model_methods_say_why_they_cannot(method: str) -> None:
    with pytest.raises(ConfigError, match="split method"):
        frozen(method=method)


def test_all_views_of_an_image_and_nothing_else_count_against_its_quotas() -> None:
    bits = 5 * row_bits(build_model(frozen(), (1, 16, 16), 4).features, NOISE["noise"])
    for quota, value in (("uses_per_image", 5), ("bits_per_image", bits)):
        here(frozen(policy={**NOISE, quota: value}))
        with pytest.raises(PolicyBreach, match=rf"{quota} = .* lower clients\.weak_views = 2 or"):
            here(frozen(policy={**NOISE, quota: value - 1}))


def test_a_teacher_that_follows_on_clients_has_no_effect(caplog: Any) -> None:
    results = []
    for follows in ("frozen", "ema"):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            experiment, fleet = here(frozen(semisfl={"client_teacher": follows}))
        assert ("client_teacher" in caplog.text) == (follows == "ema")
        results.append(experiment.method.round(0).loss_semi)
        fleet.close(finished=True)
    assert results[0] == results[1]

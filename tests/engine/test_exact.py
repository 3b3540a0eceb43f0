"""Test how far the engine and the plain twin, in float32, are from results in float64."""

from semisfl.runs.experiment import assemble
from semisfl.runs.run_data import divide
from semisfl.settings import config, presets
from tests.twin import ExactTwin, toy_data

OPTIONS = [
    "rounds=2",
    "data.labeled=12",
    "data.partition.kind=iid",
    "clients.total=4",
    "clients.active=3",
    "clients.batch=8",
    "clients.steps=4",
    "server.batch=8",
    "server.steps=4",
    "semisfl.confidence_threshold=0",
    "optimizer.lr=0.01",
    "runtime.precision=fp32",
]


def test_rounds_in_float32_stay_near_those_in_float64() -> None:
    options = config.parse(config.override(presets.values_of("digits"), OPTIONS))
    data = toy_data(side=28)
    experiment = assemble(options, data, device="cpu")
    student = experiment.method.student  # type: ignore[attr-defined]
    twin = ExactTwin(options, student, data, divide(options, data))
    start = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    for index in range(2):
        expected, row = twin.round(index), experiment.method.round(index)
        assert abs(row.loss_semi - expected["loss_semi"]) < 1e-5
    for name, tensor in twin.student.state_dict().items():
        error = (student.state_dict()[name] - tensor).abs().max()
        moved = (tensor - start[name]).abs().max()
        assert error < 1e-5 < 1e-3 < moved, name

"""A checkpoint's file, as other programs read it."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from semisfl.runs import checkpoint


@pytest.mark.parametrize("kind", checkpoint.KINDS, ids=str)
def test_every_kind_of_number_is_read_back_by_others_too(kind: torch.dtype, tmp_path: Path) -> None:
    path, some = tmp_path / "one.safetensors", torch.arange(6).reshape(2, 3).to(kind)
    tensors = {
        "turned": some.t(),
        "none": some[:0],
        "single": some[1, 2],
        "byte": torch.ones(1) > 0,
    }
    checkpoint.write(path, {"nested": [tensors, {"again": some.t()}], "é": 3})
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["format"] == "1"
    theirs, ours = load_file(path), checkpoint.read(path)
    assert ours["é"] == 3 and torch.equal(ours["nested"][1]["again"], some.t())
    for name, tensor in tensors.items():
        for stored in (theirs[f"/nested/0/{name}"], ours["nested"][0][name]):
            assert stored.dtype == tensor.dtype and torch.equal(stored, tensor)


def test_a_snapshot_stays_as_it_was() -> None:
    weights = torch.zeros(3)
    taken = checkpoint.snapshot({"first": weights, "second": [weights]})
    weights.add_(1)
    assert not taken["first"].any() and taken["second"][0] is taken["first"], "copied once"


def test_what_a_state_has_twice_is_written_once(tmp_path: Path) -> None:
    path, large = tmp_path / "one.safetensors", torch.zeros(100_000)
    checkpoint.write(path, {"first": large, "second": {"same": large}})
    assert 400_000 < path.stat().st_size < 401_000
    read = checkpoint.read(path)
    assert torch.equal(read["first"], large) and torch.equal(read["second"]["same"], large)

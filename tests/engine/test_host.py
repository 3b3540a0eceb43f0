import torch

from semisfl.engine.host import HostShelf
from semisfl.runs import checkpoint


def test_a_stored_state_does_not_follow_its_source() -> None:
    shelf, source = HostShelf(torch.device("cpu")), torch.ones(3)
    shelf.put("one", {"weight": source})
    before = checkpoint.snapshot(shelf.state_dict())
    source.zero_()
    shelf.put("two", {"weight": source})
    shelf.keep(["two"])
    assert set(shelf.state_dict()) == {"two"}
    assert set(before) == {"one"} and torch.equal(before["one"]["weight"], torch.ones(3))
    shelf.load_state_dict(before)
    assert torch.equal(shelf.get("one")["weight"], torch.ones(3))

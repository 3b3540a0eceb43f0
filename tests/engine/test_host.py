"""States in host memory: what is kept, what is lent to the device, and what is freed."""

import gc
import weakref

import torch

from semisfl.engine.host import HostShelf
from semisfl.runs import checkpoint


def test_copies_on_the_device_are_freed_with_the_next_state() -> None:
    shelf = HostShelf(torch.device("meta"))  # a device other than the host
    shelf.put("one", {"weight": torch.ones(3)})
    lent = shelf.get("one")
    assert shelf.get("one") is lent, "one copy for all who ask"
    reference = weakref.ref(lent["weight"])
    del lent
    shelf.put("two", {"weight": torch.ones(3)})
    gc.collect()
    assert reference() is None


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

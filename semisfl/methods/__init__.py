"""The methods, by name."""

from collections.abc import Callable
from dataclasses import dataclass

from semisfl.methods.base import Method, Setup
from semisfl.methods.semisfl import SemiSFL
from semisfl.methods.supervised import Supervised


@dataclass(frozen=True)
class Entry:
    make: Callable[[Setup], Method]
    title: str
    summary: str


METHODS: dict[str, Entry] = {
    "semisfl": Entry(SemiSFL, "SemiSFL", "split model, teacher pseudo-labels, clustering regularisation"),
    "supervised": Entry(Supervised, "Supervised-only", "the server's labels alone; nothing is sent"),
}

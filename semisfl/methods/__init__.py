"""The methods, by name."""

from collections.abc import Callable
from dataclasses import dataclass

from semisfl import catalog
from semisfl.fleet.base import ClientWork
from semisfl.methods.base import Method, Setup
from semisfl.methods.fedmatch.method import FedMatch, FedMatchWork
from semisfl.methods.fedswitch import FedSwitch, FedSwitchWork
from semisfl.methods.fedswitch_sl import FedSwitchSL
from semisfl.methods.semifl.method import SemiFL, SemiFLWork, StatisticsWork
from semisfl.methods.semisfl import SemiSFL
from semisfl.methods.supervised import Supervised


@dataclass(frozen=True)
class Entry:
    make: Callable[[Setup], Method]
    title: str
    summary: str
    note: str = ""
    """What is a reconstruction or our own choice; shown wherever the method's numbers are."""
    works: tuple[ClientWork, ...] = ()
    """Client halves, for clients that live in processes of their own."""


METHODS: dict[str, Entry] = {
    "semisfl": Entry(SemiSFL, *catalog.METHODS["semisfl"]),
    "supervised": Entry(Supervised, *catalog.METHODS["supervised"]),
    "semifl": Entry(SemiFL, *catalog.METHODS["semifl"], works=(SemiFLWork(), StatisticsWork())),
    "fedmatch": Entry(FedMatch, *catalog.METHODS["fedmatch"], works=(FedMatchWork(),)),
    "fedswitch": Entry(FedSwitch, *catalog.METHODS["fedswitch"], works=(FedSwitchWork(),)),
    "fedswitch-sl": Entry(FedSwitchSL, *catalog.METHODS["fedswitch-sl"]),
}

WORKS = {work.name: work for entry in METHODS.values() for work in entry.works}
"""The client halves, by the names that servers ask for them with."""

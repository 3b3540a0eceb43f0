"""The methods, by name."""

from collections.abc import Callable
from dataclasses import dataclass

from semisfl.fleet.base import ClientWork
from semisfl.methods.base import Method, Setup
from semisfl.methods.fedmatch.method import FedMatch, FedMatchWork
from semisfl.methods.fedswitch import FedSwitch, FedSwitchWork
from semisfl.methods.fedswitch_sl import FedSwitchSL
from semisfl.methods.semifl.method import SemiFL, SemiFLWork, StatisticsWork
from semisfl.methods.semisfl import SemiSFL
from semisfl.methods.supervised import Supervised
from semisfl.titles import TITLES


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
    "semisfl": Entry(
        SemiSFL, TITLES["semisfl"], "split model, teacher pseudo-labels, clustering regularisation"
    ),
    "supervised": Entry(
        Supervised, TITLES["supervised"], "the server's labels alone; nothing is sent"
    ),
    "semifl": Entry(
        SemiFL,
        TITLES["semifl"],
        "pseudo-labels once a round by the global model, mixed images, server fine-tuning",
        "iterations, rates and augmentation as for the other methods, not the authors' own; "
        "BatchNorm statistics over the server and active clients",
        (SemiFLWork(), StatisticsWork()),
    ),
    "fedmatch": Entry(
        FedMatch,
        TITLES["fedmatch"],
        "decomposed weights, helpers' consistency, agreement pseudo-labels",
        "loss weights are ours (variant fedmatch_original: the authors'), as are bias and BatchNorm handling "
        "and how long helpers stay",
        (FedMatchWork(),),
    ),
    "fedswitch": Entry(
        FedSwitch,
        TITLES["fedswitch"],
        "EMA teacher; clients label with it or with their student",
        "a reconstruction: no public code, full paper not obtained",
        (FedSwitchWork(),),
    ),
    "fedswitch-sl": Entry(
        FedSwitchSL,
        TITLES["fedswitch-sl"],
        "FedSwitch with a split model: SemiSFL without its contrastive terms",
        "a reconstruction: FedSwitch's rule, decided on the server",
    ),
}

WORKS = {work.name: work for entry in METHODS.values() for work in entry.works}
"""The client halves, by the names that servers ask for them with."""

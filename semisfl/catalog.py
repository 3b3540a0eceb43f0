"""What there is, in words, for tables, reports and `semisfl list`; needs nothing that trains."""

from typing import NamedTuple


class Description(NamedTuple):
    title: str
    """The method's name as people write it."""
    summary: str
    note: str = ""
    """What is a reconstruction or our own choice; shown wherever the method's numbers are."""


METHODS = {
    "semisfl": Description(
        "SemiSFL", "split model, teacher pseudo-labels, clustering regularisation"
    ),
    "supervised": Description("Supervised-only", "the server's labels alone; nothing is sent"),
    "semifl": Description(
        "SemiFL",
        "pseudo-labels once a round by the global model, mixed images, server fine-tuning",
        "iterations, rates and augmentation as for the other methods, not the authors' own; "
        "BatchNorm statistics over the server and active clients",
    ),
    "fedmatch": Description(
        "FedMatch",
        "decomposed weights, helpers' consistency, agreement pseudo-labels",
        "loss weights are ours (variant fedmatch_original: the authors'), as are bias and BatchNorm handling "
        "and how long helpers stay",
    ),
    "fedswitch": Description(
        "FedSwitch",
        "EMA teacher; clients label with it or with their student",
        "a reconstruction: no public code, full paper not obtained",
    ),
    "fedswitch-sl": Description(
        "FedSwitch-SL",
        "FedSwitch with a split model: SemiSFL without its contrastive terms",
        "a reconstruction: FedSwitch's rule, decided on the server",
    ),
}
DATA = {
    "digits": "7,000 MNIST images, inside the package",
    "cifar10": "CIFAR-10",
    "svhn": "SVHN",
    "stl10": "STL-10 with its 100,000 unlabelled images",
    "image100": "100 classes of ImageNet, 144 x 144 pixels",
}


def title_of(method: str) -> str:
    """A method from outside the package is called by its name."""
    return METHODS[method].title if method in METHODS else method


def note_of(method: str) -> str:
    return METHODS[method].note if method in METHODS else ""

"""The methods' names as people write them; needs nothing that trains."""

TITLES = {
    "semisfl": "SemiSFL",
    "supervised": "Supervised-only",
    "semifl": "SemiFL",
    "fedmatch": "FedMatch",
    "fedswitch": "FedSwitch",
    "fedswitch-sl": "FedSwitch-SL",
}


def title_of(method: str) -> str:
    """A method from outside the package is called by its name."""
    return TITLES.get(method, method)

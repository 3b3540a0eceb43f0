"""Which settings make a run what it is: two runs that agree in these are the same but for the seed."""

import hashlib
import json
from typing import Any

from semisfl.runs.labels import UNSEEN
from semisfl.settings import lookup
from semisfl.settings.config import Config

# Where clients live, when a run ends, what it saves and how fast it is change none of its numbers
# on purpose; seeds are averaged, and rounds are told apart beside the rest.
LEFT_OUT = (
    *("seed", "rounds", "sinks", "stop", "fleet", "network"),
    *("runtime.deterministic", *UNSEEN),
)


def identity(config: Config) -> str:
    """A digest of every setting that matters to ``config``'s method."""
    values = config.model_dump(mode="json", exclude_none=True)
    partition = values["data"]["partition"]
    if partition["kind"] != "dirichlet":
        del partition["alpha"]
    if config.method == "supervised":  # nobody holds anything but the server
        del values["data"]["partition"]
    for key in (*LEFT_OUT, *lookup.unread_settings(config.method)):
        _remove(values, key.split("."))
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def _remove(values: dict[str, Any], path: list[str]) -> None:
    *sections, leaf = path
    for section in sections:
        values = values.get(section, {})
    values.pop(leaf, None)

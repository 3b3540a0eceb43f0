"""The identity of a run: runs with the same identity differ only in seed and number of rounds."""

import hashlib
import json

from semisfl.runs.labels import UNSEEN
from semisfl.settings.config import Config

# The kind of fleet, the end of a run, its outputs and its speed are not meant to change its numbers.
# Seeds are averaged, and rounds are compared separately.
LEFT_OUT = (
    *("seed", "rounds", "sinks", "stop", "fleet", "network"),
    *("runtime.deterministic", *UNSEEN),
)


def identity(config: Config) -> str:
    """Return a digest of the settings; a configuration has those of its own method alone."""
    values = config.model_dump(mode="json", exclude_none=True)
    partition = values["data"]["partition"]
    if partition["kind"] != "dirichlet":
        del partition["alpha"]
    if config.method == "supervised":  # only the server holds images
        del values["data"]["partition"]
    for key in LEFT_OUT:
        *sections, leaf = key.split(".")
        table = values
        for section in sections:
            table = table.get(section, {})
        table.pop(leaf, None)
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

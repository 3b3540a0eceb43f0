"""Give each run a colour that it keeps, whatever other runs appear."""

import json
from collections.abc import Mapping

from semisfl.runs.labels import BESIDE, flatten
from semisfl.watch.follow import Followed


class Colours:
    """Numbers 0, 1, ... in the order in which runs began; runs that differ only in their seed share one."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}
        """The number of each run, by its key."""
        self._groups: dict[str, int] = {}

    def add(self, runs: Mapping[str, Followed]) -> None:
        """Give a number to every run that has none. Later changes of its settings do not matter."""
        new = [key for key, one in runs.items() if key not in self.of and one.config]
        for key in sorted(new, key=lambda key: (runs[key].began(), runs[key].path.name)):
            group = _group(runs[key])
            self.of[key] = self._groups.setdefault(group, len(self._groups))


def _group(followed: Followed) -> str:
    other = ("seed", *BESIDE)
    values = {
        key: value
        for key, value in flatten(followed.config).items()
        if key not in other and not key.startswith("sinks")
    }
    return json.dumps(values, sort_keys=True, default=str)

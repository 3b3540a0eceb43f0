"""Notice that a client left for good, or that another one took its place."""

from collections.abc import Iterable, Mapping


class Membership:
    """Remember the name of each client; one with a name that it did not have before is another one."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def gone(self, known: Iterable[int], members: Mapping[int, str]) -> set[int]:
        """Return the clients of ``known`` that left or whose place another one has; remember the names of ``members``."""
        same = {client for client, name in members.items() if name == self._names.get(client, name)}
        self._names = dict(members)
        return set(known) - same

    def state_dict(self) -> dict[str, str]:
        """Return the name that each client number had, for a checkpoint."""
        return {str(client): name for client, name in self._names.items()}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Go on from the names of a checkpoint."""
        self._names = {int(client): name for client, name in state.items()}

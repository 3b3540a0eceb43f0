"""Notice that a client left for good, or that another one took its place."""

from collections.abc import Iterable, Mapping


class Membership:
    """Remember the name of each client; one with a name that it did not have before is another one."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def gone(self, known: Iterable[int], members: Mapping[int, str]) -> set[int]:
        """Return those of ``known`` that are no ``members`` (`Fleet.members`) any more, and remember these."""
        same = {client for client, name in members.items() if name == self._names.get(client, name)}
        self._names = dict(members)
        return set(known) - same

    def state_dict(self) -> dict[str, str]:
        return {str(client): name for client, name in self._names.items()}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        self._names = {int(client): name for client, name in state.items()}

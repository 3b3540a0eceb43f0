"""Who is which client: identity -> index, given once and never again changed."""

import json
import os
from collections.abc import Mapping
from pathlib import Path


class Roster:
    """Indices 0..total-1 in order of first arrival.

    With ``path`` every enrolment is on disk before the client hears of it: a server killed before
    its first checkpoint still gives every client the index its draws follow from.
    """

    def __init__(self, total: int, path: Path | None = None) -> None:
        self.total = total
        self.index: dict[str, int] = {}
        self._path = path
        if path is not None and path.exists():
            self.load_state_dict(json.loads(path.read_text(encoding="utf-8")))

    def enrol(self, identity: str) -> int | None:
        """This identity's index; None if every place is taken by others."""
        if identity not in self.index:
            if len(self.index) >= self.total:
                return None
            self.index[identity] = len(self.index)
            self._save()
        return self.index[identity]

    def name(self, client: int) -> str:
        return next(
            (name for name, index in self.index.items() if index == client), f"client {client}"
        )

    def state_dict(self) -> dict[str, int]:
        return dict(self.index)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take over ``state``; identities enrolled meanwhile must not disagree with it."""
        merged = {str(name): int(index) for name, index in state.items()}
        for name, index in self.index.items():
            if merged.setdefault(name, index) != index:
                raise ValueError(
                    f"{name} is client {index} here and client {merged[name]} in the checkpoint; "
                    "start the server with the --out folder the checkpoint came from"
                )
        if sorted(merged.values()) != list(range(len(merged))) or len(merged) > self.total:
            raise ValueError(
                f"a roster of {len(merged)} clients with indices {sorted(merged.values())} does not fit "
                f"clients.total = {self.total}; indices must be 0, 1, 2, ... below it"
            )
        self.index = dict(sorted(merged.items(), key=lambda item: item[1]))

    def _save(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(".tmp")
        with beside.open("w", encoding="utf-8") as file:
            json.dump(self.index, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)

"""How a run is asked to end: its owner sets a flag, and whatever takes long looks at it."""


class Stopped(BaseException):
    """Somebody asked the run to end; raised between two iterations, or anywhere before the first.

    No ``Exception``: whoever is ready for a failure of any kind must not take it for one.
    """


class StopFlag:
    """Belongs to a run; may be set from a signal handler or another thread."""

    def __init__(self) -> None:
        self.requested = False

    def request(self) -> None:
        self.requested = True

    def check(self) -> None:
        """Raise `Stopped` if the end was asked for."""
        if self.requested:
            raise Stopped

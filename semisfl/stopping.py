"""Ask a run to end: its owner sets a flag, and long operations check it."""


class Stopped(BaseException):
    """The run was asked to end; raised between two iterations, or anywhere before the first.

    Not an ``Exception``, so that code that catches every failure does not catch it.
    """


class StopFlag:
    """The flag of one run; a signal handler or another thread may set it."""

    def __init__(self) -> None:
        self.requested = False

    def request(self) -> None:
        """Ask the run to stop after its current iteration."""
        self.requested = True

    def check(self) -> None:
        """Raise `Stopped` if the run was asked to end."""
        if self.requested:
            raise Stopped

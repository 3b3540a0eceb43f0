"""``python -m semisfl``, and the command ``semisfl``."""

import os
import sys

from semisfl.cli import signals


def run() -> int:
    open_closed_streams()
    signals.note_early(sys.argv[1:])
    # Only now: this takes a moment, in which a signal may come.
    from semisfl.cli import console
    from semisfl.cli.main import main

    console.accept_all_letters()
    status = main()
    signals.ignore()
    console.end()
    return status


def open_closed_streams() -> None:
    """Open closed standard streams on the null device, or a file of the run would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(run())

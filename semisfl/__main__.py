"""``python -m semisfl``, and the command ``semisfl``."""

import sys
from typing import TextIO

from semisfl.cli import signals


def run() -> int:
    signals.note_early(sys.argv[1:])
    # Only now: this takes a moment, in which a signal may come.
    from semisfl.cli.main import main

    status = main()
    signals.ignore()
    _end(sys.stderr)
    return status


def _end(stream: TextIO | None) -> None:
    """What could not be written is no reason for Python to end a command with a status of its own."""
    from semisfl.cli.console import discard

    if stream is not None:
        try:
            stream.flush()
        except (OSError, ValueError):
            discard(stream)


if __name__ == "__main__":
    sys.exit(run())

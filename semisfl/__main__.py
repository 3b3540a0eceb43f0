"""``python -m semisfl``, and the command ``semisfl``."""

import sys

from semisfl.cli import signals


def run() -> int:
    signals.note_early(sys.argv[1:])
    # Only now: this takes a moment, in which a signal may come.
    from semisfl.cli import console
    from semisfl.cli.main import main

    console.accept_all_letters()
    status = main()
    signals.ignore()
    console.end()
    return status


if __name__ == "__main__":
    sys.exit(run())

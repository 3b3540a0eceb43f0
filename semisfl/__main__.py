"""``python -m semisfl``, and the command ``semisfl``."""

import io
import sys

from semisfl.cli import signals
from semisfl.cli.main import main


def run() -> int:
    """Run the command line of this process and return its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of files and classes may have letters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    status = main()
    signals.ignore()
    return status


if __name__ == "__main__":
    sys.exit(run())

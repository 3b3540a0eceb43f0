"""``python -m semisfl``."""

import sys

from semisfl.cli.main import main

sys.exit(main())

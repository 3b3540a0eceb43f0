"""Run the real client with poisoned answers: ``python -m tests.net.poisoning_client ATTACK join ...``."""

import sys
from functools import partial

from semisfl.attacks.poisoned_fleet import PoisonedBlock
from semisfl.attacks.poisoning import ATTACKS
from semisfl.cli.main import main
from semisfl.net.client import member

if __name__ == "__main__":
    member.ClientBlock = partial(PoisonedBlock, attack=ATTACKS[sys.argv[1]])  # type: ignore[attr-defined, assignment, misc]
    sys.exit(main(sys.argv[2:]))

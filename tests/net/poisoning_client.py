"""Run the real client with poisoned answers: ``python -m tests.net.poisoning_client ATTACK join ...``."""

import sys
from functools import partial

from reproduction.poisoning.attacks import ATTACKS
from reproduction.poisoning.fleet import PoisonedBlock
from semisfl.cli.main import main
from semisfl.net.client import member

if __name__ == "__main__":
    member.ClientBlock = partial(PoisonedBlock, attack=ATTACKS[sys.argv[1]])  # type: ignore[attr-defined, assignment, misc]
    sys.exit(main(sys.argv[2:]))

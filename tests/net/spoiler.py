"""The real client, whose fleet of one sends something else: ``python -m tests.net.spoiler ATTACK join ...``."""

import sys

from semisfl.attacks.poisoned_fleet import poisoned_fleet
from semisfl.attacks.poisoning import attack_named
from semisfl.cli.main import main
from semisfl.net.client import member

if __name__ == "__main__":
    member.LocalFleet = poisoned_fleet(attack_named(sys.argv[1]), 1.0)  # type: ignore[attr-defined, assignment, misc]
    sys.exit(main(sys.argv[2:]))

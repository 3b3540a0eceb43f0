"""Old names of commands and options. They work until the next release.

Loads nothing large: `signals` needs to know a command's name before torch is imported.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

COMMANDS = {"cost": "replay", "costs": "plan", "spoilers": "poisoning"}

Translate = Callable[[str], list[str]]
"""Takes the value of an old option and returns the words of today."""
OPTIONS: Mapping[str, Mapping[str, Translate]] = {
    "costs": {
        "--up": lambda value: ["--uplink", value],
        "--down": lambda value: ["--downlink", value],
    },
    "bench": {"--preset": lambda value: [value]},
    "certs server": {"--name": lambda value: ["--host", value]},
    # Any other value stays as it is, and is refused with the option.
    "leakage": {
        "--effort": lambda value: {"quick": ["--quick"], "full": []}.get(value, ["--effort", value])
    },
}
# What `costs` assumed: devices that take no time, and the middle of the paper's connection speeds.
COSTS = ("--methods", "all", "--profile", "wire-only", "--latency", "0")
COSTS_LINKS = {"--uplink": "4.4", "--downlink": "15"}


def today(words: Sequence[str]) -> list[str]:
    """Return a command line in the names of today; the same words if it has no old names."""
    if not words:
        return []
    command = " ".join(words[:2]) if words[0] == "certs" else words[0]
    count = len(command.split())
    rest = list(_options(words[count:], OPTIONS.get(command, {})))
    if command == "costs":
        missing = [word for pair in COSTS_LINKS.items() if pair[0] not in rest for word in pair]
        rest += [*COSTS, *missing]
    return [*(COMMANDS.get(word, word) for word in words[:count]), *rest]


def _options(words: Sequence[str], old: Mapping[str, Translate]) -> Iterator[str]:
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in old:
            yield from old[name](value if equals else next(rest, ""))
        else:
            yield word

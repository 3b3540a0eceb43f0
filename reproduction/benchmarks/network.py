"""Measure the network: an iteration against a bare TLS socket, idle clients, and reconnecting.

    python -m reproduction.benchmarks.network [iteration | idle ...] [--clients N] [--small]

Everything is on loopback with mutual TLS. The two sides of a ratio are measured in turns within
one run, so that a busy machine disturbs both alike.
"""

import argparse
import json
import logging
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from reproduction.benchmarks.idle_clients import idle
from reproduction.benchmarks.iteration import iteration

BENCHMARKS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "iteration": lambda options: iteration(1, 1, clients=2) if options.small else iteration(),
    "idle": lambda options: idle(3 if options.small else options.clients),
}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)
    return BENCHMARKS[name](options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", default=list(BENCHMARKS), help=", ".join(BENCHMARKS))
    parser.add_argument(
        "--clients", type=int, default=1000, help="of `idle`; 5000 needs `ulimit -n 20000`"
    )
    parser.add_argument("--small", action="store_true", help="few clients, once: does it run?")
    options = parser.parse_args()
    for name in options.names:
        if name not in BENCHMARKS:
            sys.exit(f"{name!r} is not known; use {', '.join(BENCHMARKS)}")
        # In a process of its own: one whose fleet started gRPC threads must not fork again.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context) as worker:
            result = worker.submit(measure, name, options).result()
        print(json.dumps({"benchmark": f"network_{name}", **result}))


if __name__ == "__main__":
    main()

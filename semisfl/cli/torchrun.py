"""``torchrun -m semisfl run``: what each rank does, and how a restarted run continues."""

import logging
from pathlib import Path

import typer

from semisfl.cli import console, signals
from semisfl.engine.hardware import Hardware
from semisfl.fleet.cluster.ranks import Launch, RankLost, Ranks
from semisfl.runs.compare import Job
from semisfl.runs.start import serve_rank
from semisfl.settings.config import Config, ConfigError
from semisfl.stopping import StopFlag, Stopped


def lead(launch: Launch, config: Config, out: Path | None) -> tuple[Config, Path | None]:
    """Return rank 0's configuration, and the run to continue if torchrun may have started it before."""
    if config.fleet.kind == "local":
        config = config.in_fleet("cluster")
    if not launch.max_restarts:
        return config, None
    if out is None:
        raise ConfigError(
            "torchrun --max-restarts needs --out DIR, where a restarted run continues"
        )
    # Not by torchrun's count of restarts: with several machines each has its own.
    return config, out if Job.of(config, out).status != "new" else None


def take_part(launch: Launch, device: str) -> None:
    """Work as a rank other than 0, which writes nothing and prints only its failure."""
    logging.getLogger("semisfl").setLevel(logging.ERROR)
    stop = StopFlag()
    try:
        # A signal ends this process until all ranks have met: that wait ignores signals.
        signals.end_at_once()
        device = launch.device(device)
        ranks = Ranks.join(Hardware(device).device)
        with signals.noted(stop):
            serve_rank(ranks, device, stop)
    except Stopped:
        raise typer.Exit from None
    except RankLost:
        # The lost rank, or torchrun, prints the reason.
        raise typer.Exit(1) from None
    except Exception as error:
        console.say(f"rank {launch.rank}: {type(error).__name__}: {error}", "error")
        raise typer.Exit(1) from error

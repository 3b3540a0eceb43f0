"""``torchrun -m semisfl run``: what its ranks do, and what becomes of a run whose ranks are restarted."""

import logging
from pathlib import Path

import typer

from semisfl.cli import console, signals
from semisfl.fleet.cluster.ranks import Launch, RankLost
from semisfl.runs.compare import Job
from semisfl.runs.rank import TakingPart, on_ranks
from semisfl.settings.config import Config, ConfigError
from semisfl.stopping import StopFlag, Stopped


def lead(told: Launch, config: Config, out: Path | None) -> tuple[Config, Path | None]:
    """Rank 0's configuration, and the run to go on with if torchrun may have started it before."""
    config = on_ranks(config)
    if not told.max_restarts:
        return config, None
    if out is None:
        raise ConfigError(
            "torchrun --max-restarts needs --out DIR: a run whose ranks are started again goes on there"
        )
    # Not by torchrun's count of restarts: with several machines each has its own.
    return config, out if Job.of(config, out).status != "new" else None


def take_part(told: Launch, device: str) -> None:
    """Every other rank writes nothing, and says nothing unless it fails."""
    logging.getLogger("semisfl").setLevel(logging.ERROR)
    stop = StopFlag()
    try:
        # Until all have met, a signal ends this process: waiting for them hears of none.
        signals.end_at_once()
        rank = TakingPart(told, device, stop)
        with signals.noted(stop):
            rank.serve()
    except Stopped:
        raise typer.Exit from None
    except RankLost:
        # Whoever is gone, or torchrun, says why.
        raise typer.Exit(1) from None
    except Exception as error:
        console.say(f"error: rank {told.rank}: {type(error).__name__}: {error}")
        raise typer.Exit(1) from error

"""Start or continue a run. The library, every command, every worker and the server of a network run use this module.

`begin` and `go_on` prepare a run and give it to a ``with`` block; its rounds begin with `PreparedRun.go`. `train` and
`resume` do both. Errors are raised before the run's directory is created where possible. If anything fails before
the first round, the directory is restored.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from semisfl.data.dataset import Dataset
from semisfl.data.partition import Partition
from semisfl.engine.hardware import Hardware
from semisfl.fleet.cluster.rank_worker import RankWorker
from semisfl.fleet.cluster.ranks import Ranks
from semisfl.fleet.setup import FleetSetup, NetworkOptions
from semisfl.models.own import Own
from semisfl.runs import checkpoint, run_log
from semisfl.runs.directory import RunDirectory
from semisfl.runs.experiment import Experiment, assemble, fleet_setup
from semisfl.runs.loop import Result, run_rounds
from semisfl.runs.portable import check_images
from semisfl.runs.run_data import as_passed, load_data
from semisfl.runs.sinks import Callback, Guarded, Observed, Observer, Sink
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.counts import plural
from semisfl.settings.lookup import sink
from semisfl.stopping import StopFlag

log = logging.getLogger(__name__)


class PreparedRun:
    """A run whose data, model and clients are ready, as `begin` and `go_on` give it to a ``with`` block.

    A server's fleet already listens. The block may look at ``experiment`` and ``directory`` before it calls `go`.
    """

    def __init__(self, experiment: Experiment, first: int = 0) -> None:
        """``first`` is the index of the first round to run."""
        self.experiment = experiment
        self.directory: RunDirectory | None = None
        """The run's files; None: nothing is written."""
        self.started = False
        self.finished = False
        """Whether the rounds ended by themselves, so that clients need not come back."""
        self._first = first
        # A wrong name is an error here, before the first round.
        self._named = [Guarded(sink(name)) for name in experiment.config.sinks]

    def go(self, sinks: Sequence[Sink] = (), callbacks: Sequence[Callback] = ()) -> Result:
        """Run the remaining rounds and return the result.

        The sinks that the configuration names get the metrics too. May be called once.
        """
        self.started = True
        result = run_rounds(
            self.experiment,
            self.directory,
            first=self._first,
            sinks=[*sinks, *self._named],
            callbacks=callbacks,
        )
        self.finished = not (result.stopped or result.diverged)
        return result

    def leave(self) -> None:
        """Tell the clients how the run ended, then give up its directory, or restore it if no round began."""
        self.experiment.fleet.close(self.finished)
        if self.directory is not None:
            if not self.started:
                self.directory.undo()
            self.directory.unlock()


@contextmanager
def begin(
    config: Config,
    *,
    out: Path | str | None = None,
    data: Dataset | None = None,
    partition: Partition | None = None,
    network: NetworkOptions | None = None,
    **arguments: Any,
) -> Iterator[PreparedRun]:
    """Prepare a new run; with ``out``, create its directory there. The arguments are those of `train`.

    If the block ends before the first round, the directory is removed again. Raises `Taken` if ``out`` holds a run.
    """
    place = Path(out) if out is not None else None
    if place is not None:
        RunDirectory.check_free(place)
    config = _where_clients_live(as_passed(config, data, partition), network)
    with ExitStack() as stack:
        stack.enter_context(run_log.collected())
        experiment = assemble(config, data, partition, network=network, **arguments)
        run = PreparedRun(experiment)
        stack.callback(run.leave)
        if place is not None:
            device = str(experiment.hardware.device)
            run.directory = RunDirectory.create(
                place, experiment.config, experiment.holdings, device
            )
        experiment.fleet.open(place)
        yield run


@contextmanager
def go_on(
    path: Path | str,
    *,
    settings: Sequence[str] = (),
    cluster: bool = False,
    device: str = "auto",
    network: NetworkOptions | None = None,
    **arguments: Any,
) -> Iterator[PreparedRun]:
    """Prepare the run in a directory from its latest good checkpoint; ``path`` may also name a checkpoint.

    ``settings`` are ``key=value`` assignments as for ``--set``, for limits (``stop.*``) and sinks, and for the
    size and the waits of a fleet of devices (``clients.total``, ``clients.active``, ``network.*``). ``cluster``: use
    all ranks of torchrun, wherever the run was before; otherwise simulated clients are in this process. The other
    arguments are those of `train`.
    """
    directory = RunDirectory.open(Path(path))
    config = directory.changed(settings)
    if network is not None and config.fleet.kind != "network":
        raise ConfigError(
            f"{directory.path} is a simulated run, with other images and clients; start one with devices from its "
            f"model: model.weights={directory.path / 'best.safetensors'}"
        )
    config = _where_clients_live(config, network)
    if config.fleet.kind != "network":
        config = config.in_fleet("cluster" if cluster else "local")
    with ExitStack() as stack:
        stack.enter_context(run_log.collected())
        directory.lock()
        stack.callback(directory.unlock)
        file, state = checkpoint.to_continue(Path(path)) or (None, None)
        directory.warn_of_changes(device)
        experiment = assemble(config, device=device, network=network, resumed=state, **arguments)
        if state is None:
            # Killed before its first checkpoint. Every draw follows from the seed, so starting again gives the same
            # run, but for the first weights of a module that a program passed: they are on no disk.
            log.warning("%s has no checkpoint yet: beginning anew", directory.path)
            run = PreparedRun(experiment)
        else:
            log.warning("going on from %s: %s done", file, plural(state["round"], "round"))
            run = PreparedRun(experiment, state["round"])
        run.directory = directory
        stack.callback(run.leave)
        if state is not None:
            before = state["model"]["description"]
            may_grow = config.fleet.kind == "network"
            check_images(before, experiment.description.as_dict(), may_grow=may_grow)
            experiment.load_state_dict(state)
            if file == directory.path / "latest.safetensors":
                directory.latest_round = state["round"]
        if settings:
            directory.keep_config(config)
        state = None  # as large as all models of the run
        # Only now, so that a client that connects gets its former place.
        experiment.fleet.open(directory.path)
        yield run


def _where_clients_live(config: Config, network: NetworkOptions | None) -> Config:
    """Return ``config`` with clients on other machines if ``network`` is set."""
    if network is None:
        return config
    # A round over a network is expensive: a restarted server repeats only the unfinished one.
    runtime = config.runtime.model_copy(update={"checkpoint_every": 1})
    return config.in_fleet("network").model_copy(update={"runtime": runtime})


def serve_rank(ranks: Ranks, device: str, stop: StopFlag) -> None:
    """Serve rank 0 of a run that torchrun started, as another rank, until it ends the run.

    Raises `RankLost` if rank 0 is gone, and `Stopped` once ``stop`` is set.
    """

    def prepare(config: Config) -> FleetSetup:
        data, partition = load_data(config)
        return fleet_setup(config, data, partition, Hardware(device, config.runtime), stop=stop)

    RankWorker(ranks, prepare).serve()
    ranks.leave()


def train(
    config: Config,
    *,
    data: Dataset | None = None,
    partition: Partition | None = None,
    model: Own | None = None,
    top: Own | None = None,
    device: str = "auto",
    callbacks: Sequence[Callback] = (),
    out: Path | str | None = None,
    sinks: Sequence[Sink] = (),
    observe: Observer | None = None,
    network: NetworkOptions | None = None,
    stop: StopFlag | None = None,
) -> Result:
    """Train as ``config`` says and return the result.

    ``data``, ``partition`` and ``model`` replace those that the configuration names, and ``top`` the layers after its
    cut: any module that is given what the last layer before the cut gives. ``device`` is "auto", "cpu",
    "cuda" or "cuda:N". ``callbacks`` are called after rounds, tests and checkpoints, and may end the run. With ``out``, the run is
    kept in that new directory.

    ``sinks`` get the metrics of every round; one that fails is not called again. ``observe`` is a function that gets
    them as a dictionary. ``network`` is set if clients connect from other machines. Another thread sets ``stop`` to
    end the run.
    """
    with begin(
        config,
        out=out,
        data=data,
        partition=partition,
        model=model,
        top=top,
        device=device,
        network=network,
        stop=stop,
    ) as run:
        return run.go([*map(Guarded, sinks)], _called(callbacks, observe))


def resume(
    path: Path | str,
    *,
    settings: Sequence[str] = (),
    data: Dataset | None = None,
    partition: Partition | None = None,
    model: Own | None = None,
    top: Own | None = None,
    device: str = "auto",
    callbacks: Sequence[Callback] = (),
    sinks: Sequence[Sink] = (),
    observe: Observer | None = None,
    network: NetworkOptions | None = None,
    stop: StopFlag | None = None,
) -> Result:
    """Continue the run in ``path`` from its latest good checkpoint, or from the checkpoint ``path``.

    A run that met a limit continues with another: ``settings=["stop.target=none"]``. The other parameters are
    those of `train`.
    """
    with go_on(
        path,
        settings=settings,
        data=data,
        partition=partition,
        model=model,
        top=top,
        device=device,
        network=network,
        stop=stop,
    ) as run:
        return run.go([*map(Guarded, sinks)], _called(callbacks, observe))


def _called(callbacks: Sequence[Callback], observe: Observer | None) -> list[Callback]:
    """Return the callbacks of a caller of `train`, with the function that gets the metrics of each round, if any."""
    return [*callbacks, *([Observed(observe)] if observe is not None else [])]

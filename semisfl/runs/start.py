"""Start or continue a run. The library, every command and the server of a network run use this module.

Errors are raised before the run's directory is created where possible. If anything fails before the first
round, the directory is restored.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypedDict, Unpack

from semisfl.data.dataset import Dataset
from semisfl.data.partition import Partition
from semisfl.fleet.cluster.ranks import launch
from semisfl.fleet.setup import NetworkOptions
from semisfl.models.build import check_same, with_layers_of
from semisfl.models.own import Own, is_sequential, stages_of
from semisfl.runs import checkpoint, health, run_log
from semisfl.runs.arguments import check_arguments, check_config, usual_modes
from semisfl.runs.callbacks import Callback
from semisfl.runs.directory import RunDirectory
from semisfl.runs.experiment import Experiment, assemble
from semisfl.runs.loop import run_rounds
from semisfl.runs.portable import check_images
from semisfl.runs.rank import in_one_process, on_ranks
from semisfl.runs.result import Result
from semisfl.runs.run_data import as_passed, load_data
from semisfl.runs.sinks import Guarded, Observed, Observer, Sink
from semisfl.settings.config import Config, ConfigError
from semisfl.settings.counts import counted
from semisfl.settings.lookup import check_importable, sink
from semisfl.stopping import StopFlag

log = logging.getLogger(__name__)


class Arguments(TypedDict, total=False):
    """The arguments of a run besides its configuration; ``data``, ``partition`` and ``model`` replace what it names."""

    data: Dataset | None
    partition: Partition | None
    model: Own | None
    device: str
    stop: StopFlag | None
    network: NetworkOptions | None
    """Set if clients connect from other machines; ``data`` is then the server's own."""


class Run:
    """A run that is ready. `begin` and `go_on` connect its clients and tell them how it ended."""

    def __init__(
        self,
        experiment: Experiment,
        directory: RunDirectory | None,
        named: Sequence[Sink],
    ) -> None:
        """Take ``named``: the sinks that the configuration names."""
        self.experiment = experiment
        self.directory = directory
        self.first = 0
        """The first round to run."""
        self.started = self.finished = False
        self._best = 0.0
        self._usual: health.Usual | None = None
        self._named = named

    def continue_from(self, state: Mapping[str, Any]) -> None:
        """Take over the ``state`` of a checkpoint."""
        self.experiment.load_state_dict(state)
        self.first, self._best = state["round"], state["best"]
        self._usual = state.get("health")  # older checkpoints have none

    def go(self, sinks: Sequence[Sink] = (), callbacks: Sequence[Callback] = ()) -> Result:
        """Run the remaining rounds. The sinks that the configuration names get the metrics too."""
        self.started = True
        result = run_rounds(
            self.experiment,
            self.directory,
            first=self.first,
            best=self._best,
            usual=self._usual,
            sinks=[*sinks, *self._named],
            callbacks=callbacks,
        )
        self.finished = not result.stopped
        return result


@contextmanager
def begin(
    config: Config, *, out: Path | str | None = None, **arguments: Unpack[Arguments]
) -> Iterator[Run]:
    """Prepare a new run; with ``out``, create its directory there."""
    place = Path(out) if out is not None else None
    if place is not None:
        RunDirectory.check_free(place)
    config = _where_clients_live(config, arguments)
    arguments = _with_stages(config, arguments)
    config = with_layers_of(config, arguments.get("model"))
    sinks = _named_sinks(config)
    experiment = assemble(config, **arguments)
    with ExitStack() as stack:
        run = Run(experiment, None, sinks)
        # After the clients have left: until then the fleet may write to the directory.
        stack.callback(_leave, run)
        stack.callback(lambda: experiment.fleet.close(run.finished))
        if place is not None:
            run.directory = RunDirectory.create(
                place, config, experiment.holdings, str(experiment.hardware.device)
            )
        experiment.fleet.open(place)
        yield run


def _leave(run: Run) -> None:
    if run.directory is not None:
        if not run.started:
            run.directory.undo()
        run.directory.unlock()


@contextmanager
def go_on(
    path: Path | str,
    *,
    settings: Sequence[str] = (),
    cluster: bool = False,
    **arguments: Unpack[Arguments],
) -> Iterator[Run]:
    """Prepare the run in a directory from its latest good checkpoint; ``path`` may also name a checkpoint.

    ``settings`` are ``key=value`` assignments as for ``--set``, for limits (``stop.*``) and sinks, and for the
    size and the waits of a fleet of devices (``clients.total``, ``clients.active``, ``network.*``).
    ``cluster``: use all ranks of torchrun, wherever the run was before. Without torchrun, the run continues in this process.
    """
    place = Path(path)
    named = place.suffix == ".safetensors"
    directory = RunDirectory.open(place)
    if not any(assignment.partition("=")[0].strip() == "sinks" for assignment in settings):
        for name in directory.config().sinks:
            check_importable(name, f"{directory.path / 'config.toml'}")
    config = directory.changed(settings)
    if arguments.get("network") is not None and config.fleet.kind != "network":
        raise ConfigError(
            f"{directory.path} is a simulated run, with other images and clients; start one with devices from its "
            f"model: model.weights={directory.path / 'best.safetensors'}"
        )
    config = _where_clients_live(config, arguments)
    if cluster:
        config = on_ranks(config)
    elif launch() is None:
        config = in_one_process(config)
    arguments = _with_stages(config, arguments)
    check_same(arguments.get("model"), config.model.name, config.model.layers)
    with ExitStack() as stack:
        directory.lock()
        stack.callback(directory.unlock)
        source = (place, _training_state(place)) if named else health.last_good(place)
        if source is not None:
            state = source[1]
            log.warning("going on from %s: %s done", source[0], counted(state["round"], "round"))
            if source[0].name == "latest.safetensors":
                directory.trust_latest(state["round"])
            elif named:
                with suppress(checkpoint.CheckpointError):
                    directory.trust_latest(directory.load()["round"])
        else:
            # Killed before its first checkpoint. Every draw follows from the seed, so starting again gives the same
            # run, but for the first weights of a module that a program passed: they are on no disk.
            anew = "%s has no checkpoint yet: beginning anew"
            if config.model.layers is not None and arguments.get("model") is None:
                anew += "; if a program passed its network, pass it again, for its first weights"
            log.warning(anew, directory.path)
            state = None
        directory.warn_of_changes(arguments.get("device", "auto"))
        sinks = _named_sinks(config)
        experiment = assemble(config, resumed=state, **arguments)
        run = Run(experiment, directory, sinks)
        stack.callback(lambda: experiment.fleet.close(run.finished))
        if state is not None:
            before = state["model"]["description"]
            may_grow = config.fleet.kind == "network"
            check_images(before, experiment.description.as_dict(), may_grow=may_grow)
            run.continue_from(state)
        if settings:
            directory.keep_config(config)
        state = source = None  # as large as all models of the run
        # Only now, so that a client that connects gets its former place.
        experiment.fleet.open(directory.path)
        yield run


def _training_state(file: Path) -> dict[str, Any]:
    """Return the state in a checkpoint; refuse a file that holds the model alone."""
    state = checkpoint.read(file)
    if "method" not in state:
        raise checkpoint.CheckpointError(
            f"{file} holds a model, not the state of its training; continue from {file.parent}, or start a new "
            f"run from it with model.weights={file}"
        )
    return state


def _with_stages(config: Config, arguments: Arguments) -> Arguments:
    """Return the arguments with the user's model as a sequence of stages; this may load the images."""
    arguments, model = arguments.copy(), arguments.get("model")
    if model is None or is_sequential(model):
        return arguments
    if (data := arguments.get("data")) is None:
        data, arguments["partition"] = load_data(config, arguments.get("partition"))
        arguments["data"] = data
    arguments["model"] = stages_of(model, data.shape)
    return arguments


def _where_clients_live(config: Config, arguments: Arguments) -> Config:
    if arguments.get("network") is None:
        return config
    # A round over a network is expensive: a restarted server repeats only the unfinished one.
    runtime = config.runtime.model_copy(update={"checkpoint_every": 1})
    return config.in_fleet("network").model_copy(update={"runtime": runtime})


@usual_modes()
@run_log.collected()
def train(
    config: Config,
    *,
    data: Dataset | None = None,
    partition: Partition | None = None,
    model: Own | None = None,
    device: str = "auto",
    callbacks: Sequence[Callback] = (),
    out: Path | str | None = None,
    sinks: Sequence[Sink] = (),
    observe: Observer | None = None,
    network: NetworkOptions | None = None,
    stop: StopFlag | None = None,
) -> Result:
    """Train as ``config`` says and return the result.

    ``data``, ``partition`` and ``model`` replace those that the configuration names. ``device`` is "auto", "cpu",
    "cuda" or "cuda:N". ``callbacks`` are called after rounds, tests and checkpoints, and may end the run. With ``out``, the run is
    kept in that new directory.

    ``sinks`` get the metrics of every round; one that fails is not called again. ``observe`` is a function that gets
    them as a dictionary. ``network`` is set if clients connect from other machines. Another thread sets ``stop`` to
    end the run.
    """
    check_config(config)
    check_arguments(data, partition, device, callbacks, sinks, observe, stop)
    arguments = Arguments(
        data=data, partition=partition, model=model, device=device, network=network, stop=stop
    )
    with begin(as_passed(config, data, partition), out=out, **arguments) as run:
        return run.go(_watchers(observe, sinks), callbacks)


@usual_modes()
@run_log.collected()
def resume(
    path: Path | str,
    *,
    settings: Sequence[str] = (),
    data: Dataset | None = None,
    partition: Partition | None = None,
    model: Own | None = None,
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
    check_arguments(data, partition, device, callbacks, sinks, observe, stop)
    arguments = Arguments(
        data=data, partition=partition, model=model, device=device, network=network, stop=stop
    )
    with go_on(path, settings=settings, **arguments) as run:
        return run.go(_watchers(observe, sinks), callbacks)


def _named_sinks(config: Config) -> list[Sink]:
    return [Guarded(sink(name)) for name in config.sinks]


def _watchers(observe: Observer | None, sinks: Sequence[Sink]) -> list[Sink]:
    mine: list[Sink] = [Observed(observe)] if observe is not None else []
    return mine + [Guarded(sink) for sink in sinks]

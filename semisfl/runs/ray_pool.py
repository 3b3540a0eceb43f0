"""Run jobs on a Ray cluster: one per GPU or share of it, or one per core without GPUs.

Every machine needs this package and the folder of the runs. If a worker or machine is lost, Ray starts
its run elsewhere, and the run continues from its last checkpoint.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from semisfl.runs.compare import Job
from semisfl.runs.lock import Taken
from semisfl.runs.start import resume, train
from semisfl.settings import config as configs
from semisfl.settings.config import ConfigError

ATTEMPTS = 10
"""Attempts at a run whose worker or machine is lost."""


def train_one(values: dict[str, Any], path: str, device: str) -> None:
    """Start or continue one run, in a worker of the cluster."""
    job = Job.of(configs.parse(values), Path(path))
    if job.status == "new":
        train(job.config, out=job.path, device=device)
    elif job.status == "unfinished":
        resume(job.path, settings=job.changed, device=device)


class RayPool:
    def __init__(self, address: str | None, share: int = 1, device: str = "auto") -> None:
        """Connect to the cluster at ``address`` (None: start one here); place ``share`` runs on each GPU."""
        try:
            import ray
        except ImportError as error:
            raise ImportError("--engine ray needs Ray: pip install 'semisfl[ray]'") from error
        self._ray, self._device = ray, device
        if not ray.is_initialized():
            try:
                ray.init(
                    address,
                    log_to_driver=False,
                    include_dashboard=False if address is None else None,
                )
            except Exception as error:  # of many classes, with texts for Ray's own users
                raise ConfigError(
                    "Ray does not start on this machine; --debug shows its reason, --jobs needs no Ray"
                    if address is None
                    else f"no Ray cluster answers at {address!r}; give HOST:PORT of one, or auto, or use --engine ray"
                ) from error
        gpus = ray.cluster_resources().get("GPU", 0)
        self._train = ray.remote(
            num_cpus=1, num_gpus=1 / share if gpus else 0, max_retries=ATTEMPTS - 1
        )(train_one)
        self._running: dict[Any, Path] = {}

    def has_room(self) -> bool:
        """Return True: the cluster queues what does not fit yet."""
        return True

    def start(self, job: Job) -> None:
        values = job.config.model_dump(mode="json")
        answer = self._train.remote(values, str(job.path.absolute()), self._device)
        self._running[answer] = job.path

    def ended(self) -> Mapping[Path, Exception | None]:
        waiting = list(self._running)
        done, _ = (
            self._ray.wait(waiting, num_returns=len(waiting), timeout=0) if waiting else ([], [])
        )
        return {self._running.pop(answer): self._problem(answer) for answer in done}

    def _problem(self, answer: Any) -> Exception | None:
        try:
            self._ray.get(answer)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, Taken):
                return error.cause
            return OSError(f"{type(error.cause).__name__}: {error.cause}")
        except self._ray.exceptions.RayError as error:
            return OSError(f"lost {ATTEMPTS} times: {str(error).splitlines()[0]}")
        return None

    def stop(self) -> None:
        """Cancel the active runs; they can continue from their last checkpoints."""
        for answer in self._running:
            self._ray.cancel(answer, force=True)
        self._ray.shutdown()

"""The device of a run: the precision it computes in, and what makes it fast.

This is the engine's door. Whoever computes gets one `Hardware` and asks it for everything that depends on the
device; algorithms and methods use its words alone and know nothing of streams and graphs.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from semisfl.engine import kernels
from semisfl.engine.adamw import AdamW
from semisfl.engine.graphs import Graphs
from semisfl.engine.metering import Meter
from semisfl.engine.sgd import SGD
from semisfl.engine.streams import Streams
from semisfl.engine.weights import Module, Weights
from semisfl.settings.run import OptimizerConfig, RuntimeConfig


class Hardware:
    """One device and the precision of a run.

    ``make_step`` and ``generator`` are those of `Graphs`, ``together`` is that of `Streams`.
    """

    def __init__(self, device: str = "auto", config: RuntimeConfig | None = None) -> None:
        """Set torch's global switches for ``device``: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

        Raises ValueError for a device that is not here.
        """
        config = config or RuntimeConfig()
        self.device = _choose(device)
        cuda = self.device.type == "cuda"
        precision = config.precision if config.precision != "auto" else ("bf16" if cuda else "fp32")
        self.precision = precision
        self.capture = cuda  # steps become CUDA graphs
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        if cuda:
            if self.device.index is not None:
                torch.cuda.set_device(self.device)  # where streams, graphs and kernels go
            torch.backends.cudnn.benchmark = not config.deterministic
        else:
            # MKL repeats its sums exactly only in this mode, and only with a fixed number of threads:
            # after a call of `set_num_threads` it no longer chooses the number itself.
            os.environ.setdefault("MKL_CBWR", "AUTO")
            torch.set_num_threads(torch.get_num_threads())
            # Values below 1.2e-38 count as 0, in this thread and all that it starts: a CPU takes ten times
            # as long for them, and a device can send features that lead to them.
            (
                np.finfo(np.float32),
                np.finfo(np.float64),
            )  # numpy up to 2.3 warns if it first looks later
            torch.set_flush_denormal(True)
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        if torch.are_deterministic_algorithms_enabled() != config.deterministic:
            # Only then: the call imports torch's compiler, which takes seconds.
            torch.use_deterministic_algorithms(config.deterministic)
        self.lasting: list[SGD] = []
        """Optimisers whose moments are part of the run's state, in the order in which they were made."""
        self._fused = cuda and kernels.register_cuda()
        self.streams = Streams(self.device, self.arithmetic)
        self.together = self.streams.together
        graphs = Graphs(self.device, self.capture, self.step)
        self.make_step, self.generator = graphs.make_step, graphs.generator

    def arithmetic(self) -> torch.autocast:
        """Return a context in which models compute in the chosen precision; it holds for one thread."""
        return torch.autocast(
            self.device.type,
            dtype=torch.bfloat16,
            enabled=self.precision == "bf16",
            # Kept until the end of the block: on a CPU it spans many steps, which change the weights.
            cache_enabled=self.device.type == "cuda",
        )

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return a context for one step: it sets the precision, and at its end waits for the side stream."""
        with self.arithmetic():
            yield
        self.streams.join_side()

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of a model's input images."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def weights_dtype(self) -> torch.dtype:
        """Return the type of the layers' working weights; other types than float32 need the CUDA kernels."""
        return self.dtype if self._fused else torch.float32

    def working_copy(self, model: Module) -> Module:
        """Return ``model`` itself; its layers now compute on a copy of the weights in this hardware's precision."""
        Weights(model, self.weights_dtype)
        return model

    def sgd(self, parameters: Iterable[Tensor], config: OptimizerConfig) -> SGD:
        """Return an optimiser of ``parameters``, which on a GPU steps them during the backward pass.

        It has no learning rate until `SGD.restart` gives it one.
        """
        return SGD(parameters, config, self.streams)

    def optimizer(self, parameters: Iterable[Tensor], config: OptimizerConfig) -> SGD:
        """Return the server's optimiser of ``parameters``; moments that live across rounds are added to ``lasting``."""
        adamw = config.kind == "adamw"
        made = AdamW(parameters, config) if adamw else self.sgd(parameters, config)
        if adamw or config.keep_momentum:
            made.lasting = True
            self.lasting.append(made)
        return made

    def meter(self) -> Meter:
        """Return sums over the steps of a round."""
        return Meter(self.streams)


def _choose(device: str) -> torch.device:
    """Return the device of this name; ``auto`` is CUDA if there is any. Raises ValueError for one that is not here."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = device.partition(":")
    if device != "cpu" and (kind != "cuda" or not (device == "cuda" or number.isdigit())):
        raise ValueError(f"--device {device!r} is not known; use auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count()
    if kind == "cuda" and int(number or 0) >= count:
        there = f"only {count}" if count else "no"
        raise ValueError(
            f"--device {device}: {there} CUDA device is available here; use --device cpu or auto"
        )
    return torch.device(device)

"""The engine as a method sees it. It decides what overlaps, what is fused and what is replayed.

`semisfl.methods` and `semisfl.algorithm` import nothing else of this folder but `engine.kernels`.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from semisfl.engine.graphs import Step
from semisfl.engine.hardware import Hardware
from semisfl.engine.host import HostShelf as HostShelf
from semisfl.engine.metering import Meter as Meter
from semisfl.engine.sgd import SGD as SGD
from semisfl.engine.streams import One, Other
from semisfl.engine.weights import Module as Module
from semisfl.engine.weights import MovingAverage as MovingAverage
from semisfl.engine.weights import follow as follow
from semisfl.settings.run import OptimizerConfig


class Engine:
    """The server's device, as a method uses it."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self.device = hardware.device

    def prepared(self, model: Module) -> Module:
        """Return ``model`` itself, its layers computing in the run's precision."""
        return self._hardware.working_copy(model)

    def sgd(self, parameters: Iterable[Tensor], config: OptimizerConfig) -> SGD:
        """Return an optimiser of ``parameters``."""
        return SGD(parameters, config, self._hardware.streams)

    def together(self, first: Callable[[], One], second: Callable[[], Other]) -> tuple[One, Other]:
        """Return the results of two calls of which neither needs the other's; they may overlap."""
        return self._hardware.streams.together(first, second)

    def repeated(self, step: Step, capturable: bool = True) -> Step:
        """Return ``step`` for calling many times: it may be captured once and replayed.

        It must read and write its state in place, and no value on the device may change what it
        does. ``capturable``: whether it works on this device alone.
        """
        return self._hardware.graphs.capture(step, capturable)

    def meter(self) -> Meter:
        """Return sums over the steps of a round."""
        return Meter(self._hardware.streams)

    def generator(self, seed: int) -> torch.Generator:
        """Return a generator on the device that a repeated step may draw from."""
        return self._hardware.graphs.generator(seed)

    def shelf(self) -> HostShelf:
        """Return a store in host memory for states that are seldom used."""
        return HostShelf(self.device)

    def arithmetic(self) -> AbstractContextManager[None]:
        """Return a context in which models compute in the run's precision; steps are in it already."""
        return self._hardware.arithmetic()

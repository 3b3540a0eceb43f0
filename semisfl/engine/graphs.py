"""Run a step a few times, capture it as a CUDA graph, and replay the graph from then on."""

import gc
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from semisfl.engine.streams import FIRST

log = logging.getLogger(__name__)

# Real iterations run before a step is captured: lazy initialisation must be over by then.
WARMUP_CALLS = 3

Step = Callable[[], None]


class Graphs:
    """Captured steps of one device; they share memory and know the generators they may draw from.

    A captured step is a CUDA graph: its kernels run again with the same addresses, and none of its Python
    does. So it must not allocate results that outlive it, read values on the host, or branch on them.
    """

    def __init__(
        self,
        device: torch.device,
        capture: bool,
        around: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Surround every step with ``around``: its precision, and a wait for its side streams at the end.

        ``capture``: whether steps are captured at all, which needs CUDA.
        """
        self._device, self._capture, self._around = device, capture, around
        self._pool: Any = None
        self._generators: list[torch.Generator] = []

    def generator(self, seed: int) -> torch.Generator:
        """Return a generator that captured steps may draw from; reseed it with ``manual_seed``."""
        generator = torch.Generator(self._device).manual_seed(seed)
        self._generators.append(generator)
        return generator

    def make_step(
        self, step: Step, capturable: bool = True, check: Callable[[], None] = lambda: None
    ) -> Step:
        """Return a function to call once per iteration in place of ``step``.

        On a GPU ``step`` is captured after a few calls and replayed from then on: it must read and write
        its state in place, and neither the host nor a value on the device may change what it does.
        ``capturable``: whether it works on this device alone. ``check`` is called on the host before
        each step, and ends the iteration if it raises.
        """
        if self._capture and capturable:
            return _Captured(self, step, check)

        def run() -> None:
            check()
            with self._around():
                step()

        return run


class _Captured:
    """A step that runs plainly `WARMUP_CALLS` times, is captured then and is replayed from then on.

    If the capture fails, a warning says where, and the step runs plainly for ever.
    """

    def __init__(self, graphs: Graphs, step: Step, check: Callable[[], None]) -> None:
        self._graphs, self._step, self._check = graphs, step, check
        self._capturable = True
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        self._check()
        if self._graph is not None:
            self._graph.replay()
            return
        if self._capturable and self._calls >= WARMUP_CALLS and self._try_capture():
            return
        self._calls += 1
        # Graph capture requires the warm-up to run on its own stream.
        stream = torch.cuda.Stream(priority=FIRST)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run()
        torch.cuda.current_stream().wait_stream(stream)

    def _run(self) -> None:
        with self._graphs._around():
            self._step()

    def _try_capture(self) -> bool:
        """Capture the step and replay the graph once; return False if it cannot be captured."""
        graphs = self._graphs
        graph = torch.cuda.CUDAGraph()
        for generator in graphs._generators:
            graph.register_generator_state(generator)
        stream = torch.cuda.Stream(priority=FIRST)
        try:
            with _no_collection(), torch.cuda.graph(graph, graphs._pool, stream):
                self._run()
        except RuntimeError as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            log.warning(
                "this step cannot be captured as a CUDA graph and runs slower: %s (%s, line %d)",
                str(error).splitlines()[0],
                where.filename,
                where.lineno or 0,
            )
            self._capturable = False
            torch.cuda.synchronize()
            return False
        graphs._pool = graphs._pool or graph.pool()
        self._graph = graph
        graph.replay()
        return True


@contextmanager
def _no_collection() -> Iterator[None]:
    """Switch off garbage collection: freeing an old graph during a capture would end the capture."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

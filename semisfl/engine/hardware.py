"""The device a run uses, its arithmetic, and the recording of steps as CUDA graphs."""

import gc
import logging
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from semisfl.config import RuntimeConfig
from semisfl.engine.kernels import fused
from semisfl.engine.weights import Module, Weights

log = logging.getLogger(__name__)

# Real iterations run before a step is recorded: lazy initialisation must be over by then.
WARMUP_CALLS = 3
# Whatever the next operation waits for goes before what is done aside.
FIRST, LATER = -1, 0
# Clients side by side on one GPU: five streams clearly beat one, and ten by a little (H200).
STREAMS = 5


class Stopped(Exception):
    """Somebody asked the run to end; raised between two iterations."""


class Hardware:
    def __init__(self, device: str = "auto", config: RuntimeConfig | None = None) -> None:
        config = config or RuntimeConfig()
        self.device = _choose(device)
        cuda = self.device.type == "cuda"
        precision = config.precision if config.precision != "auto" else ("bf16" if cuda else "fp32")
        self.precision = precision
        self.capture = config.capture and cuda
        self.stopping = False
        self._pool: Any = None
        self._graph_generators: list[torch.Generator] = []
        self._streams: list[torch.cuda.Stream] = []
        self._cores: ThreadPoolExecutor | None = None
        self._tasks: list[Callable[[], None]] = []
        self._beside: torch.cuda.Stream | None = None
        self._aside: torch.cuda.Stream | None = None
        self._gone_aside = False
        self._in_use: list[Tensor] = []
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        if cuda:
            if self.device.index is not None:
                torch.cuda.set_device(self.device)  # where streams, graphs and kernels go
            torch.backends.cudnn.benchmark = not config.deterministic
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(config.deterministic)

    @contextmanager
    def arithmetic(self) -> Iterator[None]:
        """Models called inside compute in the chosen precision."""
        with torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16"
        ):
            yield

    @property
    def dtype(self) -> torch.dtype:
        """What images are handed to a model as."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def weights_dtype(self) -> torch.dtype:
        """What layers keep their working weights in; needs the fused kernels."""
        return self.dtype if self.device.type == "cuda" and fused() is not None else torch.float32

    def working_copy(self, model: Module) -> Module:
        """``model``, its layers computing on a copy of its weights in this hardware's precision."""
        Weights(model, self.weights_dtype)
        return model

    def generator(self, seed: int) -> torch.Generator:
        """A generator for device draws that recorded steps may use; reseed it with ``manual_seed``."""
        generator = torch.Generator(self.device).manual_seed(seed)
        self._graph_generators.append(generator)
        return generator

    def side_by_side(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """The results of independent calls; on a GPU spread over a few streams, on a CPU over its cores."""
        if self.device.type != "cuda" or len(calls) == 1:
            return self._on_cores(calls)
        main = torch.cuda.current_stream()
        if not self._streams:
            self._streams = [torch.cuda.Stream(priority=FIRST) for _ in range(STREAMS)]
        for stream in self._streams:
            stream.wait_stream(main)
        results = []
        for number, call in enumerate(calls):
            with torch.cuda.stream(self._streams[number % STREAMS]):
                results.append(call())
        for stream in self._streams:
            main.wait_stream(stream)
        return results

    def _on_cores(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        def alone(call: Callable[[], Any]) -> Any:
            with self.arithmetic():  # autocast is a matter of each thread
                return call()

        return list(self._cores.map(alone, calls) if self._cores else map(alone, calls))

    @contextmanager
    def a_core_each(self) -> Iterator[None]:
        """Inside, the calls of `side_by_side` have a CPU core each; everything else uses one.

        Small models gain little from several cores in one operation, and threads that wait for
        the next operation take the cores from those that work.
        """
        threads = torch.get_num_threads()
        if self.device.type != "cpu" or threads == 1:
            yield
            return
        self._cores = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        torch.set_num_threads(1)
        try:
            with self._cores:
                yield
        finally:
            self._cores = None
            torch.set_num_threads(threads)

    @contextmanager
    def aside(self, *used: Tensor) -> Iterator[None]:
        """Inside, a GPU works beside what follows in this iteration, whose end waits for it.

        ``used`` are the tensors it reads: their memory must not be given to others before.
        """
        if self.device.type != "cuda":
            yield
            return
        if self._aside is None:
            self._aside = torch.cuda.Stream(priority=LATER)
        self._aside.wait_stream(torch.cuda.current_stream())
        self._gone_aside = True
        self._in_use += used
        with torch.cuda.stream(self._aside):
            yield

    def _join(self) -> None:
        # Only if this step went aside: what is recorded may not wait for work outside of it.
        if self._gone_aside and self._aside is not None:
            torch.cuda.current_stream().wait_stream(self._aside)
        self._gone_aside = False
        self._in_use.clear()

    def while_busy(self, task: Callable[[], None]) -> None:
        """Do ``task`` when the host would next wait for the GPU; on a CPU there is no such time."""
        if self.capture:
            self._tasks.append(task)

    def before_waiting(self) -> None:
        """Whoever is about to wait for the device calls this first.

        The tasks get a stream of their own: a copy from ordinary host memory waits for all earlier
        work of its stream, which on the main one would be the rest of the round.
        """
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        if self._beside is None:
            self._beside = torch.cuda.Stream()
        with torch.cuda.stream(self._beside):
            for task in tasks:
                task()
        torch.cuda.current_stream().wait_stream(self._beside)

    def record(self, step: Callable[[], None], capturable: bool = True) -> Callable[[], None]:
        """``step``, to be called once an iteration.

        On a GPU it is recorded after a few calls and replayed from then on: it must read and
        write its state in place and decide nothing on the host. Raises `Stopped` between
        iterations once ``stopping`` is set.
        """
        return _Recorded(self, step, self.capture and capturable)


class _Recorded:
    def __init__(self, hardware: Hardware, step: Callable[[], None], capture: bool) -> None:
        self._hardware = hardware
        self._step = step
        self._capture = capture
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._hardware.stopping:
            raise Stopped
        if self._graph is not None:
            self._graph.replay()
            return
        if self._capture and self._calls >= WARMUP_CALLS and self._try_capture():
            return
        self._calls += 1
        if not self._capture:
            self._run()
            return
        # Warm-up on a side stream, as graph capture asks for.
        side = torch.cuda.Stream(priority=FIRST)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run()
        torch.cuda.current_stream().wait_stream(side)

    def _run(self) -> None:
        with self._hardware.arithmetic():
            self._step()
        self._hardware._join()

    def _try_capture(self) -> bool:
        graph = torch.cuda.CUDAGraph()
        for generator in self._hardware._graph_generators:
            graph.register_generator_state(generator)
        stream = torch.cuda.Stream(priority=FIRST)
        try:
            with _no_collection(), torch.cuda.graph(graph, self._hardware._pool, stream):
                self._run()
        except RuntimeError as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            log.warning(
                "this step cannot be recorded as a CUDA graph and runs slower: %s (%s, line %d)",
                str(error).splitlines()[0],
                where.filename,
                where.lineno or 0,
            )
            self._capture = False
            torch.cuda.synchronize()
            return False
        self._hardware._pool = self._hardware._pool or graph.pool()
        self._graph = graph
        graph.replay()
        return True


@contextmanager
def _no_collection() -> Iterator[None]:
    """Inside, no garbage is collected: an old graph among it, freed while another is recorded, ends that."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _choose(device: str) -> torch.device:
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

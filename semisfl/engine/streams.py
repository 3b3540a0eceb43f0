"""What runs beside what: side streams on a GPU, a core per call on a CPU, host work while a GPU is busy."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

# Whatever the next operation waits for goes before what a side stream does.
FIRST, LATER = -1, 0
# Clients side by side on one GPU: five streams clearly beat one, and ten by a little (H200).
STREAMS = 5

Call = Callable[[], Any]


class Streams:
    """Order within a step, for one device. On a CPU everything happens where it stands."""

    def __init__(
        self, device: torch.device, arithmetic: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._cuda = device.type == "cuda"
        self._arithmetic = arithmetic
        self._several: list[torch.cuda.Stream] = []
        self._side: torch.cuda.Stream | None = None
        self._side_used = False
        self._in_use: list[Tensor] = []
        self._ahead: torch.cuda.Stream | None = None
        self._tasks: list[Callable[[], None]] = []
        self._cores: ThreadPoolExecutor | None = None
        self._threads = 1
        self.overlap = Overlap(self._cuda)

    # --- independent calls -----------------------------------------------------------------------

    def side_by_side(self, calls: Sequence[Call]) -> list[Any]:
        """The results of independent calls; on a GPU over a few streams, on a CPU over its cores."""
        if not self._cuda or len(calls) == 1:
            return self._on_cores(calls)
        main = torch.cuda.current_stream()
        if not self._several:
            self._several = [torch.cuda.Stream(priority=FIRST) for _ in range(STREAMS)]
        for stream in self._several:
            stream.wait_stream(main)
        results = []
        for number, call in enumerate(calls):
            with torch.cuda.stream(self._several[number % STREAMS]):
                results.append(call())
        for stream in self._several:
            main.wait_stream(stream)
        return results

    def _on_cores(self, calls: Sequence[Call]) -> list[Any]:
        def alone(call: Call) -> Any:
            with self._arithmetic():  # autocast is a matter of each thread
                return call()

        if self._cores is None:
            return list(map(alone, calls))
        # One that would be left for the end, with the other cores idle, uses all of them.
        last = len(calls) % self._threads == 1
        done = list(self._cores.map(alone, calls[:-1] if last else calls))
        if last:
            torch.set_num_threads(self._threads)
            try:
                done.append(alone(calls[-1]))
            finally:
                torch.set_num_threads(1)
        return done

    @contextmanager
    def a_core_each(self) -> Iterator[None]:
        """Inside, the calls of `side_by_side` have a CPU core each, and one that is left over all of
        them; everything else uses one.

        Small models gain little from several cores in one operation, and threads that wait for
        the next operation take the cores from those that work.
        """
        threads = torch.get_num_threads()
        if self._cuda or threads == 1:
            yield
            return
        self._threads = threads
        self._cores = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        torch.set_num_threads(1)
        try:
            with self._cores:
                yield
        finally:
            self._cores = None
            torch.set_num_threads(threads)

    # --- work that nothing in this step waits for ------------------------------------------------

    @contextmanager
    def side(self, *used: Tensor) -> Iterator[None]:
        """Inside, a GPU works on a side stream, beside what follows; the step's end waits for it.

        ``used`` are the tensors it reads: their memory must not be given to others before.
        """
        if not self._cuda:
            yield
            return
        if self._side is None:
            self._side = torch.cuda.Stream(priority=LATER)
        self._side.wait_stream(torch.cuda.current_stream())
        self._side_used = True
        self._in_use += used
        with torch.cuda.stream(self._side):
            yield

    def join_side(self) -> None:
        """Wait for the side stream: the end of every step, captured or not."""
        # Only if this step used it: what is captured may not wait for work outside of it.
        if self._side_used and self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        self._side_used = False
        self._in_use.clear()

    # --- work of the host while the device is busy -----------------------------------------------

    def while_busy(self, task: Callable[[], None]) -> None:
        """Do ``task`` when the host would next wait for the GPU; on a CPU there is no such time."""
        if self._cuda:
            self._tasks.append(task)

    def before_waiting(self) -> None:
        """Whoever is about to wait for the device calls this first.

        The tasks get a stream of their own: a copy from ordinary host memory waits for all earlier
        work of its stream, which on the main one would be the rest of the round.
        """
        tasks, self._tasks = self._tasks, []
        if not tasks:
            return
        if self._ahead is None:
            self._ahead = torch.cuda.Stream()
        with torch.cuda.stream(self._ahead):
            for task in tasks:
                task()
        torch.cuda.current_stream().wait_stream(self._ahead)


class Overlap:
    """``with overlap:`` its body runs beside what follows, until ``overlap.join()``.

    For a pass whose results are needed later in the same step, such as the teacher's beside the
    student's. On a CPU the body simply runs where it stands.
    """

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._stream: torch.cuda.Stream | None = None
        self._entered: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        if self._cuda:
            self._stream = self._stream or torch.cuda.Stream(priority=FIRST)
            self._stream.wait_stream(torch.cuda.current_stream())
            self._entered = torch.cuda.stream(self._stream)
            self._entered.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._entered is not None:
            self._entered.__exit__(*error)
            self._entered = None

    def join(self) -> None:
        """From here on, what the body computed may be used."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

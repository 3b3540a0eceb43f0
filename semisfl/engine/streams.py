"""Run things at the same time: side streams on a GPU, one core per call on a CPU, host work while a GPU is busy."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

# Stream priorities: what the next operation waits for goes before the side stream's work.
FIRST, LATER = -1, 0
# Clients side by side on one GPU: five streams are clearly faster than one, and a little faster than ten (H200).
STREAMS = 5

Call = Callable[[], Any]
One = TypeVar("One")
Other = TypeVar("Other")


class Streams:
    """Decide what overlaps within a step on one device. A CPU runs everything in program order.

    A GPU has the main stream, one beside it for a second model (`together`), a few for clients
    (`side_by_side`), the side stream for what nothing waits for (`side`), and one for the next round.
    """

    def __init__(
        self, device: torch.device, arithmetic: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._cuda = device.type == "cuda"
        self._arithmetic = arithmetic
        self._several: list[torch.cuda.Stream] = []
        self._beside: torch.cuda.Stream | None = None
        self._side: torch.cuda.Stream | None = None
        self._side_used = False
        self._in_use: list[object] = []
        self._ahead: torch.cuda.Stream | None = None
        self._tasks: list[Callable[[], None]] = []
        self._cores: ThreadPoolExecutor | None = None
        self._threads = 1

    # --- independent calls -----------------------------------------------------------------------

    def together(self, first: Callable[[], One], second: Callable[[], Other]) -> tuple[One, Other]:
        """Return the results of two independent calls. A GPU runs the first on a stream of its own."""
        if not self._cuda:
            return first(), second()
        main = torch.cuda.current_stream()
        self._beside = self._beside or torch.cuda.Stream(priority=FIRST)
        self._beside.wait_stream(main)
        with torch.cuda.stream(self._beside):
            one = first()
        other = second()
        main.wait_stream(self._beside)
        return one, other

    def side_by_side(self, calls: Sequence[Call]) -> list[Any]:
        """Return the results of independent calls: on a GPU over a few streams, on a CPU over its cores.

        A CPU uses several cores only inside `a_core_each`.
        """
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
            with self._arithmetic():  # autocast is set per thread
                return call()

        if self._cores is None:
            return list(map(alone, calls))
        # A last call that would leave the other cores idle uses all of them.
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
        """Give each call of `side_by_side` one CPU core, and a call that is left over all of them.

        Everything else inside uses one core. Small models gain little from several cores per
        operation, and threads that wait for the next operation take cores from those that work.
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
    def side(self, *used: object) -> Iterator[None]:
        """Run the body on a GPU's side stream, while the main stream goes on; the step's end waits for it.

        ``used`` are the tensors that the body reads, or what holds them: they are kept until the
        step's end, so that their memory is not reused too early.
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
        """Wait for the side stream; called at the end of every step, captured or not."""
        # Only if this step used it: a captured step may not wait for work outside of it.
        if self._side_used and self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)
        self._side_used = False
        self._in_use.clear()

    # --- work of the host while the device is busy -----------------------------------------------

    def while_busy(self, task: Callable[[], None]) -> None:
        """Run ``task`` when the host next waits for the GPU; on a CPU it never waits, and never runs it."""
        if self._cuda:
            self._tasks.append(task)

    def before_waiting(self) -> None:
        """Run the waiting tasks; every caller that is about to wait for the device calls this first.

        The tasks get a stream of their own. A copy from pageable host memory waits for all earlier
        work of its stream; on the main stream that would be the rest of the round.
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

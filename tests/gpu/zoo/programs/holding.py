"""A healthy loop beside work on the GPU that does not end, from when the file `hold` is made until it is removed.

hold_*: for stand_still.py. Every stream here waits for no other one, and whatever could wait for an idle device
(loading of code, allocations) is done before the loop. What is held is let go on a thread of its own, since the loop
may stand still. healthy_*: the GPU never rests, but its queue is short.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from gpu.zoo.catalog import Program, add, program
from gpu.zoo.life import Life, Skip
from gpu.zoo.programs.driver import WAIT_EQ, Driver, Semaphore, Spin
from gpu.zoo.programs.torch_common import torch_of

WARM_STEPS = 50
AHEAD_S, SLEEP_S, HEALTHY_AHEAD_S = 0.7, 0.25, 0.06


class Hold(Protocol):
    """Work that does not end."""

    def begin(self) -> None:
        """Enqueues it."""

    def top_up(self) -> None:
        """Called in every step while it is held."""

    def release(self) -> None:
        """Lets it end."""


class _Hold:
    def begin(self) -> None:
        """Nothing."""

    def top_up(self) -> None:
        """Nothing."""

    def release(self) -> None:
        """Nothing."""


class Spins(_Hold):
    """Spinning kernels on some streams, in the current context or in one of their own."""

    def __init__(self, _torch: Any, streams: int = 1, own_context: bool = False) -> None:
        driver = Driver()
        primary = driver.push_primary()
        if own_context:
            self._context = driver.own_context()
        self.spin, self.streams = Spin(driver), [driver.stream() for _ in range(streams)]
        if own_context:
            driver("cuCtxSetCurrent", primary)
        self.driver, self._primary, self._own = driver, primary, own_context

    def begin(self) -> None:
        """Launches one kernel on each stream."""
        self.spin.flag.value = 0
        if self._own:
            self.driver("cuCtxSetCurrent", self._context)
        for stream in self.streams:
            self.spin.launch(stream)
        if self._own:
            self.driver("cuCtxSetCurrent", self._primary)

    def release(self) -> None:
        """All kernels see the flag."""
        self.spin.flag.value = 1


class SpinsInBoth(_Hold):
    """A spinning kernel in the primary context and one in another context."""

    def __init__(self, torch: Any) -> None:
        self._both = [Spins(torch), Spins(torch, own_context=True)]

    def begin(self) -> None:
        """Both."""
        for each in self._both:
            each.begin()

    def release(self) -> None:
        """Both."""
        for each in self._both:
            each.release()


class WaitedFor(Spins):
    """Another thread of the program waits in cuStreamSynchronize for the kernel, as a rank does for a slow one."""

    def begin(self) -> None:
        """Launches, and lets the thread wait."""
        super().begin()
        threading.Thread(target=self._wait).start()

    def _wait(self) -> None:
        self.driver("cuCtxSetCurrent", self._primary)
        self.driver("cuStreamSynchronize", self.streams[0])


class WaitsForValue(_Hold):
    """A stream that waits until a word in memory has a value, with a kernel behind it."""

    def __init__(self, _torch: Any) -> None:
        self._driver = Driver()
        self._driver.push_primary()
        self._spin, self._stream = Spin(self._driver), self._driver.stream()

    def begin(self) -> None:
        """Enqueues the wait and a kernel that ends at once when it runs."""
        flag = self._spin.flag
        flag.value = 0
        self._driver("cuStreamWaitValue32_v2", self._stream, flag.device, ctypes.c_uint32(1), WAIT_EQ)
        self._spin.launch(self._stream)

    def release(self) -> None:
        """Gives the word its value."""
        self._spin.flag.value = 1


class HostFunction(_Hold):
    """A host function on a stream that waits for a semaphore."""

    def __init__(self, _torch: Any) -> None:
        self._driver = Driver()
        self._driver.push_primary()
        self._semaphore, self._stream = Semaphore(), self._driver.stream()
        self._semaphore.post()
        self._semaphore.wait_on(self._driver, self._stream)  # the first one starts a thread of the driver
        self._driver("cuStreamSynchronize", self._stream)

    def begin(self) -> None:
        """Enqueues it."""
        self._semaphore.wait_on(self._driver, self._stream)

    def release(self) -> None:
        """Lets it return."""
        self._semaphore.post()


class Queued(_Hold):
    """A stream with so many seconds of work queued all the time: sleeping kernels, or products of matrices."""

    def __init__(self, torch: Any, ahead_s: float, products: bool, size: int = 4096) -> None:
        self._torch, self._stream, self._products = torch, torch.cuda.Stream(), products
        self._ends: list[Any] = []
        self._big = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        self._unit = 10 if size <= 4096 else 1
        self._cycles = 10_000_000
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._enqueue()
        torch.cuda.synchronize()
        self._events[0].record(self._stream)
        self._enqueue()
        self._events[1].record(self._stream)
        torch.cuda.synchronize()
        unit_s = self._events[0].elapsed_time(self._events[1]) / 1e3
        if not products:
            self._cycles = int(self._cycles * SLEEP_S / unit_s)
            unit_s = SLEEP_S
        self._units = max(2, round(ahead_s / unit_s))

    def _enqueue(self) -> None:
        with self._torch.cuda.stream(self._stream):
            if self._products:
                for _ in range(self._unit):
                    self._torch.mm(self._big, self._big, out=self._out())
            else:
                self._torch.cuda._sleep(self._cycles)

    def _out(self) -> Any:
        if not hasattr(self, "_result"):
            self._result = self._torch.empty_like(self._big)
        return self._result

    def begin(self) -> None:
        """Fills the queue."""
        self.top_up()

    def top_up(self) -> None:
        """Fills the queue again."""
        self._ends = [end for end in self._ends if not end.query()]
        while len(self._ends) < self._units:
            self._enqueue()
            end = self._torch.cuda.Event()
            end.record(self._stream)
            self._ends.append(end)


class GraphOfSpins(Spins):
    """A spinning kernel inside a CUDA graph."""

    def __init__(self, torch: Any) -> None:
        super().__init__(torch)
        graph, self._instance = ctypes.c_void_p(), ctypes.c_void_p()
        self.driver("cuStreamBeginCapture_v2", self.streams[0], 1)  # thread-local
        self.spin.launch(self.streams[0])
        self.driver("cuStreamEndCapture", self.streams[0], ctypes.byref(graph))
        self.driver("cuGraphInstantiateWithFlags", ctypes.byref(self._instance), graph, ctypes.c_uint64(0))
        self.driver("cuGraphLaunch", self._instance, self.streams[0])
        self.driver("cuStreamSynchronize", self.streams[0])

    def begin(self) -> None:
        """Launches the graph."""
        self.spin.flag.value = 0
        self.driver("cuGraphLaunch", self._instance, self.streams[0])


def run_beside(life: Life, make: Callable[[Any], Hold]) -> None:
    """Small steps on a stream of their own; each waits for its result, as Tensor.item() does."""
    torch = torch_of(life)
    if life.device != "cuda":
        raise Skip("needs a GPU")
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)]).cuda()
    data = torch.randn(64, 512, device="cuda")
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        golden = model(data).sum().item()
        hold = make(torch)
        for _ in range(WARM_STEPS):
            model(data).sum().item()
        step_while(life, hold, lambda: model(data).sum().item() == golden)


def step_while(life: Life, hold: Hold, step: Callable[[], bool]) -> None:
    """Steps until the end, and holds the GPU while it is asked for."""
    begun, ended = threading.Event(), threading.Event()

    def let_go() -> None:
        while not ended.wait(0.02):
            if begun.is_set() and not life.held():
                begun.clear()
                hold.release()
                life.event("released")

    thread = threading.Thread(target=let_go)
    thread.start()
    for _ in life.loop():
        if not begun.is_set() and life.held():
            hold.begin()
            life.event("held")
            begun.set()
        if begun.is_set():
            hold.top_up()
        life.check(step(), "the result of a step is not what it was at first")
    ended.set()
    thread.join()
    if begun.is_set():
        hold.release()


HOLDS: dict[str, Callable[[Any], Hold]] = {
    "spin": Spins,
    "spins_on_eight_streams": partial(Spins, streams=8),
    "spin_in_another_context": partial(Spins, own_context=True),
    "spins_in_both_contexts": SpinsInBoth,
    "spin_that_a_thread_waits_for": WaitedFor,
    "spin_in_a_graph": GraphOfSpins,
    "wait_for_a_value": WaitsForValue,
    "host_function": HostFunction,
    "sleeps": partial(Queued, ahead_s=2 * SLEEP_S, products=False),
    "products": partial(Queued, ahead_s=AHEAD_S, products=True),
}
for hold_name, hold_kind in HOLDS.items():
    add(Program(name=f"hold_{hold_name}", run=partial(run_beside, make=hold_kind), by_name=True))
for hold_mode in ("spin", "own"):
    add(Program(name=f"hold_cu_{hold_mode}", source="hold", arguments=(hold_mode,), by_name=True))


def always_busy(life: Life, streams: int, size: int) -> None:
    """The GPU is never idle, but what is queued ends within 60 ms."""
    torch = torch_of(life)
    if life.device != "cuda":
        raise Skip("needs a GPU")
    queues = [Queued(torch, HEALTHY_AHEAD_S / streams, products=True, size=size) for _ in range(streams)]
    for _ in life.loop():
        for queue in queues:
            queue.top_up()
        threading.Event().wait(0.002)


for busy_streams, busy_size in ((1, 4096), (2, 4096), (1, 16384)):
    add(
        Program(
            name=f"healthy_{busy_streams}_queues_of_{busy_size}", by_name=True, deterministic=False,
            run=partial(always_busy, streams=busy_streams, size=busy_size),
        )
    )  # fmt: skip


@program(by_name=True, deterministic=False)
def healthy_training(life: Life) -> None:
    """A large step of training, compute-bound, each waited for only every fourth time."""
    torch = torch_of(life)
    if life.device != "cuda":
        raise Skip("needs a GPU")
    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096, dtype=torch.bfloat16) for _ in range(8)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    data = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for number in life.loop():
        optimizer.zero_grad(set_to_none=True)
        model(data).square().mean().backward()
        optimizer.step()
        if number % 4 == 3:
            torch.cuda.synchronize()

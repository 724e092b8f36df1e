"""Counts training iterations: by the program's own `kineto_agent.step()`, torch's optimizers, or its profiler's steps.

Theory of operation
    One of three counts at a time, the most reliable that has been seen so far: step(), then the optimizers, then
    torch.profiler. A counter that takes over continues from the current count. With several optimizers an iteration
    ends when the largest count per optimizer grows, as in Kineto; an optimizer that joins later continues at the
    current count. The same holds for several profilers. `kineto_agent.steps.torch_hooks` connects torch and JAX
    to this.

    `count` is the number of finished iterations and so the number of the running one; -1 before the first.
    Iteration N begins when the count becomes N; a ring keeps when that was for the last RING_ITERATIONS. While a
    capture records, the agent's thread copies them out of the ring before they are overwritten (step_marks.py).

    Everything here runs in the program's training thread: no lock, no raise, about a microsecond. It writes to a pipe
    only when somebody waits for this very iteration, or when it is time to copy: about once a second, and not again
    until the agent's thread has copied. Each write releases the GIL for a moment; releases more often than Python's
    switch interval would keep that thread from ever getting it. `_due_at` is the first iteration with work other than
    counting. Both threads may change it; after a change each checks whether the other has changed the values that it
    depends on.
"""

import _thread
import time
import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

RING_ITERATIONS = 2048
MARKS_AT_ONCE = RING_ITERATIONS // 4  # copying them takes half a millisecond with the GIL
_MASK = RING_ITERATIONS - 1
_NEVER = 1 << 62
_BASELINE_ITERATIONS = 256  # the median of this many is stable, and sorting them is cheap
_MIN_SAMPLES = 3
# For a comparison each side is split into parts, whose medians may differ by this share of the side's median.
_PARTS = 4
_MIN_COMPARED = 2 * _PARTS
_UNSTEADY = 0.1
# An iteration that takes this many times longer than usual, and at least this long, no longer shows the pace.
_STALLED = 20
_STALLED_NS = 1_000_000_000
_PROFILER, _OPTIMIZER, _PROGRAM = 1, 2, 3  # counting method: the largest seen so far


def _ignore() -> None:
    """Do nothing."""


def median_ns(durations: Sequence[int]) -> int:
    """The median, or 0 if there are too few durations for a meaningful one."""
    return sorted(durations)[len(durations) // 2] if len(durations) >= _MIN_SAMPLES else 0


def step_ratio(before_ns: Sequence[int], during_ns: Sequence[int]) -> float:
    """The median iteration time during a capture divided by that before it; 0.0 if the two cannot be compared.

    The two are measured one after the other, so anything else that changes in between (other programs on the machine,
    another phase of the program) also affects the ratio. So there must be enough of both, in order of time, and the
    medians of their quarters must agree within a tenth: if the pace drifts or jumps on one side, the two cannot be
    compared. Before the capture only the latest ones must, since the first iterations of a program are slow. Recording
    makes no program faster, so a ratio further below 1 has another cause.
    """
    before_ns = _latest_steady(before_ns)
    if not (_is_steady(before_ns) and _is_steady(during_ns)):
        return 0.0
    ratio = median_ns(during_ns) / median_ns(before_ns)
    return ratio if ratio >= 1 - _UNSTEADY else 0.0


def least_step_ratio(before_ns: Sequence[int], during_ns: Sequence[int]) -> float:
    """Lower bound of a capture's slowdown of iterations, if the pace changes and there is no step_ratio.

    That is the median of the fastest quarter during the capture over that of the slowest quarter before it. 0.0: there
    is a ratio, too little was measured, or a change of the pace alone could explain it.
    """
    before_ns = _latest_steady(before_ns)
    before, during = _quarters_ns(before_ns), _quarters_ns(during_ns)
    if not (before and during) or (_is_steady(before_ns) and _is_steady(during_ns)):
        return 0.0
    ratio = min(during) / max(before)
    return ratio if ratio > 1 else 0.0


def _latest_steady(durations: Sequence[int]) -> Sequence[int]:
    """All durations, or as many of the latest (a half, a quarter, …) as have a constant pace; all if none have."""
    latest = durations
    while len(latest) >= _MIN_COMPARED:
        if _is_steady(latest):
            return latest
        latest = latest[len(latest) // 2 :]
    return durations


def _is_steady(durations: Sequence[int]) -> bool:
    medians = _quarters_ns(durations)
    return bool(medians) and max(medians) - min(medians) <= _UNSTEADY * median_ns(durations)


def _quarters_ns(durations: Sequence[int]) -> List[int]:
    """The medians of the quarters, in order of time; empty if there are too few durations or they are invalid."""
    count = len(durations)
    if count < _MIN_COMPARED or not median_ns(durations):
        return []
    parts = [sorted(durations[count * part // _PARTS : count * (part + 1) // _PARTS]) for part in range(_PARTS)]
    medians = [part[len(part) // 2] for part in parts]
    return medians if min(medians) else []


class StepCounter:
    """Counts iterations and wakes those who wait for one."""

    def __init__(self, time_ns: Callable[[], int] = time.time_ns) -> None:
        self.count = -1
        self._time_ns = time_ns
        self._ring = [0] * RING_ITERATIONS
        self.thread = 0  # system thread id that stepped last
        self.hooked_ns = 0  # Unix ns since when torch's optimizers have been counted; 0: they are not
        self.undisturbed_ns = 0  # Unix ns since when no recording has been slowing iterations down
        self._ident = 0  # Python's identifier of that thread
        self._authority = 0
        self._counts: Dict[int, List[Any]] = {}  # id of an optimizer or profiler -> [count, weak reference]
        self._wake: Callable[[], None] = _ignore  # for the watched iteration
        self._watched = self._woken_for = _NEVER
        self._copy: Callable[[], None] = _ignore  # requests that the ring be copied
        self._copy_at = _NEVER
        self._due_at = _NEVER

    def step(self) -> None:
        """Count an iteration; called by the program."""
        self._authority = _PROGRAM
        self._advance(max(self.count, 0) + 1)

    def on_optimizer_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count a step of one of torch's optimizers; torch calls it as a hook."""
        self._stepped(_OPTIMIZER, optimizer)

    # torch.compile must not trace into the hook: it calls it unchanged.
    on_optimizer_step._torchdynamo_disable = True  # type: ignore[attr-defined]

    def on_profiler_step(self, profiler: Any) -> None:
        """Count a step of torch.profiler (or of one requester of torch's step tracker), or one marked for JAX's."""
        self._stepped(_PROFILER, profiler)

    def _stepped(self, authority: int, stepper: Any) -> None:
        if authority != self._authority:
            if authority < self._authority:
                return
            self._authority = authority
        entry = self._counts.get(id(stepper))
        if entry is None:
            self._join(stepper)
            return
        entry[0] += 1
        if entry[0] > self.count:
            self._advance(entry[0])

    def _join(self, stepper: Any) -> None:
        key = id(stepper)
        counts = self._counts
        try:
            reference = weakref.ref(stepper, lambda _dead: counts.pop(key, None))
        except TypeError:  # a class with __slots__: it stays uncounted
            return
        first = max(self.count, 1)
        counts[key] = [first, reference]
        if first > self.count:
            self._advance(first)

    def _advance(self, count: int) -> None:
        ident = _thread.get_ident()
        if ident != self._ident:  # asking the kernel is ten times slower
            self._ident, self.thread = ident, _thread.get_native_id()
        self._ring[count & _MASK] = self._time_ns()
        self.count = count
        if count >= self._due_at:
            self._act(count)

    def _act(self, count: int) -> None:
        """Wake those who wait for this iteration."""
        watched = self._watched
        wakes, copies = watched != self._woken_for and count >= watched, count >= self._copy_at
        if wakes:
            self._woken_for = watched
        if copies:
            self._copy_at = _NEVER  # before the wake-up, after which the agent's thread sets it again
        self._set_due()
        if wakes:
            self._wake()
        if copies:
            self._copy()

    def _set_due(self) -> None:
        while True:
            watched, woken_for, copy_at = self._watched, self._woken_for, self._copy_at
            self._due_at = copy_at if watched == woken_for else min(watched, copy_at)
            if (watched, woken_for, copy_at) == (self._watched, self._woken_for, self._copy_at):
                return

    # ------------------------------------------------------------ for the agent's thread

    def watch(self, iteration: Optional[int], wake: Callable[[], None] = _ignore) -> bool:
        """Call `wake` once when this iteration begins; None cancels that. Returns True if it has already begun."""
        self._watched = _NEVER
        self._wake = wake
        if iteration is not None:
            self._woken_for = _NEVER
            self._watched = iteration
        self._set_due()
        return iteration is not None and self.count >= iteration

    def copy_after(self, iterations: Optional[int], wake: Callable[[], None] = _ignore) -> None:
        """Call `wake` once after this many more iterations; None cancels that."""
        self._copy = wake
        self._copy_at = _NEVER if iterations is None else self.count + iterations
        self._set_due()

    @property
    def will_ask_to_copy(self) -> bool:
        """False once the call requested by `copy_after` has been made or is about to be."""
        return self._copy_at != _NEVER

    def time_of(self, iteration: int) -> int:
        """Start of this iteration (Unix ns), or 0 if unknown or forgotten."""
        time_ns = self._ring[iteration & _MASK]  # before the check: it may be overwritten right now
        return time_ns if iteration >= 0 and 0 <= self.count - iteration < RING_ITERATIONS - 1 else 0

    def begun_since(self, iteration: int) -> Tuple[List[Tuple[int, int]], int]:
        """Number and start (Unix ns) of this iteration and the following ones; and how many of them are forgotten."""
        last = self.count
        numbers = range(max(iteration, last - RING_ITERATIONS + 2, 1), last + 1)  # no iteration has number 0
        found = [(number, time_ns) for number in numbers for time_ns in (self.time_of(number),) if time_ns]
        return found, last + 1 - max(iteration, 1) - len(found) if last >= iteration else 0

    def forget_thread(self) -> None:
        """Forget the thread's number in a forked child: it has a new one, while Python's identifier stays the same."""
        self._ident = 0

    def steppers(self) -> List[Any]:
        """Weak references to the live optimizers or profilers that have stepped."""
        return [reference for _count, reference in list(self._counts.values())]

    def durations_ns(self, start_ns: int, end_ns: int) -> List[int]:
        """The lengths of the latest iterations that lie within [start_ns, end_ns]."""
        last = self.count
        times = [self.time_of(number) for number in range(max(last - _BASELINE_ITERATIONS, 0), last + 1)]
        pairs = zip(times, times[1:])
        return [
            after - before for before, after in pairs if 0 < before <= after and start_ns <= before and after <= end_ns
        ]

    def pace_ns(self) -> Tuple[int, int]:
        """Median length of the latest iterations, and for how long the running one has lasted if that is far longer.

        At least one of them is 0; both are if there are too few iterations.
        """
        now_ns = self._time_ns()
        median = median_ns(self.durations_ns(0, now_ns))
        running_ns = now_ns - self.time_of(self.count)
        stalled = median > 0 and running_ns > max(_STALLED * median, _STALLED_NS)
        return (0, running_ns) if stalled else (median, 0)


COUNTER = StepCounter()
"""The iterations of this process."""

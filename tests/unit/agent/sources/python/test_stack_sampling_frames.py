"""Stacks of every kind of frame, of code that calls faster than it can be read, of threads that come and go."""

import asyncio
import contextlib
import sys
import threading
import time
from collections import Counter
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest
from support.agent.agent_daemon import Sample
from support.agent.stack_recorder import Recorder, of_thread, plain
from support.waiting import until


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    made = Recorder(stack_sample_hz=1000)
    yield made
    made.close()


def own(recorder: Recorder) -> List[Sample]:
    return of_thread(recorder.stop(), threading.get_native_id())


def inner(recorder: Recorder, name: str) -> Tuple[str, ...]:
    """The stack of this thread from the frame `name` on, as most samples have it."""
    stacks = Counter(plain(sample.stack) for sample in own(recorder) if name in plain(sample.stack))
    (stack, _count), *_ = stacks.most_common(1)
    return stack[stack.index(name) :]


def rest(recorder: Recorder) -> None:
    enough = recorder.session.ticks() + 6
    while recorder.session.ticks() < enough:
        time.sleep(0.005)  # what is sampled: a call into C in which the stack stays as it is


def test_a_generator_is_below_who_asks_it(recorder: Recorder) -> None:
    def numbers() -> Iterator[int]:
        yield from inner_numbers()

    def inner_numbers() -> Iterator[int]:
        rest(recorder)
        yield 1

    def ask() -> None:
        next(numbers())

    ask()
    assert inner(recorder, "ask") == ("ask", "numbers", "inner_numbers", "rest")


def test_a_coroutine_is_below_the_event_loop(recorder: Recorder) -> None:
    async def outer() -> None:
        await step()

    async def step() -> None:
        await asyncio.sleep(0)
        rest(recorder)

    asyncio.run(outer())
    assert inner(recorder, "outer") == ("outer", "step", "rest")


def test_calls_through_c_are_all_there(recorder: Recorder) -> None:
    class Thing:
        def __lt__(self, other: Any) -> bool:
            rest(recorder)
            return False

    def in_order(things: List[Thing]) -> List[Thing]:
        return sorted(things)

    def through() -> None:
        list(map(in_order, [[Thing(), Thing()]]))

    through()
    assert inner(recorder, "through") == ("through", "in_order", "__lt__", "rest")


def test_a_class_body_and_a_comprehension_are_frames_where_python_has_them(recorder: Recorder) -> None:
    def body() -> None:
        class Made:
            rest(recorder)

        assert Made.__name__

    body()
    assert inner(recorder, "body") == ("body", "Made", "rest")


@pytest.mark.slow
def test_stacks_of_code_that_calls_all_the_time_are_true(recorder: Recorder) -> None:
    """f calls g calls h, every 50 ns or so. A look takes longer than a call, and `other` has the place that f had.

    So a look may find g below `other`: 0 to 3 of 100 looks do on a busy machine, hardly any on another one.
    """

    def h() -> int:
        return 1

    def g() -> int:
        return h() + h()

    def f() -> int:
        return g() + g()

    def other() -> int:
        return 1

    def busy() -> None:
        enough = recorder.session.ticks() + 400
        while recorder.session.ticks() < enough:
            for _ in range(200):
                f()
                other()

    busy()
    allowed = [("busy",), ("busy", "f"), ("busy", "f", "g"), ("busy", "f", "g", "h"), ("busy", "other")]
    seen: Counter[Tuple[str, ...]] = Counter()
    for sample in own(recorder):
        stack = plain(sample.stack)
        if "busy" in stack:
            seen[stack[stack.index("busy") :]] += 1
    strange = {stack: count for stack, count in seen.items() if stack not in allowed and stack[1] != "ticks"}
    assert sum(strange.values()) <= 0.12 * sum(seen.values()), strange  # 6.5 % seen on 3.12
    assert all(stack[0] == "busy" and set(stack[1:]) <= {*"fgh", "other", "ticks"} for stack in strange), strange
    assert recorder.outcome.metadata["torn_samples"] <= 0.02 * sum(seen.values())


def misjudged(recorder: Recorder) -> float:
    """By how much the samples misjudge the share of one of two functions of some 0.1 ms that take turns."""

    def calls() -> int:
        return sum(one(number) for number in range(3000))

    def one(number: int) -> int:
        return number

    def plain_loop() -> int:
        total = 0
        for number in range(7500):
            total += number
        return total

    spent: Dict[str, int] = {"calls": 0, "plain_loop": 0}
    works: List[Tuple[str, Callable[[], int]]] = [("calls", calls), ("plain_loop", plain_loop)]
    enough = recorder.session.ticks() + 300  # the share of either is known to 3 % then
    while recorder.session.ticks() < enough:
        for name, work in works:
            begin = time.perf_counter_ns()
            work()
            spent[name] += time.perf_counter_ns() - begin
    seen = Counter(name for sample in own(recorder) for name in plain(sample.stack) if name in spent)
    truth = spent["calls"] / sum(spent.values())
    return abs(seen["calls"] / sum(seen.values()) - truth)


@pytest.mark.slow
def test_shares_of_short_functions_are_those_of_their_time() -> None:
    """A sampler that drops what it cannot read in time would misjudge them."""
    found: list[float] = []
    while len(found) < 5 and sum(each < 0.12 for each in found) < 3:
        with contextlib.closing(Recorder(stack_sample_hz=1000)) as recorder:
            found.append(misjudged(recorder))
    # With walks repeated until one fits it was 0.10 to 0.17 on a loaded machine; 0.08 is seen on 3.9 with an idle one,
    # and 0.13 once in some dozens of recordings beside other work.
    assert sum(each < 0.12 for each in found) == 3, found


@pytest.mark.slow
def test_threads_that_come_and_go_are_survived_and_named(recorder: Recorder) -> None:
    ids = set()

    def brief() -> None:
        ids.add(threading.get_native_id())
        end = recorder.session.ticks() + 2
        until(lambda: recorder.session.ticks() >= end, "it samples")

    for _ in range(30):
        threads = [threading.Thread(target=brief) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    samples = [sample for sample in recorder.stop() if sample.thread_id in ids]  # what runs the tests has its own
    assert len({sample.thread_id for sample in samples}) > 20
    roots = Counter(plain(sample.stack)[0] for sample in samples if sample.stack)
    assert roots["_bootstrap"] >= 0.98 * sum(roots.values()), roots


@pytest.mark.slow
def test_recursion_at_all_depths_is_read(recorder: Recorder) -> None:
    def down(depth: int) -> int:
        if depth == 0:
            time.sleep(0.0005)  # at the bottom it holds still for some of the looks; on its way it does not
            return 0
        return down(depth - 1) + 1

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        enough = recorder.session.ticks() + 200
        while recorder.session.ticks() < enough:
            down(600)
    finally:
        sys.setrecursionlimit(limit)
    samples = [sample for sample in own(recorder) if "down" in plain(sample.stack)]
    assert len(samples) > 100
    assert max(len(sample.stack) for sample in samples) == 256
    assert recorder.outcome.metadata["torn_samples"] <= 0.05 * len(samples)

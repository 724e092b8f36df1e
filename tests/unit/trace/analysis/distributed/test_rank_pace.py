"""Whether the host of one rank is slower than those of the others."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from kineto_trace.analysis.distributed.rank_pace import RankPace, rank_pace, slower_host
from kineto_trace.structure.activity_links import EVALUATE_FUNCTION
from support.trace_files.ranks import Event, context, event, launched, step

STEPS = 10
NAMES = tuple(f"aten::op{number}" for number in range(10))
BACKWARD = tuple(f"{EVALUATE_FUNCTION}Op{number}Backward0" for number in range(10))


def rank(
    pace: float | Mapping[str, float] = 1.0,
    *,
    names: tuple[str, ...] = NAMES,
    calls: int = 6,
    more: Sequence[Event] = (),
    us: float = 20.25,
    host: str = "node0",
) -> RankPace:
    """Steps in which each operator is called so often for `us`. pace: of all operators, or of single ones."""
    events: list[Event] = [*more]
    for number in range(STEPS):
        begin = at = 20_000.0 * number
        events.append(step(number, begin, 19_900))
        for name in names * calls:
            took = us * (pace if isinstance(pace, float) else pace.get(name, 1.0))
            events.append(event("cpu_op", name, at + 5, took, tid=2 if name.startswith(EVALUATE_FUNCTION) else 1))
            at += 60
    return context(events, rank=0, size=2, host=host).get(rank_pace)


def told(own: RankPace, *others: RankPace, late_us: float = 0.0) -> str | None:
    found = slower_host(own, others, 1e3 * late_us)
    return None if found is None else found.cause


def test_operators_that_take_longer_on_one_rank_are_a_slower_host() -> None:
    found = slower_host(rank(1.3), [rank()], 0.0)
    assert found is not None
    assert (round(found.ratio, 2), found.names, found.thread, found.host) == (1.3, 10, "", "")
    assert found.more_ns == pytest.approx(60 * 20_250 * 0.3, rel=0.01)
    assert found.about == (
        "the same operators take 1.30 times as long on its host as on the other ranks (median over 10 operators): "
        "probably a slower or shared core; pin each rank to cores of its GPU's NUMA node, look for other programs "
        "there, and compare clock speeds"
    )


def test_of_four_ranks_the_slow_one_is_compared_with_the_middle_one_of_the_others() -> None:
    ranks = [rank(), rank(1.3), rank(1.02), rank(0.9)]
    causes = [told(own, *(each for each in ranks if each is not own)) for own in ranks]
    assert causes == [None, "the same operators take 1.30 times as long on its host", None, None]


@pytest.mark.parametrize("pace", [1.0, 1.05, 0.7])
def test_hosts_that_are_as_fast_or_nearly_so_are_no_slower_ones(pace: float) -> None:
    assert told(rank(pace), rank()) is None


@pytest.mark.parametrize("slow", [1, 7])
def test_a_few_slow_operators_are_no_slower_host(slow: int) -> None:
    assert told(rank(dict.fromkeys(NAMES[:slow], 2.0)), rank()) is None


def test_three_quarters_of_the_operators_are_enough() -> None:
    assert told(rank({**dict.fromkeys(NAMES, 1.4), NAMES[0]: 0.9, NAMES[1]: 0.9}), rank()) is not None


def test_operators_that_other_ranks_lack_or_seldom_call_are_not_compared() -> None:
    assert told(rank(1.3), rank(names=NAMES[:7])) is None
    assert told(rank(1.3), rank(), rank(names=NAMES[:7])) is None
    assert told(rank(1.3, calls=4), rank(calls=4)) is None  # 40 calls of each
    assert told(rank(1.3), rank(names=())) is None


def test_a_rank_that_calls_more_operators_has_more_work_and_no_slower_host() -> None:
    assert told(rank(1.3, calls=9), rank()) is None
    assert told(rank(1.3, names=(*NAMES, "aten::other", "aten::other")), rank()) == (
        "the same operators take 1.30 times as long on its host"
    )


def test_a_host_that_is_late_by_much_more_than_its_operators_take_longer_is_late_for_another_reason() -> None:
    more_us = 60 * 20.25 * 0.3
    assert told(rank(1.3), rank(), late_us=3 * more_us) is not None
    assert told(rank(1.3), rank(), late_us=5 * more_us) is None


@pytest.mark.parametrize(
    ("slow", "cause"),
    [
        ({*NAMES, *BACKWARD}, "the same operators take 1.30 times as long on its host"),
        ({*BACKWARD}, "the same operators take 1.30 times as long in its backward thread"),
        ({*NAMES}, "the same operators take 1.30 times as long in its training thread"),
    ],
)
def test_the_thread_is_told_if_only_one_is_slower(slow: set[str], cause: str) -> None:
    names = (*NAMES, *BACKWARD)
    assert told(rank(dict.fromkeys(slow, 1.3), names=names), rank(names=names)) == cause


def test_threads_with_few_operators_each_are_compared_together() -> None:
    names = (*NAMES[:5], *BACKWARD[:5])
    assert told(rank(1.3, names=names), rank(names=names)) == "the same operators take 1.30 times as long on its host"


@pytest.mark.parametrize(
    "waits",
    ["aten::item", "aten::_local_scalar_dense", "aten::copy_", "c10d::allreduce_", "nccl:all_reduce",
     "record_param_comms", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"],
)  # fmt: skip
def test_operators_that_wait_are_not_compared(waits: str) -> None:
    names = (*NAMES[:7], waits)
    assert told(rank(1.3, names=names), rank(names=names)) is None


def test_an_operator_in_which_the_host_waited_for_the_gpu_is_not_compared() -> None:
    waited = [
        *launched("k", 1, 10, 30, 1),
        event("cuda_runtime", "cudaStreamSynchronize", 7, 10, correlation=7),
    ]
    names = NAMES[:8]
    assert told(rank(1.3, names=names), rank(names=names)) is not None
    assert told(rank(1.3, names=names, more=waited), rank(names=names)) is None


def test_calls_to_cuda_are_no_time_of_their_operators_and_count_by_themselves_if_they_launch() -> None:
    launches = [
        each for number in range(60) for each in launched("k", 60.0 * number + 6, 60.0 * number + 20, 5, number)
    ]
    own = rank(names=NAMES[:1], calls=60, more=launches)
    assert {key: (pace.calls, round(pace.ns)) for key, pace in own.of.items()} == {
        ("training", "aten::op0"): (600, 20_250),  # of the first step 18.25 us
        ("training", "cudaLaunchKernel"): (60, 2_000),
    }


def test_medians_that_the_clock_of_the_trace_does_not_resolve_are_not_compared() -> None:
    assert told(rank(2.0, us=4.0), rank(us=4.0)) is None  # whole microseconds
    assert told(rank(2.0, us=4.25), rank(us=4.25)) is not None
    assert told(rank(2.0, us=0.125), rank(us=0.125)) is None  # as long as it takes to record them


def test_the_host_is_called_by_its_name_if_the_ranks_have_several() -> None:
    assert told(rank(1.3, host="b"), rank(host="a")) == "the same operators take 1.30 times as long on its host (b)"


def test_a_rank_whose_threads_wait_for_a_cpu_is_told_by_another_finding() -> None:
    assert told(replace(rank(1.3), without_cpu=True), rank()) is None


def test_ranks_of_which_only_some_have_calls_of_python_are_not_compared() -> None:
    python = [event("python_function", "a.py(1): f", 1, 5, **{"Python id": 1})]
    assert told(rank(1.3, more=python), rank()) is None
    assert told(rank(1.3, more=python), rank(more=python)) is not None


def test_a_rank_alone_has_nobody_to_be_slower_than() -> None:
    assert told(rank(1.3)) is None

"""The step rates of processes over the last minutes."""

from collections.abc import Iterable

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.output.top.trends import SPAN_S, Trends, rates_of


def sample(time_s: float, iterations: int, start_ns: int = 1) -> pb.HostSample:
    process = pb.Process(pid=7, start_time_ns=start_ns, iterations=iterations)
    return pb.HostSample(time_ns=int(time_s * 1e9), processes=[pb.ProcessSample(process=process)])


def shown(samples: Iterable[pb.HostSample]) -> str:
    trends, last = Trends(), pb.HostSample()
    for last in samples:
        trends.see(last)
    return trends.text(last.processes[0])


def at_rates(*rates: int, each_s: int = 20) -> list[pb.HostSample]:
    """Samples every two seconds of a process with these rates, one after the other."""
    counts, samples = 1000, []
    for part, rate in enumerate(rates):
        for step in range(0, each_s, 2):
            samples.append(sample(part * each_s + step, counts))
            counts += 2 * rate
    return [*samples, sample(len(rates) * each_s, counts)]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ((10,), "███ →"),
        ((10, 10, 10, 10, 10, 5, 5), "█████▄▄ ↘"),
        ((4, 4, 4, 4, 4, 8, 8), "▄▄▄▄▄██ ↗"),
        ((8, 8, 8, 8, 8, 8, 0), "██████▁ ↘"),
    ],
)
def test_bars_grow_with_the_rate_and_an_arrow_says_where_it_goes(rates: tuple[int, ...], expected: str) -> None:
    assert shown(at_rates(*rates)) == expected


def test_nothing_is_said_of_what_was_not_seen() -> None:
    assert shown([sample(0, 5)]) == "-"
    assert shown([sample(2 * time_s, -1) for time_s in range(9)]) == "-"
    assert shown([sample(2 * time_s, 70) for time_s in range(9)]) == "-"
    assert shown(sample(2 * time_s, time_s) for time_s in range(9)) == "-"  # too few steps to tell one from two


def test_slow_steps_share_fewer_bars_so_that_one_more_or_less_does_not_show() -> None:
    assert len(rates_of([(2.0 * place, place // 4) for place in range(120)])) == 3


def test_what_is_older_than_the_span_is_forgotten_and_so_is_a_process_that_counts_anew() -> None:
    slow = [sample(time_s, time_s) for time_s in range(0, 400, 2)]
    fast = [sample(400 + time_s, 400 + 9 * time_s) for time_s in range(0, int(SPAN_S) + 2, 2)]
    assert shown([*slow, *fast]) == "███████ →"
    assert shown([*at_rates(10), sample(30, 3)]) == "-"
    assert shown([*at_rates(10), sample(30, 2000, start_ns=2)]) == "-"

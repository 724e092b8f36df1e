"""Many small collectives that the host calls while the GPU waits for it."""

import pytest
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings.collective_findings import SMALL_COLLECTIVES as SMALL
from kineto_trace.analysis.findings.collective_findings import small_collectives
from kineto_trace.analysis.findings.finding_rules import findings
from kineto_trace.model.context import Context
from support.trace_files.ranks import Event, context, event, launched, nccl, step

STEPS = 5


def found(**options: float) -> list[Finding]:
    """The findings of this kind."""
    return list(small_collectives(trace(**options)))


def trace(*, collectives: float, elements: float, busy_us: float = 0.0) -> Context:
    """Steps of 2 ms, in which the host spends 50 us in each all_reduce of float32. busy_us: of a kernel beside them."""
    events: list[Event] = []
    for number in range(STEPS):
        at = 2_000.0 * number
        events.append(step(number, at, 2_000))
        events += launched("gemm", at + 1, at + 10, max(busy_us, 1), 1_000 * number + 900)
        for place in range(int(collectives)):
            begin, key = at + 20 + 60 * place, 1_000 * number + place
            events.append(event("cpu_op", "c10d::allreduce_", begin, 50))
            arguments = nccl("allreduce", int(elements), [0, 1], key)
            kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
            events += launched(kernel, begin + 40, begin + 50, 5, key, stream=20, **arguments)
    return context(events)


def test_small_collectives_save_the_hosts_time_in_all_but_those_that_their_bytes_need() -> None:
    (finding,) = found(collectives=30, elements=1_000)
    assert finding.title == "The host calls many small collectives, most of them all_reduce, and the GPU waits for it"
    assert finding.saving_ns == pytest.approx(STEPS * 29 * 50_000, rel=0.02)
    assert finding.evidence.startswith("30 collectives of less than 4 MiB in each step, of 3.906 KiB on average")


@pytest.mark.parametrize(
    ("collectives", "elements", "busy_us"),
    [(10, 1_000, 0.0), (30, 10_000_000, 0.0), (30, 1_000, 1_985.0)],
    ids=["few", "large", "while the GPU computes"],
)
def test_few_or_large_ones_or_those_beside_work_of_the_gpu_are_no_finding(
    collectives: int, elements: int, busy_us: float
) -> None:
    assert sum(each.saving_ns for each in found(collectives=collectives, elements=elements, busy_us=busy_us)) < 200_000


def test_what_is_in_small_collectives_is_not_launch_time_too() -> None:
    every = findings(trace(collectives=30, elements=1_000)).findings
    small, launches = (sum(each.saving_ns for each in every if each.name == name) for name in (SMALL, "host_bound"))
    assert small > 7_000_000
    assert launches < 1_500_000

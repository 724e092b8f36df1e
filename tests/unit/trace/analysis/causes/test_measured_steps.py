"""Times in these traces are milliseconds."""

from typing import Any

from kineto_trace.analysis.causes.measured_steps import measured_steps
from kineto_trace.model.context import Context
from support.trace_files.traces import START_NS, trace

MS = 1_000_000


def kernels(*times: tuple[int, int]) -> list[dict[str, Any]]:
    return [
        {"name": "k", "start": start * MS, "duration": (end - start) * MS, "correlation": n + 1}
        for n, (start, end) in enumerate(times)
    ]


def test_without_steps_what_happens_once_at_the_beginning_is_warm_up() -> None:
    """CUDA is initialised for 5 s, and the first convolution takes 3 s; then there is a kernel each 10 ms."""
    steady = [(8100 + 10 * n, 8105 + 10 * n) for n in range(50)]
    made = trace({"kernel": kernels((5000, 5001), (8001, 8002), *steady)}, length_ns=8600 * MS)
    found = Context(made).get(measured_steps)
    assert (found.start - START_NS).tolist() == [0, 8001 * MS]
    assert found.left_out.tolist() == [True, False]
    assert found.measured_ns == 599 * MS
    assert found.note() == "the first 8 s, up to the end of a gap that does not recur, are warm-up and left out"


def test_gaps_that_recur_are_no_warm_up() -> None:
    made = trace({"kernel": kernels(*((1000 * n + 900, 1000 * n + 1000) for n in range(4)))}, length_ns=4000 * MS)
    found = Context(made).get(measured_steps)
    assert (len(found.start), found.note(), found.measured_ns) == (1, None, 4000 * MS)


def test_an_empty_trace_has_no_warm_up_to_tell_of() -> None:
    assert measured_steps(Context(trace({}, length_ns=0))).note() is None

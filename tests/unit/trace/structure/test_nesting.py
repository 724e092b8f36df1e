import numpy as np
import pytest
from kineto_trace.arrays.codec import Events
from kineto_trace.model.source_coverage import SourceCoverage
from kineto_trace.structure.nesting import nest, recorded, unrecorded
from support.trace_files import traces

START = traces.START_NS


@pytest.mark.parametrize("thread", [0, 1, 2, 3])
def test_the_tree_of_one_thread_is_that_of_its_events_alone(thread: int) -> None:
    random = np.random.default_rng(7)
    threads, start = random.integers(0, 3, 300), random.integers(0, 1000, 300)
    end = start + random.integers(0, 200, 300)
    own = np.flatnonzero(threads == thread)
    found, alone = (
        nest(Events(threads, start, end), 2000).of_thread(thread),
        nest(Events(threads[own], start[own], end[own]), 2000),
    )
    assert found.order.tolist() == own[alone.order.astype(np.int64)].tolist()
    assert [column.tolist() for column in found.tree] == [column.tolist() for column in alone.tree]
    moments = np.arange(1200)
    asked = np.full(len(moments), thread, np.uint32)
    assert found.innermost(asked, moments).tolist() == alone.innermost(asked, moments).tolist()


def test_a_table_is_recorded_where_all_of_its_sources_were() -> None:
    first = SourceCoverage(source="a", kinds=("cpu_op",), missing=((START, START + 10), (START + 90, START + 2000)))
    second = SourceCoverage(source="b", kinds=("cpu_op", "kernel"), missing=((START + 5, START + 20),))
    trace = traces.trace({}, length_ns=100, coverage=(first, second))
    assert [(a - START, b - START) for a, b in zip(*unrecorded(trace, ("cpu_op",)), strict=True)] == [
        (0, 20),
        (90, 100),
    ]
    assert [(a - START, b - START) for a, b in zip(*recorded(trace, ("kernel",)), strict=True)] == [(0, 5), (20, 100)]
    assert recorded(trace, ("python_function",)).length() == 100
    assert unrecorded(traces.trace({}), ("cpu_op",)).length() == 0

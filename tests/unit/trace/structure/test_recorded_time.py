from kineto_trace.model.source_coverage import SourceCoverage
from kineto_trace.structure.recorded_time import recorded, unrecorded
from support.trace_files import traces

START = traces.START_NS


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

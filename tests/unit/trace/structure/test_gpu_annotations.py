from kineto_trace.model.trace import Table
from kineto_trace.structure.gpu_annotations import gpu_annotations
from support.trace_files.op_tables import spans, table

NAMES = ("start", "duration", "name", "device", "stream", "external_id")


def rows(result: Table) -> list[tuple[int, ...]]:
    """Sorted by annotation, device and stream."""
    columns = [result[name].tolist() for name in NAMES]
    return sorted(zip(*columns, strict=True), key=lambda row: (row[5], row[3], row[4]))


def parts() -> dict[str, Table]:
    """A step with an optimizer in it; one kernel before, two inside, one after it, and one outside of all."""
    return {
        "user_annotation": spans("user_annotation", (0, 100), (40, 60), id=[1, 2], name=[11, 12]),
        "cuda_runtime": spans("cuda_runtime", *((at, at + 1) for at in (10, 45, 50, 70, 200)), correlation=range(1, 6)),
        "kernel": spans(
            "kernel",
            (20, 30),
            (50, 55),
            (60, 90),
            (95, 99),
            (300, 310),
            correlation=range(1, 6),
            stream=[7, 7, 8, 7, 7],
        ),
    }


def test_the_innermost_annotation_has_a_span_on_each_stream_that_it_used() -> None:
    assert rows(gpu_annotations(parts())) == [
        (20, 79, 11, 0, 7, 1),
        (50, 5, 12, 0, 7, 2),
        (60, 30, 12, 0, 8, 2),
    ]


def test_devices_are_apart_and_copies_count() -> None:
    tables = {
        "user_annotation": spans("user_annotation", (0, 100)),
        "cuda_runtime": spans("cuda_runtime", (10, 11), correlation=[1]),
        "kernel": spans("kernel", (20, 30), (40, 50), correlation=[1, 1], device=[0, 1]),
        "gpu_memcpy": spans("gpu_memcpy", (60, 70), correlation=[1], stream=[7]),
    }
    assert rows(gpu_annotations(tables)) == [(20, 50, 0, 0, 7, 1), (40, 10, 0, 1, 7, 1)]


def test_launches_of_other_threads_do_not_count() -> None:
    tables = {**parts(), "user_annotation": spans("user_annotation", (0, 100), thread=[9])}
    assert rows(gpu_annotations(tables)) == []


def test_missing_parts_give_no_rows() -> None:
    for missing in parts():
        rest = {kind: found for kind, found in parts().items() if kind != missing}
        assert len(gpu_annotations(rest)) == 0
        assert len(gpu_annotations({**rest, missing: table(missing)})) == 0

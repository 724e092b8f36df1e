from kineto_trace.model.activity_table import ViewerRow
from kineto_trace.model.activity_tables import CATEGORIES, KINDS, TABLES, numbers_of, tables_on
from kineto_trace.model.event_kinds import MAX_ARGS


def test_tables_are_named_by_the_rows_that_they_stand_on() -> None:
    assert tables_on(ViewerRow.SYNC, ViewerRow.GPU) == ("cuda_sync", "kernel", "gpu_memcpy", "gpu_memset")


def test_a_category_is_read_into_one_table_and_those_of_the_host_come_first() -> None:
    texts = [text for text, _, _ in CATEGORIES]
    assert len(set(texts)) == len(texts)
    assert texts[:3] == ["cpu_op", "operator", "user_annotation"]
    assert CATEGORIES[-4:-2] == (("_runtime", True, "cuda_runtime"), ("_driver", True, "cuda_driver"))
    assert {table for _, _, table in CATEGORIES[-2:]} == {"counter"}


def test_every_argument_has_a_bit_and_what_no_table_takes_comes_last() -> None:
    assert max(map(len, KINDS.values())) <= MAX_ARGS
    assert list(KINDS)[-2:] == ["flow", "other"]


def test_gpu_work_has_the_columns_that_every_analysis_needs() -> None:
    needed = ["start", "duration", "name", "device", "context", "stream", "correlation", "external_id"]
    for table in TABLES:
        if table.row is ViewerRow.GPU:
            assert [column.name for column in table.columns][: len(needed)] == needed


def test_the_numbers_of_gpu_work_go_by_their_first_names() -> None:
    assert numbers_of("gpu_memset") == {
        "device": "device", "context": "context", "stream": "stream", "correlation": "correlation",
        "graph_id": "graph id", "graph_node_id": "graph node id", "channel": "channel", "channel_type": "channel_type",
        "bytes": "bytes",
    }  # fmt: skip
    assert numbers_of("gpu_memcpy")["device"] == "device"

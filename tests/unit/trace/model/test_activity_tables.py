from typing import Any

import pytest
from kineto_trace.decode.declared_records import own_table
from kineto_trace.decode.rocprofiler_records import SCHEMA
from kineto_trace.model.activity_tables import (
    CATEGORIES,
    KINDS,
    MAX_ARGS,
    TABLES,
    ViewerRow,
    declared_from_json,
    declared_to_json,
    numbers_of,
    tables_on,
)


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


@pytest.mark.parametrize("name", ["rocm_memory", "rocm_scratch"])
def test_a_table_of_rocm_is_read_back_as_it_was_stored(name: str) -> None:
    table = own_table(name, SCHEMA.types[name])
    assert declared_from_json(name, declared_to_json(table)) == table


def test_a_column_that_queries_add_is_refused() -> None:
    stored: Any = declared_to_json(own_table("rocm_memory", SCHEMA.types["rocm_memory"]))
    stored["columns"][-1]["name"] = "end_ns"
    with pytest.raises(ValueError, match="columns"):
        declared_from_json("rocm_memory", stored)

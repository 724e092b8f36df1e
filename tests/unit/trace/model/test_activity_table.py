"""Tables of own activity types as they are stored beside their rows."""

from typing import Any

import pytest
from kineto_trace.decode.declared.declared_tables import own_table
from kineto_trace.decode.rocprofiler.rocm_schema import SCHEMA
from kineto_trace.model.activity_table import declared_from_json, declared_to_json


@pytest.mark.parametrize("name", ["rocm_memory", "rocm_scratch"])
def test_a_table_of_rocm_is_read_back_as_it_was_stored(name: str) -> None:
    table = own_table(name, SCHEMA.types[name])
    assert declared_from_json(name, declared_to_json(table)) == table


def test_a_column_that_queries_add_is_refused() -> None:
    stored: Any = declared_to_json(own_table("rocm_memory", SCHEMA.types["rocm_memory"]))
    stored["columns"][-1]["name"] = "end_ns"
    with pytest.raises(ValueError, match="columns"):
        declared_from_json("rocm_memory", stored)

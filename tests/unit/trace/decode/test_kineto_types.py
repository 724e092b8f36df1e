"""What schemas may say about Kineto's activity types is what the tables have."""

import numpy as np
from kineto_agent.protocol.schema import DTYPES, RESERVED_NAMES, ROLES, TRACKS, TYPES_OF_KINETO, VENDOR_TYPES
from kineto_trace.decode.declared_records import _NUMPY, _TRACK_COLUMNS
from kineto_trace.model.trace import SCHEMAS
from kineto_trace.sql import sql_tables

_OF_EVERY_TABLE = {"start", "duration", "external_id"}


def test_roles_and_columns_are_those_of_the_tables() -> None:
    for kind, (roles, columns) in TYPES_OF_KINETO.items():
        declared = {column.name: np.dtype(column.dtype) for column in SCHEMAS[kind] if not column.text}
        assert set(roles) == set(ROLES) & set(declared), kind
        expected = {name: dtype for name, dtype in declared.items() if name not in {*roles, *_OF_EVERY_TABLE}}
        assert {name: np.dtype(_NUMPY[code]) for name, code in columns.items()} == expected, kind


def test_names_of_vendors_are_those_that_readers_take_for_kinetos_tables() -> None:
    assert set(VENDOR_TYPES.values()) <= set(TYPES_OF_KINETO)


def test_no_own_type_can_be_called_like_a_table_or_a_view() -> None:
    names = {name.partition("_")[0] for name in (*SCHEMAS, *sql_tables()) if "_" in name}
    assert names <= RESERVED_NAMES, "add the missing ones to RESERVED_NAMES"


def test_every_type_of_a_column_and_every_column_of_a_track_is_known() -> None:
    assert tuple(_NUMPY) == DTYPES
    assert {name for columns in TRACKS.values() for name in columns} == set(_TRACK_COLUMNS)

"""Coverage of sources as JSON, which may come from anybody."""

from typing import Any

import pytest
from kineto_trace.model.source_coverage import SourceCoverage, coverage_note, from_json, parts_of

OPS = SourceCoverage(source="torch_ops", kinds=("cpu_op",), missing=((10, 20), (30, 40)), dropped=3)


def test_what_is_written_is_read() -> None:
    assert from_json([OPS.to_json()]) == (OPS,)
    assert (OPS.missing_ns, OPS.moved(5).missing) == (20, ((15, 25), (35, 45)))


def test_files_call_tables_as_their_vendor_does() -> None:
    calls = SourceCoverage(source="pebble", kinds=("kernel", "cuda_runtime", "pebble_wait"), missing=())
    written = calls.to_json(lambda kind: {"cuda_runtime": "pebble_runtime"}.get(kind, kind))
    assert written["kinds"] == ["kernel", "pebble_runtime", "pebble_wait"]
    assert from_json([written]) == (calls,)


@pytest.mark.parametrize(
    "changes",
    [{"source": 7}, {"kinds": []}, {"kinds": "cpu_op"}, {"missing": None}, {"missing": [[1, "2"]]}, {"missing": [[1]]}],
)
def test_entries_that_make_no_sense_are_skipped(changes: dict[str, Any]) -> None:
    assert from_json([{**OPS.to_json(), **changes}, OPS.to_json()]) == (OPS,)
    assert from_json({"source": "x"}) == from_json(None) == ()


def test_parts_are_in_order_and_disjoint() -> None:
    assert parts_of([[30, 40], [5, 5], [10, 20], [15, 25], [25, 26]]) == ((10, 26), (30, 40))
    assert parts_of([[0, 2**63]]) is None
    assert parts_of([[0, 1]] * 2000) is None


def test_less_than_a_hundredth_of_the_window_is_not_told() -> None:
    assert coverage_note(OPS, 0, 2000) == ""
    assert coverage_note(OPS, 0, 40).startswith("torch_ops covers 50 % of the window of 40 ns (3 records were dropped")

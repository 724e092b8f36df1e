"""Results as JSON are what docs/report.schema.json says, of every view."""

import json
from pathlib import Path

import jsonschema
import pytest
from kineto_trace import find_traces, run_views, views
from kineto_trace.view_api.result import ARROW_TYPES
from kinetoctl.output.result_tables import SCHEMA_VERSION, documents

ROOT = Path(__file__).parents[4]
DDP = ROOT / "tests/data/h200/ddp4"
SCHEMA = json.loads((ROOT / "docs/report.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_the_schema_is_one_and_of_this_version() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$defs"]["result"]["properties"]["schema_version"]["const"] == SCHEMA_VERSION
    assert set(SCHEMA["$defs"]["column"]["properties"]["type"]["enum"]) == set(ARROW_TYPES)


@pytest.mark.parametrize("differences", [False, True])
def test_every_view_s_result_fits_the_schema_and_its_rows_its_columns(differences: bool) -> None:
    names = [name for name in views() if name.startswith("diff_") == differences]
    sources = [DDP / "rank0.json.gz", DDP / "rank1.json.gz"] if differences else find_traces(DDP)
    results = dict(zip(names, run_views(names, sources), strict=True))
    value = json.loads(json.dumps(documents(results, 50)))
    assert list(VALIDATOR.iter_errors(value)) == []
    for name, document in value.items():
        columns = [column["name"] for column in document["columns"]]
        assert all(list(row) == columns for row in document["rows"]), name


@pytest.mark.parametrize("damage", [{"rows": {}}, {"schema_version": 2}, {"more": 1}, {"notes": [1]}])
def test_what_is_no_result_does_not_fit(damage: dict[str, object]) -> None:
    good = {"schema_version": 1, "rows": [{"a": 1}], "notes": [], "columns": []}
    assert VALIDATOR.is_valid({"kernels": good})
    assert not VALIDATOR.is_valid({"kernels": {**good, **damage}})

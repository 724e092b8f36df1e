"""The values behind pages, as JSON."""

import json
from collections.abc import Mapping
from typing import Any

from kinetoctl.output.result_tables import SCHEMA_VERSION
from kinetoctl.web.http.web_messages import JSON, WebAnswer


def json_answer(value: Any) -> WebAnswer:
    """Any plain value."""
    content = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1)
    return WebAnswer(content=content.encode("utf-8", "replace"), content_type=JSON)


def rows_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a view's result, with the names of the columns."""
    names = [column["name"] for column in document["columns"]]
    return [dict(zip(names, row, strict=True)) for row in document["rows"]]


def result_answer(document: Mapping[str, Any]) -> WebAnswer:
    """The result of a view, as `kinetoctl report -o json` has it (docs/report.schema.json)."""
    value = {
        "schema_version": SCHEMA_VERSION,
        "rows": rows_of(document),
        **({"failure": document["failure"]} if document["failure"] else {}),
        "notes": document["notes"],
        "columns": document["columns"],
    }
    return json_answer({document["view"]: value})

"""The values behind pages, as JSON."""

import json
from collections.abc import Mapping
from typing import Any

from kinetoctl.web.http.web_messages import JSON, WebAnswer

_PAGE = ("view", "total", "steps", "chart")  # of a result for a page, beside what a report has


def json_answer(value: Any) -> WebAnswer:
    """Any plain value."""
    content = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1)
    return WebAnswer(content=content.encode("utf-8", "replace"), content_type=JSON)


def result_answer(document: Mapping[str, Any]) -> WebAnswer:
    """The result of a view, as `kinetoctl report -o json` has it (docs/report.schema.json)."""
    return json_answer({document["view"]: {name: value for name, value in document.items() if name not in _PAGE}})

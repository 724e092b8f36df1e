"""What the fields of an address choose, checked."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from kinetoctl.web.http.web_messages import WebError, WebRequest

DEFAULT_ROWS, MAX_ROWS = 100, 20_000


def whole_number(request: WebRequest, name: str) -> str:
    """A field that is a whole number; empty if it is missing. Raises WebError."""
    text = request.first(name)
    try:
        return str(int(text)) if text else ""
    except ValueError as exc:
        raise WebError(HTTPStatus.BAD_REQUEST, f"{name} is a whole number: {exc}") from exc


def row_limit(request: WebRequest, rows: int = DEFAULT_ROWS) -> int:
    """How many rows a table may have, from the field `limit`. Raises WebError."""
    return min(MAX_ROWS, max(1, int(whole_number(request, "limit") or rows)))


def rank_choices(ranks: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The ranks of the traces for a selector."""
    return [(str(each["rank"]), f"{each['rank']} ({each['name']})") for each in ranks]

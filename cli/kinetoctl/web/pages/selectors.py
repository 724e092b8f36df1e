"""What the fields of an address choose, checked."""

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from kinetoctl.web.http.web_messages import WebError, WebRequest

DEFAULT_ROWS, MAX_ROWS = 100, 20_000
BARS, ALL_BARS, MAX_BARS = (24, 50, 100, 200), "all", 2000  # of a chart; a browser draws so many at once
_NUMBER = re.compile(r"-?[0-9]{1,20}")  # times in ns have no more digits
_SHOWN = 30  # characters of what is none


def whole_number(request: WebRequest, name: str) -> str:
    """A field that is a whole number; empty if it is missing. Raises WebError."""
    text = request.first(name)
    if text and not _NUMBER.fullmatch(text):
        raise WebError(HTTPStatus.BAD_REQUEST, f"{name} is a whole number, not {text[:_SHOWN]!r}")
    return text


def row_limit(request: WebRequest, rows: int = DEFAULT_ROWS) -> int:
    """How many rows a table may have, from the field `limit`. Raises WebError."""
    return min(MAX_ROWS, max(1, int(whole_number(request, "limit") or rows)))


def word(request: WebRequest, name: str, known: Sequence[str]) -> str:
    """A field that is one of a few words; empty if it is missing. Raises WebError, which names them."""
    text = request.first(name)
    if text and text not in known:
        meant = f"one of {', '.join(known)}" if known else "not for this page"
        raise WebError(HTTPStatus.BAD_REQUEST, f"{name} is {meant}; got {text[:_SHOWN]!r}")
    return text


def bar_limit(request: WebRequest) -> int:
    """How many bars a chart may have, from the field `bars`. Raises WebError."""
    if request.first("bars") == ALL_BARS:
        return MAX_BARS
    return min(MAX_BARS, max(1, int(whole_number(request, "bars") or BARS[0])))


def rank_choices(ranks: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The ranks of the traces for a selector."""
    return [(str(each["rank"]), f"{each['rank']} ({each['name']})") for each in ranks]

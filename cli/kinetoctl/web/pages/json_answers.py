"""The values behind pages, as JSON, and tables as CSV."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from kinetoctl.output.json_yaml import plain
from kinetoctl.web.http.web_messages import CSV, JSON, WebAnswer, WebRequest

if TYPE_CHECKING:
    from kinetoctl.web.pages.daemons import HostsFound

_PAGE = ("view", "total", "steps", "chart", "bars", "compared")  # of a result for a page, beside what a report has


def json_answer(value: Any) -> WebAnswer:
    """Any plain value."""
    content = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1)
    return WebAnswer(content=content.encode("utf-8", "replace"), content_type=JSON)


def hosts_answer(found: "HostsFound[Any]", name: str, *, several: bool) -> WebAnswer:
    """The messages of daemons. several: with their hosts, under this name, and with the hosts that did not answer."""
    if not several:
        return json_answer([plain(each.item) for each in found.items])
    items = [{**plain(each.item), "host": each.place.host, "address": each.place.address} for each in found.items]
    return json_answer({name: items, "unanswered": [each._asdict() for each in found.unanswered]})


def results_answer(documents: Sequence[Mapping[str, Any]]) -> WebAnswer:
    """The results of views, as `kinetoctl report -o json` has them (docs/report.schema.json describes one)."""
    every = [each for document in documents for each in (document, document.get("compared")) if each is not None]
    return json_answer(
        {each["view"]: {name: value for name, value in each.items() if name not in _PAGE} for each in every}
    )


def csv_answer(text: str, name: str) -> WebAnswer:
    """A table that the browser saves as `name`.csv."""
    headers = {"Content-Disposition": f'attachment; filename="{name}.csv"'}
    return WebAnswer(content=text.encode(), content_type=CSV, headers=headers)


def data_address(request: WebRequest, without: Sequence[str] = (), suffix: str = ".json") -> str:
    """Where the values behind this page are in that form, with its fields but for those in `without`."""
    kept = [(key, value) for key, value in request.query if value and key not in without]
    return f"{request.path}{suffix}" + (f"?{urlencode(kept)}" if kept else "")

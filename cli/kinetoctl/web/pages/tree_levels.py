"""The way through the tree of differences, the view diff_tree: where its rows lead, and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from kinetoctl.base.diff_names import TREE, TREE_VIEWS
from kinetoctl.web.http.web_messages import WebRequest

PATH = "set.path"  # the field of the address
_LEVEL = "-"  # between the numbers of a path


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLevel:
    """Where the page of a node leads. above: paths and addresses of the nodes around it, the root first.

    inside: the address of each row's node; empty for those that have nothing inside. operators: that of its operators.
    """

    above: list[tuple[str, str]]
    inside: list[str]
    operators: str


def drawings(request: WebRequest, name: str) -> dict[str, dict[str, str]]:
    """What the chart of a view is told, beside its rows."""
    return {name: {"address": _address(request, "")}} if name == TREE_VIEWS[TREE] else {}


def tree_level(request: WebRequest, document: Mapping[str, Any]) -> TreeLevel | None:
    """The way from here; None for other views, and without rows."""
    rows = document["rows"]
    if document["view"] != TREE_VIEWS[TREE] or not rows:
        return None
    numbers = rows[0]["path"].split(_LEVEL)
    paths = [_LEVEL.join(numbers[:count]) for count in range(1, len(numbers))]
    page = request.path.removesuffix(TREE_VIEWS[TREE])
    return TreeLevel(
        above=[(path, _address(request, path)) for path in paths],
        inside=[_address(request, row["path"]) if at and row["children"] else "" for at, row in enumerate(rows)],
        operators=f"{page}{TREE_VIEWS['ops']}?{_fields(request, rows[0]['path'])}",
    )


def _address(request: WebRequest, path: str) -> str:
    return f"{request.path}?{_fields(request, path)}"


def _fields(request: WebRequest, path: str) -> str:
    """The fields of the address, the path last."""
    kept = [(key, value) for key, value in request.query if key != PATH and value]
    return urlencode([*kept, (PATH, path)])

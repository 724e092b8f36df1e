"""trace.json of a stored trace, checked: it may come from anybody, and its names become paths and sizes. Pure."""

import re
from collections.abc import Mapping
from typing import Any

from kineto_trace.model.activity_table import declared_from_json
from kineto_trace.model.trace import SCHEMAS

MAX_NUMBER = 1 << 63
MAX_OWN_TABLES = 64
_COLUMN = re.compile(r"[a-z][a-z0-9_]{0,63}")
_CATEGORY = re.compile(r"[a-z][a-z0-9_]{0,63}")
_NUMBERS = re.compile(r"[<>|=]?[iufb][1248]")  # the types of columns, as numpy writes them


def checked_description(values: Any) -> Mapping[str, Any]:
    """Checks that the values have the types that readers rely on. Raises ValueError."""
    _need(isinstance(values, dict), "it is no object")
    tables = values.get("tables")
    _need(isinstance(tables, (dict, list)), "tables")
    own = {kind for kind, entry in tables.items() if _is_declared(entry)} if isinstance(tables, dict) else set()
    for kind in tables:
        known = isinstance(kind, str) and (kind in SCHEMAS) != (kind in own)
        _need(known, f"there is no kind of activity {kind!r:.80}")
    _need(len(own) <= MAX_OWN_TABLES, f"{len(own)} kinds of activities of its own")
    if isinstance(tables, dict):
        for kind, entry in tables.items():
            _check_table(f"tables.{kind}", entry)
            if kind in own:
                declared_from_json(kind, entry["declared"])
    _check_numbers(values, "window_start_ns", "window_end_ns", least=-MAX_NUMBER)
    _check_numbers(values, "sample_period_ns")
    _check_texts("notes", values.get("notes", []))
    head = values.get("head")
    _need(head is None or _is_mapping(head, str), "head")
    _need(_is_mapping(values.get("versions"), int), "versions")
    _need(_is_mapping(values.get("losses"), int), "losses")
    categories = values.get("categories", {})
    _need(_is_mapping(categories, str) and all(map(_CATEGORY.fullmatch, categories.values())), "categories")
    devices = values.get("devices")
    _need(isinstance(devices, list) and all(isinstance(device, dict) for device in devices), "devices")
    if isinstance(strings := values.get("strings"), dict):
        _check_numbers(strings, "count", "bytes", path="strings.")
    else:
        _check_texts("strings", strings)  # format 2
    return values  # type: ignore[no-any-return]  # it was found to be a dict


def _is_declared(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("declared") is not None


def _check_table(path: str, entry: Any) -> None:
    _need(isinstance(entry, dict), path)
    _check_numbers(entry, "rows", "bytes", path=f"{path}.")
    columns, origin = entry.get("columns"), entry.get("origin")
    _check_texts(f"{path}.columns", columns)
    _need(_is_mapping(origin, str), f"{path}.origin")
    for name in (*columns, *origin):
        _need(_COLUMN.fullmatch(name) is not None, f"{path}: {name!r:.80} is not a column name")
    for text in origin.values():
        _need(_NUMBERS.fullmatch(text) is not None, f"{path}: {text!r:.80} is not a numeric type")


def _check_numbers(entry: Mapping[str, Any], *names: str, path: str = "", least: int = 0) -> None:
    for name in names:
        value = entry.get(name)
        _need(type(value) is int and least <= value < MAX_NUMBER, f"{path}{name}")


def _check_texts(path: str, texts: Any) -> None:
    _need(isinstance(texts, list) and all(isinstance(text, str) for text in texts), path)


def _is_mapping(value: Any, kind: type) -> bool:
    return isinstance(value, dict) and all(isinstance(item, kind) for item in value.values())


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"trace.json: {what}" if " " in what else f"trace.json: {what} has an invalid value")

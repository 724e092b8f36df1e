"""Values and headings of results as texts for people, on HTML pages and in notebooks."""

from collections.abc import Mapping, Sequence
from typing import Any

from kineto_trace.base.quantities import format_duration, format_size, shortened
from kineto_trace.view_api.result_columns import ResultColumn

MAX_TEXT = 64
MAX_ITEMS = 64  # of a list
PROSE = frozenset({"meaning", "about", "title", "advice", "evidence", "why", "hides", "effect"})  # hold sentences
_WORDS: Mapping[str, str] = {  # words in names of columns, as people write them
    "gpu": "GPU",
    "gpus": "GPUs",
    "cpu": "CPU",
    "sm": "SM",
    "dram": "DRAM",
    "pcie": "PCIe",
    "nvlink": "NVLink",
    "gil": "GIL",
    "sql": "SQL",
    "id": "ID",
    "op": "operator",
    "ops": "operators",
    "exec": "execution",
    "memcpy": "copies",
    "memset": "fills",
    "dtype": "data type",
    "dataloader": "data loader",
    "algbw": "algorithm bandwidth",
    "busbw": "bus bandwidth",
    "std": "standard deviation",
}
_UNIT_SUFFIXES = (
    "_us",
    "_ns",
    "_pct",
    "_bytes",
    "_gb_s",
    "_tflop_s",
    "_tflop",
    "_gflop",
    "_flop_byte",
    "_mhz",
    "_w",
    "_c",
)


def heading(column: ResultColumn) -> str:
    """Returns the title of a column: its name without the unit, in words."""
    return f"{bare_heading(column)} %" if column.name.endswith("_pct") else bare_heading(column)


def bare_heading(column: ResultColumn) -> str:
    """Returns the title of a column whose unit is shown beside it."""
    name = next((column.name.removesuffix(end) for end in _UNIT_SUFFIXES if column.name.endswith(end)), column.name)
    return in_words(name)


def in_words(name: str) -> str:
    """Returns a name of several words as people write it."""
    return " ".join(_WORDS.get(word, word) for word in name.split("_"))


def headings(columns: Sequence[ResultColumn]) -> dict[str, str]:
    """Returns the titles of columns by name; equal ones get "time" or "size" added."""
    titles = [heading(column) for column in columns]
    return {
        column.name: f"{title} {KINDS[column.unit]}"
        if titles.count(title) > 1 and column.unit in KINDS and title != KINDS[column.unit]
        else title
        for title, column in zip(titles, columns, strict=True)
    }


KINDS: Mapping[str, str] = {"us": "time", "bytes": "size"}
UNITS: Mapping[str, str] = {
    "us": "time in µs, ms or s",
    "ns": "Unix time in ns",
    "%": "per cent",
    "bytes": "B, KiB, MiB or GiB",
}


def unit(column: ResultColumn) -> str:
    """Returns the unit in which the page shows a column's values."""
    if column.unit:
        return UNITS.get(column.unit, column.unit)
    return {"text": "text", "texts": "texts", "bool": "yes or no"}.get(column.type, "number without a unit")


def cell(value: Any, column: ResultColumn) -> str:
    """Formats a value for people."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if column.unit == "us":
        return format_duration(1000 * float(value))
    if column.unit == "bytes":
        return format_size(float(value))
    if isinstance(value, float):
        return f"{value:.1f} %" if column.unit == "%" else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}" if column.unit != "ns" else str(value)
    text = _joined(value) if isinstance(value, list) else str(value)
    return text if column.name in PROSE else shortened(text, MAX_TEXT)


def _joined(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values[:MAX_ITEMS])) + (", …" if len(values) > MAX_ITEMS else "")

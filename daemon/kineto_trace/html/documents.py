"""Results as plain values that templates show: a document for each result, and the columns of its table as texts.

A document is the output of `kinetoctl report -o json` for a view, {"rows", "columns", "notes"} and, if it failed,
"failure", with {"view", "total": number of rows, "chart": HTML, "bars": number in a chart of all rows} added.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from math import floor, isfinite, log10
from typing import Any

from markupsafe import Markup

from kineto_trace.base.quantities import time_of_day
from kineto_trace.base.source_places import short_place
from kineto_trace.base.visible_text import visible
from kineto_trace.view_api.cell_texts import KINDS, PLACES, PROSE, bare_heading, unit
from kineto_trace.view_api.result_columns import ResultColumn, scaled_unit

Document = Mapping[str, Any]
# Views whose rows are a tree, each below its parent: the column to indent, its depth, and the column that repeats both.
TREES: Mapping[str, tuple[str, str, str]] = {
    "modules": ("name", "depth", "path"),
    "call_tree": ("name", "depth", "path"),
}
MAX_ITEMS = 64  # of a list
LONG = 40  # characters
SHORT_NAMES = frozenset({"cause", "finding"})  # columns with our own names: charts show them in words, too
MAX_WHOLE = 1 << 53  # larger integers are ids or times, so their digits are not grouped
_PLACE = Markup('<span class="place" title="{}">{}</span>')


@dataclass(frozen=True, slots=True, kw_only=True)
class TableColumn:
    """A column of the table. unit: of all its values; kind: the class of its cells; texts: of its cells.

    sorted_by: the numbers behind texts that do not begin with theirs; otherwise empty.
    """

    name: str
    title: str
    unit: str
    meaning: str
    shown_unit: str
    kind: str
    texts: Sequence[str]
    sorted_by: Sequence[Any]

    @property
    def number(self) -> bool:
        """Whether it is aligned to the right and sorted by value."""
        return self.kind == "number"

    @property
    def place(self) -> bool:
        """Whether its texts may be places in source code, with whole paths."""
        return self.name in PLACES


def titles(columns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the headings of columns; equal ones get "time" or "size" added."""
    made = [ResultColumn(**column) for column in columns]
    plain = [bare_heading(column) for column in made]
    told = [
        f"{title} {KINDS[column.unit]}"
        if plain.count(title) > 1 and column.unit in KINDS and title != KINDS[column.unit]
        else f"{title} share"
        if plain.count(title) > 1 and column.unit == "%"
        else title
        for title, column in zip(plain, made, strict=True)
    ]
    return [title[:1].upper() + title[1:] for title in told]


def tree_levels(shown: Document) -> list[int]:
    """Returns the depth of each row, 0 for the outermost ones, if the rows are a tree; else nothing."""
    if shown["view"] not in TREES:
        return []
    levels = [row[TREES[shown["view"]][1]] for row in shown["rows"]]
    below = all(level <= before + 1 for before, level in zip([-1, *levels], levels, strict=False))
    return levels if below and max(levels, default=0) else []


def table_columns(shown: Document, without: Collection[str] = ()) -> list[TableColumn]:
    """Returns the columns of a document with a value in one of its rows, without those of these names.

    In a tree, one column has the kind "branch"; its indentation replaces the depth and the path.
    """
    found = []
    apart = len({str(row["unit"]) for row in shown["rows"] if "unit" in row}) > 1
    branch, *repeated = TREES[shown["view"]] if tree_levels(shown) else [""]
    without = {*without, *repeated}
    for column, title in zip(shown["columns"], titles(shown["columns"]), strict=True):
        values = [row[column["name"]] for row in shown["rows"]]
        if column["name"] not in without and any(value is not None and value != [] for value in values):
            made = _column(ResultColumn(**column), title, values, apart=apart)
            found.append(replace(made, kind="branch") if made.name == branch else made)
    return found


def unit_text(column: Mapping[str, Any]) -> str:
    """Returns the unit of a column, in words."""
    return unit(ResultColumn(**column))


def place(text: str) -> str:
    """Returns a place in source code with a short path, the whole one as its title; other text unchanged."""
    short = short_place(text)
    return text if short == text else _PLACE.format(text, short)


def _column(column: ResultColumn, title: str, values: Sequence[Any], *, apart: bool) -> TableColumn:
    """Returns the column. apart: the rows have units of their own, so figures without one are not comparable."""
    numeric = column.type in ("int", "float") and all(_is_number(value) for value in values if value is not None)
    told, texts = _numbers(column, values) if numeric else ("", _texts(column, values))
    if numeric and apart and column.type == "float" and not column.unit:
        texts = [_significant(value) for value in values]
    long = any(len(short_place(text) if column.name in PLACES else text) > LONG for text in texts)
    kind = "number" if numeric else "prose" if column.name in PROSE else "long" if long else "text"
    return TableColumn(
        name=column.name,
        title=title,
        unit=told,
        meaning=column.meaning,
        shown_unit=unit(column),
        kind=kind,
        texts=texts,
        sorted_by=["" if value is None else value for value in values] if numeric and column.unit == "ns" else (),
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)


def _texts(column: ResultColumn, values: Sequence[Any]) -> list[str]:
    texts = [_text(value) for value in values]
    return [text.replace("_", " ") for text in texts] if column.name in SHORT_NAMES else texts


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        more = ", …" if len(value) > MAX_ITEMS else ""
        return visible(", ".join(map(str, value[:MAX_ITEMS])) + more)
    return visible(str(value))


def _numbers(column: ResultColumn, values: Sequence[Any]) -> tuple[str, list[str]]:
    """Returns the unit of a column of numbers, and its texts: all have the same unit and number of decimals."""
    if column.unit == "ns":
        return "time of day", ["" if value is None else time_of_day(int(value)) for value in values]
    known = [float(value) for value in values if value is not None and isfinite(value)]
    largest = max(map(abs, known), default=0.0)
    factor, told = scaled_unit(column.unit, largest)
    if factor == 1.0 and column.unit != "%" and all(value.is_integer() for value in known):
        return told, [_whole(value) for value in values]
    decimals = 1 if column.unit == "%" else _decimals(largest * factor)
    return told, ["" if value is None else _decimal(float(value) * factor, decimals) for value in values]


def _significant(value: float | None) -> str:
    """Formats the value alone: four digits, and all before the point."""
    if value is None or not isfinite(value):
        return "" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _decimals(largest: float) -> int:
    """Returns the number of decimals that gives the largest value four digits, at most three."""
    return max(0, min(3, 3 - floor(log10(largest)))) if largest > 0 else 0


def _whole(value: Any) -> str:
    if value is None:
        return ""
    if not isfinite(value):
        return str(value)
    return f"{int(value):,}" if abs(value) < MAX_WHOLE else str(int(value))


def _decimal(value: float, decimals: int) -> str:
    """Formats the value, or states that it is smaller than the decimals can show."""
    least = 10.0**-decimals
    if value and abs(value) < least / 2:
        return f"{'<' if value > 0 else '>-'}{least:.{decimals}f}"
    return f"{value:,.{decimals}f}"

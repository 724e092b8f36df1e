"""The list of views, and the description of each, as text or for programs."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.base.view_settings import type_text
from kinetoctl.errors import UsageProblem
from kinetoctl.output.cell_values import headings
from kinetoctl.output.console import print_table, say_text
from kinetoctl.output.json_yaml import emit

if TYPE_CHECKING:
    from kineto_trace.view_api.result import ResultColumn
    from kineto_trace.view_api.view import View

LIST_COLUMNS = ("VIEW", "COMPAT", "WHAT IT SHOWS")


def summary(view: "View") -> str:
    """The first line of its description."""
    return view.description.partition("\n")[0]


def list_views(views: Sequence["View"], settings: CommonOptions) -> None:
    """Prints one line for each view, by name."""
    ordered = sorted(views, key=lambda view: view.name)
    if settings.output == "table":
        rows = [(view.name, ",".join(sorted(view.compat)) or "-", summary(view)) for view in ordered]
        print_table(LIST_COLUMNS, rows, color=settings.color)
    else:
        emit([_document(view) for view in ordered], settings.output)


def describe_views(views: Sequence[tuple["View", Sequence["ResultColumn"]]], settings: CommonOptions) -> None:
    """Prints the rules, options and columns of each view; with columns, these first and then the rules."""
    if settings.output == "table":
        say_text("\n\n".join(_definitions(view, only) if only else description(view) for view, only in views))
    else:
        emit([_document(view, only) for view, only in views], settings.output)


def find_column(view: "View", name: str) -> "ResultColumn":
    """The column of this name, which may lack its unit and be written as in tables. Raises UsageProblem."""
    wanted = name.lower().strip().replace(" ", "_").removesuffix("_%")
    titles = headings([(column.name, column.unit) for column in view.result_columns])
    for title, column in zip(titles, view.result_columns, strict=True):
        if wanted in (column.name, title.lower().replace(" ", "_").removesuffix("_%")):
            return column
    known = ", ".join(column.name for column in view.result_columns)
    raise UsageProblem(f"view {view.name} has no column {name}; its columns are: {known}")


def _definitions(view: "View", columns: Sequence["ResultColumn"]) -> str:
    lines = [f"{view.name}.{column.name}\n\n  {_type(column)}: {column.meaning}\n" for column in columns]
    return "\n".join([*lines, view.name, "", textwrap.indent(view.description, "  ")])


def _type(column: "ResultColumn") -> str:
    return column.type + (f" [{column.unit}]" if column.unit else "")


def description(view: "View") -> str:
    """The description of one view, as text."""
    lines = [view.name, "", textwrap.indent(view.description, "  ")]
    if view.options:
        lines += ["", "options (--set NAME=VALUE)"]
        lines += [f"  {row['name']} = {row['default']!r}: {row['type']}" for row in _options(view)]
    if view.compat:
        lines += ["", f"can follow (--compat): {', '.join(sorted(view.compat))}"]
    lines += ["", "columns"]
    width = max(len(column.name) for column in view.result_columns)
    for column in view.result_columns:
        lines.append(f"  {column.name.ljust(width)}  {_type(column)}: {column.meaning}")
    return "\n".join(lines)


def _options(view: "View") -> list[dict[str, Any]]:
    return [
        {"name": name, "type": type_text(view.option_type(name)), "default": _plain(default)}
        for name, default in view.options.items()
    ]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (list, tuple)) else getattr(value, "value", value)


def _document(view: "View", columns: Sequence["ResultColumn"] = ()) -> dict[str, Any]:
    return {
        "name": view.name,
        "description": view.description,
        "compat": sorted(view.compat),
        "all_ranks": view.reduce is not None,
        "options": _options(view),
        "columns": [column._asdict() for column in columns or view.result_columns],
    }

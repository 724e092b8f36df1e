"""Prints the page views.md of the site, from the registered views and the tables of SQL."""

import re
import sys
from collections.abc import Iterable, Sequence

from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.sql.schema import SqlTable, sql_tables
from kineto_trace.view_api.view import View
from kinetoctl.base.view_settings import type_text

HEAD = """# Views and tables

This page is made from the code. [analysis.md](analysis.md) explains how to use views and tables. Units: us
microseconds, ns Unix nanoseconds, % percent. Any value may be missing because it was not recorded or does not apply.
"""
VIEWS_HEAD = """
## Views

Each view is available as `kinetoctl report --view NAME`, as `run_view(NAME, …)` in Python, and as a table of the same
name in SQL. Views that look at each trace separately have `rank` as their first column (in SQL also `trace`). Set
options with `--set NAME=VALUE`.
"""
TABLES_HEAD = """
## Tables of SQL

In addition to the views, `kinetoctl query` offers these tables. All begin with the columns `rank` (of the process in
its job) and `trace` (name of the file, folder or capture).
"""
_LIST = re.compile(r"(?<=:)\n- ")  # its first item; not all renderers begin a list inside a paragraph
# An underscore inside a word is none, and a bracket only where a second pair makes a link of it.
_MARKUP = re.compile(r"([*<]|(?<!\w)_|_(?!\w)|\[(?=[^\]]*\][\[(]))")


def escaped(text: str) -> str:
    """Markdown that shows this text; what is in backticks stays."""
    parts = re.split(r"(`[^`\n]*`)", text)
    return "".join(part if place % 2 else _MARKUP.sub(r"\\\1", part) for place, part in enumerate(parts))


def cell(text: str) -> str:
    """The same in a table."""
    return escaped(" ".join(text.split())).replace("|", "\\|")


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """One table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def view_text(view: View) -> str:
    """The section of one view."""
    parts = [f"### {view.name}", _LIST.sub("\n\n- ", escaped(view.description))]
    if view.compat:
        parts.append(f"Supports {', '.join(f'`--compat {name}`' for name in sorted(view.compat))}.")
    if view.reduce is not None:
        parts.append("The view has one result for all ranks.")
    if view.options:
        rows: list[tuple[str, ...]] = [
            (f"`{name}`", type_text(view.option_type(name)), f"`{shown(default)}`".replace("|", "\\|"))
            for name, default in view.options.items()
        ]
        parts.append(table(("option", "value", "default"), rows))
    columns = [(f"`{c.name}`", str(c.type), c.unit, cell(c.meaning)) for c in view.columns]
    parts.append(table(("column", "type", "unit", "meaning"), columns))
    return "\n\n".join(parts)


def shown(value: object) -> str:
    """A default as people write it behind --set."""
    if value is None or value == ():
        return "none"
    if isinstance(value, (list, tuple)):
        return ",".join(str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def table_text(found: SqlTable) -> str:
    """The section of one table."""
    rows = [(f"`{c.name}`", c.type, c.unit, cell(c.meaning)) for c in found.columns if c.name not in ("rank", "trace")]
    return "\n\n".join(
        (f"### {found.name}", escaped(found.description), table(("column", "type", "unit", "meaning"), rows))
    )


def document() -> str:
    """The whole page, in Markdown."""
    views = "\n\n".join(view_text(VIEWS[name]) for name in sorted(VIEWS))
    tables = "\n\n".join(table_text(found) for found in sql_tables().values() if found.group != "views")
    return f"{HEAD}{VIEWS_HEAD}\n{views}\n{TABLES_HEAD}\n{tables}\n"


if __name__ == "__main__":
    sys.stdout.write(document())

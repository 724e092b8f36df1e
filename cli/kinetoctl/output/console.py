"""The terminal: lines, Rich consoles for stdout (results) and stderr (progress), and tables that survive a pipe.

Everything that kinetoctl prints goes through `say`, `say_text` or `rich_console` (a test checks this). Much of it comes
from other people, so control characters are spelled out here (`kineto_trace.base.visible_text`). Styles come later.
"""

import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

import click
from kineto_protos.plain import plain as plain
from kineto_trace.base.visible_text import in_json, one_line, visible

from kinetoctl.output.units import GAP as GAP
from kinetoctl.output.units import INDENT as INDENT

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.table import Table

LAST_LEAST = 16  # the last column goes below the others rather than being cut to less
_LOOK_S = 0.5  # how often something that waits for Ctrl-C wakes up
PIPE_WIDTH = 100_000  # nothing is cut when no terminal reads it
PROSE_WIDTH = 100  # of sentences in a pipe, and at most in a terminal


def say(text: str, *, err: bool = False, label: str = "", bold: bool = False) -> None:
    """Prints one line on stdout or stderr. label: printed before it, unchanged and with its style; bold: the line."""
    shown = one_line(text)
    click.echo(label + (click.style(shown, bold=True) if bold else shown), err=err)


def say_text(text: str, *, err: bool = False, nl: bool = True, label: str = "") -> None:
    """Like say, for a text of several lines. nl: whether to end it with a newline."""
    click.echo(label + visible(text), err=err, nl=nl)


def wait_until_set(event: threading.Event) -> None:
    """Waits until it is set; Ctrl-C raises KeyboardInterrupt.

    Event.wait() without a limit goes on for ever if the signal came just before it (1 in 150 on a busy machine).
    """
    while not event.wait(_LOOK_S):
        pass


@cache
def _console_class() -> "type[Console]":
    from rich.console import Console  # 30 ms, which plain tables do without

    class VisibleConsole(Console):
        """Spells out control characters in what is rendered; Rich itself lets most of them pass."""

        def render(self, renderable: "RenderableType", options: "ConsoleOptions | None" = None) -> "Iterable[Segment]":
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=visible(segment.text))

        def on_broken_pipe(self) -> None:
            """Rich's hook for a closed pipe, in which it would end the program with 1."""
            raise BrokenPipeError

    return VisibleConsole


def rich_console(file: TextIO, **options: Any) -> "Console":
    """A console of Rich, without highlighting."""
    if file.isatty() and os.environ.get("TERM", "dumb") == "dumb":
        size = shutil.get_terminal_size()
        options = {"width": size.columns, "height": size.lines, **options}  # Rich takes every dumb one to have 80 by 25
    return _console_class()(file=file, highlight=False, **options)


def stdout_console(*, color: bool) -> "Console":
    """The console for results."""
    return rich_console(sys.stdout, no_color=not color, soft_wrap=True)


def stderr_console(*, color: bool) -> "Console":
    """The console for progress and messages."""
    return rich_console(sys.stderr, no_color=not color, soft_wrap=True)


def prose_width(console: "Console") -> int:
    """The width of lines of sentences."""
    return min(console.width, PROSE_WIDTH) if sys.stdout.isatty() else PROSE_WIDTH


def filled(text: str, width: int, indent: str = "") -> str:
    """The text in lines of this width; words, such as paths and commands, stay whole."""
    return textwrap.TextWrapper(width, indent, indent, break_long_words=False, break_on_hyphens=False).fill(text)


def print_verdict(text: str, *, color: bool) -> None:
    """Prints the verdict on where the time went, if there is one."""
    if text:
        from rich.text import Text

        console = stdout_console(color=color)
        console.print(Text(filled(one_line(text), prose_width(console)), style="bold"))


def pipe_console() -> "Console":
    """A console whose output is captured for a pipe: nothing is cut."""
    return rich_console(sys.stdout, width=PIPE_WIDTH, color_system=None)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> "Table":
    """A table of Rich whose last column folds."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, column in enumerate(columns):
        table.add_column(column, no_wrap=position < len(columns) - 1, overflow="fold", min_width=len(column))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """The lines of the table. The last column is cut to fit; what does not fit beside the first goes below it.

    Only the last column is ever cut, so that a long command hides no pid. Control characters are spelled out.
    """
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(_cells, cells)) for cells in zip(columns, *rows, strict=True)]
    *others, last = range(len(columns))
    room = width - sum(widths[place] + len(GAP) for place in others)
    if room >= min(widths[last], max(_cells(columns[last]), LAST_LEAST)):
        widths[last] = min(widths[last], room)
        groups = [[*others, last]]
    else:
        widths[last] = min(widths[last], width - len(INDENT))
        groups = [*_packed(others, widths, width), [last]]
    return [
        ("" if number == 0 else INDENT) + GAP.join(_fitted(row[place], widths[place]) for place in group).rstrip()
        for row in (columns, *rows)
        for number, group in enumerate(groups)
    ]


def _packed(places: Sequence[int], widths: Sequence[int], width: int) -> list[list[int]]:
    """The columns in as few lines as they fit into, each line but the first indented."""
    groups: list[list[int]] = []
    room = 0
    for place in places:
        if not groups or widths[place] > room:
            room = width - (len(INDENT) if groups else 0)
            groups.append([])
        groups[-1].append(place)
        room -= widths[place] + len(GAP)
    return groups


def _cells(text: str) -> int:
    """How many cells of a terminal the text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # 30 ms, which most tables do without

    return cell_len(text)


def _fitted(text: str, size: int) -> str:
    if text.isascii():
        return text.ljust(size) if len(text) <= size else text[: size - 1] + "…"
    from rich.cells import cell_len, set_cell_size

    return set_cell_size(text, size) if cell_len(text) <= size else set_cell_size(text, size - 1) + "…"


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, color: bool, folds: bool = False) -> None:
    """Prints a table on stdout. In a terminal the last column is cut to fit, or folded; in a pipe nothing is cut."""
    terminal = sys.stdout.isatty()
    if terminal and folds:
        shown = [[one_line(cell) for cell in row] for row in rows]
        rich_console(sys.stdout, no_color=not color).print(_table(columns, shown))
        return
    lines = table_lines(columns, rows, _width() if terminal else PIPE_WIDTH)
    heading = len(lines) // (len(rows) + 1)
    for line in lines[:heading]:
        say(line, bold=terminal and os.environ.get("TERM", "dumb") != "dumb")
    if lines[heading:]:
        say_text("\n".join(lines[heading:]))


def captured(*renderables: "RenderableType") -> list[str]:
    """The lines that are printed in a pipe."""
    printer = pipe_console()
    with printer.capture() as capture:
        printer.print(*renderables)
    return [line.rstrip() for line in capture.get().split("\n")[:-1]]


def _width() -> int:
    return shutil.get_terminal_size().columns


def emit(value: Any, output: str) -> None:
    """Print a JSON value on stdout, as YAML if output is "yaml", else as JSON."""
    if output == "yaml":
        say_text(as_yaml(value), nl=False)
    else:
        say_text(as_json(value, indent=2))


def emit_one_of_many(value: Any, output: str) -> None:
    """Print one of several JSON values: a line for each, or a document of YAML."""
    if output == "yaml":
        say_text(f"---\n{as_yaml(value)}", nl=False)
    else:
        say_text(as_json(value))
    sys.stdout.flush()


def as_json(value: Any, indent: int | None = None) -> str:
    """JSON text without characters that could steer a terminal."""
    import json  # 3 ms that no other form needs

    return in_json(json.dumps(value, indent=indent, ensure_ascii=False))


def as_yaml(value: Any) -> str:
    """YAML text without such characters: if there are any, everything that is not ASCII is escaped."""
    import yaml  # 10 ms that no other form needs

    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    if visible(text) == text:
        return text
    escaped: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=False)
    return escaped

"""One picture of the live view, exactly as large as the terminal. Pure: nothing is printed here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kineto_trace.base.visible_text import one_line
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from kinetoctl.output.top import sample_picture
from kinetoctl.output.top.trends import Trends
from kinetoctl.output.top.view import HINTS, Mode, TopView

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

FEW_GPUS = 2
BARS = ((60, 6), (80, 8), (120, 12))  # least width of the terminal, length of a bar
Line = list[Segment]


@dataclass(frozen=True, slots=True)
class RenderedLines:
    """RenderedLines that have been rendered already."""

    lines: Sequence[Line]

    def __rich_console__(self, _console: Console, _options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            yield from line
            yield Segment.line()


def picture(console: Console, sample: "pb.HostSample", view: TopView, trends: Trends, extent: str) -> RenderedLines:
    """The picture of the sample; tells the view how many rows of the list and of its page there is room for.

    extent: of the traces that the view starts, such as `5 s`.
    """
    width, height = console.size
    bottom = _rendered(console, *_bottom(view, width, extent))
    if view.mode is Mode.PAGE:
        return RenderedLines([*_page(console, view, height - len(bottom)), *bottom])
    top = _rendered(console, *_top(sample, width, height))[: max(height - len(bottom) - 2, 0)]
    view.list_rows = max(height - len(top) - len(bottom) - 1, 1)  # one is the heading
    first = view.first_row()
    shown = view.rows[first : first + view.list_rows]
    live = sample_picture.LiveColumns(trend=trends.text, selected=view.selected - first if shown else None)
    body = _rendered(console, sample_picture.process_table(sample, shown, width, live))
    return RenderedLines([*top, *_filled(body, height - len(top) - len(bottom)), *bottom])


def waiting(console: Console, text: str) -> RenderedLines:
    """Before the first sample."""
    return RenderedLines(_filled(_rendered(console, Text(text)), console.size.height))


def _rendered(console: Console, *parts: RenderableType) -> list[Line]:
    return console.render_lines(Group(*parts), console.options.update(height=None), pad=False) if parts else []


def _filled(lines: list[Line], height: int) -> list[Line]:
    shown = lines[: max(height, 0)]
    return [*shown, *([] for _ in range(height - len(shown)))]


def _page(console: Console, view: TopView, height: int) -> list[Line]:
    lines = _rendered(console, view.page)
    view.page_rows = max(height, 1)
    view.page_line = min(view.page_line, max(len(lines) - height, 0))
    return _filled(lines[view.page_line :], height)


def _top(sample: "pb.HostSample", width: int, height: int) -> list[RenderableType]:
    parts: list[RenderableType] = list(sample_picture.head(sample)) if height > 2 * FEW_GPUS + 8 else []
    most = max(FEW_GPUS, height // 2 - 5)
    gpus = sample.gpus[:most]
    if gpus:
        bars = max((length for least, length in BARS if width >= least), default=0)
        parts += [Text(""), sample_picture.gpu_table(sample, gpus, width, bars=bars)]
    if len(sample.gpus) > len(gpus):
        parts.append(Text(f"… {len(sample.gpus) - len(gpus)} more GPUs"))
    return [*parts, *sample_picture.notes(sample), Text("")]


def _bottom(view: TopView, width: int, extent: str) -> list[RenderableType]:
    """What just happened or is asked, and below it which keys there are."""
    if view.mode is Mode.PAGE:
        return [_cut("↑ ↓ scroll  Esc back", width, "reverse")]
    if view.mode is Mode.FILTER:
        return [
            _cut(f"filter: {view.filter}█", width, "bold"),
            _cut("Enter keep  Esc end the filter", width, "reverse"),
        ]
    if view.mode is Mode.QUESTION:
        return [_question(view, width, extent), _cut("y trace  any other key do not", width, "reverse")]
    lines = [Text(one_line(text)) for text in (view.note, view.message) if text]
    if view.lost:
        lines.append(Text(one_line(view.lost), style="bold red"))
    return [*lines, _cut(_state(view), width, "bold"), _cut(HINTS, width, "reverse")]


def _question(view: TopView, width: int, extent: str) -> Text:
    if view.asked is None:
        return Text("")
    process = view.asked.process
    return _cut(f"trace pid {process.pid} for {extent}?  {' '.join(process.command)}", width, "bold")


def _state(view: TopView) -> str:
    """The order, the filter and what part of the list is shown."""
    filtered = f"  filter: {view.filter}" if view.filter else ""
    first = view.first_row()
    last = min(first + view.list_rows, len(view.rows))
    count = f"{first + 1}-{last} of {len(view.rows)}" if view.rows else "no"
    order = f"sorted by {view.order}{', reversed' if view.reverse else ''}"
    return f"{count} processes, {order}{filtered}"


def _cut(text: str, width: int, style: str) -> Text:
    """One line, cut to the width."""
    line = Text(one_line(text), style=style, no_wrap=True)
    line.truncate(width, overflow="ellipsis", pad=style == "reverse")
    return line

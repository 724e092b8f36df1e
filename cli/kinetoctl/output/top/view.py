"""What the live view shows and how keys change it. Pure: keys and samples in, commands out.

How it works: the list is always there; a page of text (help, doctor, explain) or a line at the bottom (the filter, the
question before a trace) may stand in front of it, and takes the keys until it is closed. The selection follows its
process, not its line. `TopView.press` returns what the caller must do; everything else has happened by then.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kinetoctl.client import enum_names
from kinetoctl.output.top.orders import ORDERS, ordered
from kinetoctl.output.top.trends import ProcessKey, key_of

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb
    from rich.console import RenderableType

MAX_FILTER = 200
KEYS = (
    ("↑ ↓, k j", "select a process, or scroll a page"),
    ("PgUp PgDn, Home End, g G", "the same by pages, and to the ends"),
    ("s > . F6, < ,", "sort by the next order, or by the previous one"),
    ("P M N", "sort by CPU, memory or pid"),
    ("r, I", "reverse the order"),
    ("/, \\ F4", "filter by pid, user, rank, job, pod or command; Enter keeps the filter, Esc ends it"),
    ("t", "trace the selected process, with the defaults of `kinetoctl trace`"),
    ("d, Enter", "what `kinetoctl doctor` says of the selected process"),
    ("e", "what `kinetoctl explain` says of how its last trace ended"),
    ("h ?, F1", "this help"),
    ("q, F10, Ctrl-C", "leave; captures go on"),
)
HINTS = "t trace  d doctor  / filter  s sort  h help  q quit"


class KeyAction(Enum):
    """What the caller must do. TRACE concerns the process that was asked about, the last two the selected one."""

    LEAVE = "leave"
    TRACE = "trace"
    DIAGNOSE = "diagnose"
    EXPLAIN = "explain"


class Mode(Enum):
    """What takes the keys."""

    LIST = "list"
    FILTER = "filter"
    QUESTION = "question"
    PAGE = "page"


@dataclass
class TopView:
    """The state of the view. page: the text in front of the list in mode PAGE, and its first line that is shown."""

    order: str
    reverse: bool = False
    filter: str = ""
    mode: Mode = Mode.LIST
    message: str = ""  # until the next key
    note: str = ""  # until Esc
    lost: str = ""  # why the sample is old
    page: "RenderableType" = ""
    page_line: int = 0
    page_rows: int = 1  # of the last picture
    list_rows: int = 1
    asked: "pb.ProcessSample | None" = None  # which process the question in mode QUESTION is about
    rows: "list[pb.ProcessSample]" = field(default_factory=list)  # that the filter lets pass, in order
    selected: int = 0  # of rows
    _all: "Sequence[pb.ProcessSample]" = ()

    def see(self, processes: "Sequence[pb.ProcessSample]") -> None:
        """The processes of a new sample."""
        self._all = processes
        self._arrange()

    def process(self) -> "pb.ProcessSample | None":
        """The selected process."""
        return self.rows[self.selected] if self.rows else None

    def has(self, process: "pb.ProcessSample") -> bool:
        """Whether the last sample has this process."""
        return any(key_of(each) == key_of(process) for each in self._all)

    def first_row(self) -> int:
        """The first row of the list that is shown: the selected one is kept in sight."""
        most = max(len(self.rows) - self.list_rows, 0)
        return min(max(self.selected - self.list_rows // 2, 0), most)

    def open(self, page: "RenderableType") -> None:
        """Shows a page in front of the list."""
        self.page, self.page_line, self.mode, self.message = page, 0, Mode.PAGE, ""

    def press(self, key: str) -> KeyAction | None:
        """One key. Returns what to do."""
        return _PRESSED[self.mode](self, key)

    def sort(self, order: str) -> None:
        """Sorts by one of ORDERS."""
        self.order = order
        self.message = f"sorted by {order}"
        self._arrange()

    def step(self, by: int) -> None:
        """Sorts by an order that stands before or behind the present one."""
        names = list(ORDERS)
        self.sort(names[(names.index(self.order) + by) % len(names)])

    def turn(self) -> None:
        """Reverses the order."""
        self.reverse = not self.reverse
        self.message = f"sorted by {self.order}{', reversed' if self.reverse else ''}"
        self._arrange()

    def narrow(self, text: str) -> None:
        """Changes the filter."""
        self.filter = text[:MAX_FILTER]
        self._arrange()

    def clear(self) -> None:
        """Ends the filter and takes the note away."""
        self.note = ""
        self.narrow("")

    def move(self, by: int) -> None:
        """Moves the selection, or the page."""
        if self.mode is Mode.PAGE:
            self.page_line = max(self.page_line + by, 0)  # the picture knows its end
        else:
            self.selected = min(max(self.selected + by, 0), max(len(self.rows) - 1, 0))

    def screenful(self) -> int:
        """How far PgUp and PgDn move."""
        return max(self.page_rows if self.mode is Mode.PAGE else self.list_rows, 1)

    def _arrange(self) -> None:
        process = self.process()
        words = self.filter.lower().split()
        found = [each for each in self._all if all(word in _searched(each) for word in words)]
        self.rows = ordered(found, self.order, reverse=self.reverse)
        places = {key_of(each): place for place, each in enumerate(self.rows)}
        known: ProcessKey | None = key_of(process) if process is not None else None
        self.selected = places.get(known, min(self.selected, max(len(self.rows) - 1, 0))) if known else 0


def _searched(sample: "pb.ProcessSample") -> str:
    """What the filter looks at, in lower case."""
    process = sample.process
    rank = f"rank {process.rank}" if process.HasField("rank") else ""
    texts = (str(process.pid), process.user, rank, process.job_id, enum_names.pod(process), " ".join(process.command))
    return "\n".join(texts).lower()


_MOVES: dict[str, Callable[[TopView], int]] = {
    "up": lambda _view: -1,
    "k": lambda _view: -1,
    "down": lambda _view: 1,
    "j": lambda _view: 1,
    "page up": lambda view: -view.screenful(),
    "page down": TopView.screenful,
    "home": lambda _view: -(1 << 30),
    "g": lambda _view: -(1 << 30),
    "end": lambda _view: 1 << 30,
    "G": lambda _view: 1 << 30,
}
_CHANGES: dict[str, Callable[[TopView], None]] = {
    "s": lambda view: view.step(1),
    ">": lambda view: view.step(1),
    ".": lambda view: view.step(1),
    "f6": lambda view: view.step(1),
    "<": lambda view: view.step(-1),
    ",": lambda view: view.step(-1),
    "P": lambda view: view.sort("cpu"),
    "M": lambda view: view.sort("memory"),
    "N": lambda view: view.sort("pid"),
    "r": TopView.turn,
    "I": TopView.turn,
    "esc": lambda view: view.clear(),
}
_OF_PROCESS = {"t": KeyAction.TRACE, "d": KeyAction.DIAGNOSE, "enter": KeyAction.DIAGNOSE, "e": KeyAction.EXPLAIN}
FILTERS, HELPS, LEAVES = ("/", "\\", "f4"), ("h", "?", "f1"), ("q", "f10")


def _press_in_list(view: TopView, key: str) -> KeyAction | None:
    view.message = ""
    if key in LEAVES:
        return KeyAction.LEAVE
    if key in HELPS:
        view.open(help_page())
    elif key in FILTERS:
        view.mode = Mode.FILTER
    elif key in _MOVES:
        view.move(_MOVES[key](view))
    elif key in _CHANGES:
        _CHANGES[key](view)
    elif key in _OF_PROCESS:
        return _for_process(view, _OF_PROCESS[key])
    return None


def _for_process(view: TopView, action: KeyAction) -> KeyAction | None:
    if view.process() is None:
        view.message = "no process is selected"
        return None
    if action is not KeyAction.TRACE:
        return action
    view.mode, view.asked = Mode.QUESTION, view.process()
    return None


def _press_in_filter(view: TopView, key: str) -> KeyAction | None:
    if key in ("enter", "esc"):
        view.mode = Mode.LIST
        if key == "esc":
            view.narrow("")
    elif key == "backspace":
        view.narrow(view.filter[:-1])
    elif key == "erase":
        view.narrow("")
    elif len(key) == 1:
        view.narrow(view.filter + key)
    elif key in ("up", "down"):
        view.move(_MOVES[key](view))
    return None


def _press_in_question(view: TopView, key: str) -> KeyAction | None:
    """Only a clear yes starts a trace: in htop, t is a harmless key. The selection may have moved meanwhile."""
    view.mode = Mode.LIST
    if key not in ("y", "Y"):
        view.message = "not traced"
    elif view.asked is not None and view.has(view.asked):
        return KeyAction.TRACE
    else:
        view.message = "not traced: the process is no longer there"
    return None


def _press_in_page(view: TopView, key: str) -> KeyAction | None:
    if key in _MOVES:
        view.move(_MOVES[key](view))
    elif key in ("esc", "enter", *LEAVES, *HELPS):
        view.mode = Mode.LIST
    return None


_PRESSED = {
    Mode.LIST: _press_in_list,
    Mode.FILTER: _press_in_filter,
    Mode.QUESTION: _press_in_question,
    Mode.PAGE: _press_in_page,
}


def help_page() -> "RenderableType":
    """The keys."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False, title="Keys", title_justify="left")
    table.add_column(style="bold", min_width=12)
    table.add_column(overflow="fold")
    for keys, meaning in KEYS:
        table.add_row(keys, meaning)
    return table

"""What the live view shows and how keys change it. Pure: keys and samples in, commands out.

How it works: the list is always there; a page of text (help, doctor, explain) or a line at the bottom (the filter, the
question before a trace) may stand in front of it, and takes the keys until it is closed. The selection follows its
process, not its line. `TopView.press` returns what the caller must do; everything else has happened by then.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING

from kineto_trace.base.visible_text import one_line
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kinetoctl.client import enum_names
from kinetoctl.output import units
from kinetoctl.output.listing import rate
from kinetoctl.output.units import NOTHING

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

MAX_FILTER = 200
KEYS = (
    ("↑ ↓, k j", "select a process, or scroll a page"),
    ("PgUp PgDn, Home End, g G", "a page up or down; the first or last row"),
    ("s > . F6, < ,", "next sort order, or the previous one"),
    ("P M N", "sort by CPU, memory or pid"),
    ("r, I", "reverse the order"),
    ("/, \\ F4", "filter by pid, user, rank, job, pod or command; Enter keeps the filter, Esc clears it"),
    ("t", "trace the selected process, with the defaults of `kinetoctl trace`"),
    ("d, Enter", "check the selected process, like `kinetoctl doctor`"),
    ("e", "explain how its last trace ended, like `kinetoctl explain`"),
    ("h ?, F1", "this help"),
    ("q, F10, Ctrl-C", "quit; captures continue"),
)
HINTS = "t trace  d doctor  / filter  s sort  h help  q quit"
SPAN_S = 300.0
MAX_POINTS = 601  # of the shortest interval, 500 ms
CELLS = 7  # with which a terminal of 60 columns has room for the longest pid
LEAST_STEPS = 8  # of the mean pace in each cell, so that one iteration more or less does not show
LEAST_SAMPLES = 3  # in each cell: a busy host takes them at uneven times
LEVELS = " ▁▂▃▄▅▆▇█"
TURN = 0.15  # a change of the rate by less is none
Point = tuple[float, float]  # seconds, iterations until then
ProcessKey = tuple[int, int]  # pid, start time (ns)


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
    """Only a clear yes starts a trace: in htop, t is a harmless key. The selection may have moved since then."""
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


# The step rates of processes over the last minutes, made of the counts in samples. Pure.
def key_of(sample: "pb.ProcessSample") -> ProcessKey:
    """Which process it is, even if its pid is used again."""
    return sample.process.pid, sample.process.start_time_ns


class Trends:
    """The counts of all processes that the last sample has."""

    def __init__(self) -> None:
        self._points: dict[ProcessKey, deque[Point]] = {}
        self._texts: dict[ProcessKey, str] = {}  # until the next sample

    def see(self, sample: "pb.HostSample") -> None:
        """Adds the counts of a sample. Those of processes that it lacks are forgotten."""
        now_s = sample.time_ns / 1e9
        kept = {}
        for each in sample.processes:
            points = self._points.get(key_of(each), deque(maxlen=MAX_POINTS))
            count = each.process.iterations
            if points and (count < points[-1][1] or now_s <= points[-1][0]):  # counted anew, or the clock was set
                points.clear()
            if count >= 0:
                points.append((now_s, count))
            while points and points[0][0] < now_s - SPAN_S:
                points.popleft()
            kept[key_of(each)] = points
        self._points = kept
        self._texts.clear()

    def text(self, sample: "pb.ProcessSample") -> str:
        """A bar for the rate of each part of the time, from 0 to the fastest, and where it goes: `▇▇▇▇▅▃▃▃ ↘`."""
        key = key_of(sample)
        if key not in self._texts:
            self._texts[key] = _drawn(rates_of(self._points.get(key, ())))
        return self._texts[key]


def _drawn(rates: Sequence[float]) -> str:
    if len(rates) < 2 or max(rates) <= 0:
        return NOTHING
    bars = "".join(LEVELS[max(1, round(rate / max(rates) * (len(LEVELS) - 1)))] for rate in rates)
    return f"{bars} {_direction(rates)}".rstrip()


def rates_of(points: Sequence[Point]) -> list[float]:
    """Iterations per second in up to CELLS equal parts of the time, each of LEAST_STEPS and LEAST_SAMPLES at least."""
    if len(points) < 2:
        return []
    (begin, first), (end, last) = points[0], points[-1]
    if last <= first:
        return []
    cells = min(CELLS, (len(points) - 1) // LEAST_SAMPLES, int((last - first) / LEAST_STEPS))
    if cells < 1:
        return []
    length = (end - begin) / cells
    counts = [_count_at(points, begin + length * place) for place in range(cells + 1)]
    return [(after - before) / length for before, after in zip(counts, counts[1:], strict=False)]


def _count_at(points: Sequence[Point], at_s: float) -> float:
    """Between two samples a process is taken to step evenly."""
    before = points[0]
    for point in points:
        if point[0] >= at_s:
            share = (at_s - before[0]) / (point[0] - before[0]) if point[0] > before[0] else 0.0
            return before[1] + share * (point[1] - before[1])
        before = point
    return points[-1][1]


def _direction(rates: Sequence[float]) -> str:
    """The last third beside what was before; nothing if there is too little of it."""
    if len(rates) < 3:
        return ""
    part = max(1, len(rates) // 3)
    earlier, now = (sum(each) / len(each) for each in (rates[:-part], rates[-part:]))
    if abs(now - earlier) <= TURN * earlier:
        return "→"
    return "↗" if now > earlier else "↘"


def gpu_memory(sample: "pb.ProcessSample") -> int:
    """Bytes on all GPUs."""
    return sum(use.memory_bytes for use in sample.gpus)


def gpu_share(sample: "pb.ProcessSample") -> float:
    """GPUs that it keeps busy."""
    return sum(use.utilization for use in sample.gpus)


# What --sort names: the key, and whether the largest comes first.
ORDERS: "dict[str, tuple[Callable[[pb.ProcessSample], tuple[object, ...]], bool]]" = {
    "gpu": (lambda each: (gpu_share(each), gpu_memory(each), each.cpu), True),
    "gpu-memory": (lambda each: (gpu_memory(each),), True),
    "cpu": (lambda each: (each.cpu,), True),
    "memory": (lambda each: (each.memory_bytes,), True),
    "pid": (lambda each: (each.process.pid,), False),
    "rank": (lambda each: (not each.process.HasField("rank"), each.process.rank, each.process.pid), False),
    "user": (lambda each: (each.process.user, each.process.pid), False),
    "job": (lambda each: (each.process.job_id == "", each.process.job_id, each.process.rank), False),
}


def ordered(processes: "Sequence[pb.ProcessSample]", order: str, *, reverse: bool = False) -> "list[pb.ProcessSample]":
    """The processes by one of ORDERS; those that are equal stay by pid."""
    key, largest_first = ORDERS[order]
    return sorted(processes, key=key, reverse=largest_first is not reverse)


# One sample of a host as `kinetoctl top` prints it. Pure: protobuf in, rich tables out.
GPU_COLUMNS = (
    "GPU",
    "NAME",
    "UTIL",
    "SM",
    "TENSOR",
    "DRAM",
    "MEM",
    "MEMORY",
    "POWER",
    "TEMP",
    "SM CLOCK",
    "PCIE RX/TX",
    "NVLINK RX/TX",
    "PROC",
)
PROCESS_COLUMNS = (
    "PID", "USER", "RANK", "JOB", "GPU", "GPU MEM", "GPU UTIL", "CPU", "RSS", "AGENT", "CAPTURE", "ITER", "ITER/S",
    "POD", "COMMAND",
)  # fmt: skip
# What is left out of a narrow terminal, in this order; KEPT stays even without any value.
LEAST_WANTED = (
    "POD", "CAPTURE", "RSS", "NVLINK RX/TX", "PCIE RX/TX", "SM CLOCK", "CPU", "JOB", "GPU UTIL", "USER", "GPU MEM",
    "MEM", "DRAM", "SM", "POWER", "TENSOR", "NAME", "AGENT", "TREND", "ITER/S",
)  # fmt: skip
KEPT = ("PID", "RANK", "GPU", "ITER")
_POD = PROCESS_COLUMNS.index("POD")
COMMAND_WANTED = 40  # characters of the last column, for which GIVING_WAY and columns without any value are left out
GIVING_WAY = ("POD", "CAPTURE")
_GAP = 2
EIGHTHS = " ▏▎▍▌▋▊▉"
TRACED = "●"  # before a process in which a capture is running


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveColumns:
    """What only the live view shows. trend: of a process; selected: the place of a row among those that are shown."""

    trend: "Callable[[pb.ProcessSample], str]"
    selected: int | None


def render(sample: "pb.HostSample", *, order: str, reverse: bool = False, width: int | None = None) -> RenderableType:
    """The whole picture. width: of the terminal, None for a pipe."""
    parts: list[RenderableType] = [*head(sample), Text("")]
    if sample.gpus:
        parts += [gpu_table(sample, sample.gpus, width), Text("")]
    parts += notes(sample)
    parts.append(process_table(sample, ordered(sample.processes, order, reverse=reverse), width))
    return Group(*parts)


def gpu_table(sample: "pb.HostSample", gpus: "Sequence[pb.GpuSample]", width: int | None, *, bars: int = 0) -> Table:
    """These GPUs of the sample. bars: length of the bars beside shares, in characters."""
    return _table(GPU_COLUMNS, [gpu_row(gpu, sample, bars) for gpu in gpus], width)


def process_table(
    sample: "pb.HostSample",
    processes: "Sequence[pb.ProcessSample]",
    width: int | None,
    live: LiveColumns | None = None,
) -> Table:
    """These processes of the sample, in this order."""
    columns, cells = list(PROCESS_COLUMNS), [list(process_row(process, sample)) for process in processes]
    if not any(process.process.pod_name for process in processes):  # no node of Kubernetes, or one that tells no names
        for each in (columns, *cells):
            del each[_POD]
    if live is None:
        return _table(columns, [tuple(each) for each in cells], width)
    place = columns.index("ITER/S") + 1
    columns.insert(place, "TREND")
    columns.insert(0, "")
    for each, process in zip(cells, processes, strict=True):
        each[-1] = _short_command(process.process)
        each.insert(place, live.trend(process))
        each.insert(0, TRACED if process.process.busy_capture_id else " ")
    return _table(columns, [tuple(each) for each in cells], width, selected=live.selected)


def head(sample: "pb.HostSample") -> list[Text]:
    """The host, in three lines."""
    at = datetime.fromtimestamp(sample.time_ns / 1e9).astimezone().strftime("%H:%M:%S")
    used = sample.memory_total_bytes - sample.memory_available_bytes
    captures, agents = sample.captures_running, sample.agents
    lines = [
        f"{one_line(sample.hostname)}  {at}  kinetod {one_line(sample.version)}  agents {agents}  captures {captures}",
        f"cpu {_percent(sample.cpu_busy)} of {sample.cpus}, waiting for disks {_percent(sample.cpu_iowait)}, "
        f"load {sample.load_1m:.1f}   memory {units.size(used)} of {units.size(sample.memory_total_bytes)}"
        + (f"   swap {units.size(sample.swap_used_bytes)}" if sample.swap_used_bytes else ""),
        f"disk read {_rate(sample.disk_read_bytes_per_second)} write {_rate(sample.disk_written_bytes_per_second)}   "
        f"network in {_rate(sample.network_receive_bytes_per_second)} "
        f"out {_rate(sample.network_transmit_bytes_per_second)}   store free {units.size(sample.store_free_bytes)}",
    ]
    return [Text(lines[0], style="bold"), *map(Text, lines[1:])]


def notes(sample: "pb.HostSample") -> list[Text]:
    """Why GPUs are missing: nothing to say of a library that is not needed beside one that works."""
    libraries = sample.gpu_libraries
    works = any(each.state == "ok" for each in libraries)
    told = {each.detail: None for each in libraries if each.state in ("failed", "late") or (not works and each.detail)}
    return [Text(f"GPUs: {one_line(detail)}") for detail in told]


def bar(share: float, length: int) -> str:
    """A bar of `length` characters, filled to an eighth of one, and a blank; empty without a length."""
    if not length:
        return ""
    whole, rest = divmod(round(min(max(share, 0.0), 1.0) * length * 8), 8)
    return f"{'█' * whole}{EIGHTHS[rest]}".rstrip().ljust(length, "·") + " "


def gpu_row(gpu: "pb.GpuSample", sample: "pb.HostSample", bars: int = 0) -> tuple[str, ...]:
    """The cells of GPU_COLUMNS."""
    if not gpu.works:
        return (str(gpu.gpu.index), one_line(gpu.gpu.name), "LOST", *[NOTHING] * (len(GPU_COLUMNS) - 3))
    filled = gpu.memory_used_bytes / gpu.gpu.memory_bytes if gpu.gpu.memory_bytes else 0.0
    memory = (
        f"{bar(filled, bars)}{units.size(gpu.memory_used_bytes)} / {units.size(gpu.gpu.memory_bytes)}"
        if gpu.HasField("memory_used_bytes")
        else NOTHING
    )
    limit = f" / {gpu.power_limit_watts:.0f}" if gpu.HasField("power_limit_watts") else ""
    count = sum(
        any(use.gpu == gpu.gpu.index and use.vendor == gpu.vendor for use in process.gpus)
        for process in sample.processes
    )
    return (
        str(gpu.gpu.index),
        one_line(gpu.gpu.name),
        f"{bar(gpu.utilization, bars)}{_percent(gpu.utilization)}" if gpu.HasField("utilization") else NOTHING,
        _share(gpu, "sm_active"),
        _share(gpu, "tensor_active"),
        _share(gpu, "dram_active"),
        _share(gpu, "memory_utilization"),
        memory,
        f"{gpu.power_watts:.0f}{limit} W" if gpu.HasField("power_watts") else NOTHING,
        f"{gpu.temperature_celsius:.0f} °C" if gpu.HasField("temperature_celsius") else NOTHING,
        f"{gpu.sm_clock_hertz / 1e6:.0f} MHz" if gpu.HasField("sm_clock_hertz") else NOTHING,
        _both(gpu, "pcie"),
        _both(gpu, "nvlink"),
        str(count),
    )


def _share(gpu: "pb.GpuSample", field: str) -> str:
    return _percent(getattr(gpu, field)) if gpu.HasField(field) else NOTHING


def _both(gpu: "pb.GpuSample", link: str) -> str:
    fields = [f"{link}_{direction}_bytes_per_second" for direction in ("receive", "transmit")]
    if not all(gpu.HasField(field) for field in fields):
        return NOTHING
    return " / ".join(_rate(getattr(gpu, field)) for field in fields)


def process_row(sample: "pb.ProcessSample", host: "pb.HostSample") -> tuple[str, ...]:
    """The cells of PROCESS_COLUMNS."""
    process = sample.process
    gpus = sorted({use.gpu for use in sample.gpus}) or sorted(process.gpus)
    utilization = any(use.HasField("utilization") for use in sample.gpus)
    memory = any(use.HasField("memory_bytes") for use in sample.gpus)
    return (
        str(process.pid),
        one_line(process.user) or str(process.uid),
        str(process.rank) if process.HasField("rank") else NOTHING,
        one_line(process.job_id) or NOTHING,
        ",".join(map(str, gpus)) or NOTHING,
        units.size(gpu_memory(sample)) if memory else NOTHING,
        _percent(gpu_share(sample)) if utilization else NOTHING,
        _percent(sample.cpu),
        units.size(sample.memory_bytes),
        enum_names.agent_state(process.agent_state),
        one_line(process.busy_capture_id) or NOTHING,
        str(process.iterations) if process.iterations > 0 else NOTHING,
        rate(process),
        one_line(enum_names.pod(process)) or NOTHING,
        one_line(" ".join(process.command)),
    )


def _short_command(process: "pb.Process") -> str:
    """The command without the folder of its program, so that a narrow column shows what follows."""
    return one_line(" ".join([*(each.rpartition("/")[2] for each in process.command[:1]), *process.command[1:]]))


def _percent(share: float) -> str:
    return f"{share * 100:.0f}%"


def _rate(per_second: float) -> str:
    return f"{units.size(int(per_second))}/s"


def _table(
    columns: Sequence[str], rows: Sequence[tuple[str, ...]], width: int | None, *, selected: int | None = None
) -> Table:
    """The last column is cut where the width does not do. Before that, columns are left out: those without any value,
    then those of LEAST_WANTED.
    """
    widths = [max([len(column), *(len(row[place]) for row in rows)]) for place, column in enumerate(columns)]
    shown = list(range(len(columns)))
    empty = [place for place in shown if columns[place] not in KEPT and all(row[place] == NOTHING for row in rows)]
    unwanted = [columns.index(column) for column in LEAST_WANTED if column in columns]
    for place in [*empty, *unwanted]:
        gives_way = place in empty or columns[place] in GIVING_WAY
        last = min(widths[-1], COMMAND_WANTED) if gives_way else len(columns[-1])
        needed = sum(widths[each] + _GAP for each in shown[:-1]) + last + _GAP
        if width is not None and needed > width:
            shown = [each for each in shown if each != place]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    for place in shown:
        least = len(columns[place]) if place == shown[-1] else widths[place]
        table.add_column(columns[place], no_wrap=True, overflow="ellipsis", min_width=least)
    *others, last = shown
    room = None if width is None else max(width - sum(widths[each] + _GAP for each in others), len(columns[last]))
    for number, row in enumerate(rows):
        command = Text(row[last])
        if room is not None:
            command.truncate(room, overflow="ellipsis")  # Rich would take from every column
        style = "reverse" if number == selected else None
        table.add_row(*(Text(row[place]) for place in others), command, style=style)
    return table

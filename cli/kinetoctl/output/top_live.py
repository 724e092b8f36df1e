"""The live view of `kinetoctl top`: one thread draws and takes the keys, others wait for the daemon.

When the daemon goes away, for example because it is restarted, the last sample stays and says since when it is old,
until the daemon is back.

How it works: whatever waits for the daemon runs in a thread of its own and posts what came of it, as a function, to the
thread that draws, which alone touches the view. Threads that are left when the view ends are of no account: the client
that they use is closed, and what they post is not read.
"""

import contextlib
import math
import os
import queue
import re
import select
import signal
import sys
import termios
import threading
import time
import tty
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

from kineto_trace.base.visible_text import one_line
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.text import Text

from kinetoctl.base.reason_codes import advices, explained
from kinetoctl.client.daemon_client import RETRYABLE, Client, Patience
from kinetoctl.client.tracing import follow, has_ended
from kinetoctl.errors import CliError
from kinetoctl.output import top_view
from kinetoctl.output.capture_progress import StateTimes, extent, state_text, summed, time_text
from kinetoctl.output.console import rich_console, say
from kinetoctl.output.diagnosis import diagnosis_page, explanation_lines
from kinetoctl.output.top_view import HINTS, KeyAction, Mode, ProcessKey, TopView, Trends, key_of

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

CLOCK_S = 0.2  # between two pictures while a trace is running, so that its time moves
IDLE_S = 60.0
MAX_POSTED = 64  # while the terminal takes no output (Ctrl-S), the threads wait, and the daemon with them
Samples = Callable[[], Iterator["pb.HostSample"]]
Spec = Callable[[int], "pb.CaptureSpec"]
FEW_GPUS = 2
BARS = ((60, 6), (80, 8), (120, 12))  # least width of the terminal, length of a bar
Line = list[Segment]
ESC_S = 0.05  # an Esc that nothing follows for so long is that key
READ_BYTES = 4096
ENDS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # SIGTERM is taken for a SIGINT in all of kinetoctl
SIGNALS = (*ENDS, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)
NAMES = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down",
    b"\x1b[5~": "page up", b"\x1b[6~": "page down",
    b"\x1b[H": "home", b"\x1bOH": "home", b"\x1b[1~": "home", b"\x1b[7~": "home",
    b"\x1b[F": "end", b"\x1bOF": "end", b"\x1b[4~": "end", b"\x1b[8~": "end",
    b"\x1bOP": "f1", b"\x1b[11~": "f1", b"\x1b[[A": "f1",
    b"\x1bOS": "f4", b"\x1b[14~": "f4", b"\x1b[[D": "f4",
    b"\x1b[17~": "f6", b"\x1b[21~": "f10",
    b"\r": "enter", b"\n": "enter", b"\x7f": "backspace", b"\x08": "backspace", b"\x15": "erase",
    b"\x03": "q", b"\x04": "q",  # in a terminal that makes no signals of them
}  # fmt: skip
# Of the standard forms for keys: an escape sequence (CSI, SS3, or Linux's own for F1 to F5), a character, another byte.
_KEY = re.compile(
    rb"\x1b\[\[[A-E]|\x1b\[[0-?]*[ -/]*[@-~]|\x1bO.|[\xc2-\xf4][\x80-\xbf]{1,3}|[\x00-\x7f\x80-\xff]", re.DOTALL
)
_UNFINISHED = re.compile(
    rb"\x1b(\[\[?|\[[0-?]*[ -/]*|O)?|[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2}"
)


# The traces that were started in the live view: what is said of them there, and after it. Pure but for the clock.
@dataclass
class OwnTrace:
    """One trace. capture: None until the daemon has answered; error: why there is none, or why nobody follows it."""

    pid: int
    capture: "pb.Capture | None" = None
    error: CliError | None = None
    _times: StateTimes = field(default_factory=StateTimes)

    @property
    def is_open(self) -> bool:
        """Whether it may still change."""
        return self.error is None and not (self.capture and has_ended(self.capture))

    def update(self, capture: "pb.Capture") -> None:
        """The capture in its present state."""
        self.capture = capture
        for target in capture.targets:
            self._times.see((target.pid, target.start_time_ns), target)

    def reason_code(self) -> str:
        """Why there is no trace, or not a whole one; empty if there is nothing to explain."""
        if self.error is not None:
            return self.error.reason_code
        return next((target.reason_code for target in self.capture.targets), "") if self.capture else ""

    def text(self) -> str:
        """One line."""
        if self.error is not None:
            where = f" (capture {self.capture.id})" if self.capture else ""
            return f"trace of pid {self.pid}{where}: {one_line(str(self.error))}{_coded(self.reason_code())}"
        if self.capture is None:
            return f"trace of pid {self.pid}: requested"
        return f"capture {self.capture.id} of pid {self.pid}: {self._state(self.capture)}"

    def _state(self, capture: "pb.Capture") -> str:
        target = next(iter(capture.targets), None)
        if target is None:
            return "no process"
        seconds = self._times.seconds((target.pid, target.start_time_ns))
        parts = [state_text(target), time_text(target, capture.spec, seconds), *summed([target])]
        text = ", ".join(filter(None, parts))
        if not has_ended(capture):
            return text
        if target.files:
            return f"{text}; `kinetoctl captures fetch {capture.id}` downloads it"
        return f"{text}; {one_line(target.reason)}" if target.reason else text

    def farewell(self) -> str:
        """One line for after the view."""
        if self.error is None and self.capture is None:
            return f"the trace of pid {self.pid} was just requested; `kinetoctl captures list` shows whether it started"
        if self.is_open and self.capture:
            later = f"`kinetoctl captures fetch {self.capture.id}` downloads it once it has ended"
            return f"capture {self.capture.id} of pid {self.pid} continues; {later}"
        return self.text()


def _coded(reason_code: str) -> str:
    return f" [{reason_code}]" if reason_code else ""


def can_show() -> bool:
    """Whether stdout is a terminal that a picture can be drawn in."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class LiveView:
    """Shows samples until somebody leaves. spec: the capture that the key t starts, for a pid."""

    def __init__(self, client: Client, samples: Samples, view: TopView, *, spec: Spec, color: bool) -> None:
        self._client, self._samples, self._view, self._spec = client, samples, view, spec
        self._console = rich_console(sys.stdout, no_color=not color)
        keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._terminal = Terminal(keys, show=self._show, hide=self._hide)
        self._posted: queue.Queue[Callable[[], None]] = queue.Queue(MAX_POSTED)
        self._sample: pb.HostSample | None = None
        self._trends = Trends()
        self._traces: dict[ProcessKey, OwnTrace] = {}  # the last one of each process
        self._started: list[OwnTrace] = []
        self._noted: OwnTrace | None = None  # whose line is shown
        self._leaving = False

    def run(self) -> None:
        """Returns when somebody leaves, or when the daemon ends its samples. Raises what ends them otherwise.

        A daemon that goes away after the first sample is waited for.
        """
        try:
            with self._terminal.taken():
                self._in_thread(self._feed)
                while not self._leaving and not self._terminal.interrupted:
                    self._draw()
                    self._handle(self._terminal.wait(self._patience_s()))
        finally:
            for trace in self._started:
                say(trace.farewell(), err=True)

    def _patience_s(self) -> float:
        return CLOCK_S if any(trace.is_open for trace in self._started) else IDLE_S

    def _handle(self, keys: list[str]) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._posted.get_nowait()()
        for key in keys:
            action = self._view.press(key)
            if not self._view.note:  # Esc took it away
                self._noted = None
            if action is not None:
                self._act(action)

    def _draw(self) -> None:
        if self._noted is not None:
            self._view.note = self._noted.text()
        self._console.update_screen(self._picture())

    def _picture(self) -> "RenderableType":
        if self._sample is None:
            return waiting(self._console, f"waiting for the first sample from {self._client.address}; q quits")
        return picture(self._console, self._sample, self._view, self._trends, extent(self._spec(0)))

    def _show(self) -> None:
        self._console.set_alt_screen(True)
        self._console.show_cursor(False)

    def _hide(self) -> None:
        self._console.show_cursor(True)
        self._console.set_alt_screen(False)

    def _act(self, action: KeyAction) -> None:
        if action is KeyAction.LEAVE:
            self._leaving = True
        elif action is KeyAction.TRACE and self._view.asked is not None:
            self._trace(self._view.asked)
        elif (selected := self._view.process()) is not None:
            if action is KeyAction.DIAGNOSE:
                self._view.message = f"checking pid {selected.process.pid}"
                self._in_thread(partial(self._diagnose, selected.process.pid))
            elif action is KeyAction.EXPLAIN:
                self._explain(selected)

    # ------------------------------------------------------------ in the thread that draws

    def _see(self, sample: "pb.HostSample") -> None:
        self._sample, self._view.lost = sample, ""
        self._trends.see(sample)
        self._view.see(sample.processes)

    def _lose(self, since_s: float) -> None:
        """since_s: Unix time."""
        since = time.strftime("%H:%M:%S", time.localtime(since_s))
        self._view.lost = f"no answer from {self._client.address} since {since}: showing older figures; trying again"

    def _leave(self) -> None:
        self._leaving = True

    def _answer(self, page: "RenderableType") -> None:
        """Opens a page, unless a question or the filter has the keys by now."""
        if self._view.mode in (Mode.LIST, Mode.PAGE):
            self._view.open(page)

    def _trace(self, sample: "pb.ProcessSample") -> None:
        key = key_of(sample)
        if key in self._traces and self._traces[key].is_open:
            self._view.message = f"a trace of pid {key[0]} is already running"
            return
        trace = OwnTrace(key[0])
        self._traces[key] = self._noted = trace
        self._started.append(trace)
        self._in_thread(partial(self._follow, trace))

    def _explain(self, sample: "pb.ProcessSample") -> None:
        trace = self._traces.get(key_of(sample))
        code = trace.reason_code() if trace else ""
        if not code:
            pid = sample.process.pid
            self._view.message = f"no trace of pid {pid} started here has a reason code; press d to check the process"
            return
        try:
            lines = list(explanation_lines(explained(code)))
        except CliError as exc:
            self._view.message = str(exc)
            return
        self._view.open(Text("\n").join(Text(text, style="bold" if is_title else "") for text, is_title in lines))

    # ------------------------------------------------------------ in threads that wait

    def _in_thread(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except Exception as exc:  # noqa: BLE001  # raised again in the thread that draws
                self._post(partial(_raise, exc))

        threading.Thread(target=run, name="top", daemon=True).start()

    def _post(self, function: Callable[[], None]) -> None:
        self._posted.put(function)
        self._terminal.wake()

    def _feed(self) -> None:
        patience, latest_s = Patience(math.inf), 0.0
        while True:
            try:
                for sample in self._samples():
                    patience.progressed()
                    latest_s = time.time()
                    self._post(partial(self._see, sample))
                break
            except RETRYABLE as exc:
                if not latest_s:
                    raise
                self._post(partial(self._lose, latest_s))
                patience.wait(exc)
        self._post(self._leave)

    def _diagnose(self, pid: int) -> None:
        try:
            page = diagnosis_page(self._client.diagnose(pid))
        except CliError as exc:
            page = _error_page(exc)
        self._post(partial(self._answer, page))

    def _follow(self, trace: OwnTrace) -> None:
        try:
            capture = self._client.create(self._spec(trace.pid), uuid.uuid4().hex)
            self._post(partial(trace.update, _copy(capture)))
            for _change in follow(self._client, capture, Patience(self._client.timeout_s)):
                self._post(partial(trace.update, _copy(capture)))
            self._post(partial(trace.update, _copy(capture)))
        except CliError as exc:
            self._post(partial(setattr, trace, "error", exc))


def _copy(capture: "pb.Capture") -> "pb.Capture":
    """The capture as it is now; the thread that follows it goes on changing its own."""
    copied = type(capture)()
    copied.CopyFrom(capture)
    return copied


def _raise(error: Exception) -> None:
    raise error


def _error_page(error: CliError) -> "RenderableType":
    code = f" [{error.reason_code}]" if error.reason_code else ""
    return Text("\n".join((f"{error}{code}", *advices(error))))


# One picture of the live view, exactly as large as the terminal. Pure: nothing is printed here.
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
    live = top_view.LiveColumns(trend=trends.text, selected=view.selected - first if shown else None)
    body = _rendered(console, top_view.process_table(sample, shown, width, live))
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
    parts: list[RenderableType] = list(top_view.head(sample)) if height > 2 * FEW_GPUS + 8 else []
    most = max(FEW_GPUS, height // 2 - 5)
    gpus = sample.gpus[:most]
    if gpus:
        bars = max((length for least, length in BARS if width >= least), default=0)
        parts += [Text(""), top_view.gpu_table(sample, gpus, width, bars=bars)]
    if len(sample.gpus) > len(gpus):
        parts.append(Text(f"… {len(sample.gpus) - len(gpus)} more GPUs"))
    return [*parts, *top_view.notes(sample), Text("")]


def _bottom(view: TopView, width: int, extent: str) -> list[RenderableType]:
    """What just happened or is asked, and below it which keys there are."""
    if view.mode is Mode.PAGE:
        return [_cut("↑ ↓ scroll  Esc back", width, "reverse")]
    if view.mode is Mode.FILTER:
        return [
            _cut(f"filter: {view.filter}█", width, "bold"),
            _cut("Enter keep  Esc clear the filter", width, "reverse"),
        ]
    if view.mode is Mode.QUESTION:
        return [_question(view, width, extent), _cut("y trace  any other key cancel", width, "reverse")]
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


# The terminal while a live view has it: keys without Enter, and every mode as it was before, however the view ends.
# How it works: keys come one by one and are not echoed, while Ctrl-C and Ctrl-Z still make signals. No signal
# interrupts the program: the handlers only note what came and wake the loop (`signal.set_wakeup_fd`), which acts at a
# safe place. Before the program stops (Ctrl-Z), the terminal gets its modes and its ordinary screen back; when it
# goes on, the view takes both again. A second Ctrl-C, before the loop has seen the first, raises KeyboardInterrupt.
class Terminal:
    """Keys and signals, while `taken`. keys: descriptor of the terminal that they come from, None for none.

    show, hide: take the screen and give it back; called when the view begins, ends, stops and goes on.
    """

    def __init__(self, keys: int | None, *, show: Callable[[], None], hide: Callable[[], None]) -> None:
        self._keys, self._show, self._hide = keys, show, hide
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing, self._is_open = threading.Lock(), True
        self._modes: list[Any] | None = None
        self._pending = b""
        self._noted: set[int] = set()
        self.interrupted = False  # one of ENDS came

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Has the terminal until the end of the block, which restores it in every case."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._close)
            for number in SIGNALS:
                stack.callback(signal.signal, number, signal.signal(number, self._note))
            stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False))
            stack.callback(self._leave)
            self._enter()
            yield

    def wake(self) -> None:
        """Ends a `wait`, now or the next one; does nothing after `taken`. May be called by any thread."""
        with self._closing, contextlib.suppress(BlockingIOError):  # it is full of wake-ups
            if self._is_open:
                os.write(self._writer, b"\0")

    def wait(self, timeout_s: float) -> list[str]:
        """The keys that have come; returns after a key, a signal, `wake`, or timeout_s seconds.

        At the end of a terminal that was closed, the key is `q`.
        """
        descriptors = [self._reader, *([] if self._keys is None else [self._keys])]
        ready = select.select(descriptors, [], [], ESC_S if self._pending else timeout_s)[0]
        if self._reader in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, READ_BYTES)
        self._obey()
        if self._keys in ready:
            return self._read(self._keys)
        return self._decoded(complete=True) if self._pending and not ready else []

    def _read(self, keys: int) -> list[str]:
        try:
            data = os.read(keys, READ_BYTES)
        except OSError:
            data = b""
        if not data:
            return ["q"]
        self._pending += data
        return self._decoded(complete=False)

    def _decoded(self, *, complete: bool) -> list[str]:
        keys, self._pending = decode(self._pending, complete=complete)
        return keys

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number in ENDS and self.interrupted:
            raise KeyboardInterrupt
        self.interrupted |= number in ENDS
        self._noted.add(number)

    def _obey(self) -> None:
        """Does what the signals that came ask for."""
        noted, self._noted = self._noted, set()
        if signal.SIGTSTP in noted:
            self._stop()
        elif signal.SIGCONT in noted:  # stopped by SIGSTOP; whoever had the terminal since may have changed it
            self._leave()
            self._enter()

    def _stop(self) -> None:
        self._leave()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)  # returns when the program goes on
        signal.signal(signal.SIGTSTP, handler)
        self._noted.discard(signal.SIGCONT)
        self._enter()

    def _enter(self) -> None:
        if self._keys is not None:
            self._modes = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys, termios.TCSANOW)
        self._show()

    def _leave(self) -> None:
        """Gives everything back. Doing it twice does no harm."""
        try:
            with contextlib.suppress(OSError):  # it was closed
                self._hide()
        finally:
            if self._keys is not None and self._modes is not None:
                with contextlib.suppress(termios.error):  # it was closed
                    termios.tcsetattr(self._keys, termios.TCSANOW, self._modes)
                self._modes = None

    def _close(self) -> None:
        with self._closing:  # the numbers of the descriptors may be given to others then
            self._is_open = False
            os.close(self._reader)
            os.close(self._writer)


# What a terminal sends for keys, by name. Pure.
def decode(data: bytes, *, complete: bool) -> tuple[list[str], bytes]:
    """The keys in what was read, and the beginning of one whose rest is still to come.

    complete: nothing more came for a while, so a lone Esc is that key. Characters stand for themselves; sequences of
    other keys are left out.
    """
    keys: list[str] = []
    while data:
        if _UNFINISHED.fullmatch(data):
            return (keys, data) if not complete else ([*keys, *(["esc"] if data == b"\x1b" else [])], b"")
        found = _KEY.match(data)
        assert found is not None  # the last alternative takes any byte
        text, data = found[0], data[found.end() :]
        name = NAMES.get(text) or ("esc" if text == b"\x1b" else _character(text))
        keys += [name] if name else []
    return keys, b""


def _character(text: bytes) -> str:
    shown = text.decode("utf-8", "ignore")
    return shown if shown.isprintable() else ""

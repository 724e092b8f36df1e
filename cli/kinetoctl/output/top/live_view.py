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
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from rich.text import Text

from kinetoctl.base.reason_codes import advices, explained
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.retry import RETRYABLE, Patience
from kinetoctl.client.tracing import follow
from kinetoctl.errors import CliError
from kinetoctl.output.console import rich_console, say
from kinetoctl.output.diagnosis import diagnosis_page
from kinetoctl.output.explanation import explanation_lines
from kinetoctl.output.recorded import extent
from kinetoctl.output.top.live_picture import picture, waiting
from kinetoctl.output.top.own_traces import OwnTrace
from kinetoctl.output.top.terminal import Terminal
from kinetoctl.output.top.trends import ProcessKey, Trends, key_of
from kinetoctl.output.top.view import KeyAction, Mode, TopView

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb
    from rich.console import RenderableType

CLOCK_S = 0.2  # between two pictures while a trace is running, so that its time moves
IDLE_S = 60.0
MAX_POSTED = 64  # while the terminal takes no output (Ctrl-S), the threads wait, and the daemon with them
Samples = Callable[[], Iterator["pb.HostSample"]]
Spec = Callable[[int], "pb.CaptureSpec"]


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
            return waiting(self._console, f"waiting for the first sample of {self._client.address}; q quits")
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
                self._view.message = f"asking about pid {selected.process.pid}"
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
        self._view.lost = f"no answer from {self._client.address} since {since}: these figures are older; trying again"

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
            self._view.message = (
                f"no trace of pid {pid} that was started here has a reason code; d asks doctor about it"
            )
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

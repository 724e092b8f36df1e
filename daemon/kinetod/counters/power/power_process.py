"""`python -m kinetod.counters.power.power_process`: reads GPUs into files until its standard input ends.

Theory of operation
    The first line of its standard input is a PowerRequest, and each later one a GPU that is to end; each line of its
    standard output is a PowerNews. One thread for each GPU, so that a GPU whose driver hangs holds up no other. The end
    of the standard input, which is the daemon's word or its death, ends all: the main thread gives the threads JOIN_S.

    No GPU takes more than a share MOST_SHARE of a core: if the driver's calls cost more than usual, there are fewer
    readings, but one every MOST_PERIOD_NS at least.
"""

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import IO, NoReturn

import msgspec
import numpy as np
from kineto_trace.spool.counter_samples import CounterHeader, SampledMetric, row_type, write_header, write_rows

from kinetod.base.safe_text import clean
from kinetod.counters.interface import CounterCode, CounterError
from kinetod.counters.power.drm_power import DrmPower
from kinetod.counters.power.interface import (
    MOST_ROW_NS,
    SET_NAME,
    WHOLE_EVERY,
    PowerMetric,
    PowerNews,
    PowerRequest,
    PowerSource,
    PowerTarget,
)
from kinetod.counters.power.nvml_power import NvmlPower, open_nvml
from kinetod.gpus.nvml_calls import NvmlCalls

JOIN_S = 1.0
MOST_SHARE = 0.03
MOST_PERIOD_NS = 500_000_000
_SMOOTHING = 0.1


class PowerRows:
    """Makes rows out of one GPU's readings. Pure."""

    def __init__(self, metrics: Sequence[PowerMetric]) -> None:
        self._layout = row_type(len(metrics))
        self._counters = [at for at, metric in enumerate(metrics) if metric.counter]
        self._costly = [at for at, metric in enumerate(metrics) if metric.costly]
        self._waiting: list[tuple[int, int, list[float]]] = []  # start, end and values, since the last whole reading
        self._before_ns = 0  # the last reading, 0: none
        self._known: dict[int, tuple[int, float | None]] = {}  # of each counter its last reading

    def add(self, time_ns: int, values: Sequence[float | None], period_ns: int, *, whole: bool) -> None:
        """One more reading, whose row ends with it.

        There is none for the first reading, and for one whose time is not later. After more than MOST_ROW_NS a row
        only goes back by one period, and counters have no value. Rows since the last whole reading get what is costly
        of this one, if it is whole.
        """
        since_ns, self._before_ns = self._before_ns, time_ns
        if since_ns and time_ns - since_ns > MOST_ROW_NS:
            since_ns = time_ns - period_ns
            self._known.clear()
        made = bool(since_ns) and time_ns > since_ns
        if made:
            self._waiting.append((since_ns, time_ns, [_number(value) for value in values]))
        for at in self._counters:
            if whole or at not in self._costly:
                then_ns, then = self._known.get(at, (time_ns, None))
                self._known[at] = (time_ns, values[at])
                if made or at in self._costly:
                    self._fill(at, _growth(then, values[at], (time_ns - then_ns) / 1e9))
        if whole:
            for at in set(self._costly).difference(self._counters):
                self._fill(at, _number(values[at]))

    def _fill(self, at: int, value: float) -> None:
        rows = self._waiting if at in self._costly else self._waiting[-1:]
        for _, _, values in rows:
            values[at] = value

    def take(self) -> "np.ndarray":
        """The rows that nobody has taken yet, to be called after a whole reading."""
        taken, self._waiting = self._waiting, []
        rows = np.zeros(len(taken), dtype=self._layout)
        for at, row in enumerate(taken):
            rows[at] = row
        return rows


class ReadingPace:
    """How long to wait between readings, by what they cost. Pure."""

    def __init__(self, period_ns: int) -> None:
        self._least_ns = period_ns
        self._cost_ns = 0.0
        self.period_ns = period_ns

    def add(self, cost_ns: int) -> None:
        """CPU time of one more reading."""
        self._cost_ns += _SMOOTHING * (cost_ns - self._cost_ns)
        self.period_ns = max(self._least_ns, min(int(self._cost_ns / MOST_SHARE), MOST_PERIOD_NS))


class GpuRecorder(threading.Thread):
    """One GPU's readings into its files, which are this thread's. tell: takes the code and the reason of its news."""

    def __init__(
        self,
        open_source: Callable[[], PowerSource],
        target: PowerTarget,
        request: PowerRequest,
        tell: Callable[[str, str], None],
    ) -> None:
        super().__init__(name=f"power {target.uuid[:12]}", daemon=True)
        self._open_source = open_source
        self._target = target
        self._request = request
        self._tell = tell
        self._left = request.max_bytes
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Ends it with one more reading."""
        self._stopped.set()

    def run(self) -> None:
        """Works until it is stopped, the GPU is gone, or the disk takes no more."""
        try:
            self._record()
        except CounterError as exc:
            self._tell(exc.code, exc.reason)
        except (OSError, ValueError) as exc:
            self._tell(CounterCode.FAILED, f"GPU {self._target.uuid}: {clean(str(exc), 200)}")

    def _record(self) -> None:
        """Raises CounterError, OSError, ValueError."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(os.fdopen(each, "wb")) for each in self._target.descriptors]
            source = self._open_source()
            for file in files:
                write_header(file, _header(source, self._target, self._request.period_ns))
                file.flush()
            self._read_on(source, files)

    def _read_on(self, source: PowerSource, files: Sequence[IO[bytes]]) -> None:
        rows, pace = PowerRows(source.metrics), ReadingPace(self._request.period_ns)
        began, number = time.monotonic(), 0
        rows.add(time.time_ns(), source.read(whole=True), pace.period_ns, whole=True)
        self._tell("", "")  # the first row begins before that is heard
        stopped = False
        try:
            while not stopped:  # the last reading is that of the end
                stopped = self._stopped.wait(max(0.0, began + pace.period_ns / 1e9 - time.monotonic()))
                began, cpu_ns, number = time.monotonic(), time.thread_time_ns(), number + 1
                whole = stopped or number % WHOLE_EVERY == 0
                rows.add(time.time_ns(), source.read(whole), pace.period_ns, whole=whole)
                if whole:
                    self._write(rows.take(), files)
                pace.add(time.thread_time_ns() - cpu_ns)
        except CounterError:
            self._write(rows.take(), files)
            raise

    def _write(self, rows: "np.ndarray", files: Sequence[IO[bytes]]) -> None:
        fitting = rows[: self._left // rows.dtype.itemsize]
        self._left -= fitting.nbytes
        for file in files:
            write_rows(file, fitting)
            file.flush()
        if len(fitting) < len(rows):
            raise CounterError(CounterCode.FAILED, "the power readings end early: their file is full")


class PowerSources:
    """Opens sources. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nvml: NvmlCalls | None = None

    def open(self, target: PowerTarget) -> PowerSource:
        """The source of this GPU. Raises CounterError."""
        if target.pci_bus_id:
            return DrmPower(target.pci_bus_id)
        with self._lock:
            if self._nvml is None:
                self._nvml = open_nvml()
        return NvmlPower(self._nvml, target.uuid)


class NewsPipe:
    """Writes news, of any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def tell(self, gpu: int, code: str, reason: str) -> None:
        """One line. A daemon that is gone does not matter: the standard input has ended, too."""
        line = msgspec.json.encode(PowerNews(gpu=gpu, code=code, reason=clean(reason, 300))) + b"\n"
        with self._lock, contextlib.suppress(OSError):
            os.write(1, line)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _growth(then: float | None, now: float | None, seconds: float) -> float:
    """Growth per second; NaN if one of them is missing, or the counter began anew."""
    return math.nan if then is None or now is None or now < then or seconds <= 0 else (now - then) / seconds


def _header(source: PowerSource, target: PowerTarget, period_ns: int) -> CounterHeader:
    return CounterHeader(
        gpu_uuid=target.uuid,
        gpu_index=source.index,
        chip=source.chip,
        interval_ns=period_ns,
        metrics=tuple(SampledMetric(name=each.name, label=each.label, unit=each.unit) for each in source.metrics),
        set=SET_NAME,
        backend=source.backend,
        library_version=source.library_version,
    )


def _serve(recorders: Sequence[GpuRecorder], within_s: float) -> bool:
    """Ends single GPUs when the daemon says so. Returns whether the standard input has ended within that time."""
    deadline = time.monotonic() + within_s
    said = b""
    while (left_s := deadline - time.monotonic()) > 0:
        if not select.select([0], [], [], left_s)[0]:
            continue
        part = os.read(0, 4096)
        if not part:
            return True
        *lines, said = (said + part).split(b"\n")
        for line in lines:
            recorders[int(line)].stop()
    return False


def main() -> NoReturn:
    """Serves one request."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the daemon
    with open(0, "rb", buffering=0, closefd=False) as stdin:  # no byte of a later line is taken
        request = msgspec.json.decode(stdin.readline(), type=PowerRequest)
    sources, news = PowerSources(), NewsPipe()
    recorders = [
        GpuRecorder(partial(sources.open, target), target, request, partial(news.tell, place))
        for place, target in enumerate(request.gpus)
    ]
    for each in recorders:
        each.start()
    if not _serve(recorders, request.most_ns / 1e9):
        for place, each in enumerate(recorders):
            if each.is_alive():
                news.tell(place, CounterCode.FAILED, "the power readings end early: their longest duration is over")
    for each in recorders:
        each.stop()
    deadline = time.monotonic() + JOIN_S
    for each in recorders:
        each.join(max(0.0, deadline - time.monotonic()))
    os._exit(0)  # a thread in the driver must not hold it


if __name__ == "__main__":
    main()

"""One Intel GPU that is being sampled: reads its stream every POLL_S, in the thread that runs it.

The hardware's buffer is asked to hold what comes between many reads. The driver's calls release the interpreter lock.
"""

import contextlib
import time
from collections.abc import Callable

from kinetod.counters.interface import CounterPlan
from kinetod.counters.level_zero.metric_formulas import GroupPlan
from kinetod.counters.level_zero.report_values import OtherClockError, ReportReader, SampleGap
from kinetod.counters.level_zero.tools_library import IntelGpu, LevelZeroFailure, MetricStream, ToolsLibrary
from kinetod.counters.sample_rings import ERROR, STOPPED, TOO_LONG, Failure, RingWriter

POLL_S = 0.05
_LEAST_REPORTS, _MOST_REPORTS = 256, 8192  # of one read; switches between contexts add reports to the timer's
_POLLS_IN_BUFFER = 8
_READS_AT_ONCE = 64


class LevelZeroSampling:
    """Implements interface.Sampling."""

    def __init__(
        self,
        tools: ToolsLibrary,
        gpu: IntelGpu,
        planned: GroupPlan,
        interval_ns: int,
        ring: RingWriter,
        on_kept: Callable[[], None],
    ) -> None:
        """Begins. on_kept: called if the driver does not give the counters back. Raises LevelZeroFailure."""
        self._on_kept = on_kept
        self.plan: CounterPlan = planned.plan
        self._tools = tools
        self._gpu = gpu
        self._ring = ring
        reports = int(_POLLS_IN_BUFFER * POLL_S * 1e9 / interval_ns)
        opened = tools.clock(gpu)
        group = planned.group
        wraps = [each for each in (gpu.wrap_ns, group.wrap_ns) if each]
        self._stream: MetricStream | None = tools.open(
            gpu, group, interval_ns, min(max(reports, _LEAST_REPORTS), _MOST_REPORTS)
        )
        self._reader = ReportReader(planned, self._stream.period_ns, min(wraps), opened)

    def run(self) -> None:
        """Reads until the end."""
        end, failure = STOPPED, None
        due = time.monotonic() + self._ring.most_ns / 1e9
        try:
            while not self._ring.wait(min(POLL_S, max(0.0, due - time.monotonic()))):
                if time.monotonic() >= due:
                    end = TOO_LONG
                    break
                self._take()
            self._take()
            self._end()
        except LevelZeroFailure as exc:
            end, failure = ERROR, _failure(exc.function, str(exc), exc.code)
        except OtherClockError:
            end, failure = ERROR, _failure("zetMetricStreamerReadData", "the samples' times are of another clock")
        except Exception as exc:  # noqa: BLE001  # whatever it is ends this sampling, which the ring tells
            end, failure = ERROR, _failure("kinetod", f"{type(exc).__name__}: {exc}")
        self.close()
        self._ring.end(end, failure)

    def _take(self) -> None:
        """Everything that is there."""
        assert self._stream is not None
        for _ in range(_READS_AT_ONCE):
            values, more = self._stream.read()
            for found in self._reader.rows(values, self._tools.clock(self._gpu)):
                if isinstance(found, SampleGap):
                    self._ring.note_gap(found.lost_ns)
                else:
                    self._ring.put(found.start_ns, found.end_ns, found.values)
            if not more:
                return

    def _end(self) -> None:
        """Raises LevelZeroFailure if the counters are still held, which only the end of the process can change."""
        stream, self._stream = self._stream, None
        if stream is not None:
            try:
                stream.close()
            except LevelZeroFailure:
                self._on_kept()
                raise

    def close(self) -> None:
        """Gives the counters back."""
        with contextlib.suppress(LevelZeroFailure):
            self._end()


def _failure(call: str, text: str, result: int = 0) -> Failure:
    return Failure(kind=0, result=result, call=call.encode()[:60], text=text.encode()[:400])

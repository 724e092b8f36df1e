"""What a trace is of, in a line and as HTML for notebooks.

Theory of operation
    Both are shown whenever somebody types the name of a trace, so nothing is analysed here: only the description of
    the trace is read, the lengths of its tables, and the starts of its training steps. A trace comes from anywhere: no
    value that it may have makes this fail, and no text is shown without being shortened and made harmless.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from kineto_trace.base.quantities import shortened, time_text, times
from kineto_trace.base.visible_text import one_line
from kineto_trace.model.activity_tables import STEP_PREFIX

MAX_TEXT = 60
MAX_ANNOTATIONS = 1_000_000  # among which steps are looked for: milliseconds
MAX_KINDS = 6
MAX_NOTES = 5
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """What is shown of a trace.

    devices: their names; anything else is no name. counts: activities by kind. annotations: the columns of the table
    `user_annotation`, whose names are numbers into `strings`.
    """

    process: str
    capture_id: str
    framework: str
    python_version: str
    devices: Sequence[object]
    window_start_ns: int
    window_end_ns: int
    counts: Mapping[str, int]
    annotations: Mapping[str, npt.NDArray[Any]]
    strings: Sequence[str]
    notes: Sequence[str]

    def text(self) -> str:
        """Returns the trace in one line."""
        activities = times(sum(self.counts.values()), "activity", "activities")
        parts = [self.process, self._window_text(), activities, self._step_text()]
        return f"<Trace of {', '.join(filter(None, parts))}>"

    def html(self) -> str:
        """Returns an overview of the trace for notebooks."""
        from kineto_trace.base import notebook_html as html

        facts = [
            ("capture", _short(self.capture_id)),
            ("software", self._software_text()),
            ("GPUs", self._device_text()),
            ("window", self._window_text()),
            ("steps", self._step_text()),
            ("activities", self._kind_text()),
            ("to go on", 'kineto_trace.run_view("findings", trace) says where the time goes'),
        ]
        left = len(self.notes) - MAX_NOTES
        said = [f"note: {shortened(note, 4 * MAX_TEXT)}" for note in self.notes[:MAX_NOTES]]
        said += [f"and {times(left, 'more note')}"] if left > 0 else []
        known = [(name, text) for name, text in facts if text]
        return str(html.title(f"Trace of {self.process}") + html.facts(known) + html.notes(said))

    def step_period_us(self) -> tuple[int, float] | None:
        """Returns how many training steps began in the window, and the median time from one to the next, in us.

        None for fewer than two, and for traces with so many annotations that looking at them would take long.
        """
        if not 2 <= self.counts.get("user_annotation", 0) <= MAX_ANNOTATIONS:
            return None
        name = self.annotations["name"]
        steps = [number for number in set(name.tolist()) if self.strings[number].startswith(STEP_PREFIX)]
        start = np.array(sorted(set(self.annotations["start"][np.isin(name, steps)].tolist())), np.int64)
        start = start[start > self.window_start_ns]  # one that had begun before is cut, and its start is not known
        return (len(start), float(np.median(np.diff(start))) / 1000) if len(start) >= 2 else None

    def _step_text(self) -> str:
        try:
            found = self.step_period_us()
        except Exception:  # noqa: BLE001 - columns of a stored trace that are damaged or gone: whoever reads them is told
            return ""
        return f"{found[0]:,} steps began, {time_text(found[1])} apart (median)" if found else ""

    def _window_text(self) -> str:
        start, end = self.window_start_ns, self.window_end_ns
        try:
            when = f" from {_EPOCH + timedelta(microseconds=start // 1000):%Y-%m-%d %H:%M:%S} UTC" if start > 0 else ""
        except OverflowError:
            when = ""
        return f"{time_text(max(end - start, 0) / 1000)}{when}"

    def _software_text(self) -> str:
        python = f"Python {_short(self.python_version)}" if self.python_version else ""
        return ", ".join(filter(None, (_short(self.framework), python)))

    def _device_text(self) -> str:
        names = Counter(_short(name) if isinstance(name, str) else "unnamed" for name in self.devices)
        return ", ".join(f"{count} {name}" for name, count in names.most_common(MAX_KINDS))

    def _kind_text(self) -> str:
        counts = Counter(self.counts)
        first = [(kind, count) for kind, count in counts.most_common(MAX_KINDS) if count]
        rest = counts.total() - sum(count for _, count in first)
        return ", ".join([f"{count:,} {kind}" for kind, count in first] + ([f"{rest:,} others"] if rest else []))


def _short(text: str) -> str:
    return one_line(shortened(text, MAX_TEXT))

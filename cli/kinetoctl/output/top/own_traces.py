"""The traces that were started in the live view: what is said of them there, and after it. Pure but for the clock."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kineto_trace.base.visible_text import one_line

from kinetoctl.client.tracing import has_ended
from kinetoctl.errors import CliError
from kinetoctl.output.capture_progress import state_text
from kinetoctl.output.recorded import StateTimes, summed, time_text

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb


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
            return f"the trace of pid {self.pid} was just requested; `kinetoctl captures list` shows whether it began"
        if self.is_open and self.capture:
            later = f"`kinetoctl captures fetch {self.capture.id}` downloads it when it has ended"
            return f"capture {self.capture.id} of pid {self.pid} goes on; {later}"
        return self.text()


def _coded(reason_code: str) -> str:
    return f" [{reason_code}]" if reason_code else ""

"""What became of a capture and of its files, for programs."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kineto_trace.base.quantities import shortened
from kineto_trace.base.visible_text import one_line

SHOWN_PROCESSES, SHOWN_ROWS, SHOWN_TEXT = 5, 20, 200  # in what is printed of a result


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResult:
    """The outcome of one process.

    rank: None if the process has none. verdict: DONE, PARTIAL, FAILED or CANCELLED, or UNKNOWN if its host was lost.
    reason_code: one of docs/errors.md, or HOST_LOST. paths: format -> fetched file on this machine.
    """

    host: str
    pid: int
    rank: int | None
    verdict: str
    reason_code: str
    reason: str
    paths: Mapping[str, Path]

    def __repr__(self) -> str:
        why = " ".join(filter(None, (self.reason_code, self.reason)))
        return f"<{shown(self.name)}: {self.verdict}{f' ({shown(why)})' if why else ''}>"

    @property
    def name(self) -> str:
        """Rank, pid and host, as far as they are known."""
        return f"{'' if self.rank is None else f'rank {self.rank}, '}pid {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureResult:
    """The outcome of a capture.

    failed_hosts: host -> error message. missing_ranks: selected ranks that no host has.
    start_ns: when the windows began, in Unix ns by this machine's clock; 0 if they had no common start time.
    clocks: host -> (offset to add to the host's times, uncertainty of that offset), both in ns.
    warnings: those of hosts and processes.
    """

    id: str
    processes: tuple[ProcessResult, ...]
    failed_hosts: Mapping[str, str]
    missing_ranks: tuple[int, ...]
    start_ns: int
    clocks: Mapping[str, tuple[int, int]]
    warnings: tuple[str, ...]

    @property
    def done(self) -> bool:
        """Whether every process of every host was recorded and stored completely."""
        complete = bool(self.processes) and all(process.verdict == "DONE" for process in self.processes)
        return complete and not self.failed_hosts and not self.missing_ranks

    def __repr__(self) -> str:
        lines = self._remarks(SHOWN_PROCESSES)
        unfinished = [process for process in self.processes if process.verdict != "DONE"]
        left = len(unfinished) - SHOWN_PROCESSES
        lines += [repr(process) for process in unfinished[:SHOWN_PROCESSES]]
        return "\n  ".join(
            [f"<CaptureResult {self._verdicts()}>", *lines, *([f"and {left:,} more"] if left > 0 else [])]
        )

    def _repr_html_(self) -> str:
        """Called by notebooks."""
        from kineto_trace.base import notebook_html as html

        first = sorted(self.processes, key=lambda process: process.verdict == "DONE")[:SHOWN_ROWS]
        rows = [
            ("" if p.rank is None else str(p.rank), p.host, str(p.pid), p.verdict, p.reason_code, shown(p.reason))
            for p in first
        ]
        left = len(self.processes) - len(first)
        more = [f"and {left:,} more processes"] if left else []
        table = html.table(("rank", "host", "pid", "verdict", "code", "reason"), rows)
        return str(html.title(f"Capture {self._verdicts()}") + table + html.notes([*more, *self._remarks(SHOWN_ROWS)]))

    def _verdicts(self) -> str:
        counts = Counter(process.verdict.replace("UNSPECIFIED", "without a verdict") for process in self.processes)
        return f"{shown(self.id)}: " + (", ".join(f"{n:,} {name}" for name, n in counts.items()) or "no process")

    def _remarks(self, most: int) -> list[str]:
        """Failed hosts, missing ranks and warnings; at most so many."""
        missing = ", ".join(map(str, self.missing_ranks))
        found = [f"failed: {shown(f'{host}: {text}')}" for host, text in self.failed_hosts.items()]
        found += [f"no host has the ranks {shown(missing)}"] if missing else []
        found += [f"warning: {shown(text)}" for text in self.warnings]
        return found[:most] + ([f"and {len(found) - most:,} more remarks"] if len(found) > most else [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The fetched files of a capture.

    folder: holds the traces of the processes. merged: one trace of all of them, or None if there is none.
    uncertainty_ns: upper limit of the clock error between ranks in the merged trace, in ns; None if unknown.
    problems: one message for each file that could not be fetched or merged.
    """

    folder: Path
    merged: Path | None
    uncertainty_ns: int | None
    problems: tuple[str, ...]


def shown(text: str) -> str:
    """Returns a text of others on one short line."""
    return one_line(shortened(text, SHOWN_TEXT))

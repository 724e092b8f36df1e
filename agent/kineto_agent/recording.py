"""The activity sources of one capture: prepare, announce, start, stop, count, close.

One source's trouble is not another's: as long as one records, the capture goes on, and `problems` says what is
missing. This is the seam where whatever a source raises becomes a SourceError.
"""

from typing import Any, Callable, Dict, List, NamedTuple, Optional

from kineto_agent import wire
from kineto_agent.debuglog import log_exception
from kineto_agent.events import Refusal
from kineto_agent.sources.interface import SourceError, SourceOutcome, SourceRequest, SourceSession
from kineto_agent.sources.registry import Choice, Plan

Announce = Callable[[wire.Arena, int], None]


class _Part(NamedTuple):
    name: str
    session: SourceSession


def _as_source_error(name: str, exc: Exception) -> SourceError:
    if isinstance(exc, SourceError):
        return SourceError(exc.reason_code, "%s: %s" % (name, exc.reason))
    log_exception("source %s failed" % name)
    return SourceError("SOURCE_FAILED", "%s: unexpected %s: %s" % (name, type(exc).__name__, exc))


class Recording:
    """What the sources do for one capture. Used by the agent's thread."""

    def __init__(self, plan: Plan, request: wire.Start) -> None:
        self._plan = plan
        self._request = request
        self._prepared: List[_Part] = []
        self._running: List[_Part] = []
        self._outcomes: Dict[str, SourceOutcome] = {}
        self.problems: List[Refusal] = []
        if plan.missing:
            reason = "this process cannot record %s" % ", ".join(plan.missing)
            self.problems.append(Refusal("ACTIVITY_TYPE_UNAVAILABLE", reason))

    def start(self, announce: Announce) -> None:
        """Prepare and announce all, then start all. Raises SourceError if none records."""
        for choice in self._plan.choices:
            self._prepare(choice, announce)
        for part in self._prepared:
            try:
                part.session.start()
                self._running.append(part)
            except Exception as exc:  # noqa: BLE001 - translated
                self._note(_as_source_error(part.name, exc))
        if not self._running:
            raise SourceError(self.problems[-1].reason_code, "; ".join(problem.reason for problem in self.problems))

    def _prepare(self, choice: Choice, announce: Announce) -> None:
        wanted = self._request
        named = bool(wanted.activity_types)
        request = SourceRequest(choice.activity_types, wanted.buffer_limit_bytes, wanted.options, named)
        name = choice.source.name
        try:
            session = choice.source.prepare(request)
        except Exception as exc:  # noqa: BLE001 - translated
            self._note(_as_source_error(name, exc))
            return
        try:
            announce(wire.Arena(self._request.capture_id, name, session.format, session.metadata), session.arena_fd)
        except Exception as exc:  # noqa: BLE001 - translated
            session.close()
            self._note(_as_source_error(name, exc))
            return
        self._prepared.append(_Part(name, session))

    def _note(self, error: SourceError) -> None:
        self.problems.append(Refusal(error.reason_code, error.reason))

    def stop(self) -> None:
        """Stop every source that runs. Never raises."""
        while self._running:
            part = self._running.pop()
            try:
                self._outcomes[part.name] = part.session.stop()
            except Exception as exc:  # noqa: BLE001 - translated
                self._note(_as_source_error(part.name, exc))

    def close(self) -> None:
        """Free the arenas. Never raises."""
        self.stop()
        while self._prepared:
            part = self._prepared.pop()
            try:
                part.session.close()
            except Exception:  # noqa: BLE001 - nobody left to tell
                log_exception("source %s cannot be closed" % part.name)

    # ------------------------------------------------------------ for the Result

    @property
    def problem(self) -> Optional[Refusal]:
        """What is missing in this recording, in one; None if nothing."""
        if not self.problems:
            return None
        return Refusal(self.problems[0].reason_code, "; ".join(problem.reason for problem in self.problems))

    def counts(self) -> Dict[str, Any]:
        """`wire.Result.sources`."""
        result: Dict[str, Any] = {}
        for name, outcome in self._outcomes.items():
            counts = outcome.counts._asdict()
            counts["metadata"] = outcome.metadata
            result[name] = counts
        return result

    def warnings(self) -> List[str]:
        """What the sources want people to know."""
        return [warning for outcome in self._outcomes.values() for warning in outcome.warnings]

    def cpu_ns(self) -> int:
        """CPU time of the sources' own threads."""
        return sum(outcome.cpu_ns for outcome in self._outcomes.values())

    def detach_ns(self) -> int:
        """The longest time until a vendor library was detached."""
        return max((outcome.detach_ns for outcome in self._outcomes.values()), default=0)

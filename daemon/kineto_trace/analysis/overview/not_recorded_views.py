"""The view of what a trace lacks, why, and which option records it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kineto_trace.analysis.overview.trace_parts import PARTS, STEPS, PartRows, TracePart
from kineto_trace.base.quantities import spans
from kineto_trace.model.activity_tables import table_of
from kineto_trace.model.context import Context
from kineto_trace.model.source_coverage import SourceCoverage
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import Trace
from kineto_trace.view_api.result import columns
from kineto_trace.view_api.view import Answer, view

NEGLIGIBLE = 0.01  # of the window
_FILLED_BY = {  # the first table that a source fills -> what it records
    "kernel": "GPU activities and calls",
    "cpu_op": "operators",
    "python_function": "Python stacks",
    "cpu_instant_event": "allocations",
}
_WARM_UP = "kinetoctl trace --warmup or --warmup-iterations"
_NO_STEPS = "the trace has no marks of steps"
_NO_MARKS = f"{_NO_STEPS}; programs without torch's optimizers call kineto_agent.step() after each"
_BUFFERS = "kinetoctl trace with a larger --buffer-limit"


class Lack(NamedTuple):
    """What one trace lacks. why: with {time} or {count} for the amount, in ns or a number."""

    what: str
    why: str
    option: str | None
    torch_profiler: str | None = None
    hides: str | None = None
    amount: int = 0

    def together(self, other: "Lack") -> "Lack":
        """Returns what two ranks lack: of times the longest, of counts the sum."""
        longest, both = max(self.amount, other.amount), self.amount + other.amount
        return self._replace(amount=longest if "{time}" in self.why else both)

    def reason(self) -> str:
        """Returns why it lacks, with the amount."""
        return self.why.replace("{time}", f"{self.amount / 1e9:.3g} s").replace("{count}", f"{self.amount:,}")


def _together(partials: Sequence[tuple[int, Sequence[Lack]]]) -> Answer:
    """Combines what several ranks lack: each thing once."""
    found: dict[tuple[object, ...], tuple[Lack, list[int]]] = {}
    for rank, lacks in partials:
        for lack in lacks:
            known = found.get(lack[:-1])
            found[lack[:-1]] = (known[0].together(lack), [*known[1], rank]) if known else (lack, [rank])
    rows = [lack for lack, _ in found.values()]
    return Answer(
        {
            "what": [lack.what for lack in rows],
            "option": [lack.option for lack in rows],
            "why": [lack.reason() for lack in rows],
            "hides": [lack.hides for lack in rows],
            "torch_profiler": [lack.torch_profiler for lack in rows],
            "ranks": [spans(ranks) if len(partials) > 1 else None for _, ranks in found.values()],
        }
    )


@view(
    "not_recorded",
    columns(
        ("what", "text", "", "what the trace does not have, or has in part"),
        ("option", "text", "", "option of kinetoctl trace that records it; missing if none would"),
        ("why", "text", "", "why it does not, as far as the trace says so"),
        ("hides", "text", "", "analyses that are empty or less exact without it"),
        ("torch_profiler", "text", "", "how torch.profiler records it; missing for traces of kinetod"),
        ("ranks", "text", "", "ranks that lack it; missing for a single trace"),
    ),
    reduce=_together,
    nothing="nothing that the report uses is missing in the trace",
)
def not_recorded(context: Context) -> list[Lack]:
    """What a trace does not show, why, and which option of `kinetoctl trace` records it.

    First come losses: a source that began late or ended early, records that were dropped or cannot be read. Then what
    is missing altogether. A trace of kinetod says which activity types and options were requested, which sources
    recorded, and why others could not; one of another tool says at most some of the options that were set, and the rest
    stays unknown. Over several ranks each thing is
    told once, with the longest time or the sum of the records. The view validate has everything that a trace may have.
    """
    return [*_losses(context.trace), *_missing(context)]


def _losses(trace: Trace) -> Iterator[Lack]:
    losses = trace.losses
    for each in trace.coverage:
        yield from _uncovered(each, trace.window_start_ns, trace.window_end_ns)
    dropped = losses.dropped - sum(each.dropped for each in trace.coverage)
    if dropped > 0:
        yield Lack("records", "{count} were dropped: buffers were full", _BUFFERS, amount=dropped)
    if losses.undecoded:
        yield Lack("records", "{count} could not be decoded", None, amount=losses.undecoded)
    if losses.torn:
        yield Lack("the last records", "the daemon ended while they were recorded", None)


def _uncovered(each: SourceCoverage, start_ns: int, end_ns: int) -> Iterator[Lack]:
    what = _FILLED_BY.get(each.kinds[0], each.source)
    least = NEGLIGIBLE * (end_ns - start_ns)
    late = sum(end - start for start, end in each.missing if start <= start_ns)
    early = sum(end - start for start, end in each.missing if end >= end_ns and start > start_ns)
    if late > least:
        yield Lack(what, "recorded from {time} after the beginning on", _WARM_UP, amount=late)
    if early > least and not each.dropped:
        yield Lack(what, "recorded until {time} before the end; kinetoctl captures show says why", None, amount=early)
    if each.dropped:
        yield Lack(what, "{count} records were dropped: buffers were full", _BUFFERS, amount=each.dropped)


def _missing(context: Context) -> Iterator[Lack]:
    ours = bool(context.trace.target.capture_id)
    for part in PARTS:
        found = part.find(context)
        if part.option and part.is_there(found) is False and _concerns(part, context):
            why = _why(part, found, context.trace)
            useless = _refusal(part, context.trace.target) or (part.name == STEPS and not found.rows)
            option = None if useless else part.option
            yield Lack(part.name, why, option, None if ours else part.missing, part.needed_for)


def _concerns(part: TracePart, context: Context) -> bool:
    """Tells whether the trace has what the part describes: without operators, their shapes are no loss of their own."""
    return not part.of or any(len(context.trace.table(kind)) for kind in part.of)


def _refusal(part: TracePart, target: TargetInfo) -> str:
    """Returns why the process could not record it; "" if it could, or if the trace does not say so."""
    return next((why for kind, why in target.not_recorded.items() if table_of(kind) in part.kinds), "")


def _is_requested(part: TracePart, target: TargetInfo) -> bool | None:
    """Tells whether it was requested by name or as an option, or is a default; None if the trace does not say so."""
    if part.request and target.options.get(part.request):
        return True
    if target.activity_types is None or not (part.kinds or part.request):
        return None
    if target.activity_types:
        return not set(part.kinds).isdisjoint(map(table_of, target.activity_types))
    return part.by_default or not part.request


def _why(part: TracePart, found: PartRows, trace: Trace) -> str:
    ours = bool(trace.target.capture_id)
    requested = _is_requested(part, trace.target)
    if found.complete:
        return f"{found.complete:,} of {found.rows:,} have it"
    if part.name == STEPS:
        return "none was recorded from beginning to end" if found.rows else _NO_MARKS if ours else _NO_STEPS
    if refusal := _refusal(part, trace.target):
        return f"could not be recorded: {refusal}"
    if requested is False:
        named = ", ".join(trace.target.activity_types or ()) if part.by_default or not part.request else ""
        return f"not requested: --activities named only {named}" if named else "not requested"
    if any(not set(part.kinds).isdisjoint(each.kinds) for each in trace.coverage):
        return "recorded, but nothing came"
    if requested and (trace.target.activity_types or trace.target.options.get(part.request)):
        return "requested, but nothing came"
    if part.request and not requested and not (ours and part.by_default):
        return "not requested" if ours else "unknown: the trace does not say whether it was requested"
    if ours and trace.coverage and part.kinds:
        return "no source recorded it"
    return "unknown: the trace does not say why it has none"

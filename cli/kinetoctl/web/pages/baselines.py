"""What a trace can be compared with: the other captures, those of the same job first, or the other files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kineto_trace.base.quantities import shortened

from kinetoctl.base.view_settings import COUNTERPARTS, DIFF_VIEWS
from kinetoctl.errors import CliError
from kinetoctl.output import units
from kinetoctl.output.listing import commands
from kinetoctl.web.http.web_messages import WebRequest
from kinetoctl.web.pages.list_pages import MAX_CAPTURES, has_trace, listed, status_of
from kinetoctl.web.pages.page_context import OfHost, PageContext, ask, rank_choices, whole_number

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

MAX_COMMAND = 60  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What an address compares with. trace_id: "" for nothing. rank: the only one of it, "" for the same ranks."""

    trace_id: str
    rank: str

    @property
    def rank_number(self) -> int | None:
        """The rank for a job of TraceJobs."""
        return int(self.rank) if self.rank else None

    def words(self, rank: str) -> list[str]:
        """What `kinetoctl diff` is told of this rank (all of them: "") and that of the baseline."""
        ranks = {"--rank": rank, "--base-rank": self.rank}
        return [word for option, value in ranks.items() if value for word in (option, value)]


def baseline_of(request: WebRequest) -> Baseline:
    """What the fields `base` and `base_rank` choose. Raises WebError."""
    return Baseline(trace_id=request.first("base"), rank=whole_number(request, "base_rank"))


def comparison(request: WebRequest, views: Sequence[str]) -> dict[str, Any]:
    """What PageContext.results is told of the baseline that the address names, and of the views that compare."""
    baseline = baseline_of(request)
    return {
        "base": baseline.trace_id,
        "base_rank": baseline.rank_number,
        "compare": views if baseline.trace_id else (),
    }


def baseline_values(
    context: PageContext, trace_id: str, chosen: Baseline, ranks: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What templates show of a baseline and its choices. ranks: of the trace itself, with which it can be compared."""
    own = [(trace_id, "same trace, another rank")] if len(ranks) > 1 or chosen.trace_id == trace_id else []
    name = context.name(chosen.trace_id)
    others, before = baselines(context, trace_id)
    return {
        "bases": [*own, *others],
        "before": before,
        "base": chosen.trace_id,
        "base_name": f"rank {chosen.rank} of {name}" if chosen.rank else name,
        "base_ranks": _ranks(context, chosen) if chosen.trace_id else [],
        "base_rank": chosen.rank,
    }


def comparison_command(
    context: PageContext,
    trace_id: str,
    chosen: Baseline,
    views: Sequence[str],
    *,
    rank: str = "",
    settings: Sequence[tuple[str, str]] = (),
) -> str:
    """The command that compares these views of a trace with a baseline. rank: of the trace, "" for all."""
    words = []
    for name in views:
        by = next((word for word, view in DIFF_VIEWS.items() if view in (name, COUNTERPARTS.get(name))), None)
        words += ["--by", by] if by is not None else ["--view", name]
    if "--view" in words:
        words += [word for name, value in settings for word in ("--set", f"{name}={value}")]
    traces = context.name(chosen.trace_id) or "BASELINE", context.name(trace_id)
    return context.command("diff", *words, *chosen.words(rank), *traces)


def _ranks(context: PageContext, chosen: Baseline) -> list[tuple[str, str]]:
    """The ranks of the baseline; none while they are not known."""
    found = rank_choices(ask(lambda: context.ranks(context.library.find(chosen.trace_id))).documents)
    listed = chosen.rank in ("", *(rank for rank, _ in found))
    return found if listed else [*found, (chosen.rank, chosen.rank)]


def baselines(context: PageContext, trace_id: str) -> tuple[list[tuple[str, str]], str]:
    """The id of each other trace with what people call it; and the id of the capture before of the same process, or "".

    Without an answer from the daemon there are none.
    """
    if context.files:
        return [(each, argument) for each, argument in context.library.files.items() if each != trace_id], ""
    try:
        captures = listed(context.daemons.captures(MAX_CAPTURES).items)[:MAX_CAPTURES]
    except CliError:
        return [], ""
    place = next((place for place, (capture_id, _) in enumerate(captures) if capture_id == trace_id), len(captures))
    own = captures[place][1] if place < len(captures) else []
    before = next(
        (each for each, parts in captures[place + 1 :] if has_trace(parts) and _processes(own) & _processes(parts)), ""
    )
    others = [each for each in captures if each[0] != trace_id and has_trace(each[1])]
    jobs = _jobs(own)
    others.sort(key=lambda each: (each[0] != before, not jobs & _jobs(each[1])))
    return [(capture_id, _title(capture_id, parts)) for capture_id, parts in others], before


def _processes(parts: "Sequence[OfHost[pb.Capture]]") -> set[tuple[str, int, int]]:
    return {(part.place.host, target.pid, target.start_time_ns) for part in parts for target in part.item.targets}


def _jobs(parts: "Sequence[OfHost[pb.Capture]]") -> set[str]:
    return {target.process.job_id for part in parts for target in part.item.targets if target.process.job_id}


def _title(capture_id: str, parts: "Sequence[OfHost[pb.Capture]]") -> str:
    first = parts[0].item
    command = shortened(next(iter(commands(first)), ""), MAX_COMMAND)
    jobs = [f"job {job}" for job in sorted(_jobs(parts))[:1]]
    known = [*jobs, command, f"{units.age(first.created_ns)} ago", status_of(parts)]
    return f"{capture_id} ({', '.join(part for part in known if part)})"

"""What a trace can be compared with: the other captures, those of the same job first, or the other files."""

from typing import TYPE_CHECKING

from kinetoctl.errors import CliError
from kinetoctl.output import units
from kinetoctl.output.lists.capture_table import commands
from kinetoctl.web.pages.capture_facts import has_trace, listed, status_of
from kinetoctl.web.pages.captures_page import MAX_CAPTURES
from kinetoctl.web.pages.page_context import PageContext

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kineto_protos.v1 import profiler_pb2 as pb

    from kinetoctl.web.pages.daemons import OfHost

MAX_COMMAND = 60  # characters


def baselines(context: PageContext, trace_id: str) -> list[tuple[str, str]]:
    """The id of each other trace, and what people call it. Without an answer of the daemon there are none."""
    if context.files:
        return [(each, argument) for each, argument in context.library.files.items() if each != trace_id]
    try:
        captures = listed(context.daemons.captures(MAX_CAPTURES).items)[:MAX_CAPTURES]
    except CliError:
        return []
    own = {job for capture_id, parts in captures if capture_id == trace_id for job in _jobs(parts)}
    others = [each for each in captures if each[0] != trace_id and has_trace(each[1])]
    return [
        (capture_id, _title(capture_id, parts))
        for capture_id, parts in sorted(others, key=lambda each: not own & _jobs(each[1]))
    ]


def _jobs(parts: "Sequence[OfHost[pb.Capture]]") -> set[str]:
    return {target.process.job_id for part in parts for target in part.item.targets if target.process.job_id}


def _title(capture_id: str, parts: "Sequence[OfHost[pb.Capture]]") -> str:
    first = parts[0].item
    command = units.shortened(next(iter(commands(first)), ""), MAX_COMMAND)
    jobs = [f"job {job}" for job in sorted(_jobs(parts))[:1]]
    known = [*jobs, command, f"{units.age(first.created_ns)} ago", status_of(parts)]
    return f"{capture_id} ({', '.join(part for part in known if part)})"

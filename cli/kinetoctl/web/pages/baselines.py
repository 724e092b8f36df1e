"""What a trace can be compared with: the other captures, those of the same job first, or the other files."""

from typing import TYPE_CHECKING

from kinetoctl.client import enum_names
from kinetoctl.errors import CliError
from kinetoctl.output import units
from kinetoctl.output.lists.capture_table import commands
from kinetoctl.web.pages.capture_facts import has_trace
from kinetoctl.web.pages.captures_page import MAX_CAPTURES
from kinetoctl.web.pages.page_context import PageContext

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

MAX_COMMAND = 60  # characters


def baselines(context: PageContext, trace_id: str) -> list[tuple[str, str]]:
    """The id of each other trace, and what people call it. Without an answer of the daemon there are none."""
    if context.files:
        return [(each, argument) for each, argument in context.library.files.items() if each != trace_id]
    try:
        with context.client() as client:
            captures = list(client.captures({}, limit=MAX_CAPTURES))
    except CliError:
        return []
    own = {job for capture in captures if capture.id == trace_id for job in _jobs(capture)}
    others = [capture for capture in captures if capture.id != trace_id and has_trace(capture)]
    return [(capture.id, _title(capture)) for capture in sorted(others, key=lambda each: not own & _jobs(each))]


def _jobs(capture: "pb.Capture") -> set[str]:
    return {target.process.job_id for target in capture.targets if target.process.job_id}


def _title(capture: "pb.Capture") -> str:
    command = units.shortened(next(iter(commands(capture)), ""), MAX_COMMAND)
    jobs = [f"job {job}" for job in sorted(_jobs(capture))[:1]]
    known = [*jobs, command, f"{units.age(capture.created_ns)} ago", enum_names.capture_status(capture.status)]
    return f"{capture.id} ({', '.join(part for part in known if part)})"

"""Where a process, a job or every rank stands: the verdict, what could not be read, and the groups with their frames.

Each request is a look, with the rights of the user who asks. It changes nothing, so that its address can be kept and
sent; since it costs the hosts processor time, no page looks again by itself.
"""

import time
from collections import Counter
from collections.abc import Sequence
from http import HTTPStatus
from typing import NamedTuple

from kineto_protos.call_values import ANY_RANK
from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.client.selection import Selection
from kinetoctl.output import stack_page
from kinetoctl.output.stack_verdict import verdicts
from kinetoctl.web.http.web_messages import WebAnswer, WebError, WebRequest, WebSession
from kinetoctl.web.pages.page_context import PageContext, data_address, json_answer, render, within

MAX_FRAMES = 10_000  # of a page
MAX_JOBS = 20  # that are offered


class StackQuestion(NamedTuple):
    """What a page is about. address: of its daemon; None: all are asked. words: of the command; field: of the page."""

    name: str
    selector: pb.Selector
    address: str | None
    words: tuple[str, ...]
    field: tuple[str, str]


def stacks_page(context: PageContext, request: WebRequest, session: WebSession) -> WebAnswer:
    """A look. Raises WebError, and the client's errors."""
    wanted, look, stood = _looked(context, request, session)
    groups = stack_page.shown_groups(look, stood, wide=True)
    shown = _fitting(groups)
    return render(
        "stacks.html",
        context,
        request,
        session,
        about=wanted,
        verdicts=verdicts(look.processes),
        troubles=list(stack_page.troubles(look)),
        groups=shown,
        cut=MAX_FRAMES if shown != groups else 0,
        again=stack_page.needs_another(look, stood),
        looked_ns=time.time_ns(),
        wholes=wholes([each.stacks.process for each in look.processes]) if wanted.field[0] == "pid" else (),
        command=context.daemons.command("stacks", *wanted.words, address=wanted.address or ""),
        json=data_address(request),
    )


def stacks_json(context: PageContext, request: WebRequest, session: WebSession) -> WebAnswer:
    """A look as `kinetoctl stacks -o json` has it. Raises WebError, and the client's errors."""
    _, look, stood = _looked(context, request, session)
    return json_answer(stack_page.document(look, stood))


def wholes(processes: Sequence[pb.Process]) -> list[tuple[str, dict[str, str]]]:
    """What people call all ranks and the jobs of these processes, the largest first, and the field of their page."""
    jobs = Counter(process.job_id for process in processes if process.job_id).most_common(MAX_JOBS)
    ranks = [("every rank", {"rank": "all"})] if any(process.HasField("rank") for process in processes) else []
    return [*ranks, *((f"job {job}", {"job": job}) for job, _ in jobs)]


def named_process(text: str) -> tuple[pb.Selector, str]:
    """The process that a form or an address names, and the address of its daemon if there are several.

    Raises ValueError.
    """
    number, _, at = text.partition("@")
    return Selection(pids=(int(number),)).to_proto(), at


def _looked(
    context: PageContext, request: WebRequest, session: WebSession
) -> tuple[StackQuestion, stack_page.StackLook, stack_page.Stood]:
    wanted = _wanted(request)
    look = context.daemons.stacks(wanted.selector, wanted.address)
    session.stood = stood = session.stood.after(look)
    return wanted, look, stood.of


def _wanted(request: WebRequest) -> StackQuestion:
    """Raises WebError."""
    if process := request.first("pid"):
        try:
            selector, at = named_process(process)
        except ValueError as exc:
            raise WebError(HTTPStatus.BAD_REQUEST, f"pid must be a process id, not {process[:30]!r}") from exc
        number = str(selector.pids[0])
        return StackQuestion(f"process {number}", selector, at, (number,), ("pid", process))
    if job := request.first("job"):
        return StackQuestion(f"job {job}", Selection(job_ids=(job,)).to_proto(), None, ("--job-id", job), ("job", job))
    if request.first("rank") == "all":
        selector = Selection(ranks=(ANY_RANK,)).to_proto()
        return StackQuestion("every rank", selector, None, ("--rank", "all"), ("rank", "all"))
    raise WebError(HTTPStatus.BAD_REQUEST, "name a process (pid=1234), a job (job=4242) or every rank (rank=all)")


def _fitting(groups: Sequence[stack_page.ShownGroup]) -> list[stack_page.ShownGroup]:
    """As many of the groups, then of their threads, as a page has room for."""
    fits = within(MAX_FRAMES)

    def fitting(threads: list[stack_page.ShownThread]) -> list[stack_page.ShownThread]:
        return [each for each in threads if fits(1 + len(each.stack.frames))]

    shown = [each for each in groups if each.main is None or fitting([each.main])]
    shown = [each._replace(others=fitting(each.others)) for each in shown]
    return [each._replace(idle=fitting(each.idle)) for each in shown]

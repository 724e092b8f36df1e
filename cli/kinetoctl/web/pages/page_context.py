"""What pages are made of: the daemon, the traces, the analyses, the templates, and what all pages have in common."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader
from kineto_trace.html.templates import environment

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.errors import CliError
from kinetoctl.output import units
from kinetoctl.output.cell_values import human
from kinetoctl.web.analyses.analysis_queue import Analyses, Computing
from kinetoctl.web.analyses.trace_library import TraceLibrary, TraceSet
from kinetoctl.web.analyses.worker_process import AnalysisFailed
from kinetoctl.web.http.sessions import WebSession
from kinetoctl.web.http.static_files import static_address
from kinetoctl.web.http.web_messages import WebAnswer, WebRequest
from kinetoctl.web.pages.daemons import PROGRAM, Daemons, OfHost
from kinetoctl.web.pages.timeline_links import places_of

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

WAIT_S = 0.7  # for a result, before a page is shown without it and loads itself again
REFRESH_S = "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContext:
    """What pages work with. ui_origin: where the Perfetto UI is served; empty
    if it is not. editor: template of links that open a source file, as editor_option has them; empty for none.
    scratch: where files are made for the timeline; the system's folder for such files if None.
    """

    settings: CommonOptions
    library: TraceLibrary
    queue: Analyses
    daemons: Daemons
    ui_origin: str
    editor: str = ""
    scratch: Path | None = None

    @property
    def files(self) -> bool:
        """Whether the pages are about files alone."""
        return self.library.of_files

    def parts(self, capture_id: str) -> "Sequence[OfHost[pb.Capture]]":
        """The capture, in parts if it is one of several hosts; nothing for a file. Raises as Daemons.parts does."""
        if self.files:
            self.library.find(capture_id)
            return ()
        return self.daemons.parts(capture_id).items

    def catalog(self, wait_s: float) -> list[dict[str, Any]]:
        """All views with their descriptions. Raises Computing, AnalysisFailed."""
        found: list[dict[str, Any]] = self.queue.result("", {"job": "catalog"}, wait_s=wait_s)
        return found

    def view(self, name: str) -> dict[str, Any] | None:
        """One view of the catalogue."""
        return next((each for each in self.catalog(self.settings.timeout_s) if each["name"] == name), None)

    def ranks(self, traces: TraceSet) -> list[dict[str, Any]]:
        """The ranks of the traces, each with the name of its file. Raises Computing, AnalysisFailed."""
        job = {"job": "ranks", "paths": traces.paths}
        found: list[dict[str, Any]] = self.queue.result(traces.identity, job, wait_s=WAIT_S)
        return found

    def results(
        self, trace_id: str, views: Sequence[str], *, base: str = "", wait_s: float = WAIT_S, **arguments: Any
    ) -> list[dict[str, Any]]:
        """Each view's result. base: the id of the traces to compare with; arguments: of TraceJobs.views.

        Raises NotFound, Computing, TooBusy, AnalysisFailed and the client's errors.
        """
        found: list[dict[str, Any]] = self.answer(
            trace_id, {"job": "views", "names": views, **arguments}, base=base, wait_s=wait_s
        )
        return found

    def first_screen(self, trace_id: str, base: str = "", base_rank: int | None = None) -> list[dict[str, Any]]:
        """What the page of a capture begins with: one value of TraceJobs.first_screen. Raises as `results` does."""
        job = {"job": "first_screen", "base_rank": base_rank}
        found: list[dict[str, Any]] = self.answer(trace_id, job, base=base)
        return found

    def answer(self, trace_id: str, job: dict[str, Any], *, base: str = "", wait_s: float = WAIT_S) -> Any:
        """The value of a job on these traces, and on those of the baseline. Raises as `results` does."""
        traces = self.library.find(trace_id, wait_s)
        identity, job = traces.identity, {**job, "paths": traces.paths}
        if base:
            before = self.library.find(base, wait_s)
            identity, job = f"{identity} {before.identity}", {**job, "base": before.paths}
        return self.queue.result(identity, job, wait_s=wait_s)

    def name(self, trace_id: str) -> str:
        """What people call these traces: their file, folder or URL, or the id of the capture."""
        return self.library.name(trace_id)

    def command(self, *words: str) -> str:
        """The command line that prints what a page shows. Names of traces become what names them in a terminal."""
        if self.files:
            named = [word for name in words[1:] for word in self.library.words(name)]
            return shlex.join((PROGRAM, words[0], *named))
        return self.daemons.command(*words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What came of asking for results: them, or why there are none, or that they are being computed."""

    documents: Sequence[Mapping[str, Any]] = ()
    failure: str = ""
    computing: bool = False

    @property
    def headers(self) -> dict[str, str]:
        """What makes the browser load the page again."""
        return {"Refresh": REFRESH_S} if self.computing else {}


def ask(find: Callable[[], Sequence[Mapping[str, Any]]]) -> Asked:
    """The results that `find` returns, or what happened instead."""
    try:
        return Asked(documents=find())
    except Computing:
        return Asked(computing=True)
    except (AnalysisFailed, CliError) as exc:
        return Asked(failure=str(exc))


def with_help(error: CliError) -> str:
    """What went wrong, and below it what to do."""
    return f"{error}\n{error.help_text}".strip()


def _since(unix_s: float) -> str:
    """How long ago that was; empty for 0."""
    return units.age(int(unix_s * 1e9)) if unix_s else ""


def _environment() -> Environment:
    made = environment(PackageLoader("kinetoctl.web.pages", "templates"))
    made.globals["static"] = static_address
    made.filters.update(
        human=human, size=units.size, age=units.age, moment=units.moment, since=_since, places_of=places_of
    )
    return made


_templates = _environment()


def render(name: str, context: PageContext, request: WebRequest, session: WebSession, /, **values: Any) -> WebAnswer:
    """A page from its template. headers: of the answer. unanswered: the hosts that are missing in what it shows."""
    headers = values.pop("headers", {})
    unanswered = values.pop("unanswered", None)
    if unanswered is None:
        unanswered = context.daemons.unanswered(values.get("id", ""))
    text = _templates.get_template(name).render(
        files=context.files,
        editor=context.editor,
        path=request.path,
        form_secret=session.form_secret,
        host=context.daemons.name,
        unanswered=unanswered,
        **values,
    )
    return WebAnswer(content=text.encode("utf-8", "replace"), headers=headers)


def plain_page(name: str, /, **values: Any) -> bytes:
    """A page outside of a session."""
    return _templates.get_template(name).render(**values).encode()

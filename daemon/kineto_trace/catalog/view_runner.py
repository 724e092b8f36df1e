"""Analyses of one or many traces: a map over ranks on all cores or on a cluster, and a small reduce.

Theory of operation
    A task is one trace and all views requested of it: the worker opens the trace, computes the contribution of each
    view (View.partial), releases the trace and sends only the contributions back. A process has one trace at a time,
    even if its executor has several threads, so that memory is bounded by the ranks in progress. The caller combines
    the contributions (View.combine).

    A rank that fails (no trace, damaged, a view that does not work on it, a worker that died) is missing in the
    results, and their notes say which one and why; if all fail, that is an error. Tasks of a worker that died are tried
    once more alone, since another trace may have used up the memory.

    A failing view does not affect the others: one that fails on all traces has a result without rows, with the reason
    (Result.failure). It is an error only if every view fails.

    Any concurrent.futures executor will do. The default one is a pool of fresh processes, as many as there are cores
    and as fit into memory, or none if the traces are few and small. A Dask cluster gives one: `with
    cluster("tcp://scheduler:8786") as executor`; its workers must see the files under the same paths. Traces in an
    object store (remote_traces.py) are fetched by workers into a temporary folder, which is removed afterwards: the
    caller reads manifests alone.
"""

import os
import re
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from kineto_trace.base.install_advice import install_advice
from kineto_trace.base.own_processes import ProcessPool
from kineto_trace.base.quantities import format_ranges, free_memory, memory_errors
from kineto_trace.catalog.view_catalog import find_view
from kineto_trace.errors import FileError, TraceError, ViewError
from kineto_trace.model.context import Context
from kineto_trace.model.trace import TRUNCATED, Trace
from kineto_trace.open.remote_traces import needed_bytes, open_remote
from kineto_trace.open.trace_discovery import Source, find_traces, rank_notes
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.open.trace_source import UNSURE
from kineto_trace.view_api.result import Result, make_result
from kineto_trace.view_api.view import Compat, View

SMALL_JOB_BYTES = 50_000_000  # text in total below which work is done here, before other processes would have started
GZIP_RATIO = 12  # of the JSON of traces
STORED_RATIO = 20  # bytes in memory for a byte of a stored trace
MEMORY_RATIO = 1.5  # bytes in memory for a byte of JSON while it is read

NO_MEMORY = "not enough memory"  # what the error of a contribution begins with
MANY_RANKS = 4  # that have the same note
WORKERS_S = 10.0  # that a cluster may take to have a first worker

# Shares of the steps, and what follows from them: without rows for a truncated file, which may lack whole kinds of
# activities. Figures of other tools are as those have them.
OF_WHOLE_TRACES = frozenset(
    {
        "time_causes",
        "rank_time_causes",
        "findings",
        "recommendations",
        "overview",
        "step_breakdown",
        "step_phases",
        "idle_causes",
        "ranks",
        "rank_what_if",
        "rank_waits",
        "step_spread",
    }
)
UNCERTAIN = "not shown: whole kinds of activities may be missing in a truncated file, so its shares would be wrong"

T = TypeVar("T")
Paths = str | PathLike[str] | Source
_RANKS_NOTE = re.compile(r"rank (\d+): (.*)", re.DOTALL)
_one_trace = threading.Lock()  # of this process, at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One requested view with its options."""

    view: str
    compat: Compat = Compat.NONE
    options: Mapping[str, Any] = field(default_factory=dict)

    def keywords(self) -> dict[str, Any]:
        """Returns the keyword arguments for the calls of a View."""
        return {"compat": Compat(self.compat), **self.options}


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one trace contributed.

    values: one per request.
    errors: why a value is missing, otherwise None.
    notes: of the trace.
    """

    source: Source
    values: list[Any]
    errors: list[str | None]
    notes: tuple[str, ...] = ()
    died: bool = False  # whether its process died


def run_view(
    view: str,
    sources: Paths | Context | Trace | Iterable[Paths],
    *,
    compat: Compat | str = Compat.NONE,
    executor: Executor | None = None,
    **options: Any,
) -> Result:
    """Returns the result of one view over one or many traces.

    sources: an open trace or its context; or paths (files, folders, patterns); or the result of find_traces().
    options: those of the view.

    Raises ViewError for a view, option or compat that does not exist, FileError if no trace can be read, TraceError if
    the view fails on all of them.
    """
    request = Request(view=view, compat=_compat(compat), options=options)
    if isinstance(sources, (Context, Trace)):
        context = sources if isinstance(sources, Context) else Context(sources)
        result = find_view(view)(context, **request.keywords())
        uncertain = _needs_all(request) and context.trace.is_truncated
        return _with_notes(_uncertain(result) if uncertain else result, context.trace.remarks)
    return run_views([request], sources, executor=executor)[0]


def run_views(
    requests: Sequence[Request | str], sources: Paths | Iterable[Paths], *, executor: Executor | None = None
) -> list[Result]:
    """Returns the results of several views over the same traces, opening each trace once.

    If only some views fail, these have an empty result with their `failure`. Raises like run_view if every view fails.
    """
    wanted = [Request(view=entry) if isinstance(entry, str) else entry for entry in requests]
    for request in wanted:
        find_view(request.view).check(_compat(request.compat), request.options)
    found = sources_of(sources)
    if executor is None and _few(found):
        contributions = [_contribute(source, wanted, alone=len(found) == 1) for source in found]
    elif executor is not None:
        contributions = _map(executor, found, wanted)
    else:
        with pool(found) as own:
            contributions = _map(own, found, wanted)
    return all_combined(wanted, contributions)


class SameProcess(Executor):
    """Runs each call at once, in this process: for one that may start no others."""

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Returns the finished call."""
        future: Future[T] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as exc:  # noqa: BLE001 - it is the caller's, who asks for the result
            future.set_exception(exc)
        return future


def contribute(source: Source, requests: Sequence[Request]) -> Contribution:
    """Opens one trace and computes what the views need from it. Runs in a worker and never raises."""
    return _contribute(source, requests, alone=False)


@contextmanager
def pool(sources: Sequence[Source], workers: int | None = None) -> Iterator[Executor]:
    """Starts fresh processes for these traces: one per core, but no more than fit into free memory."""
    count = workers or max(1, min(len(sources), _cores(), _fitting(sources)))
    with ProcessPool(count) as executor:
        yield executor


@contextmanager
def cluster(address: str) -> Iterator[Executor]:
    """Returns the executor of a Dask cluster, such as tcp://scheduler:8786. Raises TraceError."""
    try:
        from distributed import Client
    except ImportError as exc:
        raise TraceError(f"a cluster needs Dask: {install_advice('distributed')}") from exc
    try:
        client = Client(address, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as exc:
        raise TraceError(f"cannot reach the Dask scheduler at {address}: {exc}") from exc
    with client:
        try:
            client.wait_for_workers(1, timeout=WORKERS_S)
        except TimeoutError:
            raise TraceError(
                f"the Dask scheduler at {address} has no workers: start some with `dask worker {address}` on "
                "hosts where kinetod is installed"
            ) from None
        yield client.get_executor(pure=False)  # type: ignore[no-untyped-call]


# ------------------------------------------------------------ map


def _contribute(source: Source, requests: Sequence[Request], *, alone: bool) -> Contribution:
    """Computes one contribution.

    alone: whether it is the only trace: then an unreadable trace, or a failure of the only view, is raised at once.
    """
    with memory_errors(source.place), _one_trace, ExitStack() as stack:
        try:
            found, context = opened_context(source, stack)
        except Exception as exc:
            if alone:
                raise
            return unopened(source, requests, exc)
        return contribution_of(found, context, requests, alone=alone)


def opened_context(source: Source, stack: ExitStack) -> tuple[Source, Context]:
    """Opens one trace as `opened` does. Returns its context, and its source with the rank stated in the trace.

    Raises TraceError.
    """
    trace = opened(source, stack)
    if source.rank_from in UNSURE and trace.target.rank is not None:
        source = replace(source, rank=trace.target.rank, rank_from="trace")
    return source, Context(trace, rank=source.rank, worker=source.worker)


def unopened(source: Source, requests: Sequence[Request], exc: Exception) -> Contribution:
    """Returns the contribution of a trace that could not be opened: no values, and why."""
    return Contribution(source, [None] * len(requests), [_text(exc)] * len(requests))


def contribution_of(
    source: Source, context: Context, requests: Sequence[Request], *, alone: bool = False
) -> Contribution:
    """Computes the contributions of an open trace.

    alone: whether it is the only trace. Then an exception of the only request is raised; otherwise it becomes an error
        of the contribution.
    """
    values: list[Any] = [None] * len(requests)
    errors: list[str | None] = [None] * len(requests)
    for place, request in enumerate(requests):
        view = find_view(request.view)
        try:
            values[place] = view.packed(view.partial(context, **request.keywords()))
        except Exception as exc:
            if alone and len(requests) == 1:
                raise
            errors[place] = _text(exc)
    return Contribution(source, values, errors, context.trace.remarks)


def opened(source: Source, stack: ExitStack) -> Trace:
    """Returns the trace. A trace in an object store is available while the stack is open. Raises TraceError."""
    return open_trace(source.path) if source.remote is None else stack.enter_context(open_remote(source.remote))


def _map(executor: Executor, sources: Sequence[Source], requests: Sequence[Request]) -> list[Contribution]:
    futures = [_submitted(executor, source, requests) for source in sources]
    contributions = [_result(future, source, requests) for future, source in zip(futures, sources, strict=True)]
    for place, contribution in enumerate(contributions):
        if contribution.died:
            with pool([contribution.source], workers=1) as own:
                again = own.submit(contribute, contribution.source, requests)
                contributions[place] = _result(again, contribution.source, requests)
    return contributions


def _submitted(executor: Executor, source: Source, requests: Sequence[Request]) -> "Future[Contribution]":
    try:
        return executor.submit(contribute, source, requests)
    except BrokenProcessPool as exc:  # of an earlier trace, while the others were still being submitted
        died: Future[Contribution] = Future()
        died.set_exception(exc)
        return died


def _result(future: "Future[Contribution]", source: Source, requests: Sequence[Request]) -> Contribution:
    try:
        found = future.result()
        return replace(found, died=any(error and error.startswith(NO_MEMORY) for error in found.errors))
    except BrokenProcessPool:
        reason = TraceError("the process that was reading it ran out of memory and died")
        return replace(unopened(source, requests, reason), died=True)
    except Exception as exc:  # noqa: BLE001 - of a cluster: a worker that was killed, a file that it does not see, …
        return unopened(source, requests, exc)


def _text(exc: BaseException) -> str:
    if isinstance(exc, TraceError):
        return str(exc)
    if isinstance(exc, MemoryError):
        return f"{NO_MEMORY}: {exc}" if str(exc) else NO_MEMORY
    frames = traceback.extract_tb(exc.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(exc).__name__}: {exc}{place}"


# ------------------------------------------------------------ reduce


def all_combined(requests: Sequence[Request], contributions: Sequence[Contribution]) -> list[Result]:
    """Returns the result of each request from the contributions of all traces; a failed one says so.

    A rank that failed is missing, and a note says so; notes that many ranks share become one. Raises the first failure
    if all requests have failed.
    """
    results: list[Result] = []
    failures: list[Exception] = []
    for place, request in enumerate(requests):
        try:
            results.append(_combined(request, place, contributions))
        except Exception as exc:  # noqa: BLE001 - of a view's reduce: it must not take the other views down
            failures.append(exc)
            results.append(failed_result(find_view(request.view), _text(exc)))
    if failures and len(failures) == len(requests):
        raise failures[0]
    return results


def failed_result(view: View, reason: str) -> Result:
    """Returns the result of a view that failed beside others: no rows, and the reason."""
    nothing = make_result(view.name, view.result_columns, {column.name: [] for column in view.result_columns})
    return replace(nothing, failure=f"view {view.name} failed: {reason}; the other views are complete")


def _combined(request: Request, place: int, contributions: Sequence[Contribution]) -> Result:
    view = find_view(request.view)
    there = [entry for entry in contributions if entry.errors[place] is None]
    missing = [entry for entry in contributions if entry.errors[place] is not None]
    texts = [f"{entry.source.place}: {_without(entry, place)}" for entry in missing]
    if not there:
        if len(texts) == 1:
            raise FileError(texts[0])
        raise FileError(f"view {request.view} failed on all {len(texts)} traces; the first error: {texts[0]}")
    cut = [_needs_all(request) and any(note.startswith(TRUNCATED) for note in entry.notes) for entry in there]
    kept = [entry for entry, is_cut in zip(there, cut, strict=True) if not is_cut]
    result = view.combine([(entry.source.rank, entry.values[place]) for entry in kept or there], **request.keywords())
    result = result if kept else _uncertain(result)
    uncertain = [entry for entry, is_cut in zip(there, cut, strict=True) if is_cut and kept]
    notes = [f"rank {entry.source.rank}: {UNCERTAIN}" for entry in uncertain]
    notes += [f"rank {entry.source.rank} is missing: {text}" for entry, text in zip(missing, texts, strict=True)]
    notes += rank_notes([entry.source for entry in there])
    for entry in there:
        notes += [note if len(contributions) == 1 else f"rank {entry.source.rank}: {note}" for note in entry.notes]
    return _with_notes(result, notes)


def _needs_all(request: Request) -> bool:
    return request.view in OF_WHOLE_TRACES and request.compat == Compat.NONE


def _uncertain(result: Result) -> Result:
    """Returns the result without rows, and the reason."""
    return replace(result, table=result.table.slice(0, 0), notes=(UNCERTAIN,))


def _without(entry: Contribution, place: int) -> str:
    """Returns a source's error without the path, which the note states anyway."""
    return (entry.errors[place] or "").removeprefix(f"{entry.source.place}: ")


def _with_notes(result: Result, notes: Iterable[str]) -> Result:
    """Adds notes. Each note appears once; notes that many ranks share become one."""
    said: dict[str, list[int]] = {}
    for note in (*result.notes, *notes):
        match = _RANKS_NOTE.match(note)
        said.setdefault(match[2] if match else note, []).extend([int(match[1])] if match else [])
    found: list[str] = []
    for text, ranks in said.items():
        each = sorted(set(ranks))
        found += (
            [f"ranks {format_ranges(each)}: {text}"] if len(each) >= MANY_RANKS else [f"rank {n}: {text}" for n in each]
        )
        found += [text] if not ranks else []
    return replace(result, notes=tuple(found))


# ------------------------------------------------------------ sources


def _compat(compat: Compat | str) -> Compat:
    try:
        return Compat(compat)
    except ValueError:
        raise ViewError(f"compat={compat!r} is not valid; use one of {', '.join(Compat)}") from None


def sources_of(sources: Paths | Iterable[Paths]) -> list[Source]:
    """Returns the traces that these paths name. Raises FileError if there are none."""
    entries = [sources] if isinstance(sources, (str, PathLike, Source)) else list(sources)
    given = [entry for entry in entries if isinstance(entry, Source)]
    paths = [entry for entry in entries if not isinstance(entry, Source)]
    found = given + (find_traces(*paths) if paths else [])
    if not found:
        raise FileError("no trace was given: name at least one")
    return found


def _few(sources: Sequence[Source]) -> bool:
    return len(sources) == 1 or _cores() == 1 or sum(map(text_bytes, sources)) < SMALL_JOB_BYTES


def text_bytes(source: Source) -> int:
    """Returns the estimated bytes of JSON of a trace, which determine the cost of reading it."""
    path = source.path
    try:
        if source.remote is not None:
            size, columns = needed_bytes(source.remote)
        else:
            columns = path.is_dir()
            files = [entry for entry in path.rglob("*") if entry.is_file()] if columns else [path]
            size = sum(entry.stat().st_size for entry in files)
    except OSError:
        return 0
    if columns:
        return int(size * STORED_RATIO / MEMORY_RATIO)
    return size * GZIP_RATIO if path.suffix == ".gz" else size


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fitting(sources: Sequence[Source]) -> int:
    """Returns how many traces of the largest size fit into free memory."""
    largest = max(map(text_bytes, sources)) * MEMORY_RATIO
    return max(1, int(free_memory() / largest)) if largest else len(sources)

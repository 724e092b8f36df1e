"""A target whose own libkineto recorded to a Trace: its file is checked, and joined with what the daemon knows.

The file is read as every file of Kineto's. It has to be whole and to repeat the number of the request: anybody who may
write where the process writes could have put another file there.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kineto_trace.errors import DamagedError, FileError
from kineto_trace.formats.chrome.chrome_reader import load_chrome
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace_header import value
from kineto_trace.open.counter_files import with_counters
from kineto_trace.open.raw_target import LoadedTarget
from kineto_trace.spool.kineto_file import OnDemandRequest, kineto_file

TRACE_ID = "trace_id"  # the member of the file that repeats REQUEST_TRACE_ID
_WHAT = "the file that libkineto wrote"
_PLAIN = (b"", b"{", b" ", b"\n", b"\r", b"\t")  # libkineto never compresses; nothing is empty


def load_kineto_target(target_dir: Path) -> LoadedTarget:
    """Reads the file and target.json. Raises TraceError: DamagedError for a file that is not whole or not the one."""
    request, info = OnDemandRequest.read(target_dir), TargetInfo.read(target_dir)
    path = kineto_file(target_dir)
    try:
        with path.open("rb", buffering=0) as file:
            if file.read(1) not in _PLAIN:
                raise DamagedError(f"{_WHAT} does not begin as libkineto's files do")
        trace = load_chrome(path, name=_WHAT, whole=True)
    except FileError as exc:
        raise DamagedError(str(exc)) from exc
    _check_id(trace.head or {}, request)
    found = trace.target
    target = replace(
        info,
        pid=found.pid or info.pid,
        rank=info.rank if info.rank is not None else found.rank,
        world_size=info.world_size if info.world_size is not None else found.world_size,
        threads={**found.threads, **info.threads},
        options=found.options,
        window_start_ns=trace.window_start_ns,
        window_end_ns=trace.window_end_ns,
        complete=True,
    )
    noted = trace.notes
    trace, missing = with_counters(replace(trace, target=target), target_dir)
    return LoadedTarget(trace=trace, warnings=(*noted, *missing))


def _check_id(head: Mapping[str, str], request: OnDemandRequest) -> None:
    found = value(head, TRACE_ID)
    if str(found) != str(request.trace_id):
        what = f"has the trace id {found!r:.40}" if found is not None else "has no trace id"
        raise DamagedError(f"{_WHAT} {what} instead of {request.trace_id}, so it is not the trace of this request")

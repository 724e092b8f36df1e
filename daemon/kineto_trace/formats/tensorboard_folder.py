"""The folders that the TensorBoard profiler plug-in reads.

The plug-in treats every folder under the log directory that has files WORKER[.SPAN].pt.trace.json[.gz] as a run, orders
the spans of one worker by their numbers, and reads WORKER as NODE_PROCESS. torch.profiler.tensorboard_trace_handler
gives the same names; here the number is the window's start in Unix milliseconds. All ranks of a job belong in one run.
"""

import re
from pathlib import Path

from kineto_trace.base.atomic_files import atomic_file
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.shared.text_sinks import GzipSink
from kineto_trace.model.trace import Trace

SUFFIX = ".pt.trace.json.gz"
DEFAULT_RUN = "trace"
_UNSAFE = re.compile(r"[^\w.-]+")


def write_tensorboard(trace: Trace, log_directory: Path, *, run: str = "") -> Path:
    """Writes the trace into the log directory, which is created if it is missing. Returns the file.

    run: the name of the folder, by default the name of the capture. An existing trace of the same process and
    millisecond is replaced.
    """
    folder = log_directory / _safe(run or trace.target.capture_id, DEFAULT_RUN)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{worker(trace)}.{trace.window_start_ns // 1_000_000}{SUFFIX}"
    with atomic_file(path) as file, GzipSink(file) as sink:
        write_chrome(trace, sink, trace_name=path.name)
    return path


def worker(trace: Trace) -> str:
    """Returns the plug-in's name of the traced process: its host and process id."""
    return f"{_safe(trace.target.host, 'host')}_{trace.target.pid}"


def _safe(name: str, default: str) -> str:
    """Returns the name in a form that is valid for a file or folder."""
    return _UNSAFE.sub("_", name).strip(".") or default

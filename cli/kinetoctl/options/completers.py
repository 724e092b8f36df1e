"""What a shell offers after Tab: pids and capture ids from the daemon (nothing if it is not there), and names."""

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from click.shell_completion import CompletionItem
from kineto_protos import endpoints
from kineto_protos.kineto_config import KEYS, Effect
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.visible_text import one_line

from kinetoctl.client.daemon_client import Client
from kinetoctl.client.selection import Selection
from kinetoctl.errors import CliError

T = TypeVar("T")
COMPLETION_TIMEOUT_S = 1.0  # a Tab must not hang
MAX_CAPTURES = 50
_SAFE = re.compile(r"[\w.@:+-]+")  # names of users, ids of jobs and captures
ACTIVITIES = {
    "cpu_op": "PyTorch operators",
    "user_annotation": "record_function, ProfilerStep",
    "gpu_user_annotation": "annotations on the GPU timeline",
    "kernel": "GPU kernels",
    "gpu_memcpy": "GPU memory copies",
    "gpu_memset": "GPU memory sets",
    "cuda_runtime": "CUDA calls",
    "cuda_driver": "CUDA driver calls",
    "privateuse1_runtime": "runtime calls of an out-of-tree accelerator",
    "privateuse1_driver": "driver calls of an out-of-tree accelerator",
    "cuda_sync": "CUDA synchronisation",
    "xpu_runtime": "SYCL calls",
    "xpu_driver": "Level Zero calls",
    "xpu_sync": "Intel GPU synchronisation",
    "overhead": "overhead of CUPTI or PTI itself",
    "python_function": "Python stacks",
    "cpu_instant_event": "memory allocations",
    "memory_snapshot": "CUDA memory snapshot (a file)",
}


def pids(incomplete: str) -> list[CompletionItem]:
    """Processes that a person would trace, whose pid starts like this."""
    return [
        CompletionItem(str(p.pid), help=one_line(" ".join(p.command)))
        for p in _processes()
        if str(p.pid).startswith(incomplete)
    ]


def users(incomplete: str) -> list[CompletionItem]:
    """Users of these processes whose name starts like this."""
    return _items({process.user for process in _processes()}, incomplete)


def plugins(incomplete: str) -> list[CompletionItem]:
    """Plug-ins that are installed beside the daemon, whose name starts like this."""
    return _items({plugin.name for plugin in _asked(lambda client: client.host().plugins)}, incomplete)


def job_ids(incomplete: str) -> list[CompletionItem]:
    """Jobs of these processes whose id starts like this."""
    return _items({process.job_id for process in _processes()}, incomplete)


def _items(texts: set[str], incomplete: str) -> list[CompletionItem]:
    """Those that can be typed: a shell puts them on the command line as they are."""
    return [CompletionItem(text) for text in sorted(texts) if text.startswith(incomplete) and _SAFE.fullmatch(text)]


def _asked(find: Callable[[Client], Iterable[T]]) -> list[T]:
    """What the daemon has; nothing without an answer."""
    try:
        with Client(endpoints.rpc_address(), timeout_s=COMPLETION_TIMEOUT_S) as client:
            return list(find(client))
    except CliError:
        return []


def _processes() -> list[pb.Process]:
    return _asked(lambda client: client.processes(Selection().to_proto(), trainers=True))


def capture_ids(incomplete: str) -> list[CompletionItem]:
    """Latest captures whose id starts like this."""
    found = _asked(lambda client: client.captures({}, limit=MAX_CAPTURES))
    return _items({capture.id for capture in found}, incomplete)[::-1]


def activities(incomplete: str) -> list[CompletionItem]:
    """Activity types, for the last one of a comma-separated list."""
    from kineto_trace.model.activity_tables import TABLES, ViewerRow

    further = {
        table.name: table.meaning for table in TABLES if table.row is ViewerRow.GPU and table.name not in ACTIVITIES
    }
    first, comma, last = incomplete.rpartition(",")
    taken = set(first.split(","))
    offered = [
        (name, text) for name, text in (ACTIVITIES | further).items() if name.startswith(last) and name not in taken
    ]
    return [CompletionItem(f"{first}{comma}{name}", help=text) for name, text in offered]


def counter_sets(incomplete: str) -> list[CompletionItem]:
    """Sets of hardware counters on the daemon's GPUs."""
    return _items({each.name for gpu in _asked(lambda client: client.counters().gpus) for each in gpu.sets}, incomplete)


def kineto_config(incomplete: str) -> list[CompletionItem]:
    """Keys of Kineto's configuration in capitals, else files."""
    if not incomplete[:1].isupper():
        return [CompletionItem(incomplete, type="file")]
    used = [key for key in KEYS.values() if key.effect is Effect.USED and key.name.startswith(incomplete)]
    return [CompletionItem(f"{key.name}=", help=key.meaning) for key in used] or [
        CompletionItem(incomplete, type="file")
    ]

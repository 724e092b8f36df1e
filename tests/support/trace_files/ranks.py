"""Traces of several ranks made by hand, as Kineto writes them: one JSON file per rank."""

import json
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import Any

from kineto_trace.formats.chrome.chrome_reader import load_chrome
from kineto_trace.model.context import Context

Event = Mapping[str, Any]
BASE_NS = 1_790_857_026_000_000_000
FIRST_CORRELATION = 100_000


def event(category: str, name: str, start: float, duration: float, **args: Any) -> dict[str, Any]:
    """One complete event (us); pid and tid may be among the arguments."""
    place = {"pid": args.pop("pid", 1), "tid": args.pop("tid", 1)}
    return {"ph": "X", "cat": category, "name": name, **place, "ts": start, "dur": duration, "args": args}


def step(number: int, start: float, duration: float) -> Event:
    return event("user_annotation", f"ProfilerStep#{number}", start, duration, **{"External id": 9000 + number})


def launched(
    kernel: str, launch: float, start: float, duration: float, correlation: int, *, stream: int = 7, **args: Any
) -> Iterable[Event]:
    """A launch of 2 us and its kernel."""
    correlation += FIRST_CORRELATION
    yield event("cuda_runtime", "cudaLaunchKernel", launch, 2, cbid=211, correlation=correlation)
    place = {"pid": 0, "tid": stream, "device": 0, "context": 1, "stream": stream, "correlation": correlation}
    yield event("kernel", kernel, start, duration, **place, **args)


def nccl(
    collective: str, elements: int, group: Sequence[int], sequence: int, *, name: str = "0", dtype: str = "Float"
) -> dict[str, Any]:
    """The arguments that PyTorch gives to a kernel of NCCL."""
    scattered = collective.startswith(("_reduce_scatter", "reduce_scatter"))
    gathered = collective.startswith(("_allgather", "allgather"))
    return {
        "Collective name": collective,
        "In msg nelems": elements * len(group) if scattered else elements,
        "Out msg nelems": elements * len(group) if gathered else elements,
        "Group size": len(group),
        "dtype": dtype,
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": name,
        "Process Group Description": "default_pg" if name == "0" else f"mesh_{name}",
        "Process Group Ranks": json.dumps(list(group)),
        "Seq": sequence,
    }


def document(events: Iterable[Event], *, rank: int = 0, size: int = 2, host: str = "node0") -> dict[str, Any]:
    """The whole file as a JSON document."""
    return {
        "schemaVersion": 1,
        "deviceProperties": [
            {
                "id": 0,
                "name": "NVIDIA H200",
                "totalGlobalMem": 150_000_000_000,
                "computeMajor": 9,
                "computeMinor": 0,
            }
        ],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": size},
        "hostname": host,
        "host_name": host,
        "baseTimeNanoseconds": BASE_NS,
        "displayTimeUnit": "ms",
        "traceEvents": list(events),
    }


def context(events: Iterable[Event], *, rank: int = 0, size: int = 2, host: str = "node0") -> Context:
    """The trace of one rank, loaded."""
    text = json.dumps(document(events, rank=rank, size=size, host=host))
    return Context(load_chrome(BytesIO(text.encode()), name=f"rank{rank}.json"))

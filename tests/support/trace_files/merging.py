"""A job of several ranks with clocks that are off by known amounts, and what a merged file holds of each rank."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kineto_trace.collectives.rank_clocks import Blocking
from kineto_trace.open.trace_discovery import Source

from support.trace_files import ranks

Event = dict[str, Any]
ID_ARGUMENTS = {  # argument -> sort of ids, and the smallest value that is one
    "correlation": ("correlation", 1),
    "wait_on_cuda_event_record_corr_id": ("correlation", 1),
    "External id": ("external", 1),
    "Python id": ("python", 0),
    "Python parent id": ("python", 0),
    "Ev Idx": ("event", 0),
}


def events_of(rank: int, group: Sequence[int], *, ahead_us: float = 0.0, steps: int = 12) -> list[Event]:
    """Of one rank: the same ids, pid, threads, GPU and streams as on every other one; clock ahead by so much."""
    common = {"ph": "M", "pid": 1, "tid": 0}
    found: list[Event] = [
        {**common, "name": "process_name", "args": {"name": "python"}},
        {**common, "name": "process_labels", "args": {"labels": "CPU"}},
        {**common, "name": "thread_name", "tid": 5, "args": {"name": "thread 5 (main)"}},
        {**common, "name": "process_name", "pid": 0, "args": {"name": "python"}},
        {**common, "name": "process_labels", "pid": 0, "args": {"labels": "GPU 0"}},
    ]
    for number in range(steps):
        at = 1_000.0 + 500 * number + ahead_us
        late = 20.0 * ((rank + number) % len(group))  # each rank is the last one now and then
        seq = number + 1
        end = at + 20 * (len(group) - 1) + 60 + rank % 3
        ids = {"correlation": seq, "External id": 100 + seq}
        where = {"pid": 1, "tid": 5}
        found += [
            ranks.event("cpu_op", "nccl:all_reduce", at - 30, 25, **where, **{"External id": 100 + seq, "Ev Idx": seq}),
            ranks.event("python_function", "train.py(1): step", at - 31, 27, **where, **{"Python id": seq})
            | {"args": {"Python id": seq, "Python parent id": None}},
            ranks.event("cuda_runtime", "cudaLaunchKernel", at - 20, 5, **where, cbid=211, **ids),
            {"ph": "s", "id": seq, "cat": "ac2g", "name": "ac2g", **where, "ts": at - 20},
            ranks.event(
                "kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + late, end - at - late,
                pid=0, tid=7, device=0, context=1, stream=7, queued=int((at - 15) * 1000) + ranks.BASE_NS, **ids,
                **ranks.nccl("allreduce", 1 << 20, group, seq),
            ),
            {"ph": "f", "id": seq, "cat": "ac2g", "name": "ac2g", "pid": 0, "tid": 7, "ts": at + late, "bp": "e"},
        ]  # fmt: skip
    span = {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler"}
    found.append({**span, "ts": 900 + ahead_us, "dur": 500.0 * steps, "args": {"Op count": 0}})
    found.append({"ph": "b", "cat": "async", "name": "work", "id": "0x1f", "pid": 1, "tid": 5, "ts": 950 + ahead_us})
    found.append({"ph": "e", "cat": "async", "name": "work", "id": "0x1f", "pid": 1, "tid": 5, "ts": 990 + ahead_us})
    return found


def write_job(
    folder: Path,
    ahead_us: Sequence[float],
    *,
    steps: int = 12,
    clocks: Mapping[int, Mapping[str, int]] | None = None,
) -> list[Source]:
    """One file per rank, the clock of each ahead by so much. clocks: what the traces say of them."""
    group = range(len(ahead_us))
    sources = []
    for rank, ahead in enumerate(ahead_us):
        events = events_of(rank, group, ahead_us=ahead, steps=steps)
        document = ranks.document(events, rank=rank, size=len(group), host=f"node{rank}")
        if clocks and rank in clocks:
            document["kinetod"] = dict(clocks[rank])
        path = folder / f"rank{rank}.json"
        path.write_text(json.dumps(document))
        sources.append(Source(path=path, rank=rank, rank_from="trace"))
    return sources


def document(path: Path) -> dict[str, Any]:
    """A Chrome trace as a JSON document."""
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return found


def split(merged: Mapping[str, Any]) -> dict[int, list[Event]]:
    """The events of each rank, with the pids that its own trace has."""
    found: dict[int, list[Event]] = {}
    for about in merged["kinetodMerge"]["ranks"]:
        pids, tids = about["pids"], about["tids"]
        own = [event for event in merged["traceEvents"] if str(event["pid"]) in pids]
        found[about["rank"]] = [
            {**event, "pid": pids[str(event["pid"])], "tid": tids.get(str(event["tid"]), event["tid"])} for event in own
        ]
    return found


def ids_in(events: Sequence[Event]) -> set[tuple[str, Any]]:
    """Everything that could be mistaken for another rank's, as (sort, id)."""
    found: set[tuple[str, Any]] = set()
    for event in events:
        if "id" in event:
            found.add(("flow", event["id"]))
        for key, (sort, least) in ID_ARGUMENTS.items():
            value = event.get("args", {}).get(key)
            if isinstance(value, int) and value >= least:
                found.add((sort, value))
    return found


def without_ids(events: Sequence[Event]) -> list[str]:
    """The events without their ids, and without the rows that name and order processes, in any order."""
    found = []
    for event in events:
        if event.get("ph") == "M" and event["name"].startswith("process_"):
            continue
        args = {key: value for key, value in event.get("args", {}).items() if key not in ID_ARGUMENTS}
        found.append(json.dumps({**event, "id": None, "args": args}, sort_keys=True))
    return sorted(found)


def links(events: Sequence[Event]) -> list[tuple[Any, ...]]:
    """What belongs together by its ids: of each launch its kernel, its operator and its arrow."""
    by = {kind: [event for event in events if event.get("cat") == kind] for kind in ("cpu_op", "kernel", "ac2g")}
    kernels = {event["args"]["correlation"]: event["ts"] for event in by["kernel"]}
    ops = {event["args"]["External id"]: event["ts"] for event in by["cpu_op"]}
    ends = {event["id"]: event["ts"] for event in by["ac2g"] if event["ph"] == "f"}
    starts = {event["ts"]: event["id"] for event in by["ac2g"] if event["ph"] == "s"}
    calls = [event for event in events if event.get("cat") == "cuda_runtime"]
    return sorted(
        (
            call["ts"],
            kernels[call["args"]["correlation"]],
            ops[call["args"]["External id"]],
            ends[starts[call["ts"]]],
        )
        for call in calls
    )


def collectives(
    random: np.random.Generator, offsets_ns: Sequence[int], count: int, *, jitter_ns: int, wait_ns: int
) -> list[Blocking]:
    """Blocking collectives as ranks record them whose clocks need these offsets added to be right."""
    ranks_ = len(offsets_ns)
    begin = 1_000_000_000 + np.cumsum(random.integers(100_000, 2_000_000, count))
    starts = begin[:, None] + random.integers(0, wait_ns + 1, (count, ranks_))
    ends = starts.max(axis=1)[:, None] + random.integers(2_000, 200_000, count)[:, None]
    ends = ends + random.integers(0, jitter_ns + 1, (count, ranks_))
    key = np.sort(random.choice(1 << 40, count, replace=False)).astype(np.uint64)
    return [
        Blocking(key, starts[:, rank] - offset, ends[:, rank] - offset) for rank, offset in enumerate(offsets_ns)
    ]  # fmt: skip

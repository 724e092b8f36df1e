"""The recorded H200 buffers of tests/data/h200 as a target's raw folder, and Kineto's trace of the same workload."""

import json
import lzma
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kineto_agent.protocol.arena import STRING_ENTRY
from kineto_agent.protocol.records import SPACE_DRIVER_API, SPACE_KERNEL_NAME, SPACE_RUNTIME_API
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.spool.raw_records import RawWriter

DATA = Path(__file__).parents[2] / "data" / "h200"
RECORDINGS = ("mlp-cupti130001", "mlp-cupti26", "graph-cupti130001", "graph-cupti26", "streams-cupti130001")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One recording. `info` is its JSON file, `kineto` the trace that Kineto wrote of the workload."""

    info: dict[str, Any]
    buffers: tuple[bytes, ...]
    kineto: dict[str, Any]

    @property
    def window(self) -> tuple[int, int]:
        """Begin and end of the window, Unix time in ns."""
        start, end = self.info["window"]
        return start, end

    @property
    def record_bytes(self) -> dict[int, int]:
        return {int(kind): entry["size"] for kind, entry in self.info["kinds"].items()}

    def kineto_rows(self, *categories: str) -> list[dict[str, Any]]:
        """Kineto's complete events of these categories."""
        return [row for row in self.kineto["traceEvents"] if row["ph"] == "X" and row["cat"] in categories]


@cache
def recording(name: str) -> Recording:
    info = json.loads((DATA / f"{name}.json").read_text())
    data = lzma.decompress((DATA / f"{name}.bin.xz").read_bytes())
    buffers = []
    for size in info["buffers"]:
        buffers.append(data[:size])
        data = data[size:]
    kineto = json.loads(lzma.decompress((DATA / f"{info['workload']}-kineto.json.xz").read_bytes()))
    return Recording(info=info, buffers=tuple(buffers), kineto=kineto)


def string_entry(key: int, space: int, text: bytes) -> bytes:
    return STRING_ENTRY.pack(key, space, len(text)) + text + bytes(-len(text) % 8)


def strings_of(recorded: Recording) -> bytes:
    """The string table: kernel names by pointer, and the names of the calls that Kineto's trace shows."""
    table = [
        string_entry(int(pointer, 16), SPACE_KERNEL_NAME, name.encode())
        for pointer, name in recorded.info["names"].items()
    ]
    for space, category in ((SPACE_DRIVER_API, "cuda_driver"), (SPACE_RUNTIME_API, "cuda_runtime")):
        calls = {row["args"]["cbid"]: row["name"] for row in recorded.kineto_rows(category)}
        table += [string_entry(cbid, space, f"{name}_v7000".encode()) for cbid, name in calls.items()]
    return b"".join(table)


def metadata_of(recorded: Recording) -> dict[str, Any]:
    return {
        "cupti_version": recorded.info["cupti_version"],
        "cuda_driver_version": recorded.kineto["cuda_driver_version"],
        "cuda_runtime_version": recorded.kineto["cuda_runtime_version"],
        "devices": recorded.kineto["deviceProperties"],
    }


def target_of(recorded: Recording, **changes: Any) -> TargetInfo:
    start, end = recorded.window
    values: dict[str, Any] = {
        "capture_id": "cap-1",
        "host": "gpu-host",
        "pid": recorded.info["pid"],
        "process_name": "python3",
        "command": ["python3", "train.py"],
        "rank": 3,
        "world_size": 8,
        "framework": "torch 2.11.0+cu130",
        "python_version": "3.12.1",
        "window_start_ns": start,
        "window_end_ns": end,
        "threads": {recorded.info["main_tid"]: "MainThread"},
        "complete": True,
    }
    return TargetInfo(**{**values, **changes})


def make_spool(target_dir: Path, name: str, *, metadata: dict[str, Any] | None = None, **target: Any) -> Path:
    """Writes a recording as the daemon would. Returns target_dir."""
    recorded = recording(name)
    values = metadata_of(recorded) if metadata is None else metadata
    with RawWriter(target_dir / "raw" / "cupti", source="cupti", format="cupti/1", metadata=values) as writer:
        for sequence, data in enumerate(recorded.buffers):
            writer.append_buffer(data, sequence=sequence, records=0)
        writer.append_strings(strings_of(recorded))
        writer.finish(metadata={}, record_bytes=recorded.record_bytes, records=recorded.info["records"], dropped=0)
    target_of(recorded, **target).write(target_dir)
    return target_dir

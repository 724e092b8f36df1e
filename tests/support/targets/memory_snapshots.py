"""Memory snapshots as torch.cuda.memory._snapshot returns them, made by hand."""

import pickle
from pathlib import Path
from typing import Any

MIB = 1 << 20
BASE = 0x7F0000000000
ASKED = 4 * MIB - 100
Value = dict[str, Any]
FRAMES = [
    {"filename": "??", "line": 0, "name": "c10::cuda::malloc"},
    {"filename": "/usr/lib/python3/site-packages/torch/nn/modules/linear.py", "line": 117, "name": "forward"},
    {"filename": "/home/ada/train.py", "line": 12, "name": "step"},
    {"filename": "/home/ada/train.py", "line": 40, "name": "main"},
]
OTHERS = [{"filename": "/home/ada/load.py", "line": 3, "name": "load"}]


def block(address: int, size: int, state: str, frames: list[Value], requested: int = 0) -> Value:
    """One block."""
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}


def segment(address: int, blocks: list[Value], **others: Any) -> Value:
    """One segment as large as its blocks."""
    size = sum(each["size"] for each in blocks)
    allocated = sum(each["size"] for each in blocks if each["state"] == "active_allocated")
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": allocated,
        "active_size": allocated,
        "requested_size": sum(each["requested_size"] for each in blocks),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
        **others,
    }


def action(name: str, address: int, size: int, time_us: int, frames: list[Value] | None = None) -> Value:
    """One action of the allocator."""
    where = "device_free" if name == "oom" else "addr"
    told = {"frames": frames} if frames else {}
    return {"action": name, where: address, "size": size, "stream": 0, "time_us": time_us, **told}


def snapshot() -> Value:
    """One GPU: a segment of 20 MiB with blocks of all states, and one of 2 MiB that is free."""
    used = [
        block(BASE, 4 * MIB, "active_allocated", FRAMES, ASKED),
        block(BASE + 4 * MIB, 2 * MIB, "active_awaiting_free", OTHERS, 2 * MIB),
        block(BASE + 6 * MIB, 4 * MIB, "active_allocated", FRAMES, ASKED),
        block(BASE + 10 * MIB, 10 * MIB, "inactive", []),
    ]
    free = [block(BASE + 100 * MIB, 2 * MIB, "inactive", [])]
    actions = [
        action("segment_alloc", BASE, 20 * MIB, 1_000_000, FRAMES),
        action("alloc", BASE, ASKED, 1_000_010, FRAMES),
        action("oom", 5 * MIB, 900 * MIB, 1_000_020, FRAMES),
        action("free_requested", BASE + 4 * MIB, 2 * MIB, 1_000_030),
        action("snapshot", 0, 0, 1_000_040),
    ]
    return {
        "segments": [
            segment(BASE, used),
            segment(BASE + 100 * MIB, free, segment_type="small", segment_pool_id=(0, 3)),
        ],
        "device_traces": [actions, []],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "roundup_power2_divisions": {"1": 0}},
        "external_annotations": [],
    }


def write_snapshot(path: Path, value: Any = None) -> Path:
    """Writes a snapshot as the agent does."""
    path.write_bytes(pickle.dumps(snapshot() if value is None else value, protocol=4))
    return path

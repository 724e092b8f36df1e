"""Program: profiles a small training loop on the CPU with memory and shapes and writes PyTorch's tensors as JSON.

    python -m support.targets.torch_tensors FILE [--stacks]

"ops": of every operator start, end (ns) and its input tensors (TensorImpl, storage, PyTorch's id or null).
"allocations": start (ns), address, bytes (below 0: a release), PyTorch's id or null.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile


def train(steps: int) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.Adam(layers.parameters(), 0.1)
    for _ in range(steps):
        batch = torch.randn(4, 8)
        views = batch.t().view(8, 4)[:2]
        loss = layers(batch).sum() + views.sum() + torch.cat([batch, batch.clone()]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors_of(inputs: Any) -> list[list[int | None]]:
    """All tensors of an operator's inputs in their order, those of lists too."""
    found: list[list[int | None]] = []
    for each in inputs:
        if isinstance(each, list):
            found += tensors_of(each)
        elif type(each).__name__ == "_TensorMetadata":
            found.append([each.impl_ptr or 0, each.storage_data_ptr or 0, each.id])
    return found


def collected(tree: Any) -> dict[str, Any]:
    ops, allocations = [], []
    waiting = list(tree)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        fields = event.extra_fields
        if event.tag == _EventType.TorchOp:
            times = {"start": event.start_time_ns, "end": event.end_time_ns}
            ops.append({**times, "name": event.name, "inputs": tensors_of(fields.inputs)})
        elif event.tag == _EventType.Allocation:
            row = {"start": event.start_time_ns, "address": fields.ptr, "bytes": fields.alloc_size, "id": fields.id}
            allocations.append(row)
    return {"ops": ops, "allocations": allocations}


def main(path: Path, stacks: bool) -> int:
    train(1)
    options = {"profile_memory": True, "record_shapes": True, "with_stack": stacks}
    with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
        train(8)
    path.write_text(json.dumps(collected(profiler.profiler.kineto_results.experimental_event_tree())))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), "--stacks" in sys.argv))

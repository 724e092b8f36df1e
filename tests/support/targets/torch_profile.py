"""Program: profiles a small training loop on the CPU with torch.profiler and writes what it recorded as JSON.

    python -m support.targets.torch_profile FILE [--stacks]

"nodes": PyTorch's own event tree in preorder (kind, name, start and end in ns, thread, parent, scope, sequence, id);
"trace": the exported Chrome trace.
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType, _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

KINDS = {_EventType.TorchOp: "cpu_op", _EventType.PyCall: "python_function", _EventType.PyCCall: "python_function"}


def train(steps: int) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(layers.parameters(), 0.1)
    for step in range(steps):
        with record_function(f"step {step}"):
            loss = layers(torch.randn(4, 8)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def nodes_of(tree: Any) -> list[dict[str, Any]]:
    """The tree in preorder, without recursion."""
    rows: list[dict[str, Any]] = []
    waiting = [(event, -1) for event in reversed(tree)]
    while waiting:
        event, parent = waiting.pop()
        kind = KINDS.get(event.tag)
        number = parent
        if kind is not None:
            fields = event.extra_fields
            scope = int(fields.scope) if kind == "cpu_op" else 0
            rows.append(
                {
                    "kind": "user_annotation" if scope == 7 else kind,
                    "name": event.name,
                    "start": event.start_time_ns,
                    "end": event.end_time_ns,
                    "thread": event.start_tid,
                    "parent": parent,
                    "scope": scope,
                    "id": event.correlation_id,
                    "sequence": fields.sequence_number if kind == "cpu_op" else -1,
                }
            )
            number = len(rows) - 1
        waiting.extend((child, number) for child in reversed(event.children))
    return rows


def main(path: Path, stacks: bool) -> int:
    train(1)
    config = _ExperimentalConfig(profile_all_threads=not stacks)
    with profile(activities=[ProfilerActivity.CPU], with_stack=stacks, experimental_config=config) as profiler:
        other = threading.Thread(target=train, args=(5,))
        other.start()
        train(20)
        other.join()
    nodes = nodes_of(profiler.profiler.kineto_results.experimental_event_tree())
    profiler.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())
    path.write_text(json.dumps({"nodes": nodes, "trace": trace}))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), "--stacks" in sys.argv))

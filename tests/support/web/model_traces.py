"""Traces of a small model: nested modules with operators and kernels, also as PyTorch Lightning names them."""

import json
from pathlib import Path
from typing import Any

from kineto_trace.model.trace import Trace

from support.trace_files.traces import trace

Row = dict[str, Any]
LAYERS = 30


def _op(start: int, duration: int, name: str, number: int) -> Row:
    row = {"start": start, "duration": duration, "name": name, "thread": 1, "id": number, "finished": 1}
    return {**row, "sequence": -1, "inputs": -1}


def _module(start: int, duration: int, name: str, number: int, parent: int) -> Row:
    row = {"start": start, "duration": duration, "name": f"nn.Module: {name}", "thread": 1}
    return {**row, "module": number, "parent": parent}


def model_trace() -> Trace:
    """Net > Encoder > LAYERS layers and Net > Head; each layer has one operator, aten::op_N, with one kernel.

    The kernel of layer n takes n + 1 us, the head's aten::linear 500 us, of which its aten::addmm has all.
    """
    width = 1000 * (LAYERS + 4)
    modules = [
        _module(0, width, "Net_0", 0, -1),
        _module(100, 1000 * (LAYERS + 1), "Encoder_0", 1, 0),
        *(_module(1000 * (n + 1), 900, f"Layer_{n}", 2 + n, 1) for n in range(LAYERS)),
        _module(1000 * (LAYERS + 2), 1000, "Head_0", 2 + LAYERS, 0),
    ]
    ops = [_op(1000 * (n + 1) + 100, 100 + n, f"aten::op_{n}", n + 1) for n in range(LAYERS)]
    head = 1000 * (LAYERS + 2)
    ops += [_op(head + 100, 800, "aten::linear", LAYERS + 1), _op(head + 200, 600, "aten::addmm", LAYERS + 2)]
    launches = [op for op in ops if op["name"] != "aten::linear"]
    calls = [
        {"start": op["start"] + 10, "duration": 5, "name": "cudaLaunchKernel", "thread": 1, "correlation": n + 1,
         "external_id": op["id"]}
        for n, op in enumerate(launches)
    ]  # fmt: skip
    lengths = [*(1000 * (n + 1) for n in range(LAYERS)), 500_000]
    ends = [sum(lengths[: n + 1]) for n in range(len(lengths))]
    kernels = [
        {"start": width + end - length, "duration": length, "name": f"kernel_{n}", "correlation": n + 1}
        for n, (end, length) in enumerate(zip(ends, lengths, strict=True))
    ]
    rows = {"python_function": modules, "cpu_op": ops, "cuda_runtime": calls, "kernel": kernels}
    return trace(rows, length_ns=width + ends[-1])


def write_lightning(path: Path) -> Path:
    """Writes a file of PyTorch Lightning: net, and net.0 inside of it."""
    names = (("[pl][module]torch.nn.Sequential: net", 0, 100), ("[pl][module]torch.nn.Linear: net.0", 10, 50))
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": {"External id": n}}
        for n, (name, ts, dur) in enumerate((*names, ("aten::linear", 20, 30)), 1)
    ]
    path.write_text(json.dumps({"schemaVersion": 1, "Framework": "pytorch-lightning", "traceEvents": events}))
    return path

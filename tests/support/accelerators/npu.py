"""NPU, a made-up accelerator, as a plug-in declares one: a type of Kineto's, calls, and types of its own.

Runs wherever the agent runs (CPython 3.9 and later).
"""

from kineto_agent.protocol.schema import Activity, Col, Record, Schema, Texts

NAMES = 20  # string space

KERNEL = Record(
    type="kernel",
    size=64,
    fields={
        "kind": ("I", 0),
        "correlation": ("I", 4),
        "start": ("Q", 8),
        "end": ("Q", 16),
        "symbol": ("Q", 24),
        "grid_x": ("I", 32),
        "regs": ("H", 36),
        "unit": ("I", 40),
        "queue": ("Q", 48),
    },
    name="symbol",
    texts=Texts(space=NAMES, otherwise="kernel {}", demangle=True),
    correlation="correlation",
    device="unit",
    stream="queue",
)
CALL = Record(
    type="npu_runtime",
    size=48,
    fields={"kind": ("I", 0), "begin": ("q", 8), "took": ("q", 16), "fn": ("I", 24), "tid": ("I", 28), "id": ("I", 32)},
    time=("begin", "took"),
    length=True,
    name="fn",
    texts=Texts(values={1: "npuLaunch", 2: "npuSync"}),
    correlation="id",
    thread="tid",
)
WAIT = Record(
    type="npu_wait",
    size=56,
    fields={
        "kind": ("I", 0),
        "start": ("Q", 8),
        "end": ("Q", 16),
        "why": ("H", 24),
        "label": ("16s", 32),
        "load": ("f", 48),
    },
    texts=Texts(otherwise="wait"),
    constants={"weight": -1, "device": 0},
)
READING = Record(
    type="", size=24, fields={"kind": ("I", 0), "ticks": ("Q", 8), "unix": ("Q", 16)}, sync=("ticks", "unix")
)
MARK = Record(type="npu_mark", size=24, fields={"kind": ("I", 0), "at": ("Q", 8), "by": ("I", 16)}, time=("at", ""),
              texts=Texts(otherwise="mark"), thread="by")  # fmt: skip
NPU = Schema(
    name="npu",
    types={
        "kernel": Activity((Col("grid_x"), Col("registers", field="regs"))),
        "npu_runtime": Activity((Col("cbid", field="fn"),)),
        "npu_wait": Activity(
            (
                Col("why", "text", "what it waited for", texts=Texts(values={0: "data", 1: "a lock"})),
                Col("label", "text", "as the program named it"),
                Col("weight", "i32", "weight of the queue"),
                Col("load", "f64", "load of the queue in percent"),
            ),
            track="device",
            meaning="Waits of a queue.",
        ),
        "npu_mark": Activity(track="thread", meaning="Marks that the program has set."),
    },
    records={1: KERNEL, 2: WAIT, 3: CALL, 4: MARK, 9: READING},
)

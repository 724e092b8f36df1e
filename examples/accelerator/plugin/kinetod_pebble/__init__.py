"""The plug-in for Pebble: what kinetod reads. Nothing here runs in a traced process."""

from pathlib import Path

from kineto_agent.protocol.schema import Activity, Col, Record, Schema, Texts
from kinetod.plugins.accelerator import Accelerator, Signs

_HERE = Path(__file__).parent
KERNELS = Texts(values={0: "pebble_matmul", 1: "pebble_add", 2: "pebble_sum"}, otherwise="pebble kernel {}")
_FIELDS = {
    "kernel": ("I", 4),
    "start": ("Q", 8),
    "end": ("Q", 16),
    "correlation": ("I", 24),
    "thread": ("I", 28),
    "stream": ("I", 32),
    "grid_x": ("I", 36),
}

SCHEMA = Schema(
    name="pebble",
    types={
        "kernel": Activity(columns=(Col("grid_x"),)),
        "pebble_runtime": Activity(),
    },
    records={
        1: Record("kernel", 48, _FIELDS, name="kernel", texts=KERNELS, correlation="correlation", stream="stream"),
        2: Record(
            "pebble_runtime",
            48,
            _FIELDS,
            texts=Texts(otherwise="pebble_launch"),
            correlation="correlation",
            thread="thread",
        ),
    },
)

PLUGIN = Accelerator(
    name="pebble",
    signs=Signs(libraries=("libpebble.so*",)),
    agent_files={"source.py": (_HERE / "source.py").read_bytes()},
    schema=SCHEMA,
)

"""The programs of native/, which nvcc makes."""

from __future__ import annotations

from gpu.zoo.catalog import Program, add

LAUNCHES = ("streams", "pools", "cooperative", "clusters", "programmatic", "threads")
GRAPHS = ("update", "memory", "child", "conditional", "churn")
PROCESSES = ("reset", "contexts", "forks", "ipc")
DEBUGGER = ("cuda-gdb", "-batch", "-nx", "-ex", "run", "--args")

for mode in GRAPHS:
    add(Program(name=f"cu_graph_{mode}", source="graphs", arguments=(mode,), graphs=True))
add(Program(name="cu_graph_device", source="device_graphs", arguments=("launch",), graphs=True))
for mode in LAUNCHES:
    add(Program(name=f"cu_{mode}", source="launches", arguments=(mode,)))
for mode in PROCESSES:
    add(Program(name=f"cu_{mode}", source="process", arguments=(mode,)))
add(Program(name="cu_ends_during_captures", source="process", arguments=("ends",), end="self"))
add(Program(name="cu_sigterm", source="process", arguments=("term",), end="term"))
add(Program(name="cu_cupti_activity", source="cupti_user", arguments=("activity",)))
add(Program(name="cu_cupti_subscriber", source="cupti_user", arguments=("subscriber",)))
add(
    Program(
        name="cu_under_cuda_gdb", source="launches", arguments=("streams",), prefix=DEBUGGER, alone=True, twin=False
    )
)
add(Program(name="cu_full_memory", source="process", arguments=("full",), alone=True, twin=False))

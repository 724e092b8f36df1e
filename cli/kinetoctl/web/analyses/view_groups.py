"""In which order and groups the page of a capture names the views."""

from collections.abc import Mapping, Sequence
from typing import Any

from kineto_trace.html.view_heads import view_sentence

# A view belongs to the first group that one of whose words begins its name; all others are in the last one.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Where the time goes": ("overview", "time_causes", "step", "profiler_steps", "findings", "recommendations",
                            "critical_path", "flame_graph", "annotation", "recordings", "settings", "not_recorded",
                            "validate"),
    "GPU": ("kernel", "operator_flops", "flops", "gpu", "idle", "temporal", "sm_", "tensor_core", "queue", "blocked",
            "launch", "op_kernel", "cuda_graphs", "graph_", "memory_bandwidth", "counter", "roofline", "throttling",
            "op_counters", "module_counters"),
    "Memory": ("memory", "tensors"),
    "Host and Python": ("operators", "modules", "call_tree", "python", "hot_lines", "thread", "process", "child",
                        "data_loading", "frequent", "event"),
    "Ranks and collectives": ("rank", "collective", "comm", "distributed", "stragglers"),
    "Compared with a baseline": ("diff",),
}  # fmt: skip
OTHERS = "Others"


def grouped(catalog: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[dict[str, str]]]]:
    """The views by group, each with its name and the first sentence of its description."""
    groups: dict[str, list[dict[str, str]]] = {name: [] for name in (*GROUPS, OTHERS)}
    for view in catalog:
        groups[_group(view["name"])].append(
            {"name": view["name"], "about": view_sentence(view["name"], view["description"])}
        )
    return [(name, views) for name, views in groups.items() if views]


def _group(name: str) -> str:
    return next((group for group, words in GROUPS.items() if name.startswith(words)), OTHERS)

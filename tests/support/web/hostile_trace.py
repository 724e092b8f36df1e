"""A trace whose names try to become part of a page: markup, handlers, template syntax, direction overrides."""

import json
from pathlib import Path
from typing import Any

from support.trace_files import synthetic

ATTACKS = (
    "<script>window.attacked=1</script>",
    "\"><img src=x onerror='window.attacked=1'>",
    "</title></textarea></style><svg onload=window.attacked=1>",
    "{{ 7 * 191 }}{% raw %}",
    "javascript:window.attacked=1//",
    "'; DROP TABLE kernel; --\u202egnp.exe",
    "<a href='http://evil.example/'>x</a><meta http-equiv=refresh content='0;url=http://evil.example/'>",
)


def write_hostile(path: Path, events: int = 2_000) -> Path:
    """Writes a trace of training steps in which every name of a kernel, operator or function is an attack."""
    trace: dict[str, Any] = json.loads(synthetic.text(events))
    names = dict.fromkeys(event["name"] for event in trace["traceEvents"] if event.get("cat") in _RENAMED)
    attacks = {name: f"{ATTACKS[at % len(ATTACKS)]} {at} {name}" for at, name in enumerate(names)}
    for event in trace["traceEvents"]:
        if event.get("cat") in _RENAMED:
            event["name"] = attacks[event["name"]]
    path.write_text(json.dumps(trace))
    return path


_RENAMED = ("kernel", "cpu_op", "python_function", "gpu_memcpy", "gpu_memset", "cuda_runtime")

"""Queries that a helper process answers besides attaching: facts that only a process's owner may read. Every query
names processes by pid and start time; replaced processes are left out.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kinetod.attach.inspect import device_graph_code, process_inspection
from kinetod.attach.inspect.cupti_search import find_cupti
from kinetod.attach_helper import messages
from kinetod.base.safe_text import clean
from kinetod.kineto_ipc.network_namespaces import inhabited
from kinetod.processes.accelerator_signs import OutsideSigns
from kinetod.processes.identity import PROC, start_time_ns
from kinetod.processes.process_info import JOB_ID_VARIABLES, RANK_VARIABLES, WORLD_SIZE_VARIABLES, read_private
from kinetod.profilers import look_into

LOOK, SEARCH, TOOLKIT, DEVICE_GRAPHS = "look", "search", "toolkit", "device_graphs"
NAMESPACES = "namespaces"
MAX_PATH_CHARS = 4096
_VARIABLES = (
    *RANK_VARIABLES,
    *WORLD_SIZE_VARIABLES,
    *JOB_ID_VARIABLES,
)  # everything that kineto_agent.control.self_description reads
_MAX_VALUE_CHARS = 256


def answer(question: Mapping[str, Any], proc: Path = PROC) -> dict[str, Any]:
    """question: {"do": one of these, "boot_time_ns", "targets": [[pid, start_time_ns], …]}, with LOOK also "signs":
    [[plug-in, libraries, variables, open files], …]. Raises ValueError.

    For NAMESPACES it is {"do", "own"}: the caller's network namespace; start times assume a machine booted at 0.
    """
    if question["do"] == NAMESPACES:
        namespaces = inhabited(int(question["own"]), proc)
        return {"found": [[each, [[key.pid, key.start_time_ns] for key in keys]] for each, keys in namespaces.items()]}
    boot_time_ns = int(question["boot_time_ns"])
    targets = [(int(pid), int(start)) for pid, start in question["targets"]]

    def same(pid: int, start: int) -> bool:
        with contextlib.suppress(OSError):
            return start_time_ns(pid, proc, boot_time_ns=boot_time_ns) == start
        return False

    if question["do"] == LOOK:
        seen = []
        signs = [OutsideSigns(plugin, *map(tuple, patterns)) for plugin, *patterns in question["signs"]]
        for pid, start in targets:
            if same(pid, start):
                private = read_private(pid, proc, signs)
                if same(pid, start):  # the data belongs to this process
                    seen.append({"pid": pid, **asdict(private), "gpus": private.gpus[: messages.MAX_GPUS]})
        return {"seen": seen}
    if question["do"] == SEARCH:
        searched, tools = list[int](), list[dict[str, Any]]()
        for pid, start in targets:
            found = _tools(pid, proc) if same(pid, start) else None
            if found is not None and len(tools) + len(found) <= messages.MAX_TOOLS and same(pid, start):
                searched.append(pid)
                tools += found
        return {"searched": searched, "tools": tools}
    if question["do"] == TOOLKIT:
        ((pid, start),) = targets
        environ = process_inspection.environment(pid, proc) or {}
        cupti = clean(find_cupti(pid, environ, proc) or "", MAX_PATH_CHARS)
        named = {name: clean(environ[name], _MAX_VALUE_CHARS) for name in _VARIABLES if name in environ}
        return {"cupti": cupti, "environ": named} if same(pid, start) else {"cupti": "", "environ": {}}
    if question["do"] == DEVICE_GRAPHS:
        ((pid, start),) = targets
        file = clean(device_graph_code.find(pid, proc), MAX_PATH_CHARS) if same(pid, start) else ""
        return {"file": file if same(pid, start) else ""}
    raise ValueError(f"unknown request: {question['do']!r}")


def _tools(pid: int, proc: Path) -> list[dict[str, Any]] | None:
    """Other profilers in a process; None if it could not be inspected."""
    try:
        profilers = look_into(pid, proc)
    except OSError:
        return None
    return [{"pid": pid, "product": each.product, "gpus": each.gpus[: messages.MAX_GPUS]} for each in profilers]

"""As much of a torch with CUDA as the memory sources use, with the signatures of torch 2.13.

`test_memory.py` compares the signatures with an installed torch.
"""

import sys
import time
from types import ModuleType
from typing import Any, Dict, List, Optional

import pytest

SEGMENT_BYTES = 2 << 20


def _module(name: str) -> Any:
    return ModuleType(name)


def entry(action: str, address: int, size: int, time_us: int) -> Dict[str, Any]:
    """One action of the allocator, as torch tells it."""
    where = "device_free" if action == "oom" else "addr"
    return {"action": action, where: address, "size": size, "stream": 7, "time_us": time_us, "frames": []}


class FakeTorch:
    """A process with one GPU. `history`: the arguments with which recording is on, None: off."""

    def __init__(self) -> None:
        self.history: Optional[Dict[str, Any]] = None
        self.calls: List[Any] = []
        self.trace: List[Dict[str, Any]] = []
        self.blocks: List[Dict[str, Any]] = []
        self.initialized = True
        self.backend = "native"
        self.fails = ""
        self.module = _module("torch")
        self.module.__version__ = "2.13.0+cu130"
        self.module.version = _module("torch.version")
        self.module.version.cuda = "13.0"
        self.module.version.hip = None
        self.module._C = _module("torch._C")
        self.module.cuda = _module("torch.cuda")
        self.module.cuda.memory = _module("torch.cuda.memory")
        self.module.cuda.is_initialized = lambda: self.initialized
        core, memory = self.module._C, self.module.cuda.memory
        core._cuda_isHistoryEnabled = lambda: self.history is not None
        core._cuda_getAllocatorBackend = lambda: self.backend
        core._cuda_record_memory_history = self._record
        core._cuda_record_memory_history_legacy = self._record
        memory._record_memory_history = _record_memory_history(core)
        memory._record_memory_history_impl = memory._record_memory_history
        memory._snapshot = self._snapshot

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Stands in for torch until the end of the test."""
        for module in (self.module, self.module.cuda, self.module.cuda.memory):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def allocate(self, address: int, size: int) -> None:
        """Records that the program allocates memory."""
        self.blocks.append({"address": address, "size": size, "requested_size": size, "state": "active_allocated"})
        self._note("alloc", address, size)

    def free(self, address: int) -> None:
        """Records that the program frees memory."""
        (block,) = [block for block in self.blocks if block["address"] == address]
        self.blocks.remove(block)
        self._note("free_requested", address, block["size"])
        self._note("free_completed", address, block["size"])

    def note(self, action: str, address: int, size: int) -> None:
        """Records any action of the allocator."""
        self._note(action, address, size)

    def _note(self, action: str, address: int, size: int) -> None:
        history = self.history  # another thread may switch it off
        if history is not None:
            self.trace.append(entry(action, address, size, time.time_ns() // 1000 + 1))
            del self.trace[: -history["max_entries"]]

    def _record(
        self,
        enabled: Optional[str],
        context: Optional[str],
        stacks: str,
        max_entries: int,
        *_others: Any,
    ) -> None:
        self.calls.append((enabled, context, stacks, max_entries))
        if self.fails:
            raise RuntimeError(self.fails)
        self.history = {"max_entries": max_entries} if enabled else None
        self.trace.clear()

    def _snapshot(self, device: Any = None, augment_with_fx_traces: bool = False) -> Dict[str, Any]:
        if self.fails:
            raise RuntimeError(self.fails)
        held = sum(block["size"] for block in self.blocks)
        segment = {"device": 0, "address": 1, "total_size": SEGMENT_BYTES, "allocated_size": held}
        return {
            "segments": [{**segment, "blocks": [dict(block) for block in self.blocks]}],
            "device_traces": [[dict(each) for each in self.trace]],
            "allocator_settings": {},
        }


def _record_memory_history(core: Any) -> Any:
    def record(
        enabled: Optional[str] = "all",
        context: Optional[str] = "all",
        stacks: str = "all",
        max_entries: int = sys.maxsize,
        device: Any = None,
        clear_history: bool = False,
        compile_context: bool = False,
        global_record_annotations: bool = False,
        skip_actions: Optional[List[str]] = None,
    ) -> None:
        core._cuda_record_memory_history(enabled, context, stacks, max_entries, clear_history)

    return record

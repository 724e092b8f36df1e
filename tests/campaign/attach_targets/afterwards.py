"""A program that does things after a trace which call code of the agent, and says what that did on its thread.

afterwards.py CPU_SECONDS CUDA_LIBRARY, under any Python, with stand-ins for torch and JAX. Its thread has used
CPU_SECONDS of processor time before it prints "ready". It computes until it gets a line on its standard input. Then it
does each of its things with an audit hook, and prints them as a JSON object: what it did -> [seconds that it took,
names of the audit events of its thread which it must not have]. Then it ends as programs do.
"""

import _thread
import ctypes
import importlib
import json
import os
import select
import sys
import time
from collections import OrderedDict
from importlib.abc import Loader as Loaders
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional

FORBIDDEN = ("import", "compile", "exec", "marshal.", "open", "ctypes.dl", "time.sleep", "_thread.start", "socket.")


class CUDAGraph:
    """As torch's: which does nothing here."""

    def capture_begin(self) -> str:
        return "begun"

    def capture_end(self) -> str:
        return "ended"


class Profile:
    """As torch.profiler.profile and torch.autograd.profiler.profile."""

    def step(self) -> None:
        """Does nothing."""

    def _prepare_trace(self) -> None:
        """Does nothing."""

    def __enter__(self) -> "Profile":
        self._prepare_trace()
        return self

    def __exit__(self, *_error: object) -> None:
        """Does nothing."""


class KinetoStepTracker:
    """As torch.autograd.profiler's."""

    @classmethod
    def increment_step(cls, requester: str) -> None:
        """Does nothing."""


class StepTraceAnnotation:
    """As jax.profiler's."""

    def __init__(self, name: str) -> None:
        self.name = name


def register_optimizer_step_post_hook(hook: Callable[..., None]) -> None:
    hooks[len(hooks)] = hook


hooks: "OrderedDict[int, Callable[..., None]]" = OrderedDict()


class Loader(Loaders):
    """Makes one of the modules."""

    def __init__(self, content: Dict[str, Any]) -> None:
        self._content = content

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(self._content)


class Finder:
    """Has all of them: they are imported as an installed torch is."""

    @staticmethod
    def find_spec(name: str, _path: Any = None, _target: Any = None) -> Optional[ModuleSpec]:
        return ModuleSpec(name, Loader(MODULES[name]), is_package=True) if name in MODULES else None


MODULES: Dict[str, Dict[str, Any]] = {
    "torch": {"__version__": "2.11.0", "__file__": "/nowhere/torch/__init__.py", "_C": object()},
    "torch.cuda": {"_initialized": True, "current_stream": lambda: None},
    "torch.cuda.graphs": {"CUDAGraph": CUDAGraph},
    "torch.optim": {},
    "torch.optim.optimizer": {
        "_global_optimizer_post_hooks": hooks,
        "register_optimizer_step_post_hook": register_optimizer_step_post_hook,
    },
    "torch.profiler": {},
    "torch.profiler.profiler": {"profile": Profile},
    "torch.autograd": {},
    "torch.autograd.profiler": {"profile": Profile, "KinetoStepTracker": KinetoStepTracker},
    "jax": {},
    "jax._src": {},
    "jax._src.profiler": {"StepTraceAnnotation": StepTraceAnnotation},
}


def step() -> None:
    for hook in list(hooks.values()):
        hook(CUDAGraph(), (), {})


def profiled() -> None:
    with Profile() as profile:
        profile.step()


def fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


THINGS: Dict[str, Callable[[], object]] = {
    "first capture": lambda: (CUDAGraph().capture_begin(), CUDAGraph().capture_end()),
    "first step of an optimizer": step,
    "first profiler": profiled,
    "first step of torch's tracker": lambda: KinetoStepTracker.increment_step("ours"),
    "first annotation of JAX": lambda: StepTraceAnnotation("train"),
    "first fork": fork,
}


def hooked() -> List[str]:
    """What the agent has shadowed here."""
    methods = (CUDAGraph.capture_begin, CUDAGraph.capture_end, Profile.step, StepTraceAnnotation.__init__)
    return [method.__qualname__ for method in methods if hasattr(method, "__wrapped__")] + ["step"] * len(hooks)


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(1000))


def main() -> None:
    loaded = ctypes.CDLL(sys.argv[2])  # maps the file
    sys.meta_path.insert(sys.meta_path.index(PathFinder), Finder)  # before an installed torch, after the agent's
    for name in MODULES:
        importlib.import_module(name)
    compute(float(sys.argv[1]))
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        compute(0.01)
    events: List[str] = []
    found: Dict[str, Any] = {"hooked": hooked()}
    own, ident = _thread.get_ident(), _thread.get_ident

    def note(event: str, _arguments: Any) -> None:
        if ident() == own and event.startswith(FORBIDDEN):
            events.append(event)

    sys.addaudithook(note)
    for name, do in THINGS.items():
        events.clear()
        begin = time.perf_counter()
        do()
        took_s = time.perf_counter() - begin
        found[name] = [took_s, list(events)]
    assert loaded
    print(json.dumps(found), flush=True)


main()

"""Targets that have put functions and modules of their own in the places of the standard ones."""

import _thread
import builtins
import contextlib
import io
import os
import select
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, List

from campaign.attach_targets.control import Target, must_be
from campaign.attach_targets.loops import Loop, python_work

# What the agent and its bootstrap use, or would without care.
FUNCTIONS: Dict[Any, List[str]] = {
    _thread: ["start_new_thread", "allocate_lock", "get_ident", "get_native_id"],
    time: ["sleep", "time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "thread_time", "thread_time_ns"],
    select: ["poll"],
    os: ["read", "write", "open", "close", "pipe2", "fstat", "listdir", "readlink"],
    builtins: ["__import__"],
}
SHADOWS = (
    *("select", "fcntl", "mmap", "struct", "json", "typing", "re", "enum", "contextlib", "functools", "collections"),
    *("atexit", "signal", "ctypes", "tempfile", "shutil", "glob", "pickle", "operator", "keyword", "types", "copyreg"),
    *("_socket", "traceback", "weakref", "io", "threading", "queue", "socket", "random"),
)
SHADOW = """import os
file = os.open(%r, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
os.write(file, b'%s ')
os.close(file)
"""
STAY = ("io", "threading", "enum", "re", "collections")  # what the target itself cannot be without


class Replaced(Loop):
    """Each such function notes on which thread it is called, and is the real one."""

    def __init__(self) -> None:
        super().__init__(python_work)
        self._main = _thread.get_ident()
        self.called: List[str] = []
        for owner, names in FUNCTIONS.items():
            for name in names:
                setattr(owner, name, self._noting(getattr(owner, name), name, _thread.get_ident))

    def _noting(self, function: Any, name: str, ident: Callable[[], int]) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            if ident() != self._main:
                self.called.append(name)
            return function(*arguments, **more)

        return call

    def close(self) -> None:
        must_be("what was called on a thread that the program has not started", sorted(set(self.called)), [])


class Shadowed(Loop):
    """Its folder, first in sys.path, has modules with names of the standard library."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._ran = folder / "ran"
        for name in SHADOWS:
            (folder / (name + ".py")).write_text(SHADOW % (str(self._ran), name))
        super().__init__(python_work)
        self._modules = dict(sys.modules)
        for name in self._modules:  # as if nobody had imported them yet
            if name.partition(".")[0] in set(SHADOWS) - set(STAY):
                del sys.modules[name]
        sys.path.insert(0, str(folder))

    def close(self) -> None:
        sys.path.pop(0)
        ran = self._ran.read_text() if self._ran.exists() else ""
        new = sorted(set(sys.modules) - set(self._modules))
        sys.modules.update(self._modules)
        self._folder.cleanup()
        must_be("what was run of the program's modules", ran, "")
        must_be("new modules", new, [])


class Eventlet(Target):
    """Green threads that take turns in the main thread."""

    def __init__(self) -> None:
        warnings.simplefilter("ignore")  # it tells that nobody should use it
        import eventlet  # type: ignore[import-untyped]

        with contextlib.redirect_stderr(
            io.StringIO()
        ):  # on 3.14 it always says that a lock of `warnings` stays as it is
            eventlet.monkey_patch()
        self._pool = eventlet.GreenPool()
        self._wanted = python_work()

    def lap(self) -> None:
        def work(_number: int) -> int:
            time.sleep(0.001)
            return python_work()

        must_be("the sums", set(self._pool.imap(work, range(4))), {self._wanted})


class Gevent(Target):
    """Green threads of gevent, whose hubs are counted."""

    def __init__(self) -> None:
        from gevent import monkey  # type: ignore[import-untyped]

        monkey.patch_all()
        import gevent.pool  # type: ignore[import-untyped]

        self._pool = gevent.pool.Pool(4)
        self._wanted = python_work()

    def lap(self) -> None:
        def work(_number: int) -> int:
            time.sleep(0.001)
            return python_work()

        must_be("the sums", set(self._pool.map(work, range(4))), {self._wanted})

    def close(self) -> None:
        import gc

        from gevent.hub import Hub  # type: ignore[import-untyped]

        must_be("hubs", len([one for one in gc.get_objects() if isinstance(one, Hub)]), 1)


KINDS: Dict[str, Callable[[], Target]] = {
    "replaced": Replaced,
    "shadowed": Shadowed,
    "eventlet": Eventlet,
    "gevent": Gevent,
}

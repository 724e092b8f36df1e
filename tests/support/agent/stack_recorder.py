"""Records stacks in this process as the agent does, and reads what the daemon would. Runs wherever the agent runs."""

import contextlib
import gc
import os
import threading
from pathlib import Path
from typing import Dict, FrozenSet, Iterator, List, Tuple

from kineto_agent.protocol.records import SPACE_THREAD_NAME
from kineto_agent.sources.interface import SourceRequest
from kineto_agent.sources.python.stack_sampling import PythonStacksSession, PythonStacksSource

from support.agent.agent_daemon import ArenaReader, Sample
from support.waiting import scaled, until

TYPES: FrozenSet[str] = frozenset(["python_function"])


def prepared(**options: object) -> PythonStacksSession:
    """A session of this process."""
    return PythonStacksSource().prepare(SourceRequest(TYPES, 8 << 20, dict(options)))


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """No garbage is collected but by gc.collect(), and without callbacks: test tools register some."""
    callbacks = list(gc.callbacks)
    gc.callbacks.clear()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.callbacks.extend(callbacks)


class Recorder:
    """A running session and what the daemon sees of it."""

    def __init__(self, **options: object) -> None:
        self.session = prepared(**options)
        self.reader = ArenaReader(os.dup(self.session.arena_fd))
        self.session.start()

    def wait(self, ticks: int) -> None:
        """Wait until that many more ticks have begun and ended."""
        enough = self.session.ticks() + ticks + 1
        until(lambda: self.session.ticks() >= enough, "samples are taken")

    def stop(self) -> List[Sample]:
        """Ends the recording. Returns all samples."""
        self.outcome = self.session.stop()
        return self.reader.samples()

    def names(self) -> Dict[int, str]:
        """Names of threads by thread id."""
        table = self.reader.strings()
        return {key: text.decode() for (space, key), text in table.items() if space == SPACE_THREAD_NAME}

    def close(self) -> None:
        """Frees the session and its arena."""
        self.session.close()
        self.reader.close()


class Waiter:
    """A thread that waits, three calls deep, until it is told to end."""

    def __init__(self, depth: int = 0) -> None:
        self.tid = 0
        self.ready, self.end = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.outer, args=(depth,), name="waiter")
        self.thread.start()
        assert self.ready.wait(scaled(20))
        until(self._is_asleep, "the thread waits")

    def _is_asleep(self) -> bool:
        stat = Path(f"/proc/self/task/{self.tid}/stat").read_text()
        return bool(self.end._cond._waiters) and stat.rpartition(")")[2].split()[0] == "S"  # type: ignore[attr-defined]

    def outer(self, depth: int) -> None:
        """Calls itself `depth` times."""
        if depth:
            self.outer(depth - 1)
        else:
            self.inner()

    def inner(self) -> None:
        """Waits until the test ends the thread."""
        self.tid = threading.get_native_id()
        self.ready.set()
        self.end.wait(scaled(200))

    def __enter__(self) -> "Waiter":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.end.set()
        self.thread.join()


def of_thread(samples: List[Sample], tid: int) -> List[Sample]:
    """The samples of one thread."""
    return [sample for sample in samples if sample.thread_id == tid]


def plain(stack: Tuple[str, ...]) -> Tuple[str, ...]:
    """Names as they were before 3.11: without the class or function around them."""
    return tuple(name.rpartition(".")[2] for name in stack)

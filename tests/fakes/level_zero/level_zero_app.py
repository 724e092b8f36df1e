"""A program that "trains" on an Intel GPU, for tests: it needs Level Zero and nothing else that is not Python's own.

    LEVEL_ZERO_PROGRAM=liblevel_zero_program.so python level_zero_app.py --threads 2

It prints one line of JSON, {"ready": true, "pid": …}, and then answers each line of its standard input by one:

    steps N K [T]   N training steps of K kernels in each of T threads (1 if left out)
    launch N        N kernels, nothing else
    peer N          N copies between the first two GPUs
    kineto begin    with --torch: the program's own profiler begins to record
    kineto end      it ends; the answer has the records that it got, by kind, and foreign buffers
    kineto end now  it ends without taking its records
    kineto lent     the answer has the number of its buffers that have not come back
    fork            a child process is forked that launches some work and ends by exit(); the answer has its pid and its
                    exit status, -1 if it hangs
    child           a child process is forked that stays until the program ends; the answer has its pid
    environ NAME    the value of a variable as C code sees it, or null
    usage           descriptors, threads, KiB of memory of its own, once garbage has been collected and given back
    stop            ends the program

Between two lines, with --forever, steps run in the main thread. What has been launched says the fake driver's log.
"""

import argparse
import ctypes
import gc
import json
import os
import select
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, List

FORK_LIMIT_S = 20.0
CHILD_STEPS = 4000  # more than PTI can hold without its thread
KINDS = 16
PAUSE_S = 0.001  # between two steps of --forever: at full speed they outgrow what a capture may hold


class FakeTorch:
    """As much of torch as the guard of torch.profiler looks at, with a profiler that uses PTI as Kineto does.

    LEVEL_ZERO_KINETO: the library that does so, which has the name of torch's. KINETO_PTI_LIBRARY: libpti_view.
    """

    def __init__(self) -> None:
        self.kineto = ctypes.CDLL(os.environ["LEVEL_ZERO_KINETO"])
        self.answer: Dict[str, Any] = {}
        profiler = ModuleType("torch.autograd.profiler")
        fake = self

        class profile:
            """torch.autograd.profiler.profile"""

            def _prepare_trace(self) -> None:
                fake.answer = {"code": fake.kineto.xpupti_begin(os.environ["KINETO_PTI_LIBRARY"].encode())}
                profiler._is_profiler_enabled = True  # type: ignore[attr-defined]

            def __exit__(self, *how: Any) -> None:
                if how:
                    profiler._is_profiler_enabled = False  # type: ignore[attr-defined]
                    fake.answer = {"code": fake.kineto.xpupti_leave()}
                    return
                counts = (ctypes.c_uint64 * KINDS)()
                code = fake.kineto.xpupti_end(counts, KINDS)
                profiler._is_profiler_enabled = False  # type: ignore[attr-defined]
                records = {str(kind): count for kind, count in enumerate(counts) if count}
                fake.answer = {"code": code, "records": records, "foreign": fake.kineto.xpupti_foreign()}

        profiler.profile = profile  # type: ignore[attr-defined]
        profiler._is_profiler_enabled = False  # type: ignore[attr-defined]
        self.session = profile()
        for name in ("torch", "torch._C", "torch.autograd"):
            sys.modules[name] = ModuleType(name)
        torch: Any = sys.modules["torch"]
        torch._C, torch.__file__ = sys.modules["torch._C"], os.environ["LEVEL_ZERO_KINETO"]
        sys.modules[profiler.__name__] = profiler


class App:
    """The program and its standard input."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        if options.map:
            self._mapped = ctypes.CDLL(options.map)  # as `import torch` maps libpti_view
        self.program = ctypes.CDLL(os.environ["LEVEL_ZERO_PROGRAM"])
        self.program.program_launch.argtypes = [ctypes.c_uint32, ctypes.c_uint64]
        self.program.program_steps.argtypes = [ctypes.c_uint32, ctypes.c_uint64, ctypes.c_uint64]
        self.libc = ctypes.CDLL(None)
        self.libc.getenv.restype = ctypes.c_char_p
        self.torch = FakeTorch() if options.torch else None
        self.children: List[int] = []
        self.commands: Dict[str, Callable[[List[str]], Dict[str, Any]]] = {
            "steps": self.steps,
            "launch": self.launch,
            "peer": self.peer,
            "kineto": self.profile,
            "fork": self.fork,
            "child": self.child,
            "environ": self.environ,
            "usage": self.usage,
        }

    def steps(self, words: List[str]) -> Dict[str, Any]:
        """Run training steps in some threads."""
        count, kernels, threads = int(words[0]), int(words[1]), int(words[2]) if len(words) > 2 else 1
        codes: List[int] = []

        def run(number: int) -> None:
            codes.append(self.program.program_steps(number, count, kernels))

        others = [threading.Thread(target=run, args=(number,)) for number in range(1, threads)]
        for other in others:
            other.start()
        run(0)
        for other in others:
            other.join()
        return {"code": max(codes)}

    def launch(self, words: List[str]) -> Dict[str, Any]:
        """Run kernels."""
        begin = time.perf_counter()
        code = self.program.program_launch(0, int(words[0]))
        return {"code": code, "seconds": time.perf_counter() - begin}

    def peer(self, words: List[str]) -> Dict[str, Any]:
        """Copy between GPUs."""
        return {"code": max(self.program.program_copy_between(0) for _ in range(int(words[0])))}

    def profile(self, words: List[str]) -> Dict[str, Any]:
        """Begin or end a session of the program's own profiler."""
        assert self.torch is not None
        session: Any = self.torch.session
        if words[0] == "begin":
            session._prepare_trace()
        elif words[0] == "lent":
            return {"lent": self.torch.kineto.xpupti_lent()}
        else:
            session.__exit__(*words[1:])
        return self.torch.answer

    def fork(self, _words: List[str]) -> Dict[str, Any]:
        """Fork a child that works, and ends as a C program does, with all exit handlers."""
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = self.program.program_steps(0, CHILD_STEPS, 10)
            self.libc.exit(7 if code == 0 else 1)
        end = time.monotonic() + FORK_LIMIT_S
        while time.monotonic() < end:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return {"child": pid, "status": os.waitstatus_to_exitcode(status)}
            time.sleep(0.01)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        return {"child": pid, "status": -1}

    def child(self, _words: List[str]) -> Dict[str, Any]:
        """Fork a child that waits to be killed."""
        pid = os.fork()
        if pid == 0:
            while True:
                time.sleep(0.01)
        self.children.append(pid)
        return {"pid": pid}

    def environ(self, words: List[str]) -> Dict[str, Any]:
        """One variable."""
        value = self.libc.getenv(words[0].encode())
        return {"value": None if value is None else value.decode()}

    def usage(self, _words: List[str]) -> Dict[str, Any]:
        """What the process holds."""
        gc.collect()
        self.libc.malloc_trim(0)
        status = Path("/proc/self/status").read_text()
        (own,) = (line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:"))
        return {
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "threads": len(list(Path("/proc/self/task").iterdir())),
            "own_kib": int(own),
        }

    def say(self, **values: Any) -> None:
        """One line of JSON."""
        sys.stdout.write(json.dumps(values) + "\n")
        sys.stdout.flush()

    def lines(self) -> Any:
        """The lines of standard input; steps run in between if that was asked for."""
        unread = ""
        while True:
            while self.options.forever and not select.select([0], [], [], PAUSE_S)[0]:
                self.program.program_steps(0, 1, self.options.kernels_per_step)
            data = os.read(0, 4096)
            if not data:
                return
            *whole, unread = (unread + data.decode()).split("\n")
            yield from whole

    def run(self) -> int:
        """Until "stop" comes, or standard input ends."""
        if self.options.level_zero:
            code = self.program.program_begin(self.options.threads)
            if code and self.options.warm_up:
                sys.stderr.write("Level Zero: %#x\n" % code)
                return 1
            if self.options.warm_up:
                self.program.program_steps(0, 1, self.options.kernels_per_step)
        self.say(ready=True, pid=os.getpid())
        for line in self.lines():
            word, *words = line.split()
            if word == "stop":
                break
            self.say(**self.commands[word](words))
        for pid in self.children:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        return 0


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description="A program that needs Level Zero.")
    parser.add_argument("--threads", type=int, default=4, help="command lists that are made, one for each thread")
    parser.add_argument("--kernels-per-step", type=int, default=10)
    parser.add_argument("--forever", action="store_true", help="run steps while no line comes")
    parser.add_argument("--torch", action="store_true", help="have a torch.profiler")
    parser.add_argument("--map", help="a library to load before anything else")
    parser.add_argument(
        "--no-warm-up", dest="warm_up", action="store_false", help="begin without a first step, and without a device"
    )
    parser.add_argument("--no-level-zero", dest="level_zero", action="store_false", help="do not initialise it")
    return App(parser.parse_args()).run()


if __name__ == "__main__":
    sys.exit(main())

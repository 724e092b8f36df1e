"""Compares the stack sampler with the program's own clock, and with py-spy at the same rate.

    python tests/bench/stacks.py [--seconds 6] [--hz 100] [--programs stat torch python uvloop uwsgi threads gil]

Each program has a function `heavy` and measures by its own clock what share of the time it spends there. Printed:
that share and the shares of the samples, ours and py-spy's (in processes of their own, with `--nonblocking` and
without); the CPU time of the program's steps while it is sampled, divided by that of the steps in between (the
sampler is switched on and off every 0.3 s); the sampler's own CPU time; and how many samples were torn (dropped) or
partial.

`uvloop` needs gunicorn, uvicorn and uvloop, `uwsgi` needs uWSGI, `torch` needs torch in --python's environment;
programs whose needs are missing are left out. The servers run with their own handlers, which this script calls over
HTTP.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from statistics import mean, median
from typing import Any, Callable, Dict, Iterator, List, Optional

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "agent"), str(ROOT / "tests")]

BLOCK_S = 0.3
PORT = 18437
SERVERS = ("uvloop", "uwsgi")
PROGRAMS = ("stat", "torch", "python", "threads", "gil", *SERVERS)


# ---------------------------------------------------------------- in the program

spent: Dict[str, float] = {"heavy": 0.0}


def spin(seconds: float) -> None:
    """Runs Python code with no call that would release the GIL except the clock's."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def count(times: int) -> int:
    """Runs pure Python."""
    total = 0
    for number in range(times):
        total += number * number
    return total


def clocked(heavy: Callable[[], object]) -> None:
    """Calls `heavy` once, timed by the program's clock."""
    begin = time.perf_counter()
    heavy()
    spent["heavy"] += time.perf_counter() - begin


def steps(kind: str) -> Callable[[], object]:
    """Makes one step of a loop."""
    if kind == "stat":

        def heavy() -> None:
            count(70_000)

        def step() -> None:
            clocked(heavy)
            for _ in range(20):
                os.stat("/")  # noqa: PTH116 - the bare system call

    elif kind == "torch":
        import torch

        torch.set_num_threads(1)
        small = torch.ones(64, 64)

        def heavy() -> None:
            count(30_000)

        def step() -> None:
            clocked(heavy)
            torch.mm(small, small)

    else:

        def heavy() -> None:
            count(45_000)

        def light() -> None:
            count(15_000)

        def step() -> None:
            clocked(heavy)
            light()

    return step


def loop(step: Callable[[], object], until: float, took: Optional[List[float]] = None) -> None:
    """Makes steps until the given time; `took` receives the CPU time of each."""
    while time.monotonic() < until:
        begin = time.thread_time()
        step()
        if took is not None:
            took.append(time.thread_time() - begin)


class Sampling:
    """A recording of this process, made as the agent makes it."""

    def __init__(self, hz: int) -> None:
        from support.agent.stack_recorder import Recorder

        self._recorder = Recorder(stack_sample_hz=hz)

    def result(self, thread: int = 0) -> Dict[str, float]:
        """Samples in `heavy` and all: of a thread that is not in Python all the time, or of all in `loop`."""
        samples = [each for each in self._recorder.stop() if each.stack]
        outcome = self._recorder.outcome
        self._recorder.close()
        own = [each for each in samples if (each.thread_id == thread if thread else "loop" in each.stack)]
        heavy = sum(any(name.endswith("heavy") for name in each.stack) for each in own)
        told = {name: outcome.metadata[name] for name in ("ticks", "torn_samples", "partial_stacks")}
        every = outcome.metadata["ticks"] if thread else len(own)
        return {"heavy": heavy, "all": every, "cpu_s": outcome.cpu_ns / 1e9, **told}


def run_loop(kind: str, seconds: float, hz: int) -> Dict[str, Any]:
    """Runs the program itself. hz 0: another process samples it."""
    step = steps(kind)
    loop(step, time.monotonic() + 0.5)
    print("ready", flush=True)
    sys.stdin.readline()
    if not hz:
        return {"heavy_time": share_of(kind, step, seconds)}
    calm: List[float] = []
    sampled: List[float] = []
    for turn in range(int(seconds / BLOCK_S)):
        recording = Sampling(hz) if turn % 2 else None
        loop(step, time.monotonic() + BLOCK_S, sampled if turn % 2 else calm)
        if recording is not None:
            recording.result()
    recording = Sampling(hz)
    heavy_time = share_of(kind, step, seconds)
    found = recording.result()
    return {"heavy_time": heavy_time, "cost": median(sampled) / median(calm), "seconds": seconds, **found}


def share_of(kind: str, step: Callable[[], object], seconds: float) -> float:
    """The share of the time in `heavy`, by the program's own clock."""
    others = 3 if kind in ("threads", "gil") else 1
    spent["heavy"] = 0.0
    began = time.monotonic()
    until = began + seconds
    threads = [threading.Thread(target=loop, args=(step, until)) for _ in range(others - 1)]
    for thread in threads:
        thread.start()
    loop(step, until)
    for thread in threads:
        thread.join()
    return spent["heavy"] / (time.monotonic() - began) / others


# ---------------------------------------------------------------- in the server

server: Dict[str, Any] = {}


def heavy() -> None:
    """What the handler does most of the time."""
    spin(0.004)


def answer(path: str) -> str:
    """Handles /begin-HZ and /end; the requests between them count, each being one `heavy` and something light."""
    if path.startswith("/begin"):
        hz = int(path.rpartition("-")[2])
        spent["heavy"] = 0.0
        server.update(began=time.monotonic(), sampling=Sampling(hz) if hz else None)
        return str(os.getpid())
    if path == "/end":
        heavy_time = spent["heavy"] / (time.monotonic() - server["began"])
        sampling = server["sampling"]
        found = sampling.result(threading.get_native_id()) if sampling else {}
        return json.dumps({"heavy_time": heavy_time, **found})
    clocked(heavy)
    return "x" * 100


def application(environ: Dict[str, Any], start_response: Any) -> List[bytes]:
    """The WSGI application."""
    body = answer(environ["PATH_INFO"]).encode()
    start_response("200 OK", [("Content-Length", str(len(body)))])
    return [body]


async def app(scope: Dict[str, Any], receive: Any, send: Any) -> None:
    """The ASGI application."""
    if scope["type"] != "http":
        return
    body = answer(scope["path"]).encode()
    await asyncio.sleep(0.001)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


# ---------------------------------------------------------------- outside


def get(path: str) -> str:
    """Sends a request to the server."""
    with urllib.request.urlopen("http://127.0.0.1:%d%s" % (PORT, path), timeout=30) as response:
        text: str = response.read().decode()
    return text


def server_command(kind: str, python: str) -> List[str]:
    """Command that starts the server."""
    here = Path(python).parent
    if kind == "uwsgi":
        return [
            str(here / "uwsgi"), "--http-socket", "127.0.0.1:%d" % PORT, "--master", "--processes", "1",
            "--enable-threads", "--lazy-apps", "--die-on-term", "--need-app", "--disable-logging", "--module",
            "stacks:application",
        ]  # fmt: skip
    return [
        str(here / "gunicorn"), "--bind", "127.0.0.1:%d" % PORT, "--workers", "1", "--worker-class",
        "uvicorn.workers.UvicornWorker", "stacks:app",
    ]  # fmt: skip


def missing(kind: str, python: str) -> str:
    """What the program needs and the interpreter's environment lacks; "" if nothing is missing."""
    modules = {"torch": ("torch",), "uvloop": ("gunicorn", "uvicorn", "uvloop"), "uwsgi": ()}
    for module in modules.get(kind, ()):
        if subprocess.run([python, "-c", f"import {module}"], check=False, capture_output=True).returncode != 0:
            return module
    return "uwsgi" if kind == "uwsgi" and not Path(server_command(kind, python)[0]).exists() else ""


def serving(kind: str, python: str) -> "Iterator[None]":
    """Starts a server and waits until it answers."""
    folder = str(Path(__file__).parent)
    child = subprocess.Popen(
        server_command(kind, python), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": folder},
    )  # fmt: skip
    try:
        for _ in range(200):
            try:
                get("/")
                break
            except OSError:
                time.sleep(0.1)
        yield
    finally:
        child.terminate()
        child.wait()


def requests(seconds: float) -> None:
    """Calls the handler repeatedly, one call after another."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        get("/")


def run_server(kind: str, python: str, seconds: float, hz: int, spy: Callable[[int], Any]) -> Dict[str, Any]:
    """One measurement of a server."""
    for _ in serving(kind, python):
        requests(0.5)
        pid = int(get("/begin-%d" % hz))
        watched = spy(pid)
        requests(seconds)
        result: Dict[str, Any] = {"seconds": seconds, **json.loads(get("/end"))}
        return {**result, **watched()}
    return {}


def run_program(kind: str, python: str, seconds: float, hz: int, spy: Callable[[int], Any]) -> Dict[str, Any]:
    """One measurement of a loop."""
    command = [python, __file__, "--role", kind, "--seconds", str(seconds), "--hz", str(hz)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    if child.stdout.readline() != "ready\n":
        return {}
    watched = spy(child.pid)
    child.stdin.write("\n")
    child.stdin.flush()
    result = json.loads(child.stdout.readline())
    child.wait()
    return {**result, **watched()}


def nobody(_pid: int) -> Callable[[], Dict[str, float]]:
    """The sampler that does nothing."""
    return dict


def py_spy(kind: str, seconds: float, hz: int, *flags: str) -> "Callable[[int], Callable[[], Dict[str, float]]]":
    """Samples with py-spy."""

    def begin(pid: int) -> Callable[[], Dict[str, float]]:
        raw = Path(tempfile.mkdtemp()) / "raw"
        command = [
            shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy")), "record", "--rate", str(hz),
            "--duration", "%d" % max(seconds - 1, 1), "--format", "raw", "--idle", "--output", str(raw), *flags,
            "--pid", str(pid),
        ]  # fmt: skip
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def end() -> Dict[str, float]:
            child.wait()
            found: Dict[str, float] = counted(raw, kind) if raw.exists() else {}
            shutil.rmtree(raw.parent)
            return found

        return end

    return begin


def counted(raw: Path, kind: str) -> Dict[str, float]:
    """Counts folded stacks such as "a (f:1);b (f:2) 17"."""
    result = {"heavy": 0.0, "all": 0.0}
    for line in raw.read_text().splitlines():
        stack, _space, number = line.rpartition(" ")
        names = [frame.partition(" (")[0] for frame in stack.split(";")]
        if kind in SERVERS or "loop" in names:
            result["all"] += int(number)
            result["heavy"] += int(number) * any(name.endswith("heavy") for name in names)
    return result


def told(results: List[Dict[str, Any]]) -> str:
    """Formats the program's clock and the samples of all runs."""
    results = [each for each in results if each.get("all")]
    if not results:
        return "none"
    samples = sum(each["heavy"] for each in results) / sum(each["all"] for each in results)
    return "%.1f / %.1f" % (100 * mean(each["heavy_time"] for each in results), 100 * samples)


def row(kind: str, python: str, seconds: float, hz: int, runs: int) -> str:
    """Runs all samplers, in turn."""
    run = run_server if kind in SERVERS else run_program
    samplers = {
        "ours": (hz, nobody),
        "nonblocking": (0, py_spy(kind, seconds, hz, "--nonblocking")),
        "py-spy": (0, py_spy(kind, seconds, hz)),
    }
    found: Dict[str, List[Dict[str, Any]]] = {name: [] for name in samplers}
    for _ in range(runs):
        for name, (own_hz, spy) in samplers.items():
            found[name].append(run(kind, python, seconds, own_hz, spy))
    ours = [each for each in found["ours"] if each.get("all")]
    if not ours:
        return "| %s | not there, or nothing sampled |" % kind
    costs = [each["cost"] for each in ours if "cost" in each]
    return "| %s | %s | %s | %s | %s | %.2f %% | %d / %d of %d |" % (
        kind, *map(told, found.values()), "x%.4f" % mean(costs) if costs else "",
        100 * mean(each["cpu_s"] / each["seconds"] for each in ours),
        sum(each["torn_samples"] for each in ours), sum(each["partial_stacks"] for each in ours),
        sum(each["all"] for each in ours),
    )  # fmt: skip


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--hz", type=int, default=100)
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, choices=PROGRAMS)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the programs")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        print(json.dumps(run_loop(arguments.role, arguments.seconds, arguments.hz)), flush=True)
        return 0
    print(
        "| program | clock / ours, % | clock / py-spy --nonblocking, % | clock / py-spy, % | cost, CPU of a step |",
        end="",
    )
    print(" sampler's CPU | torn / partial of samples |\n" + "|---" * 7 + "|")
    for kind in arguments.programs:
        if lacks := missing(kind, arguments.python):
            print(f"{kind} is left out: there is no {lacks} for {arguments.python}", file=sys.stderr)
            continue
        print(row(kind, arguments.python, arguments.seconds, arguments.hz, arguments.runs), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Stacks from outside, beside py-spy by turns; what looks do to a busy program, beside its twin; many ranks at once.

usage: looks.py [--turns 20] [--looks 1000] [--ranks 256] [--hosts 8]
(needs py-spy on PATH, and torch; root for the ranks)

Columns: wall and cpu = medians of one look in ms, a process each time; names it = looks that name the function in which
the program hangs. Then what a program that is looked at all the time says of itself, and its untouched twin: steps, the
median and the longest one in ms, results that differ, signals, and descriptors, threads and files that were left. Last:
one `kinetoctl stacks --rank all` of ranks that sleep, on that many daemons in PID namespaces of their own, in s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.waiting import until

HANGS = """
import sys, threading{more}
lock = threading.Lock()
lock.acquire()
def hangs():
    print(1, flush=True)
    lock.acquire()
hangs()
"""
BUSY = """
import hashlib, os, select, signal, sys, threading, time
steps, results, signals = [], set(), []
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, lambda number, frame: signals.append(number))
def held():
    return set(os.listdir("/proc/self/fd")), os.listdir("/proc/self/task"), os.listdir(os.environ["TMPDIR"])
before = held()
print(1, flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    digest, began = hashlib.sha256(), time.perf_counter()
    for number in range(20_000):
        digest.update(b"%d" % number)
    steps.append(time.perf_counter() - began)
    results.add(digest.hexdigest())
steps.sort()
left = [len(after) - len(first) for first, after in zip(before, held())]
print(len(steps), *(f"{each * 1e3:.2f}" for each in (steps[len(steps) // 2], steps[-1])), len(results) - 1,
      len(signals), *left, flush=True)
"""
# The first process of a PID namespace; its children are a daemon, and then some ranks.
HOST = """
import os, subprocess, sys
folder, first, ranks, size = sys.argv[1], *map(int, sys.argv[2:])
daemon = subprocess.Popen([
    sys.executable, "-m", "kinetod", "--listen", f"unix:{folder}/kinetod.sock",
    "--agent-socket", f"{folder}/agent.sock", "--state-dir", f"{folder}/state", "--min-free-bytes", "1MiB"])
for rank in range(first, first + ranks):
    environ = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size)}
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100000)"], env=environ)
daemon.wait()
"""
THREADS = "\nfor _ in range(200): threading.Thread(target=threading.Event().wait, daemon=True).start()"
PROGRAMS = {"python": "", "torch": ", torch", "torch and 200 threads": f", torch{THREADS}"}


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    """A program that has printed its first line."""
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(program)
    os.utime(file.name, (0, 0))
    process = subprocess.Popen(
        [sys.executable, file.name, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    Path(file.name).unlink()
    return process


def look(command: Sequence[str], question: bytes = b"") -> tuple[float, float, bytes]:
    """Wall and CPU time in ms, and the output."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, input=question, capture_output=True, check=False)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall * 1e3, cpu * 1e3, done.stdout or done.stderr


def ways(pid: int) -> dict[str, tuple[Sequence[str], bytes]]:
    """Commands, and what goes to their standard input."""
    question = json.dumps({"pid": pid, "uid": os.geteuid(), "deadline_s": 30}).encode()
    spy = shutil.which("py-spy") or sys.exit("no py-spy on PATH")
    return {
        "kinetod": ([sys.executable, "-P", "-m", "kinetod.stacks.read_process"], question),
        "py-spy dump --nonblocking": ([spy, "dump", "--nonblocking", "-p", str(pid)], b""),
        "py-spy dump": ([spy, "dump", "-p", str(pid)], b""),
        "py-spy dump --native": ([spy, "dump", "--native", "-p", str(pid)], b""),
    }


def beside_its_twin(looks: int) -> None:
    """Looks at one of two busy programs."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder  # where looks would leave files
        busy, twin = started(BUSY), started(BUSY)
        command, question = ways(busy.pid)["kinetod"]
        for _ in range(looks):
            look(command, question)
        names = ("steps", "median", "longest", "differ", "signals", "descr.", "threads", "files")
        print(f"\n{'':<24}{''.join(f'{name:>9}' for name in names)}")
        for which, process in ((f"looked at {looks} times", busy), ("untouched", twin)):
            said, _ = process.communicate("end\n")
            print(f"{which:<24}{''.join(f'{each:>9}' for each in said.split())}")
        del os.environ["TMPDIR"]


def first_child(pid: int) -> int:
    """The oldest child."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def used_s(pid: int) -> tuple[float, float]:
    """Processor time of a process and of its children that have ended."""
    own = [int(each) for each in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]]
    ticks = os.sysconf("SC_CLK_TCK")
    return (own[0] + own[1]) / ticks, (own[2] + own[3]) / ticks


def of_many_ranks(ranks: int, hosts: int, turns: int) -> None:
    """One command for all of them, on all hosts."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        each, environ = ranks // hosts, {**os.environ, "KINETOD_STORE_START_FREE_BYTES": "0"}
        daemons, listed = list[int](), ""
        for host in range(hosts):
            home = Path(folder, str(host))
            home.mkdir()
            command = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", HOST)
            arguments = (str(home), *map(str, (host * each, each, ranks)))
            outer = stack.enter_context(
                subprocess.Popen([*command, *arguments], env=environ, stderr=subprocess.DEVNULL)
            )
            stack.callback(outer.kill)
            until((home / "kinetod.sock").exists, "the daemon listens", 60)
            daemons.append(first_child(first_child(outer.pid)))
            listed += f"host{host} unix:{home}/kinetod.sock\n"
        Path(folder, "hosts").write_text(listed)
        program = [sys.executable, "-m", "kinetoctl", "stacks", "--hosts", f"{folder}/hosts", "--rank", "all"]
        print(f"\n{'ranks':>7}{'wall':>8}{'command':>9}{'daemons':>9}{'readers':>9}  {'verdict'}")
        for _ in range(turns):
            before = [used_s(pid) for pid in daemons]
            wall, cpu, answer = look([*program, "--timeout", "100s"])
            after = [used_s(pid) for pid in daemons]
            own, readers = (sum(b[n] - a[n] for a, b in zip(before, after, strict=True)) for n in (0, 1))
            verdict = answer.decode().partition("\n")[0]
            print(f"{ranks:>7}{wall / 1e3:>8.1f}{cpu / 1e3:>9.1f}{own:>9.1f}{readers:>9.1f}  {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--looks", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--hosts", type=int, default=8)
    options = parser.parse_args()
    print(f"{'program':<24}{'way':<28}{'wall':>8}{'cpu':>8}{'names it':>10}")
    for name, more in PROGRAMS.items():
        process = started(HANGS.replace("{more}", more))
        told: dict[str, list[tuple[float, float, bytes]]] = {}
        for _ in range(options.turns):
            for way, (command, question) in ways(process.pid).items():
                told.setdefault(way, []).append(look(command, question))
        process.kill()
        for way, looks in told.items():
            walls, cpus, answers = zip(*looks, strict=True)
            named = sum(b"hangs" in answer for answer in answers)
            print(f"{name:<24}{way:<28}{statistics.median(walls):>8.0f}{statistics.median(cpus):>8.0f}{named:>10}")
    beside_its_twin(options.looks)
    of_many_ranks(options.ranks, options.hosts, 3)


if __name__ == "__main__":
    main()

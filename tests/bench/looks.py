"""Stacks from outside, beside py-spy by turns, and what looks do to a busy program, beside its twin.

usage: looks.py [--turns 20] [--looks 300]          (needs py-spy on PATH, and torch)

Columns: wall and cpu = medians of one look in ms, a process each time; names it = looks that name the function in which
the program hangs. Last rows: median and longest step in ms, and steps, of a program that is looked at all the time, and
of its untouched twin.
"""

from __future__ import annotations

import argparse
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
import hashlib, sys, time
digest, steps = hashlib.sha256(), []
print(1, flush=True)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    began = time.perf_counter()
    for number in range(20_000):
        digest.update(b"%d" % number)
    steps.append(time.perf_counter() - began)
steps.sort()
print(steps[len(steps) // 2] * 1e3, steps[-1] * 1e3, len(steps), flush=True)
"""
THREADS = "\nfor _ in range(200): threading.Thread(target=threading.Event().wait, daemon=True).start()"
PROGRAMS = {"python": "", "torch": ", torch", "torch and 200 threads": f", torch{THREADS}"}


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    """A program that has printed its first line."""
    with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as file:
        file.write(program)
    os.utime(file.name, (0, 0))
    process = subprocess.Popen([sys.executable, file.name, *arguments], stdout=subprocess.PIPE, text=True)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--looks", type=int, default=300)
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
    busy, twin = started(BUSY, "60"), started(BUSY, "60")
    command, question = ways(busy.pid)["kinetod"]
    done = 0
    while done < options.looks and busy.poll() is None:
        look(command, question)
        done += 1
    for which, process in ((f"looked at {done} times", busy), ("untouched", twin)):
        assert process.stdout is not None
        print(f"{which:<24}{process.stdout.read().strip()}")


if __name__ == "__main__":
    main()

"""What an idle agent costs: import time, memory, wake-ups, step time. Prints one line per figure with its goal.

    python tests/bench/agent_idle.py

Each figure comes from fresh interpreters that differ in one thing only. This process plays the daemon's end of the
link, so that the agent is connected and waits.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "agent"), str(ROOT / "tests")]

from support.agent.agent_daemon import Daemon  # noqa: E402 - found through the line above

IMPORT = """
import sys, time
begin = time.perf_counter()
import kineto_agent
imported = time.perf_counter()
kineto_agent.start()
print((imported - begin) * 1e3, (time.perf_counter() - begin) * 1e3)
"""

# Modules that any training script has loaded long before; without them their cost would be counted as ours.
MEMORY = """
import os, sys
if sys.argv[1] == "agent":
    import kineto_agent; kineto_agent.start()
print("ready", flush=True); sys.stdin.readline()
for line in open("/proc/self/smaps_rollup"):
    if line.startswith(("Rss", "Pss")): print(line.split()[1], flush=True)
sys.stdin.readline()
"""

# The same process with and without in turn: two processes differ by more than an idle agent costs.
STEPS = """
import sys, time, kineto_agent
from kineto_agent.steps.counting import COUNTER
class Optimizer: pass
optimizer = Optimizer()
def work():
    total = 0
    for number in range(20000): total += number * number
def steps(hook):
    times = []
    for _ in range(200):
        begin = time.perf_counter_ns()
        work()
        if hook is not None: hook(optimizer, (), {})
        times.append(time.perf_counter_ns() - begin)
    times.sort()
    return times[len(times) // 2]
steps(None)
for _ in range(int(sys.argv[1])):
    without = steps(None)
    kineto_agent.start()
    print("ready", flush=True); sys.stdin.readline()
    print(steps(COUNTER.on_optimizer_step) / without, flush=True)
    kineto_agent.stop()
"""

WAKE_UPS = """
import os, sys, time
import kineto_agent; kineto_agent.start()
print("ready", flush=True); sys.stdin.readline()
def name_of(tid):
    with open("/proc/self/task/%s/comm" % tid) as comm: return comm.read().strip()
def switches(tid):
    with open("/proc/self/task/%s/status" % tid) as status:
        return [int(line.split()[1]) for line in status if "ctxt_switches" in line]
def cpu_ns(tid):
    with open("/proc/self/task/%s/schedstat" % tid) as stat: return int(stat.read().split()[0])
def used(): return [sum(each) for each in zip(*([*switches(tid), cpu_ns(tid)] for tid in ours))]
time.sleep(0.5)  # the welcome is dealt with
ours = [tid for tid in os.listdir("/proc/self/task") if name_of(tid).startswith("kineto-")]
assert len(ours) == 2, ours
before = used()
time.sleep(float(sys.argv[1]))
print(*(after - first for after, first in zip(used(), before)), flush=True)
"""


def interpreter(code: str, *arguments: str, env: "dict[str, str]") -> "subprocess.Popen[str]":
    """A fresh interpreter, connected by pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def lines(child: "subprocess.Popen[str]", daemon: "Daemon | None", count: int) -> "list[str]":
    """Output of the interpreter after "ready"; with a daemon, the agent is connected and welcomed before it goes on."""
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    if daemon is not None:
        daemon.welcome()
    child.stdin.write("\n")
    child.stdin.flush()
    said = [child.stdout.readline().strip() for _ in range(count)]
    child.stdin.close()
    child.wait(30)
    child.stdout.close()
    return said


def import_ms(env: "dict[str, str]", runs: int) -> "tuple[float, float]":
    """Best times of `import kineto_agent` and of the import with start(), in ms."""
    done = [
        subprocess.run([sys.executable, "-c", IMPORT], env=env, capture_output=True, text=True, check=True).stdout
        for _ in range(runs)
    ]
    pairs = [tuple(map(float, text.split())) for text in done]
    return min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)


def memory_kb(env: "dict[str, str]", daemon: Daemon, runs: int) -> "tuple[float, float]":
    """Median growth of RSS and of PSS by a connected idle agent, in KiB."""
    figures: dict[str, list[list[int]]] = {"plain": [], "agent": []}
    for _ in range(runs):
        for kind in figures:
            child = interpreter(MEMORY, kind, env=env)
            figures[kind].append([int(text) for text in lines(child, daemon if kind == "agent" else None, 2)])
    rss, pss = (median(row[i] for row in figures["agent"]) - median(row[i] for row in figures["plain"]) for i in (0, 1))
    return rss, pss


def step_ratio(env: "dict[str, str]", daemon: Daemon, runs: int) -> float:
    """Median over the runs of the median step time with an agent and its step hook, divided by that without."""
    child = interpreter(STEPS, str(runs), env=env)
    assert child.stdin is not None
    assert child.stdout is not None
    ratios = []
    for _ in range(runs):
        assert child.stdout.readline() == "ready\n"
        daemon.welcome()
        child.stdin.write("\n")
        child.stdin.flush()
        ratios.append(float(child.stdout.readline()))
    child.stdin.close()
    child.wait(30)
    child.stdout.close()
    return median(ratios)


def main() -> int:
    """Measures, prints, and returns the exit status: 0 if the goals were met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--idle-s", type=float, default=5.0)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Daemon(folder + "/agent.sock") as daemon:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("KINETO_", "PYTHON"))}
        env = {**env, "PYTHONPATH": str(ROOT / "agent"), "KINETO_AGENT_SOCKET": daemon.path}
        env["PYTHONPYCACHEPREFIX"] = folder + "/bytecode"  # compiled once, as in an installed package
        imported, started = import_ms({**env, "KINETO_AGENT_SOCKET": folder + "/none"}, arguments.runs)
        rss, pss = memory_kb(env, daemon, arguments.runs)
        child = interpreter(WAKE_UPS, str(arguments.idle_s), env=env)
        voluntary, involuntary, cpu_ns = map(int, lines(child, daemon, 1)[0].split())
        ratio = step_ratio(env, daemon, 5 * arguments.runs)
    figures = [
        ("import kineto_agent, ms", imported, 30.0),
        ("import and start(), ms", started, 30.0),
        ("more RSS, connected and idle, KiB", rss, 5 * 1024.0),
        ("more PSS, connected and idle, KiB", pss, 5 * 1024.0),
        ("voluntary context switches in %g s" % arguments.idle_s, voluntary, 0.0),
        ("involuntary context switches in %g s" % arguments.idle_s, involuntary, 0.0),
        ("CPU time of the agent's threads in %g s, ns" % arguments.idle_s, cpu_ns, 0.0),
        ("step time with / without an idle agent", ratio, 1.02),
    ]
    if arguments.json:
        print(json.dumps({name: value for name, value, _goal in figures}))
    else:
        for name, value, goal in figures:
            print("%-48s %10.3f   goal <= %-8g %s" % (name, value, goal, "ok" if value <= goal else "MISSED"))
    return 0 if all(value <= goal for _name, value, goal in figures) else 1


if __name__ == "__main__":
    sys.exit(main())

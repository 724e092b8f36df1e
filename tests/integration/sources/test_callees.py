"""What a process calls in C is named line by line: a real daemon, agent, sampler and decoder."""

from pathlib import Path

import pytest
from kineto_trace.model.line_counts import parse_callees
from kineto_trace.open.trace_opener import open_trace
from support.machine.pythons import python
from support.service.cli import kinetoctl, run_process, wait_for_agent
from support.service.daemon import Daemon
from support.targets.programs import program
from support.waiting import scaled_option

SOURCE = """\
import dis, hashlib, pickle, sys, threading, time, zlib

def work(rows, data):
    pickle.dumps(rows, protocol=0)
    zlib.compress(
        data, 6)
    sorted(rows * 20, key=None, reverse=True)
    hashlib.sha256(data * 10)
    ','.join(map(str, range(50_000))).encode()
    time.sleep(0.005)

threading.Thread(target=lambda: (sys.stdin.read(), __import__("os")._exit(0)), daemon=True).start()
rows, data = [[0.5 * place for place in range(300)] for _ in range(200)], bytes(range(256)) * 2000
print("ready", flush=True)
while True:
    work(rows, data)
"""
CALLEES = {  # by line
    4: {"pickle.dumps"},
    5: {"zlib.compress"},
    7: {"sorted"},
    8: {"hashlib.sha256"},
    9: {".join", "map", "range", ".encode"},
    10: {"time.sleep"},
}
OFTEN = {4: "pickle.dumps", 7: "sorted", 8: "hashlib.sha256", 9: ".join", 10: "time.sleep"}


@pytest.mark.slow
@pytest.mark.parametrize("version", [f"3.{minor}" for minor in range(10, 16)])
def test_the_c_functions_that_lines_call_are_in_the_trace(daemon: Daemon, tmp_path: Path, version: str) -> None:
    (tmp_path / "work.py").write_text(SOURCE)
    command = kinetoctl("--quiet", "run", "--", str(python(version)), str(tmp_path / "work.py"))
    with program(command, daemon, quiet=True) as process:
        wait_for_agent(daemon, process.pid)
        arguments = ["trace", "--pid", str(process.pid), "--activities", "python_function"]
        arguments += ["--duration", scaled_option(2)]
        result = run_process(arguments, daemon.client_environ(), tmp_path)
        assert result.code == 0, result
    (path,) = tmp_path.glob("*.json.gz")
    trace = open_trace(path)
    table = trace.table("python_function")
    of_work = [": work" in trace.strings[number] for number in table["name"]]
    texts = [trace.strings[number] for number in table["callees"][of_work] if number >= 0]
    told = {(entry.line, entry.callee) for text in texts for entry in parse_callees(text)}
    if version == "3.10":  # its code objects have no columns
        assert told == set()
    else:
        assert told <= {(line, name) for line, names in CALLEES.items() for name in names}
        assert told >= set(OFTEN.items())

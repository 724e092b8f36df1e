import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Sequence

import pytest
from support.agent.python_child import environment
from support.machine.native import collector, fake_cupti, fake_kineto_library
from support.targets import torch_forks

LINKED = {
    "lazy": ("-Wl,-z,lazy", "-Wl,-z,norelro"),
    "lazy, half read-only": ("-Wl,-z,lazy", "-Wl,-z,relro"),
    "read-only": ("-Wl,-z,now", "-Wl,-z,relro"),
    "without a procedure table": ("-fno-plt", "-Wl,-z,now", "-Wl,-z,relro"),
}
START = """
import ctypes, json, sys, threading
from kineto_agent.sources import collector_library
from kineto_agent.sources.torch.profiler_recorder import kept_off
collector_library.INSTALLED = %r
def on_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]
kineto = ctypes.CDLL(%r)
cupti = ctypes.CDLL(%r)
def on(kind):
    return bool(cupti.fake_is_enabled(kind))
"""


def run(linked: Sequence[str], plan: str) -> Any:
    start = START % (str(collector()), str(fake_kineto_library(*linked)), str(fake_cupti()))
    found = subprocess.run(
        [sys.executable, "-c", start + plan], env=environment(), capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.parametrize("linked", LINKED.values(), ids=list(LINKED))
def test_what_kineto_asks_for_on_this_thread_is_kept_off(linked: Sequence[str]) -> None:
    found = run(
        linked,
        """
cupti.cuptiActivityEnable(10)
with kept_off():
    results = [kineto.kineto_register(None, None)]
    results += [kineto.kineto_enable(39), kineto.kineto_enable(5), kineto.kineto_disable(10)]
    results += [kineto.kineto_single_call(304, 0), cupti.fake_single_calls()]
    inside = [on(kind) for kind in (39, 5, 10)]
    of_others = [on_thread(lambda: kineto.kineto_enable(4)), on(4)]
    of_others += [on_thread(lambda: kineto.kineto_disable(4)), on(4)]
    of_others += [on_thread(lambda: kineto.kineto_register(None, None)) != 0]
kineto.kineto_single_call(304, 0)
after = [cupti.fake_single_calls(), kineto.kineto_enable(5), on(5), kineto.kineto_disable(10), on(10)]
after += [kineto.kineto_register(None, None) != 0]
with kept_off():
    kineto.kineto_enable(39)
print(json.dumps([results, inside, of_others, after, on(39)]))
""",
    )
    assert found == [[0] * 6, [False, False, True], [0, True, 0, False, True], [1, 0, True, 0, False, True], False]


def test_a_table_that_was_writable_stays_so_and_a_read_only_one_too() -> None:
    plan = """
def permissions():
    with open("/proc/self/maps") as maps:
        return [line.split()[:2] for line in maps if "libtorch_cpu" in line]
before = permissions()
with kept_off():
    kineto.kineto_enable(5)
print(json.dumps(before == permissions()))
"""
    assert all(run(linked, plan) for linked in LINKED.values())


def test_without_cupti_there_is_nothing_to_do(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f0000-7f1000 r-xp 0 0:0 1 /usr/lib/libc.so.6\n")
    plan = f"with kept_off(maps={str(maps)!r}):\n    kineto.kineto_enable(5)\nprint(json.dumps(on(5)))"
    assert run(LINKED["lazy"], plan) is True


def test_a_library_that_does_not_use_cupti_needs_no_gate() -> None:
    plan = """
for library in ("libc.so.6", "libnowhere.so"):
    with kept_off(library=library):
        pass
kineto.kineto_enable(5)
print(json.dumps(on(5)))
"""
    assert run(LINKED["lazy"], plan) is True


def test_one_gate_at_a_time() -> None:
    plan = """
from kineto_agent.sources.interface import SourceError
found = []
with kept_off():
    try:
        with kept_off():
            found.append("entered")
    except SourceError as error:
        found.append(error.reason_code + ": " + str(error))
kineto.kineto_enable(5)
print(json.dumps([*found, on(5)]))
"""
    refused, enabled = run(LINKED["lazy"], plan)
    assert refused.startswith("TORCH_PROFILER_UNAVAILABLE: ") and "is being kept off CUPTI already" in refused
    assert enabled


def test_what_is_not_required_goes_on_without_it() -> None:
    plan = """
with kept_off():
    with kept_off(required=False):
        kineto.kineto_enable(39)
kineto.kineto_enable(5)
print(json.dumps([on(39), on(5)]))
"""
    assert run(LINKED["read-only"], plan) == [False, True]


@pytest.mark.parametrize("linked", LINKED.values(), ids=list(LINKED))
def test_a_child_forked_while_a_gate_is_up_has_none_and_may_put_one_up(linked: Sequence[str]) -> None:
    plan = """
import os
reader, writer = os.pipe()
with kept_off():
    pid = os.fork()
    if pid == 0:
        found = [kineto.kineto_enable(4), on(4)]
        with kept_off():
            found += [kineto.kineto_enable(39), on(39)]
        found += [kineto.kineto_enable(5), on(5)]
        os.write(writer, json.dumps(found).encode())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    kineto.kineto_enable(5)
print(json.dumps([json.loads(os.read(reader, 100)), on(5)]))
"""
    assert run(linked, plan) == [[0, True, 0, False, 0, True], False]


SILENT = {"stderr": "", "stdout": ""}
ROUNDS = """
import ctypes
model = Model()
for _ in range(2):
    recording = Recording(stack_trace=True, record_shapes=True)
    for _ in range(20):
        model.step()
    outcome, data = recording.stop()
    assert data.count(b'"name": "step"') == 20 and not outcome.warnings, outcome
level = ctypes.c_int.in_dll(libtorch_symbols.library(), "_ZN9libkineto6Logger14severityLevel_E").value
Path(sys.argv[2]).write_text(json.dumps(level))
"""


def spoken(plan: str, tmp_path: Path, **variables: str) -> Dict[str, str]:
    found = torch_forks.run(
        "-m",
        "support.agent.torch_session",
        plan,
        str(tmp_path / "level"),
        env=environment(TMPDIR=str(tmp_path), **variables),
    )
    assert found.returncode == 0, found.stderr
    return {"stderr": found.stderr, "stdout": found.stdout}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({}, 4),
        pytest.param({"KINETO_LOG_LEVEL": ""}, 4, marks=pytest.mark.slow),
        pytest.param({"KINETO_LOG_LEVEL": "0"}, 0, marks=pytest.mark.slow),
        ({"KINETO_LOG_LEVEL": "2"}, 2),
    ],
)
def test_the_first_use_of_kineto_is_silent_and_leaves_the_log_level_that_torch_sets(
    variables: Dict[str, str], level: int, tmp_path: Path
) -> None:
    assert spoken(ROUNDS, tmp_path, **variables) == SILENT
    assert json.loads((tmp_path / "level").read_text()) == level


@pytest.mark.torch
def test_the_programs_own_profiler_is_whole_after_kineto_was_started_by_us(tmp_path: Path) -> None:
    plan = """
import torch
model = Model()
Recording().stop()
with torch.profiler.profile() as profile:
    for _ in range(10):
        model.step()
assert sum(event.name == "step" for event in profile.events()) == 10
"""
    assert "External init callback" not in spoken(plan, tmp_path)["stderr"]


@pytest.mark.torch
def test_a_torch_that_cannot_be_started_silently_is_refused(tmp_path: Path) -> None:
    plan = """
from kineto_agent.sources.torch import profiler_recorder
from kineto_agent.sources.interface import SourceError
profiler_recorder._REGISTER_CLIENT = "missing"
try:
    Recording()
except SourceError as error:
    assert (error.reason_code, "standard error" in error.reason) == ("TORCH_PROFILER_UNAVAILABLE", True)
else:
    raise AssertionError
"""
    assert spoken(plan, tmp_path) == SILENT

"""What is said about collectives, beside what torch's own profiler says about the same ones."""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.decode.torch.torch_ops import comms_text
from support.agent.python_child import environment
from support.machine.native import CACHE, FAKES
from support.targets import torch_forks

SOURCE = FAKES / "collectives.cpp"


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX") or "g++")


def library() -> Path:
    """The compiled library; the same input is compiled once."""
    torch = pytest.importorskip("torch")
    folder = Path(torch.__file__).parent
    found = compiler()
    assert found is not None
    command = [
        found, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-I{folder / 'include'}",
        f"-I{folder / 'include' / 'torch' / 'csrc' / 'api' / 'include'}", str(SOURCE),
        f"-L{folder / 'lib'}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    state = hashlib.sha256("\0".join([*command, torch.__version__, SOURCE.read_text()]).encode()).hexdigest()
    target = CACHE / state[:20] / "libcollectives.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f"{target.name}.{os.getpid()}")
        subprocess.run([*command, "-o", str(scratch)], check=True)
        scratch.replace(target)
    return target


pytestmark = [pytest.mark.slow, pytest.mark.torch]
PLAN = """
import ctypes, json, sys
say = ctypes.CDLL(sys.argv[3])
say.say_all_reduce.argtypes = [ctypes.c_long]
recording = Recording()
with profiler() as profile:
    train(model())
    say.say_all_reduce(5)
    say.say_all_reduce(1 << 40)
    say.say_all_to_all()
outcome = recording.stop()
profile.export_chrome_trace(sys.argv[2])
places = [op.number for op in recording.ops if op.name == "record_param_comms"]
ours = [(number, sequence, entry.hex()) for number, sequence, _transfer, entry in recording.collectives]
print(json.dumps({"places": places, "ours": ours, "dtypes": recording.session.metadata["dtypes"]}))
"""
UNKNOWN = {"External id", "Record function id", "Ev Idx", "Comms Id", "Is asynchronized op"}


def test_collectives_are_described_as_torchs_profiler_describes_them(tmp_path: Path) -> None:
    if compiler() is None:
        pytest.skip("needs a C++ compiler")
    file = tmp_path / "trace.json"
    child = torch_forks.run("-m", "support.agent.ops_session", PLAN, str(file), str(library()), env=environment())
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout.splitlines()[-1])
    ours = [
        json.loads("{" + comms_text(bytes.fromhex(entry), sequence, found["dtypes"]) + "}")
        for _number, sequence, entry in found["ours"]
    ]
    assert [number for number, _sequence, _entry in found["ours"]] == found["places"]
    assert ours == kinetos(file)
    assert [each["Collective name"] for each in ours] == ["allreduce", "allreduce", "all_to_allv"]


def kinetos(file: Path) -> list[dict[str, Any]]:
    """The arguments in the order of the operators' starts."""
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event["name"] == "record_param_comms"]
    return [
        {key: value for key, value in event["args"].items() if key not in UNKNOWN}
        for event in sorted(events, key=lambda event: float(event["ts"]))
    ]

"""What is said about collectives, beside what torch's own profiler says about the same ones."""

import json
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.decode.torch.torch_comms import comms_text
from support.agent.python_child import environment
from support.targets import torch_forks

pytestmark = [pytest.mark.slow, pytest.mark.torch]
PLAN = """
import ctypes, json, sys
from support.targets import torch_collectives
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
    collectives = pytest.importorskip("support.targets.torch_collectives")
    if collectives.compiler() is None:
        pytest.skip("needs a C++ compiler")
    file = tmp_path / "trace.json"
    child = torch_forks.run(
        "-m", "support.agent.ops_session", PLAN, str(file), str(collectives.library()), env=environment()
    )
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

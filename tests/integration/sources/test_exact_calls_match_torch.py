"""Python's calls as we record them are those that torch's own tracer records around the same steps."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from kineto_agent.protocol.records import SPACE_PYTHON_CALL
from kineto_trace.decode import exact_calls
from kineto_trace.model.trace import StringTable, Table
from kineto_trace.spool.raw_records import Chunk, RawSource
from support.agent.python_child import environment
from support.targets import torch_forks

pytestmark = [pytest.mark.slow, pytest.mark.torch]
PLAN = """
import json, torch
from pathlib import Path
from support.agent.torch_session import Model
model = Model()
model.step()
def work():
    for _ in range(5):
        model.step()
recording = Recording()
work()
outcome, data, names = recording.stop()
assert not outcome.warnings and not outcome.incomplete, outcome
folder = Path(sys.argv[2])
(folder / "records").write_bytes(data)
(folder / "names").write_text(json.dumps([names, recording.session.metadata["prefixes"], threading.get_native_id()]))
with torch.profiler.profile(with_stack=True) as profile:
    work()
profile.export_chrome_trace(str(folder / "theirs.json"))
"""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")
_QUALIFIED = re.compile(r"(?<=\): )[\w.<>]*\.")  # torch's tracer names a method without its class


def _names_inside_work(table: Table, strings: StringTable, thread: int) -> Iterator[str]:
    """Of the calls of one thread. Before and after work() the recording sees its own start and stop."""
    columns = (table[name].tolist() for name in ("name", "thread", "start", "duration"))
    rows = [(strings.strings[name], *rest) for name, *rest in zip(*columns, strict=True)]
    (work,) = [row for row in rows if row[0].endswith(": work")]
    begin, end = work[2], work[2] + work[3]
    return (name for name, row_thread, start, _ in rows if row_thread == thread and begin <= start < end)


def test_rows_are_those_of_torchs_tracer(tmp_path: Path) -> None:
    child = torch_forks.run("-m", "support.agent.calls_session", PLAN, str(tmp_path), env=environment())
    assert child.returncode == 0, child.stderr
    names, prefixes, thread = json.loads((tmp_path / "names").read_text())
    data, strings = (tmp_path / "records").read_bytes(), StringTable()
    source = RawSource(
        source="python_calls", format=exact_calls.FORMAT, metadata={"prefixes": prefixes}, record_bytes={}, records=0,
        dropped=0, data=memoryview(data), chunks=(Chunk(sequence=0, records=0, offset=0, size=len(data)),),
        strings={SPACE_PYTHON_CALL: {int(number): text.encode() for number, text in names.items()}}, torn=0,
    )  # fmt: skip
    table = exact_calls.decode(source, strings).tables["python_function"]
    ours = Counter(_QUALIFIED.sub("", name) for name in _names_inside_work(table, strings, thread))
    events = json.loads((tmp_path / "theirs.json").read_text())["traceEvents"]
    theirs = Counter(_ADDRESS.sub(">", event["name"]) for event in events if event.get("cat") == "python_function")
    inside = {name for name, count in theirs.items() if count % 5 == 0}  # what is called in each of the five steps
    assert len(inside) > 40 and {"nn.Module: Sequential_0", "nn.Module: Linear_1"} <= inside
    assert {name: ours[name] for name in inside} == {name: theirs[name] for name in inside}

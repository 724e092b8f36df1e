"""From torch's own profiler in a process to tables."""

import json
from decimal import Decimal
from pathlib import Path

import pytest
from kineto_trace.decode.decoded import Decoded
from kineto_trace.decode.torch import kineto_json
from kineto_trace.model.trace import StringTable
from kineto_trace.spool.raw_records import Chunk, RawSource
from kineto_trace.structure.activity_links import forward_backward
from support.agent.python_child import environment
from support.targets import torch_forks

pytestmark = pytest.mark.torch
MIB = 1 << 20
PLAN = """
model = Model()
model.step()
recording = Recording(with_flops=True)
def work():
    for _ in range(5):
        model.step()
work()
thread = threading.Thread(target=work)
thread.start()
thread.join()
outcome, data = recording.stop()
Path(sys.argv[2]).write_bytes(data)
print(json.dumps({**recording.session.metadata, **outcome.metadata}))
"""


def test_the_tables_say_what_the_trace_of_torch_says(tmp_path: Path) -> None:
    file = tmp_path / "recording"
    child = torch_forks.run("-m", "support.agent.torch_session", PLAN, str(file), env=environment())
    assert child.returncode == 0, child.stderr
    data, strings = file.read_bytes(), StringTable()
    trace = kineto_json.decode(_source(data, json.loads(child.stdout.splitlines()[-1])), strings)
    assert (trace.undecoded, trace.warnings) == (0, ())
    document = json.loads(data[1:], parse_float=Decimal)  # a float of microseconds may be half a nanosecond off
    events, base = document["traceEvents"], document["baseTimeNanoseconds"]
    for kind, table in trace.tables.items():
        found = sorted(
            (round(event["ts"] * 1000), event["tid"], event["name"]) for event in events if event.get("cat") == kind
        )
        columns = (table["start"].tolist(), table["thread"].tolist(), table["name"].tolist())
        assert (
            sorted((start - base, tid, strings.strings[name]) for start, tid, name in zip(*columns, strict=True))
            == found
        )
        assert len(table) > 10 or kind == "python_function"  # never by torch
    _links_are_the_arrows(trace, events)
    ops = trace.tables["cpu_op"]
    flops = {strings.strings[number].rpartition(": ")[2] for number in ops["inputs"].tolist() if number >= 0}
    assert "512" in flops  # aten::addmm of 4 x 8 and 8 x 8


def _links_are_the_arrows(trace: Decoded, events: list[dict[str, object]]) -> None:
    pairs = forward_backward(trace.tables)
    assert len(pairs.forward_rows) == sum(event.get("cat") == "fwdbwd" and event["ph"] == "s" for event in events) > 30
    ops = trace.tables["cpu_op"]
    assert (ops["torch_thread"][pairs.forward_rows] == ops["forward_thread"][pairs.backward_rows]).all()
    assert len(set(ops["torch_thread"].tolist()) - {0}) == 2


def _source(data: bytes, metadata: dict[str, object]) -> RawSource:
    chunks = [
        Chunk(sequence=at, records=1, offset=at, size=min(MIB, len(data) - at)) for at in range(0, len(data), MIB)
    ]
    return RawSource(
        source="torch_ops", format="kineto_json/1", metadata=metadata, record_bytes={}, records=len(chunks), dropped=0,
        data=memoryview(data), chunks=tuple(chunks), strings={}, torn=0,
    )  # fmt: skip

"""The operators that captured CUDA graphs, in files for viewers: a replay's work has no operator of its own there."""

import io
import json
from collections.abc import Callable

import pytest
from kineto_trace.formats.chrome.chrome_writer import write_chrome
from kineto_trace.formats.perfetto.perfetto_reader import load_perfetto
from kineto_trace.formats.perfetto.perfetto_writer import write_perfetto
from kineto_trace.formats.text_sinks import TextSink
from kineto_trace.model.trace import Trace
from support.trace_files.captured_graph import OPS, context, op

Ops = dict[str, object]


def in_chrome(trace: Trace) -> Ops:
    file = io.BytesIO()
    with TextSink(file) as sink:
        write_chrome(trace, sink, trace_name="trace.json")
    events = json.loads(file.getvalue())["traceEvents"]
    return {event["name"]: event["args"].get("captured op") for event in events if event.get("ph") == "X"}


def in_perfetto(trace: Trace) -> Ops:
    """The same from a .pftrace file, whose arguments the reader keeps as they are."""
    file = io.BytesIO()
    with TextSink(file) as sink:
        write_perfetto(trace, sink)
    return in_chrome(load_perfetto(io.BytesIO(file.getvalue())))


@pytest.mark.parametrize("exported", [in_chrome, in_perfetto])
def test_work_of_a_replay_names_the_operator_that_captured_it(exported: Callable[[Trace], Ops]) -> None:
    found = exported(context().trace)
    work = {name: found[name] for name in ("gemm", "relu", "Memcpy DtoD", "cudaGraphLaunch")}
    assert work == {"gemm": "aten::mm", "relu": "aten::relu", "Memcpy DtoD": "aten::relu", "cudaGraphLaunch": None}


@pytest.mark.parametrize("exported", [in_chrome, in_perfetto])
@pytest.mark.parametrize("name", ['a"b', "back\\slash", "two\nlines", "</script>", "имя"])
def test_any_operator_name_is_written(exported: Callable[[Trace], Ops], name: str) -> None:
    assert exported(context(ops=[OPS[0], op(0, name, 0), OPS[2]]).trace)["gemm"] == name


@pytest.mark.parametrize("exported", [in_chrome, in_perfetto])
def test_work_of_unknown_graphs_names_none(exported: Callable[[Trace], Ops]) -> None:
    found = exported(context(nodes=[], ops=[]).trace)
    assert found["gemm"] is None
    assert found["relu"] is None

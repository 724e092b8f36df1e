"""decode/torch/graph_nodes.py: captured graphs as tables."""

import struct
from pathlib import Path
from typing import Any

import pytest
from kineto_agent.protocol.records import (
    GRAPH_HEAD,
    GRAPH_MAGIC,
    GRAPH_NODE,
    GRAPH_NODES_FORMAT,
    GRAPH_NONE,
    GRAPH_OP,
)
from kineto_trace.decode.decoded import Decoded
from kineto_trace.decode.torch.graph_nodes import decode
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.model.trace import StringTable
from kineto_trace.open.raw_target import load_target
from kineto_trace.spool.raw_records import RawWriter, read_source

SIZES = bytes([1, 0, 1, 6, 2, 0]) + struct.pack("<4q", 3, 4, 4, 1)  # one float tensor
MANGLED = b"_ZN2at6native4reluEi"


def texts(*entries: bytes) -> tuple[bytes, list[int]]:
    """The texts of a graph, and where each begins."""
    data, places = b"", []
    for entry in entries:
        places.append(len(data))
        data += struct.pack("<I", len(entry)) + entry
    return data, places


def graph(*, parent: int = 0, operator: int = 1, name: int | None = None) -> bytes:
    """A kernel in an operator in an annotation, and a copy outside."""
    data, (kernel, outer, inner, inputs) = texts(MANGLED, b"forward", b"aten::relu", SIZES)
    nodes = GRAPH_NODE.pack(0, operator, kernel if name is None else name, 2, 3, 4, 32, 2, 1)
    nodes += GRAPH_NODE.pack(1, GRAPH_NONE, GRAPH_NONE, 0, 0, 0, 0, 0, 0)
    ops = GRAPH_OP.pack(GRAPH_NONE, outer, GRAPH_NONE, 7) + GRAPH_OP.pack(parent, inner, inputs, 0)
    size = GRAPH_HEAD.size + len(nodes) + len(ops) + len(data)
    return GRAPH_HEAD.pack(GRAPH_MAGIC, size, 2, 2, len(data), 0) + nodes + ops + data


def nested(depth: int) -> bytes:
    """A graph without nodes whose operators lie in each other."""
    data, (name,) = texts(b"aten::relu")
    parents = (GRAPH_NONE, *range(depth - 1))
    ops = b"".join(GRAPH_OP.pack(parent, name, GRAPH_NONE, 0) for parent in parents)
    return GRAPH_HEAD.pack(GRAPH_MAGIC, GRAPH_HEAD.size + len(ops) + len(data), 0, depth, len(data), 0) + ops + data


def overlapping(count: int) -> bytes:
    """A graph whose operators have names that begin everywhere in one long text of zeros and lengths."""
    data = struct.pack("<I", 256) * (count + 256)
    ops = b"".join(GRAPH_OP.pack(GRAPH_NONE, 4 * place, GRAPH_NONE, 0) for place in range(count))
    return GRAPH_HEAD.pack(GRAPH_MAGIC, GRAPH_HEAD.size + len(ops) + len(data), 0, count, len(data), 0) + ops + data


def spool(directory: Path, data: bytes, **metadata: Any) -> Path:
    with RawWriter(directory, source="graphs", format=GRAPH_NODES_FORMAT, metadata=metadata) as writer:
        half = len(data) // 2  # buffers end anywhere
        for sequence, part in enumerate((data[:half], data[half:])):
            writer.append_buffer(part, sequence=sequence, records=1)
        writer.finish(metadata={}, record_bytes={}, records=2, dropped=0)
    return directory


def decoded(tmp_path: Path, data: bytes, **metadata: Any) -> tuple[Decoded, list[str]]:
    strings = StringTable()
    dtypes = ["unsigned char", "signed char", "short", "int", "long", "Half", "float"]
    return decode(read_source(spool(tmp_path, data, dtypes=dtypes, **metadata)), strings), strings.strings


def test_nodes_and_operators_of_all_graphs_are_rows(tmp_path: Path) -> None:
    found, strings = decoded(tmp_path, graph() + graph())
    nodes, ops = found.tables["graph_node"], found.tables["graph_op"]
    assert nodes["graph"].tolist() == [0, 0, 1, 1]
    assert nodes["node"].tolist() == [0, 1, 0, 1]
    assert nodes["type"].tolist() == [0, 1, 0, 1]
    assert [strings[name] if name >= 0 else None for name in nodes["name"]] == ["at::native::relu(int)", None] * 2
    shapes = [nodes[name][0] for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")]
    assert shapes == [2, 3, 4, 32, 2, 1]
    assert nodes["operator"].tolist() == [1, -1, 3, -1]
    assert [strings[name] for name in ops["name"]] == ["forward", "aten::relu"] * 2
    assert (ops["parent"].tolist(), ops["scope"].tolist()) == ([-1, 0, -1, 2], [7, 0, 7, 0])
    assert ops["inputs"][0] == -1
    assert '"Input Dims": [[3,4]]' in strings[ops["inputs"][1]].replace(", ", ",")
    assert (found.records, found.undecoded, found.warnings) == (2, 0, ())


@pytest.mark.parametrize(
    "damaged",
    [
        b"?" + graph()[1:],
        graph(parent=1),
        graph(parent=5),
        graph(operator=2),
        graph(name=4000),
        graph().replace(SIZES, b"\xff" * len(SIZES)),
        graph()[:20],
        nested(129),
        overlapping(300),
    ],
    ids=["magic", "own parent", "no parent", "no operator", "no text", "inputs", "no head", "too deep", "overlapping"],
)
def test_a_damaged_graph_and_those_behind_it_are_left_out_and_counted(tmp_path: Path, damaged: bytes) -> None:
    found, _ = decoded(tmp_path, graph() + damaged + graph())
    assert (len(found.tables["graph_node"]), found.records, found.undecoded) == (2, 1, 1)


def test_operators_may_be_nested_as_deep_as_the_agent_notes(tmp_path: Path) -> None:
    found, _ = decoded(tmp_path, nested(128))
    assert (len(found.tables["graph_op"]), found.undecoded) == (128, 0)


def test_a_graph_whose_end_is_missing_is_left_out_and_counted(tmp_path: Path) -> None:
    found, _ = decoded(tmp_path, graph() + graph()[:-1])
    assert (len(found.tables["graph_node"]), found.records, found.undecoded) == (2, 1, 1)


def test_without_graphs_there_are_no_tables_and_the_agents_reasons_are_warnings(tmp_path: Path) -> None:
    found, _ = decoded(tmp_path, b"", left_out={"no room\x07": 3, "bad": "number", "none": 0})
    assert (found.tables, found.warnings) == (
        {}, ("the operators of 3 captured CUDA graphs are unknown: no room\\x07",)
    )  # fmt: skip
    assert decoded(tmp_path / "other", b"", left_out="text")[0].warnings == ()


def test_the_tables_of_graphs_are_in_the_trace_whatever_its_window(tmp_path: Path) -> None:
    target = TargetInfo(capture_id="c", host="h", pid=1, process_name="p", window_start_ns=10, window_end_ns=20)
    target.write(tmp_path)
    spool(tmp_path / "raw" / "graphs", graph())
    trace = load_target(tmp_path).trace
    assert (len(trace.table("graph_node")), len(trace.table("graph_op"))) == (2, 2)

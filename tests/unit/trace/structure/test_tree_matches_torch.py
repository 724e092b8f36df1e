"""The event tree and the links beside PyTorch's own, on a real profile of a training loop with two threads."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kineto_trace.model.trace import NO_ROW, StringTable, Table, make_table
from kineto_trace.structure.activity_links import forward_backward, with_evaluated_sequences
from kineto_trace.structure.nesting import KINDS, build
from support.targets import torch_forks

NAMED = ("start", "thread", "id", "scope", "sequence")

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def profiled(folder: Path, *options: str) -> dict[str, Any]:
    path = folder / "profile.json"
    done = torch_forks.run("-m", "support.targets.torch_profile", str(path), *options, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    profile: dict[str, Any] = json.loads(path.read_text())
    return profile


@pytest.fixture(scope="module")
def plain_profile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return profiled(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def stacks_profile(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return profiled(tmp_path_factory.mktemp("stacks"), "--stacks")


def tables_of(nodes: list[dict[str, Any]], strings: StringTable) -> tuple[dict[str, Table], dict[str, list[int]]]:
    """The nodes as tables, and for each table the nodes of its rows."""
    tables, places = {}, {}
    for kind in KINDS:
        places[kind] = [number for number, node in enumerate(nodes) if node["kind"] == kind]
        own = [nodes[number] for number in places[kind]]
        columns = {name: np.array([node[name] for node in own]) for name in NAMED}
        columns["name"] = strings.add_all([node["name"] for node in own])
        columns["duration"] = np.array([node["end"] - node["start"] for node in own])
        columns["finished"] = np.ones(len(own))
        tables[kind] = make_table(kind, len(own), columns)
    return tables, places


def test_every_op_of_every_thread_has_the_parent_that_pytorch_gives_it(plain_profile: dict[str, Any]) -> None:
    assert {node["thread"] for node in plain_profile["nodes"]} == {1, 2}
    assert_same_parents(plain_profile["nodes"])


def test_every_op_among_python_calls_has_the_parent_that_pytorch_gives_it(stacks_profile: dict[str, Any]) -> None:
    assert any(node["kind"] == "python_function" for node in stacks_profile["nodes"])
    assert_same_parents(stacks_profile["nodes"])


def assert_same_parents(nodes: list[dict[str, Any]]) -> None:
    tables, places = tables_of(nodes, StringTable())
    assert len(nodes) > 2000
    tree = build(tables, max(node["end"] for node in nodes))
    number = [places[KINDS[kind]][row] for kind, row in zip(tree.kind, tree.row, strict=True)]
    differ = 0
    for node, event in enumerate(number):
        theirs = nodes[event]["parent"]
        if theirs >= 0 and nodes[theirs]["thread"] != nodes[event]["thread"]:
            theirs = -1  # PyTorch hangs backward ops of an idle thread under the forward thread
        above = int(tree.parent[node])
        differ += (-1 if above == NO_ROW else number[above]) != theirs
    assert differ == 0


def test_links_are_those_that_pytorch_writes(plain_profile: dict[str, Any]) -> None:
    profile = plain_profile
    strings = StringTable()
    ops = tables_of(profile["nodes"], strings)[0]["cpu_op"]
    rows = [row for row in profile["trace"]["traceEvents"] if row.get("cat") == "cpu_op"]
    arguments = {row["args"]["External id"]: row["args"] for row in rows}
    forward_thread = np.array([arguments[number].get("Fwd thread id", 0) for number in ops["id"].tolist()], np.uint32)
    ops = Table("cpu_op", {**ops.columns, "torch_thread": ops["thread"], "forward_thread": forward_thread})

    row_at = {(row["tid"], row["ts"]): row["args"]["External id"] for row in rows}
    flows: dict[int, dict[str, int]] = {}
    for row in profile["trace"]["traceEvents"]:
        if row.get("cat") == "fwdbwd":
            flows.setdefault(row["id"], {})[row["ph"]] = row_at[row["tid"], row["ts"]]
    expected = {(flow["s"], flow["f"]) for flow in flows.values()}

    forward, backward = forward_backward({"cpu_op": ops})
    assert set(zip(ops["id"][forward].tolist(), ops["id"][backward].tolist(), strict=True)) == expected
    assert len(forward) == len(expected) > 100

    evaluate = np.array([text.startswith("autograd::engine::evaluate_function") for text in strings.strings])[
        ops["name"]
    ]
    bare = {name: ops[name].copy() for name in ("sequence", "forward_thread")}
    bare["sequence"][evaluate], bare["forward_thread"][evaluate] = -1, 0
    restored = with_evaluated_sequences(Table("cpu_op", {**ops.columns, **bare}), strings.strings)
    assert np.array_equal(restored["sequence"], ops["sequence"])
    assert np.array_equal(restored["forward_thread"], ops["forward_thread"])

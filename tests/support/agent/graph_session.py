"""Captures of CUDA graphs in a process with a real torch and a fake driver (tests/fakes/fake_graph_driver.c).

Run with "python -m support.agent.graph_session LIBRARY PLAN", where PLAN is Python text that uses what is here.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Callable, Iterator, NamedTuple

import torch
import torch.cuda.graphs
from kineto_agent.protocol.records import GRAPH_HEAD, GRAPH_NODE, GRAPH_NONE, GRAPH_OP
from kineto_agent.sources.torch import graph_captures
from kineto_agent.sources.torch.graph_captures import GraphCaptures, KeptGraphs

LIBRARY, PLAN = sys.argv[1:]
driver = ctypes.CDLL(LIBRARY)
driver.fake_counts.restype = driver.fake_queries.restype = ctypes.c_uint64
KERNEL, COPY, EMPTY = 0, 1, 5
_names: list[bytes] = []  # the driver has their addresses


class CUDAGraph:
    """Stands for torch's class, which needs a GPU."""

    def capture_begin(self, fail: bool = False) -> str:
        if fail:
            raise ValueError("torch's own")
        driver.fake_capture_begin()
        return "begun"

    def capture_end(self, fail: bool = False) -> None:
        driver.fake_capture_end()
        if fail:
            raise ValueError("torch's own")


def launch(name: str, kind: int = KERNEL) -> None:
    """Adds a node, as an operator does that launches a kernel."""
    _names.append(name.encode())
    driver.fake_add_node(kind, _names[-1])


class Launch(torch.autograd.Function):  # type: ignore[misc]
    """An operator that launches one kernel forward and two backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        launch("forward")
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        launch("backward")
        launch("", COPY)
        return grad * 1


class Node(NamedTuple):
    """One node with its names looked up. path: operators from the outermost on."""

    kind: int
    name: str
    path: tuple[str, ...]
    inputs: bytes
    grid: tuple[int, ...]
    block: tuple[int, ...]


def nodes(graph: bytes) -> list[Node]:
    """The nodes of one graph as it was handed over."""
    _, size, node_count, op_count, text_bytes, _ = GRAPH_HEAD.unpack_from(graph)
    assert size == len(graph) == GRAPH_HEAD.size + GRAPH_NODE.size * node_count + GRAPH_OP.size * op_count + text_bytes
    of_ops = GRAPH_HEAD.size + GRAPH_NODE.size * node_count
    texts = graph[of_ops + GRAPH_OP.size * op_count :]

    def text(place: int) -> bytes:
        if place == GRAPH_NONE:
            return b""
        (length,) = struct.unpack_from("<I", texts, place)
        return texts[place + 4 : place + 4 + length]

    ops = [GRAPH_OP.unpack_from(graph, of_ops + GRAPH_OP.size * number) for number in range(op_count)]

    def path(number: int) -> tuple[str, ...]:
        return () if number == GRAPH_NONE else (*path(ops[number][0]), text(ops[number][1]).decode())

    found = []
    for number in range(node_count):
        kind, op, name, *shape = GRAPH_NODE.unpack_from(graph, GRAPH_HEAD.size + GRAPH_NODE.size * number)
        inputs = b"" if op == GRAPH_NONE else text(ops[op][2])
        found.append(Node(kind, text(name).decode(), path(op), inputs, tuple(shape[:3]), tuple(shape[3:])))
    return found


def paths(graph: bytes) -> list[tuple[str, tuple[str, ...]]]:
    """Name and path of each node."""
    return [(node.name, node.path) for node in nodes(graph)]


@contextmanager
def capture(**end: Any) -> Iterator[None]:
    """A capture of the program."""
    graph = torch.cuda.graphs.CUDAGraph()
    graph.capture_begin()
    yield
    graph.capture_end(**end)


def in_thread(work: Callable[[], None]) -> None:
    """Runs it on another thread, to its end."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _library(name: bytes) -> str:
    return LIBRARY if name else ""


def install(captures: GraphCaptures) -> None:
    """Puts the stand-ins for what needs a GPU in their places, and watches."""
    torch.cuda.graphs.CUDAGraph = CUDAGraph
    torch.cuda._initialized = True
    torch.cuda.current_stream = lambda: SimpleNamespace(cuda_stream=1, device=SimpleNamespace(index=0))
    graph_captures._CUDA = LIBRARY
    graph_captures._mapped = _library
    captures.remove()  # where an agent runs already
    captures._shadows.clear()
    ready(captures)


def ready(captures: GraphCaptures) -> None:
    """Makes ready what the hooks need, as the agent's thread does, as if for the first time."""
    captures._refusal, captures._watcher = "", None
    captures.install()
    assert not captures.look()


def main() -> None:
    """Runs the plan."""
    captures = graph_captures.CAPTURES
    install(captures)

    def kept() -> KeptGraphs:
        return captures.kept()

    names = {**globals(), "captures": captures, "kept": kept, "os": os, "graph_session": graph_captures}
    exec(compile(PLAN, "plan", "exec"), names)


if __name__ == "__main__":
    main()

"""Which HLO instruction each kernel of a JAX program ran, from the modules that its executables have.

Theory of operation
    CUPTI's records know nothing of HLO, and the name of a kernel is not enough: XLA runs one kernel for all
    instructions that do the same, modules have kernels of the same name, and a library's kernel has a name of its own.
    So the kernels of a device are read as a text, in the order in which they were launched: those that one thread
    launched, by correlation id, and within the launch of a CUDA graph by node, which XLA adds in the order of the
    schedule. launch_orders.py knows which orders the modules allow.

    Each kernel gets the instructions that it may have run in some explanation of the whole text around it. Only what
    all of them agree on is said: the instruction, or at least the module. Where no explanation is left (a module that
    was freed meanwhile, another library on the same device, lost records) the text begins anew.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.id_sets import lookup
from kineto_trace.decode.xplane.hlo_arguments import HloArguments
from kineto_trace.model.hlo_module import HloModule
from kineto_trace.model.trace import API_TABLES, NO_STRING, StringTable, Table
from kineto_trace.structure.hlo.launch_orders import COLLECTIVE, COPY, LIBRARY, LaunchOrders

_DRIVERS_OWN = re.compile(r"mem(?:cpy|set)\w*$")  # copies of a CUDA graph that was instantiated before CUPTI came
_COLLECTIVE = re.compile(r"(?:nccl|rccl|.*nvshmem)", re.IGNORECASE)
MOST_POSSIBLE = 5000  # instructions that a kernel may have run: with more, nothing is said
Ints = npt.NDArray[np.int64]
States = frozenset[int]


def with_hlo(tables: Mapping[str, Table], modules: Sequence[HloModule], strings: StringTable) -> dict[str, Table]:
    """Returns the tables with the column `hlo` of kernels filled in, where it was unknown."""
    kernels = tables.get("kernel")
    if kernels is None or not len(kernels) or not modules:
        return dict(tables)
    names, place = np.unique(kernels["name"], return_inverse=True)
    texts = [strings.strings[number] for number in names.tolist()]
    orders = LaunchOrders(modules, texts)
    known = {token for state in orders.states for token in state.tokens}
    tokens = [text if text in known else _sort(text) for text in texts]
    numbers = _Numbers(orders, strings)
    hlo = np.full(len(kernels), NO_STRING, np.int32)
    for rows in _launch_sequences(tables, kernels):
        hlo[rows] = _explained([tokens[number] for number in place.reshape(-1)[rows].tolist()], orders, numbers)
    hlo = np.where(kernels["hlo"] == NO_STRING, hlo, kernels["hlo"])
    return {**tables, "kernel": Table("kernel", {**kernels.columns, "hlo": hlo.astype(np.int32)}, kernels.origin)}


def _sort(name: str) -> str:
    if _DRIVERS_OWN.match(name):
        return COPY
    return COLLECTIVE if _COLLECTIVE.match(name) else LIBRARY


def _launch_sequences(tables: Mapping[str, Table], kernels: Table) -> Iterator[Ints]:
    """Yields the rows of the kernels of each device and launching thread, in the order of their launches."""
    thread = _launching_threads(tables, kernels["correlation"])
    node = kernels["graph_node_id"].astype(np.int64)
    order = np.lexsort((kernels["start"], node, kernels["correlation"], thread, kernels["device"]))
    again = (
        (np.diff(kernels["correlation"][order].astype(np.int64)) == 0)
        & (np.diff(node[order]) == 0)
        & (node[order][1:] != 0)
    )
    if again.any():  # a node ran repeatedly in one launch: a loop inside the graph, which only times tell about
        repeated = np.isin(kernels["correlation"], kernels["correlation"][order][1:][again])
        node = np.where(repeated, 0, node)
        order = np.lexsort((kernels["start"], node, kernels["correlation"], thread, kernels["device"]))
    key = np.stack([kernels["device"][order].astype(np.int64), thread[order]])
    borders = np.flatnonzero((np.diff(key, axis=1) != 0).any(axis=0)) + 1
    yield from np.split(order, borders)


def _launching_threads(tables: Mapping[str, Table], correlation: npt.NDArray[np.uint32]) -> Ints:
    """Returns the thread of the call that launched each kernel; 0: no such call was recorded."""
    calls = [tables[kind] for kind in API_TABLES if kind in tables and len(tables[kind])]
    if not calls:
        return np.zeros(len(correlation), np.int64)
    ids = np.concatenate([call["correlation"] for call in calls])
    threads = np.concatenate([call["thread"] for call in calls]).astype(np.int64)
    found: Ints = lookup(correlation, ids, threads, 0)
    return found


class _Numbers:
    """The number of the arguments for each set of instructions: what all of them agree on."""

    def __init__(self, orders: LaunchOrders, strings: StringTable) -> None:
        self._states = orders.states
        self._arguments = HloArguments(strings)
        self._known: dict[States, int] = {}

    def of(self, states: States) -> int:
        """Returns NO_STRING if they agree on nothing."""
        found = self._known.get(states)
        if found is None:
            values = {self._values(number) for number in states}
            agreed = [column[0] if len(set(column)) == 1 else "" for column in zip(*values, strict=True)]
            if agreed and not agreed[1]:  # not even the module
                agreed = []
            found = self._known[states] = self._arguments.number(*agreed)
        return found

    def _values(self, number: int) -> tuple[str, ...]:
        state = self._states[number]
        instruction = state.instruction
        return instruction.name, state.module.name, instruction.op_name, instruction.source


class _Steps:
    """The automaton's steps between sets of states, each computed once."""

    def __init__(self, orders: LaunchOrders) -> None:
        self._orders = orders
        self._forward: dict[tuple[States, str], States] = {}
        self._backward: dict[tuple[States, str, States], States] = {}

    def forward(self, states: States, token: str) -> States:
        """The states after these that launch the token."""
        key = states, token
        found = self._forward.get(key)
        if found is None:
            found = self._forward[key] = frozenset().union(*(self._orders.after(each, token) for each in states))
        return found

    def backward(self, states: States, token: str, later: States) -> States:
        """Those of the states after which one of the later ones launches the token."""
        key = states, token, later
        found = self._backward.get(key)
        if found is None:
            kept = (each for each in states if not later.isdisjoint(self._orders.after(each, token)))
            found = self._backward[key] = frozenset(kept)
        return found


def _explained(tokens: Sequence[str], orders: LaunchOrders, numbers: _Numbers) -> list[int]:
    """Returns the number of the arguments of each token of a sequence."""
    steps = _Steps(orders)
    possible: list[States] = []
    states: States = frozenset()
    for token in tokens:
        states = steps.forward(states, token) or orders.accepting(token)
        if len(states) > MOST_POSSIBLE:
            states = frozenset()
        possible.append(states)
    later: States = frozenset()
    for place in range(len(tokens) - 1, -1, -1):
        if place + 1 < len(tokens):
            # Nothing is left where the text begins anew behind this place.
            possible[place] = steps.backward(possible[place], tokens[place + 1], later) or possible[place]
        later = possible[place]
    return [numbers.of(states) if states else NO_STRING for states in possible]

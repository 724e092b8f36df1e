"""Finds the HLO instruction of each kernel of a JAX program, from the modules of its executables.

Theory of operation
    CUPTI's records do not contain HLO, and the name of a kernel is not enough: XLA runs one kernel for all equal
    instructions, modules have kernels of the same name, and a library's kernel has a name of its own. So the kernels of
    a device are read as a text, in the order in which they were launched: those that one thread launched, by
    correlation id, and within the launch of a CUDA graph by node, which XLA adds in the order of the schedule.
    LaunchOrders has the orders that the modules allow.

    Each kernel gets the instructions that it may have run in some explanation of the whole text around it. The result
    is what all of them agree on: the instruction, or at least the module. If no explanation is left (a module that has
    been freed, another library on the same device, lost records) the text begins anew.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kineto_trace.arrays.id_sets import lookup
from kineto_trace.base.array_types import Ints, UInts32
from kineto_trace.decode.hlo_modules import HloArguments
from kineto_trace.model.hlo_module import HloInstruction, HloModule, Launch
from kineto_trace.model.trace import API_TABLES, NO_STRING, StringTable, Table

_DRIVERS_OWN = re.compile(r"mem(?:cpy|set)\w*$")  # copies of a CUDA graph that was instantiated before CUPTI came
_COLLECTIVE = re.compile(r"(?:nccl|rccl|.*nvshmem)", re.IGNORECASE)
MOST_POSSIBLE = 5000  # instructions that a kernel may have run: with more, it gets no result
States = frozenset[int]
LIBRARY, COLLECTIVE, COPY = "?library", "?collective", "?copy"
_SORTS = {
    Launch.FUSION: (LIBRARY, COPY),
    Launch.COPY: (COPY,),
    Launch.COLLECTIVE: (COLLECTIVE, COPY),
    Launch.LIBRARY: (LIBRARY, COPY),
}
MOST_AHEAD = 300  # instructions that may come next
MOST_STATES = 300_000
_MOST_STEPS = 20 * MOST_AHEAD  # of a search for them, over loops and calls
_MOST_FOLLOWING = 3_000_000  # in all
_CONTROL = (Launch.CALL, Launch.LOOP, Launch.BRANCH)


# In which orders modules can launch their instructions: an automaton over the names of kernels.
# Theory of operation
# Each launching instruction of each module is a state. It is followed by the next ones of the schedule; those that need
# not launch a kernel may be skipped; loops repeat, branches go either way, and after the last one any module may begin.
# A computation that is called from several places counts once, so that its end continues at each of them. That allows a
# little more than can happen, never less.
# A kernel is a token: its own name if XLA made it for an instruction of one of the modules, otherwise its kind
# (LIBRARY, COLLECTIVE, COPY). A fusion whose kernel is among the tokens launches exactly that one. One that is never
# seen may be a copy or a library's kernel instead, or nothing.
class TooManyOrders(Exception):
    """Nearly nothing of the module was seen, or it is too large."""


@dataclass(frozen=True, slots=True)
class LaunchState:
    """One instruction. tokens: what it may launch; exactly: it launches exactly one of them."""

    module: HloModule
    instruction: HloInstruction
    tokens: frozenset[str]
    exactly: bool


class LaunchOrders:
    """The automaton. States are numbers into `states`; names: of the kernels that were seen."""

    def __init__(self, modules: Sequence[HloModule], names: Iterable[str]) -> None:
        self.states: list[LaunchState] = []
        self._next: list[tuple[frozenset[int], bool]] = []  # states that may follow; whether the module may be over
        self._starts: dict[str, set[int]] = {}
        self._accepting: dict[str, set[int]] = {}
        self._following = 0
        seen = frozenset(names)
        for module in modules:
            with suppress(TooManyOrders):
                self._add(module, seen)
        for number, state in enumerate(self.states):
            for token in state.tokens:
                self._accepting.setdefault(token, set()).add(number)

    def accepting(self, token: str) -> frozenset[int]:
        """Returns the states that launch this token."""
        return frozenset(self._accepting.get(token, ()))

    def after(self, state: int, token: str) -> frozenset[int]:
        """Returns the states that may launch this token next."""
        following, over = self._next[state]
        found = {number for number in following if token in self.states[number].tokens}
        if not self.states[state].exactly and token in self.states[state].tokens:
            found.add(state)
        if over:
            found |= self._starts.get(token, set())
        return frozenset(found)

    def _add(self, module: HloModule, seen: frozenset[str]) -> None:
        flow, made = _Flow(module), _names_of(module)
        if len(self.states) + len(flow.launches) > MOST_STATES:
            raise TooManyOrders
        states: dict[int, LaunchState] = {}  # by node of the flow
        for node, instruction in flow.launches.items():
            own = frozenset(made[instruction.same_kernel]) & seen
            alone = bool(own) and instruction.launch is Launch.FUSION
            states[node] = LaunchState(module, instruction, own or frozenset(_SORTS[instruction.launch]), alone)

        def exactly(node: int) -> bool:
            return states[node].exactly

        following = []
        for node in states:
            following.append(flow.reach(node, exactly))
            self._following += len(following[-1][0])
            if self._following > _MOST_FOLLOWING:
                raise TooManyOrders
        begins, _empty = flow.reach(flow.begin, exactly)
        numbers = {node: len(self.states) + place for place, node in enumerate(states)}
        self.states += states.values()
        self._next += [(frozenset(numbers[node] for node in nodes), over) for nodes, over in following]
        for node in begins:
            for token in states[node].tokens:
                self._starts.setdefault(token, set()).add(numbers[node])


def _names_of(module: HloModule) -> dict[str, set[str]]:
    """Returns the possible names of the kernel of equal instructions."""
    found: dict[str, set[str]] = {}
    for instructions in module.computations.values():
        for instruction in instructions:
            found.setdefault(instruction.same_kernel, set()).add(instruction.kernel_name)
    return found


class _Flow:
    """The steps of a module as a graph: from each node to its possible successors. Node `end`: the module is over."""

    def __init__(self, module: HloModule) -> None:
        self.launches: dict[int, HloInstruction] = {}
        self._edges: list[list[int]] = []
        self._borders: dict[int, tuple[int, int]] = {}  # of computations: first and last node
        self._module = module
        self._todo: list[int] = []
        self.begin, self.end = self._computation(module.entry)
        while self._todo:
            self._fill(self._todo.pop())

    def _node(self) -> int:
        self._edges.append([])
        return len(self._edges) - 1

    def _computation(self, key: int) -> tuple[int, int]:
        if key not in self._borders:
            self._borders[key] = self._node(), self._node()
            self._todo.append(key)
        return self._borders[key]

    def _fill(self, key: int) -> None:
        at, last = self._borders[key]
        for instruction in self._module.computations.get(key, ()):
            after = self._node()
            if instruction.launch in _CONTROL:
                self._control(instruction, at, after)
            else:
                self.launches[after] = instruction
                self._edges[at].append(after)
            at = after
        self._edges[at].append(last)

    def _control(self, instruction: HloInstruction, at: int, after: int) -> None:
        inner = [self._computation(key) for key in instruction.called]
        if instruction.launch is Launch.LOOP and len(inner) == 2:
            # In any order: it need not be known which of the two is the condition.
            for begin, end in inner:
                self._edges[at].append(begin)
                self._edges[end] += [after, *(other for other, _end in inner)]
        else:
            for begin, end in inner:
                self._edges[at].append(begin)
                self._edges[end].append(after)
        if not inner:
            self._edges[at].append(after)

    def reach(self, node: int, exactly: Callable[[int], bool]) -> tuple[set[int], bool]:
        """Returns the launches that may come next, and whether the module may be over before. Raises TooManyOrders.

        exactly: which launches cannot be skipped.
        """
        found: set[int] = set()
        seen, todo = {node}, list(self._edges[node])
        while todo:
            each = todo.pop()
            if each in seen and not (each == node and each in self.launches):
                continue
            seen.add(each)
            if each in self.launches:
                if each in found:
                    continue
                found.add(each)
                if len(found) > MOST_AHEAD:
                    raise TooManyOrders
                if exactly(each):
                    continue
            if len(seen) > _MOST_STEPS:
                raise TooManyOrders
            todo += self._edges[each]
        return found, self.end in seen


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
    if again.any():  # a node ran repeatedly in one launch: a loop inside the graph, which only shows in the times
        repeated = np.isin(kernels["correlation"], kernels["correlation"][order][1:][again])
        node = np.where(repeated, 0, node)
        order = np.lexsort((kernels["start"], node, kernels["correlation"], thread, kernels["device"]))
    key = np.stack([kernels["device"][order].astype(np.int64), thread[order]])
    borders = np.flatnonzero((np.diff(key, axis=1) != 0).any(axis=0)) + 1
    yield from np.split(order, borders)


def _launching_threads(tables: Mapping[str, Table], correlation: UInts32) -> Ints:
    """Returns the thread of the call that launched each kernel; 0: no such call was recorded."""
    calls = [tables[kind] for kind in API_TABLES if kind in tables and len(tables[kind])]
    if not calls:
        return np.zeros(len(correlation), np.int64)
    ids = np.concatenate([call["correlation"] for call in calls])
    threads = np.concatenate([call["thread"] for call in calls]).astype(np.int64)
    found: Ints = lookup(correlation, ids, threads, 0)
    return found


class _Numbers:
    """The number of the arguments that all instructions of a set agree on."""

    def __init__(self, orders: LaunchOrders, strings: StringTable) -> None:
        self._states = orders.states
        self._arguments = HloArguments(strings)
        self._known: dict[States, int] = {}

    def of(self, states: States) -> int:
        """Returns the number of the arguments, or NO_STRING if they agree on nothing."""
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
        """Returns the states after these that launch the token."""
        key = states, token
        found = self._forward.get(key)
        if found is None:
            found = self._forward[key] = frozenset().union(*(self._orders.after(each, token) for each in states))
        return found

    def backward(self, states: States, token: str, later: States) -> States:
        """Returns those of the states after which one of the later ones launches the token."""
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
            # Empty if the text begins anew after this place.
            possible[place] = steps.backward(possible[place], tokens[place + 1], later) or possible[place]
        later = possible[place]
    return [numbers.of(states) if states else NO_STRING for states in possible]

"""In which orders modules can launch their instructions: an automaton over the names of kernels.

Theory of operation
    Each launching instruction of each module is a state. After it come the next ones of the schedule; those that need
    not launch a kernel may be stepped over; loops go round, branches go either way, and after the last one any module
    may begin. A computation that is called from several places counts once, so that its end goes on at each of them.
    That allows a little more than can happen, never less.

    A kernel is a token: its own name where XLA made it for an instruction of one of the modules, otherwise what sort it
    is of (LIBRARY, COLLECTIVE, COPY). A fusion whose kernel is among the tokens launches exactly that one. One that is
    never seen may be a copy or a library's kernel instead, or nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kineto_trace.model.hlo_module import HloInstruction, HloModule, Launch

LIBRARY, COLLECTIVE, COPY = "?library", "?collective", "?copy"
_SORTS = {
    Launch.FUSION: (LIBRARY, COPY),
    Launch.COPY: (COPY,),
    Launch.COLLECTIVE: (COLLECTIVE, COPY),
    Launch.LIBRARY: (LIBRARY, COPY),
}
MOST_AHEAD = 300  # instructions that may come next
MOST_STATES = 300_000
_MOST_STEPS = 20 * MOST_AHEAD  # of a walk to them, over loops and calls
_MOST_FOLLOWING = 3_000_000  # in all
_CONTROL = (Launch.CALL, Launch.LOOP, Launch.BRANCH)


class TooManyOrders(Exception):
    """Nearly nothing of the module was seen, or it is too large."""


@dataclass(frozen=True, slots=True)
class LaunchState:
    """One instruction. tokens: what it launches; exactly: one of them, no more and no less."""

    module: HloModule
    instruction: HloInstruction
    tokens: frozenset[str]
    exactly: bool


class LaunchOrders:
    """The automaton. States are numbers into `states`; names: those of the kernels that were seen."""

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
        """The states that launch this."""
        return frozenset(self._accepting.get(token, ()))

    def after(self, state: int, token: str) -> frozenset[int]:
        """The states that may launch this next."""
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
            own = frozenset(made[instruction.alike]) & seen
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
    """Returns the names that the kernel of instructions that are alike may have."""
    found: dict[str, set[str]] = {}
    for instructions in module.computations.values():
        for instruction in instructions:
            found.setdefault(instruction.alike, set()).add(instruction.kernel_name)
    return found


class _Flow:
    """The steps of a module as a graph: from each node to those that may come next. Node `end`: the module is over."""

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
            # In any order: which of the two is the condition need not be known.
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

        exactly: tells which launches nothing steps over.
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

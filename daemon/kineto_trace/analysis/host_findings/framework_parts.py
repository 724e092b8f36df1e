"""Divides what a framework does beside the training into parts, each of one function that does one thing.

Theory of operation
    The loop of a framework calls a function for several things, each only now and then: to log, to save, to evaluate.
    What each moment is for is its purpose: the kind of the library that was called, or an evaluation; below a function
    whose name says one purpose ("_save_checkpoint", not "_maybe_log_save_evaluate") it is that one. A subtree of the
    tree of calls (framework_calls.py) is divided from its top downwards. A function below that has another purpose than
    the rest, and enough time, is a part of its own, and so is each function of the user that is called back. Where one
    function has nearly all of what is left, it is looked into further.

    A part is named by the outermost function on that way whose name says its purpose, otherwise by the innermost one.
    Functions of torch and Python itself, through which frameworks call their own, have no say.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kineto_trace.analysis.host_findings.host_figures import LEAST, total_ns
from kineto_trace.analysis.host_time.call_tree import inclusive
from kineto_trace.analysis.host_time.framework_calls import framework_calls
from kineto_trace.analysis.host_time.host_moments import NOTHING, moments
from kineto_trace.analysis.host_time.moment_classes import Class, moment_classes
from kineto_trace.analysis.host_time.user_calls import user_calls
from kineto_trace.model.context import Context
from kineto_trace.structure.python.code_places import CodePlace, function_places
from kineto_trace.structure.python.library_calls import CALLING_BACK, CallKind, framework_of

DOMINATES = 0.8  # of the time of a function in one that it calls: then that one is named
MOSTLY = 0.6  # of a part's time: its purpose
MOST = 0.5  # of a part's time in the one function of the user that it calls back: then it is there for that
PART = 0.25  # of the time of a function that has a purpose, in one that it calls for another: then that is a part
EVALUATION = len(CallKind)  # a purpose beside those of CallKind
_WORDS: tuple[tuple[int, frozenset[str]], ...] = tuple(
    (purpose, frozenset(words.split()))
    for purpose, words in (
        (CallKind.CHECKPOINT, "save saves saving saver savings checkpoint checkpoints checkpointing checkpointer ckpt"),
        (
            EVALUATION,
            "evaluate evaluates evaluation evaluator evaluating eval validate validation validating val predict"
            " prediction predicting test testing score scores scoring scorer",
        ),
        (CallKind.LOGGING, "log logs logging logger report reports reporting progress print printing tensorboard"),
        (CallKind.CLIP, "clip clipping"),
    )
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class FrameworkPart:
    """A part of a framework's work. root: the node below which it is; what has another root below that is not of it.

    purpose: of most of it; NONE: not known, or the part is a function of the user.
    """

    root: int
    named: int
    purpose: int


def purposes(context: Context, evaluates: Flags) -> Ints:
    """Returns for each moment what it is for: a CallKind, or EVALUATION. evaluates: whether it is one, by functions."""
    found, calls, classes = context.get(moments), context.get(user_calls), context.get(moment_classes)
    kind, outer = calls.kind[found.place].astype(np.int64), calls.outer[found.place].astype(np.int64)
    kind = np.where((kind == CallKind.NONE) & np.isin(outer, CALLING_BACK), outer, kind)
    return np.where(evaluates | (classes.kind == Class.UNLINKED), EVALUATION, kind)


class FrameworkParts:
    """Divides subtrees of framework_calls."""

    def __init__(self, context: Context, aside: Flags, evaluates: Flags, trains: frozenset[int]) -> None:
        """Adds up what each node is for.

        aside: the moments that count. evaluates: as for purposes. trains: names of functions that train elsewhere: they
        are no parts, whoever calls them.
        """
        self._tree = tree = context.get(framework_calls)
        self._trains = trains
        self._least = LEAST * total_ns(context)
        node = tree.node[context.get(moments).place[aside]]
        own = np.zeros((len(tree), EVALUATION + 1))
        np.add.at(own, (node, purposes(context, evaluates)[aside]), context.get(moment_classes).weight[aside])
        places = context.get(function_places)
        self._place: list[CodePlace] = [places[name] for name in tree.name.tolist()]
        self._says = [purpose_said(place) for place in self._place]
        said = np.array(self._below_what_is_said(), np.int64)
        whole = own.sum(axis=1)
        own[said != CallKind.NONE] = 0
        own[np.arange(len(tree)), said] += np.where(said != CallKind.NONE, whole, 0)
        self._spent = inclusive(tree, own)
        self._weight = self._spent.sum(axis=1)
        self._below: dict[int, list[int]] = {}
        for place, above in enumerate(tree.parent.tolist()):
            if self._weight[place] > 0:
                self._below.setdefault(above, []).append(place)

    def of(self, start: int) -> Iterator[FrameworkPart]:
        """Yields the parts of a subtree; the first one has it for its root."""
        todo = [start]
        while todo:
            root = todo.pop(0)
            way, apart, left = self._followed(root)
            todo += apart
            if self._tree.user[way[-1]]:
                yield FrameworkPart(root, way[-1], CallKind.NONE)
            else:
                purpose = main_purpose(left)
                yield FrameworkPart(root, self._named(way, purpose), purpose)

    def _below_what_is_said(self) -> list[int]:
        """Returns for each node the purpose that it or the innermost function of a framework around it says."""
        said: list[int] = []
        for place, above in enumerate(self._tree.parent.tolist()):
            inherits = above != NOTHING and not self._is_users(place)
            said.append(self._says[place] or (said[above] if inherits else CallKind.NONE))
        return said

    def _followed(self, root: int) -> tuple[list[int], list[int], Floats]:
        """Returns the nodes from the root down that have nearly all of its time, and those below that are apart.

        The last part is what is left for each purpose. The user's function that is the only one called back, and has
        most of the time, is the end of the way.
        """
        apart = self._called_back(root)
        if len(apart) == 1 and self._weight[apart[0]] >= MOST * self._weight[root]:
            return [root, apart[0]], [], self._spent[root]
        way, gone = [root], self._gone(root, apart)
        while True:
            below = [node for node in self._below.get(way[-1], ()) if node not in apart]
            around = self._spent[way[-1]] - gone.get(way[-1], 0.0)
            left = {node: self._spent[node] - gone.get(node, 0.0) for node in below}
            apart += [node for node in below if self._is_apart(node, left[node], around)]
            gone = self._gone(root, apart)
            whole = self._spent[root] - gone.get(root, 0.0)
            rest = [node for node in below if node not in apart]
            inner = max(rest, key=lambda node: float(left[node].sum()), default=NOTHING)
            if inner == NOTHING or left[inner].sum() < DOMINATES * whole.sum() or self._tree.user[inner]:
                return way, apart, whole
            way.append(inner)

    def _called_back(self, root: int) -> list[int]:
        """Returns the user's functions with enough time that the framework calls back below this node."""
        found, todo = [], [root]
        while todo:
            node = todo.pop()
            if self._is_users(node):
                found.append(node)
            elif not self._tree.user[node]:
                todo += [below for below in self._below.get(node, ()) if self._weight[below] >= self._least]
        return found

    def _gone(self, root: int, apart: list[int]) -> dict[int, Floats]:
        """Returns what of the time of each node from the root down is below one of those that are apart."""
        gone: dict[int, Floats] = {}
        for node in apart:
            at = node
            while at != NOTHING:
                gone[at] = gone.get(at, 0.0) + self._spent[node]
                at = int(self._tree.parent[at]) if at != root else NOTHING
        return gone

    def _is_users(self, node: int) -> bool:
        return bool(self._tree.user[node]) and int(self._tree.name[node]) not in self._trains

    def _is_apart(self, node: int, own: Floats, around: Floats) -> bool:
        if self._tree.user[node] or own.sum() < self._least:
            return False
        purpose, whole = main_purpose(own), main_purpose(around)
        large = whole == CallKind.NONE or own.sum() >= PART * around.sum()
        return purpose not in (CallKind.NONE, whole) and large

    def _named(self, way: list[int], purpose: int) -> int:
        own = [node for node in way if framework_of(self._place[node])]
        saying = (node for node in own if self._says[node] == purpose != CallKind.NONE)
        return next(saying, own[-1] if own else way[0])


def purpose_said(place: CodePlace) -> int:
    """Returns the one purpose that the words of a framework's function say; NONE: none, several, or the user's."""
    if not framework_of(place):
        return CallKind.NONE
    words = {word.lower() for word in _WORD.findall(place.function)}
    found = [purpose for purpose, saying in _WORDS if words & saying]
    return found[0] if len(found) == 1 else CallKind.NONE


def main_purpose(spent: Floats) -> int:
    """Returns what most of the time is for; NONE if no purpose has enough of it. spent: the time of each purpose."""
    known = spent.copy()
    known[CallKind.NONE] = 0
    best = int(np.argmax(known))
    return best if known[best] >= MOSTLY * spent.sum() > 0 else CallKind.NONE

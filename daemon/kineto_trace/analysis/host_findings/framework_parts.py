"""Divides a framework's work other than training into parts, each of one function that does one thing.

Theory of operation
    The loop of a framework calls a function for several things, each only now and then: to log, to save, to evaluate.
    What each moment is for is its purpose: the kind of the library that was called, or an evaluation; below a function
    whose name says one purpose ("_save_checkpoint", not "_maybe_log_save_evaluate") it is that one. A subtree of the
    tree of calls (moment_classes.py) is divided from its top downwards. A function below it with another purpose than
    the rest, and enough time, is a part of its own, and so is each function of the user that is called back. If one
    function has nearly all of the rest, it is divided further.

    A part is named after the outermost function on that path whose name says its purpose, otherwise after the innermost
    one. Functions of torch and Python itself, through which frameworks call their own, are ignored.

Divides the training thread's work other than training into subtrees of its calls, each named after one function.
    A node of the tree of calls (moment_classes.py) belongs to the loop if the training runs below it; all other code
    hangs below such nodes. Each largest subtree without training is one, for all of its time. It is named after the
    innermost user's function that has nearly all of that time, so that neither a wrapper nor one of several helpers
    gets the name. The self time of a function of the loop is given by line.

    A subtree below a framework's own loop is divided further (framework_parts.py).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kineto_trace.analysis.host_findings.threads import LEAST, total_ns
from kineto_trace.analysis.host_time.moment_classes import LOOP, TRAINING, MomentClass, framework_calls, moment_classes
from kineto_trace.analysis.host_time.user_calls import (
    CallTree,
    heaviest_below,
    inclusive_sums,
    moments,
    own_lines,
    thread_slices,
    user_calls,
)
from kineto_trace.arrays.row_groups import places_by_value
from kineto_trace.base.array_types import NOTHING, Flags, Floats, Ints
from kineto_trace.model.context import Context
from kineto_trace.structure.library_calls import CALLING_BACK, CallKind, CodePlace, framework_of, function_places

DOMINATES = 0.8  # of the time of a function in one callee: then the callee is named
MOSTLY = 0.6  # of a part's time for one purpose: then the part has it
MOST = 0.5  # of a part's time in the one function of the user that it calls back: then the part exists for it
PART = 0.25  # of the time of a function with a purpose, in one callee with another purpose: then the callee is a part
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
WITHOUT = 0.25  # of the operators without a backward: fewer with one are sampling errors
_EVALUATION, _CHECKPOINT, _LOGGING, _CLIP = (
    "evaluation_in_the_step",
    "user_code_checkpoint",
    "user_code_logging",
    "user_code_clip",
)
_SETTINGS = {
    ("transformers", _EVALUATION): "TrainingArguments: eval_strategy, eval_steps.",
    ("transformers", _CHECKPOINT): "TrainingArguments: save_strategy, save_steps, save_only_model.",
    ("transformers", _LOGGING): "TrainingArguments: logging_steps, report_to, disable_tqdm.",
    ("transformers", _CLIP): "TrainingArguments: max_grad_norm.",
    ("lightning", _EVALUATION): "Trainer: val_check_interval, check_val_every_n_epoch, limit_val_batches.",
    ("lightning", _CHECKPOINT): "ModelCheckpoint: every_n_train_steps, every_n_epochs, save_weights_only.",
    ("lightning", _LOGGING): "Trainer: log_every_n_steps, enable_progress_bar.",
    ("lightning", _CLIP): "Trainer: gradient_clip_val.",
}
_SAME = {"accelerate": "transformers", "pytorch_lightning": "lightning", "lightning_fabric": "lightning"}


@dataclass(frozen=True, slots=True)
class FrameworkPart:
    """A part of a framework's work.

    root: its top node; nodes below another part's root do not belong to it.
    purpose: of most of it; NONE if unknown, or if the part is a function of the user.
    """

    root: int
    named: int
    purpose: int


class FrameworkParts:
    """Divides subtrees of framework_calls."""

    def __init__(self, context: Context, aside: Flags, evaluates: Flags, trains: frozenset[int]) -> None:
        """Adds up the time of each node by purpose.

        aside: the moments that count.
        evaluates: as for purposes.
        trains: names of functions that train elsewhere: they are no parts, whoever calls them.
        """
        self._tree = tree = context.get(framework_calls)
        self._trains = trains
        self._least = LEAST * total_ns(context)
        node = tree.node[context.get(moments).place[aside]]
        own = np.zeros((len(tree), EVALUATION + 1))
        np.add.at(own, (node, purposes(context, evaluates)[aside]), context.get(moment_classes).weight[aside])
        places = context.get(function_places)
        self._place: list[CodePlace] = [places[name] for name in tree.name.tolist()]
        self._says = [purpose_by_name(place) for place in self._place]
        said = np.array(self._below_what_is_said(), np.int64)
        whole = own.sum(axis=1)
        own[said != CallKind.NONE] = 0
        own[np.arange(len(tree)), said] += np.where(said != CallKind.NONE, whole, 0)
        self._spent = inclusive_sums(tree, own)
        self._weight = self._spent.sum(axis=1)
        self._below: dict[int, list[int]] = {}
        for place, above in enumerate(tree.parent.tolist()):
            if self._weight[place] > 0:
                self._below.setdefault(above, []).append(place)

    def of(self, start: int) -> Iterator[FrameworkPart]:
        """Yields the parts of a subtree; the first one has its root."""
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
        """Returns for each node the purpose stated by it or by the innermost function of a framework around it."""
        said: list[int] = []
        for place, above in enumerate(self._tree.parent.tolist()):
            inherits = above != NOTHING and not self._is_users(place)
            said.append(self._says[place] or (said[above] if inherits else CallKind.NONE))
        return said

    def _followed(self, root: int) -> tuple[list[int], list[int], Floats]:
        """Returns the nodes from the root down with nearly all of its time, and the nodes below that are separate
        parts.

        The last item is the remaining time by purpose. The path ends at the user's function if it is the only one
        called back and has most of the time.
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
        """Returns, for each node from the root down, its time below one of the separate parts."""
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


@dataclass(frozen=True, slots=True)
class Subtree:
    """A subtree of framework_calls (or a line of the loop) with its moments.

    named: the node with its best name.
    entry: entry node of the framework whose loop calls it, or whose loop it is; NOTHING if it is the user's, or the
        user calls it.
    of_loop: whether it is the self time of a function of that loop.
    purpose: of a part of a framework's work, if known.
    root: its top node; NOTHING for the loop.
    """

    named: int
    line: int
    moments: Ints
    entry: int = NOTHING
    of_loop: bool = False
    purpose: int = CallKind.NONE
    root: int = NOTHING


def purposes(context: Context, evaluates: Flags) -> Ints:
    """Returns for each moment its purpose: a CallKind, or EVALUATION. evaluates: whether functions evaluate."""
    found, calls, classes = context.get(moments), context.get(user_calls), context.get(moment_classes)
    kind, outer = calls.kind[found.place].astype(np.int64), calls.outer[found.place].astype(np.int64)
    kind = np.where((kind == CallKind.NONE) & np.isin(outer, CALLING_BACK), outer, kind)
    return np.where(evaluates | (classes.kind == MomentClass.UNLINKED), EVALUATION, kind)


def purpose_by_name(place: CodePlace) -> int:
    """Returns the one purpose in the name of a framework's function; NONE for none, several, or a user's function."""
    if not framework_of(place):
        return CallKind.NONE
    words = {word.lower() for word in _WORD.findall(place.function)}
    found = [purpose for purpose, saying in _WORDS if words & saying]
    return found[0] if len(found) == 1 else CallKind.NONE


def main_purpose(spent: Floats) -> int:
    """Returns the purpose of most of the time; NONE if no purpose has enough of it. spent: the time of each purpose."""
    known = spent.copy()
    known[CallKind.NONE] = 0
    best = int(np.argmax(known))
    return best if known[best] >= MOSTLY * spent.sum() > 0 else CallKind.NONE


def has_training(context: Context) -> bool:
    """Returns whether a forward with a backward, a backward or an optimizer was seen; a module's call alone is none."""
    classes = context.get(moment_classes)
    trains = np.isin(classes.kind, (MomentClass.BACKWARD, MomentClass.OPTIMIZER))
    return bool((trains | ((classes.kind == MomentClass.FORWARD) & classes.linked)).any())


def subtrees(context: Context) -> Iterator[Subtree]:
    """Yields all subtrees. In a program that does not train, each function is one, with its self time."""
    found, tree, classes = context.get(moments), context.get(framework_calls), context.get(moment_classes)
    if not len(tree) or not len(found):
        return
    if not has_training(context):
        yield from _functions(context)
        return
    node, evaluates = tree.node[found.place], _evaluates(context)
    aside = np.isin(classes.kind, (MomentClass.OTHER, MomentClass.UNLINKED)) | evaluates
    loop = _loop(context, aside)
    other = inclusive_sums(tree, np.bincount(node, classes.weight * aside, len(tree)))
    heaviest, names = heaviest_below(tree, other), frozenset(tree.name[loop].tolist())
    parts = FrameworkParts(context, aside, evaluates, names)
    begins = np.full(len(tree), NOTHING, np.int64)  # the root of each node's subtree
    named: dict[int, FrameworkPart] = {}
    for place in np.flatnonzero(~loop).tolist():
        above = int(tree.parent[place])
        if place in named:
            begins[place] = place
        elif above != NOTHING and begins[above] != NOTHING:
            begins[place] = begins[above]
        else:
            begins[place] = place
            framework = tree.entry[place] != NOTHING
            divided = parts.of(place) if framework else (FrameworkPart(place, place, CallKind.NONE),)
            named |= {part.root: part for part in divided}
    mine = np.flatnonzero(aside & (classes.weight > 0))
    of_moment = begins[node[mine]]
    aside_of_loop = of_moment != NOTHING
    outside = mine[aside_of_loop]
    for start, places in places_by_value(of_moment[aside_of_loop]):
        best = named[start].named
        if tree.entry[best] == NOTHING:
            best = dominating(tree, other, best, heaviest, names)
        yield Subtree(best, 0, outside[places], int(tree.entry[best]), purpose=named[start].purpose, root=start)
    rest = mine[~aside_of_loop]
    lines = np.where(tree.user[node[rest]], _lines(context, rest), 0)
    keys = node[rest] << 32 | lines
    for key, places in places_by_value(keys):
        at = int(key >> 32)
        yield Subtree(at, key & 0xFFFFFFFF, rest[places], int(tree.entry[at]), of_loop=True)


def _functions(context: Context) -> Iterator[Subtree]:
    """Yields the self time of each function, or its time in one function of a library, except for running models."""
    found, tree, classes = context.get(moments), context.get(framework_calls), context.get(moment_classes)
    mine = np.flatnonzero((classes.kind == MomentClass.OTHER) & (classes.weight > 0))
    for node, places in places_by_value(tree.node[found.place[mine]].astype(np.int64)):
        if node != NOTHING:
            yield Subtree(node, 0, mine[places])


def _evaluates(context: Context) -> Flags:
    """Returns which moments of the forward without an operator are in functions whose operators have no backward."""
    found, tree, classes = context.get(moments), context.get(framework_calls), context.get(moment_classes)
    node, forward = tree.node[found.place], classes.kind == MomentClass.FORWARD
    linked = inclusive_sums(tree, np.bincount(node, forward & classes.linked, len(tree)))
    unlinked = inclusive_sums(tree, np.bincount(node, classes.kind == MomentClass.UNLINKED, len(tree)))
    without = (unlinked > 0) & (linked < WITHOUT * unlinked)
    told: Flags = forward & ~classes.linked & without[node]
    return told


def _loop(context: Context, aside: Flags) -> Flags:
    """Returns which nodes have a part of the training below them. In a framework, loading alone does not count.

    An evaluation loads, too.
    """
    found, tree, classes = context.get(moments), context.get(framework_calls), context.get(moment_classes)
    node = tree.node[found.place]
    of_framework = tree.entry != NOTHING
    told = np.zeros(len(tree), np.bool_)
    for nodes, counts in ((~of_framework, ~aside), (of_framework, ~aside & np.isin(classes.kind, TRAINING))):
        below = inclusive_sums(tree, np.bincount(node, found.weight * counts, len(tree)))
        told |= nodes & (below > LOOP * float((found.weight * counts).sum()))
    return told


def dominating(tree: CallTree, weight: Floats, start: int, heaviest: Ints, trains: frozenset[int]) -> int:
    """Returns the innermost user's function below `start` that has nearly all of its time, else `start`.

    heaviest: of heaviest_below.
    trains: names of functions that train elsewhere, which are not to blame for their other callers.
    """
    named = at = start
    while True:
        at = int(heaviest[at])
        if at == NOTHING or weight[at] < DOMINATES * weight[start]:
            return named
        if tree.user[at]:
            if int(tree.name[at]) in trains:
                return named
            named = at


def _lines(context: Context, rows: Ints) -> Ints:
    """Returns the line at which the innermost slice of each of these moments was most often itself; 0 if unknown."""
    slices, found = context.get(thread_slices), context.get(moments)
    return context.get(own_lines)[slices.row[found.place[rows]]]


def settings_of(package: str, finding: str) -> str:
    """Returns which setting makes this package do less of the finding with this name; "" if unknown."""
    known = _SETTINGS.get((_SAME.get(package, package), finding), "")
    return f"See {known}" if known else ""

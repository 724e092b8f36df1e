"""What Python did at any moment of a thread: the innermost function of the user, and what it was waiting for.

Theory of operation
    A frame is the user's unless its file belongs to Python, to an installed package or to a well-known library; calls
    of C functions and of nn.Module count as library. What a library frame does is told by its name (time.sleep, a lock,
    a file, logging, …); it counts for the innermost function of the user that called it, and of several such frames
    the more telling kind counts (data loading before a lock). Data loading also counts for what it calls, a collate
    function of the user's for example. Where stacks were sampled, C functions have no frames: a function that was seen
    off the CPU in most of its own samples was blocked, or waited for the GIL.

    Sampled stacks are true at the moments of their samples alone, which are taken to be equally spread over the
    stretch in which the innermost frame stayed the same.
"""

import re
import sys
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kineto_trace.arrays.active_sets import ascending
from kineto_trace.model.context import Context
from kineto_trace.structure.nesting import Nested, nest_tables
from kineto_trace.structure.python.python_samples import IDLE, WAITING, sample_period_ns, state_counts

Ints = npt.NDArray[np.int64]
NOTHING = -1

# What a frame does, the more telling the larger.
KINDS = ("", "gil", "blocked", "backward", "lock", "sleep", "input_output", "garbage_collection", "logging", "data")
RUNNING, GIL, BLOCKED, BACKWARD, LOCK, SLEEP, INPUT_OUTPUT, COLLECTION, LOGGING, DATA = range(len(KINDS))

_PACKAGES = (
    "torch torchvision torchaudio torchdata torchtext functorch numpy pandas PIL cv2 scipy sklearn transformers "
    "accelerate deepspeed lightning pytorch_lightning lightning_fabric triton tqdm wandb tensorboard tensorboardX "
    "mlflow requests urllib3 botocore boto3 fsspec s3fs gcsfs aiohttp datasets tokenizers huggingface_hub safetensors "
    "jax jaxlib flax optax tensorflow apex xformers einops matplotlib yaml loguru kineto_agent"
)
_ROOTS = "|".join(sorted({*_PACKAGES.split(), *sys.stdlib_module_names}))
_LIBRARY = re.compile(
    rf"^(?:<|nn\.Module: |(?:{_ROOTS})(?:/|\.py\())"
    r"|/(?:site|dist)-packages/|/lib(?:64)?/python3[^/]*/|/kineto_agent/"
)
_PLACE = re.compile(r"^(?P<file>.*)\((?P<line>\d+)\): (?P<function>.*)$", re.DOTALL)
_START = r"(?:^|/)"
_PATTERNS = (  # of library frames
    (BACKWARD, re.compile(_START + r"torch/autograd/(?:graph|__init__)\.py")),
    (
        LOCK,
        re.compile(
            r"<built-in method (?:acquire|__enter__) of (?:_thread|_multiprocessing)|"
            + _START
            + r"(?:threading\.py\(\d+\): .*(?:wait|acquire|join|_wait_for_tstate_lock)$|queue\.py\(\d+\)"
            r"|multiprocessing/(?:connection|synchronize|queues|popen_\w+)\.py|concurrent/futures/_base\.py)"
        ),
    ),
    (SLEEP, re.compile(r"^<built-in (?:function|method) (?:sleep|usleep)\b")),
    (
        INPUT_OUTPUT,
        re.compile(
            r"^<built-in (?:function|method) (?:read\w*|recv\w*|send\w*|open|fsync|write\w*|stat|listdir|scandir"
            r"|select|poll|connect|accept)\b|"
            + _START
            + r"(?:(?:socket|ssl|selectors|subprocess|shutil|tarfile|zipfile|gzip|tempfile|http/client|urllib/request"
            r"|torch/serialization|PIL/Image\w*|safetensors/\w+|numpy/lib/\w*npyio\w*)\.py"
            r"|(?:urllib3|requests|botocore|s3fs|fsspec|aiohttp)/)"
        ),
    ),
    (COLLECTION, re.compile(r"^<built-in (?:function|method) collect\b")),
    (
        LOGGING,
        re.compile(
            r"^<built-in function print>|"
            + _START
            + r"(?:logging/\w+\.py|torch/_tensor_str\.py|(?:tqdm|loguru|tensorboardX?|wandb|mlflow)/"
            r"|torch/utils/tensorboard/)"
        ),
    ),
    (DATA, re.compile(_START + r"(?:torch/utils/data/(?!distributed)\w+(?:/\w+)*\.py|torchdata/)")),
)


class FramePlace(NamedTuple):
    """A function of the user's, as its frame tells it. line: its first one."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class PythonFrames:
    """The frames of all threads in the order of their tree (places of `nested`).

    row: of python_function; name: number into Trace.strings. user: place of the innermost function of the user's at
    this frame; NOTHING: none. kind: number into KINDS. samples: whether the frames come from samples; period_ns: the
    time between two of them.
    """

    nested: Nested
    row: Ints
    name: Ints
    user: Ints
    kind: npt.NDArray[np.uint8]
    samples: bool
    period_ns: int

    def innermost(self, thread: npt.NDArray[np.uint32], moment: Ints) -> Ints:
        """Returns the place of the innermost frame of a thread at each moment; NOTHING: none."""
        if not len(self.row):
            return np.full(len(moment), NOTHING)
        return self.nested.innermost(thread, moment).astype(np.int64)

    def stack(self, row: int) -> list[int]:
        """Returns the names (numbers of strings) of a row of python_function and its callers, innermost first."""
        place, names = int(np.flatnonzero(self.row == row)[0]), []
        while place >= 0:
            names.append(int(self.name[place]))
            place = int(self.nested.tree.parent[place])
        return names

    def changes(self, thread: int) -> Ints:
        """Returns the times, ascending, at which a frame of this thread begins or ends."""
        own = self.nested.events.track == thread
        return ascending(np.concatenate([self.nested.events.start[own], self.nested.tree.end[own]]))


def python_frames(context: Context) -> PythonFrames:
    """Returns the frames of a trace."""
    trace = context.trace
    table = trace.table("python_function")
    nested = nest_tables([table], trace.window_end_ns)
    row = nested.order.astype(np.int64)
    names = table["name"][row]
    user_names, kinds = np.zeros(len(trace.strings), np.bool_), np.zeros(len(trace.strings), np.uint8)
    for number in np.unique(names).tolist():
        found = library_kind(trace.strings[number])
        user_names[number], kinds[number] = found is None, found or RUNNING
    is_user, own = user_names[names], kinds[names]
    samples = bool((table["self_samples"] > 0).any())
    if samples:
        counts = state_counts(table)[row]
        most = 2 * counts > counts.sum(axis=1, keepdims=True)
        own = np.maximum(own, np.select([most[:, IDLE], most[:, WAITING]], [BLOCKED, GIL], RUNNING).astype(np.uint8))
    user, kind = _inherited(nested, is_user, own)
    period = (
        sample_period_ns(trace) or int(np.median(table["duration"] // np.maximum(table["samples"], 1)))
        if samples
        else 0
    )
    return PythonFrames(nested, row, names.astype(np.int64), user, kind, samples, period)


def _inherited(
    nested: Nested, is_user: npt.NDArray[np.bool_], own: npt.NDArray[np.uint8]
) -> tuple[Ints, npt.NDArray[np.uint8]]:
    """Returns the innermost function of the user's at each frame, and the most telling kind below it."""
    parent, depth = nested.tree.parent.astype(np.int64), nested.tree.depth
    user = np.where(is_user, np.arange(len(parent)), NOTHING)
    kind = own.copy()
    by_depth = np.argsort(depth, kind="stable")
    bounds = np.searchsorted(depth[by_depth], np.arange(int(depth.max(initial=-1)) + 2))
    for first, last in zip(bounds[1:-1], bounds[2:], strict=True):
        places = by_depth[first:last]
        above = parent[places]
        inherits = ~is_user[places]
        user[places[inherits]] = user[above[inherits]]
        passed = np.where(inherits | (kind[above] == DATA), kind[above], RUNNING)
        # Whether a caller was off the CPU in its own samples says nothing of what it calls.
        passed[(passed == GIL) | (passed == BLOCKED)] = RUNNING
        kind[places] = np.maximum(kind[places], passed)
    return user, kind


def library_kind(name: str) -> int | None:
    """Returns what a library's frame of this name does (number into KINDS); None for a frame of the user's."""
    if _LIBRARY.search(name) is None:
        return None
    return max((kind for kind, pattern in _PATTERNS if pattern.search(name) is not None), default=RUNNING)


def place_of(name: str) -> FramePlace:
    """Returns file, line and function of a frame's name; line 0 and no file if the name has another form."""
    match = _PLACE.match(name)
    return FramePlace(match["file"], int(match["line"]), match["function"]) if match else FramePlace("", 0, name)


def described(name: str, line: int = 0) -> str:
    """Returns a frame as "function (file:line)". line: the executing one; 0: unknown, so the function's first one."""
    place = place_of(name)
    return f"{place.function} ({place.file}:{line or place.line})" if place.file else name

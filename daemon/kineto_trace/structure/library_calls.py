"""Classifies Python functions: which belong to libraries, and what those are called for (waiting, files, copies, …).

Theory of operation
    A function is the user's if it has a file that belongs neither to Python, nor to an installed package, nor to a
    well-known library. All others are a library's, including C functions and calls of modules. A comprehension, which
    is a function before Python 3.12, and a generator expression are parts of the function that contains them.

    Code without a file has a name in angle brackets instead. Text that was typed or passed on is the user's: "<string>"
    (python -c, exec), "<stdin>" (a prompt before 3.13, or a pipe), "<python-input-0>" (a prompt since),
    "<ipython-input-1-…>" (IPython), "<doctest …>", "<timeit-src>", "<command-…>" (Databricks). Cells of Jupyter, Colab
    and marimo are files in the folder for temporary files. Other names are code that libraries generate; some libraries
    use "<string>", too, which is recognised by its functions' names.

    One table maps a library's function, by its file and name, to its purpose for the program (CallKind, on which advice
    depends) and the activity of its thread (FrameKind). The first row that fits counts.

Also reads the names of Python functions in traces: "file(first line): function", or without a file.
    A file's path and a function's name may contain anything, also what looks like a line: "/runs (1): b/x.py(12): f".
    The line is the first number in parentheses after the ending of a Python file, otherwise the first one at all
    ("<string>(5): f", "/usr/bin/torchrun(8): main"). C functions, which the interpreter describes as "<built-in method
    sleep …>", and the calls of modules ("nn.Module: Linear_0") have no file, whatever follows.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from kineto_trace.arrays.id_sets import unique_values
from kineto_trace.base.array_types import Flags, Ints8, UInts8
from kineto_trace.base.source_places import portable_path, source_file
from kineto_trace.model.context import Context
from kineto_trace.model.trace import NAME_CHARS

_PACKAGES = (
    "torch torchvision torchaudio torchdata torchtext functorch numpy pandas PIL cv2 scipy sklearn skimage "
    "transformers accelerate deepspeed lightning pytorch_lightning lightning_fabric triton tqdm wandb tensorboard "
    "tensorboardX mlflow requests urllib3 httpx botocore boto3 fsspec s3fs gcsfs aiohttp datasets tokenizers "
    "sentencepiece nltk regex huggingface_hub safetensors jax jaxlib flax optax tensorflow apex xformers einops "
    "matplotlib yaml simplejson orjson cloudpickle dill loguru albumentations imageio kornia h5py pyarrow zstandard "
    "kineto_agent"
)
_NO_FRAMEWORKS = frozenset({"torch", "functorch", "numpy", *sys.stdlib_module_names})
_ROOTS = "|".join(sorted({*_PACKAGES.split(), *sys.stdlib_module_names}))
_LIBRARY = re.compile(
    rf"^(?:<|(?:{_ROOTS})(?:/|\.py: ))|/(?:site|dist)-packages/|/lib(?:64)?/python3[^/]*/|/kineto_agent/"
    rf"|^[A-Za-z]:/(?:.*/)?Lib/(?:{_ROOTS})(?:/|\.py: )"  # Python on Windows
    r"|(?:^|/)c[a-z2-7]{51}\.py: "  # code written by torch.compile: the name is a hash
)
_TYPED = re.compile(
    r"<(?:string|stdin|input|console|timeit-src|magic-timeit[a-z-]*|doctest [^>]*|command-\d+|pyshell#\d+"
    r"|(?:python|ipython|bpython)-input-[^>]*)>(?:-\d+)?"
)
_GENERATED = re.compile(  # "line: function" in "<string>"
    r"1: <lambda>$|2: __\w+__$"  # named tuples; data classes before Python 3.11
    r"|\d+: (?:__create_fn__|___make_guard_fn|__generate_func__|launcher|inner_fn|wrap_fn|unwrap_fn)\b"  # later; torch
)
_STARTS_WORKER = re.compile(
    r"(?:^|/)multiprocessing/(?:spawn\.py: spawn_main|(?:forkserver|resource_tracker)\.py: main)$"
)
_STACK = r"(?:format_stack|extract_stack|StackSummary)"
_LOADER = r"torch/utils/data/dataloader\.py: (?:_MultiProcessingDataLoaderIter\.)?"
_BUILT_IN = r"<built-in (?:method|function) "
_NO_TENSOR = r"\b(?! of (?:type|Tensor|Parameter) object)"  # torch has operators of these names
_PART = re.compile(r"<(?:(?:list|set|dict)comp|genexpr)>$")
_LINE = re.compile(r"\(([0-9]{1,9})\): (?=.)", re.DOTALL)
_PYTHON_FILES = (".py", ".pyw", ".pyx", ".pxd", ".pxi")
_NO_FILE = re.compile(r"nn\.Module: |<(?:built-in|method|method-wrapper|slot wrapper|class|function|bound method) ")


class CallKind(IntEnum):
    """The purpose of calling a library. NONE: the user's own function, or an unknown function of a library."""

    NONE = 0
    COMPILE = 1
    ANOMALY = 2
    TENSOR_PRINT = 3
    LOGGING = 4
    CHECKPOINT = 5
    COPY = 6
    JSON = 7
    PICKLE = 8
    SUBPROCESS = 9
    IMPORT = 10
    TOKENS = 11
    ARCHIVE = 12
    IMAGE = 13
    NETWORK = 14
    FILE = 15
    WAIT = 16
    TABLES = 17
    SLEEP = 18
    ITEM = 19
    GARBAGE = 20
    WORKER_START = 21
    WORKER_WAIT = 22
    COLLATE = 23
    PIN = 24
    RESET = 25
    COLLECTIVE = 26
    CLIP = 27
    HASH = 28
    DATABASE = 29
    CONVERT = 30


CALLING_BACK = (
    CallKind.LOGGING,
    CallKind.CHECKPOINT,
    CallKind.COPY,
    CallKind.JSON,
    CallKind.PICKLE,
)  # libraries that call the user's code


class FrameKind(IntEnum):
    """The activity of a thread in a function; larger is more specific. GIL, BLOCKED, COLLECTIVE: by samples alone."""

    RUNNING = 0
    GIL = 1
    BLOCKED = 2
    BACKWARD = 3
    LOCK = 4
    SLEEP = 5
    INPUT_OUTPUT = 6
    GARBAGE_COLLECTION = 7
    LOGGING = 8
    DATA = 9
    COLLECTIVE = 10


class _Row(NamedTuple):
    call: CallKind
    frame: FrameKind
    patterns: tuple[str, ...]  # regular expressions that begin at a file's name, or at that of a folder above it


_TABLE = (
    _Row(CallKind.ANOMALY, FrameKind.RUNNING, (r"torch/autograd/anomaly_mode", rf"traceback\.py: {_STACK}")),
    _Row(CallKind.RESET, FrameKind.RUNNING, (r"torch/_dynamo/__init__\.py: reset", r"torch/__init__\.py: compile$")),
    _Row(
        CallKind.COMPILE,
        FrameKind.RUNNING,
        (
            r"torch/_dynamo/(?:convert_frame|symbolic_convert|output_graph|guards)",
            r"torch/_inductor/compile_fx\w*\.py: (?!(?:.*\.)?run$)",  # compiled code is called through functions run()
            r"torch/_inductor/(?:graph|scheduler|async_compile|pattern_matcher|select_algorithm|cpp_builder)\.py",
            r"torch/_inductor/(?:codegen|fx_passes|kernel)/",
            r"torch/_inductor/runtime/triton_heuristics\.py: .*(?:compile|autotun|benchmark|descent|_make_launcher)",
            r"torch/fx/(?!graph_module\.py: .*(?:__call__|call_wrapped)$|interpreter\.py)",
            *(r"jax/_src/compiler\.py", r"jax/_src/interpreters/(?:mlir|partial_eval)\.py"),
            r"triton/compiler/(?!compiler\.py: (?:CompiledKernel\.)?(?:__get\w+|run|launch_metadata)$)",
        ),
    ),
    _Row(CallKind.NONE, FrameKind.BACKWARD, (r"torch/autograd/(?:graph|__init__)\.py",)),
    _Row(CallKind.TENSOR_PRINT, FrameKind.LOGGING, (r"torch/_tensor_str\.py",)),
    _Row(
        CallKind.LOGGING,
        FrameKind.LOGGING,
        (
            *(
                r"logging/",
                r"warnings\.py",
                r"loguru/",
                r"torch/utils/tensorboard/",
                r"tensorboardX?/",
                r"wandb/",
                r"mlflow/",
                r"tqdm/",
                r"(?:lightning/pytorch|pytorch_lightning)/core/module\.py: LightningModule\.log(?:_dict)?$",
                r"(?:lightning/pytorch|pytorch_lightning)/trainer/connectors/logger_connector/",
            ),
            _BUILT_IN + r"print\b",
        ),
    ),
    _Row(
        CallKind.CHECKPOINT,
        FrameKind.INPUT_OUTPUT,
        (r"torch/serialization\.py", r"safetensors/", r"torch/distributed/checkpoint/"),
    ),
    _Row(
        CallKind.COLLECTIVE,
        FrameKind.RUNNING,
        (r"torch/distributed/(?:distributed_c10d|c10d_logger|_functional_collectives)\.py",),
    ),
    _Row(CallKind.CLIP, FrameKind.RUNNING, (r"torch/nn/utils/clip_grad\.py",)),
    _Row(CallKind.COPY, FrameKind.RUNNING, (r"copy\.py: ",)),
    _Row(CallKind.JSON, FrameKind.RUNNING, (r"json/", r"yaml/", r"simplejson/", r"orjson")),
    _Row(
        CallKind.PICKLE,
        FrameKind.RUNNING,
        (r"pickle\.py", r"multiprocessing/reductions?\.py", r"cloudpickle/", r"dill/"),
    ),
    _Row(CallKind.SUBPROCESS, FrameKind.INPUT_OUTPUT, (r"subprocess\.py",)),
    _Row(CallKind.IMPORT, FrameKind.RUNNING, (r"<frozen importlib", r"importlib/")),
    _Row(
        CallKind.TOKENS,
        FrameKind.RUNNING,
        (r"re/", r"re\.py", r"sre_", r"regex/", r"tokenizers/", r"transformers/.*token", r"sentencepiece", r"nltk/"),
    ),
    _Row(
        CallKind.ARCHIVE,
        FrameKind.INPUT_OUTPUT,
        (r"gzip", r"zipfile", r"tarfile", r"bz2", r"lzma", r"zlib", r"zstandard"),
    ),
    _Row(CallKind.IMAGE, FrameKind.INPUT_OUTPUT, (r"PIL/ImageFile\.py", r"PIL/Image\.py: (?:.*\.)?(?:open|save)$")),
    _Row(
        CallKind.IMAGE,
        FrameKind.RUNNING,
        (r"PIL/", r"cv2/", r"torchvision/(?:transforms|io)", r"albumentations/", r"skimage/", r"imageio/", r"kornia/"),
    ),
    _Row(
        CallKind.NETWORK,
        FrameKind.INPUT_OUTPUT,
        (
            *(r"socket\.py", r"ssl\.py", r"http/", r"urllib/request\.py", r"urllib3/", r"requests/", r"botocore/"),
            *(r"s3fs/", r"gcsfs/", r"aiohttp/", r"httpx/"),
            _BUILT_IN + r"(?:recv\w*|send\w*|select|poll|connect|accept)" + _NO_TENSOR,
        ),
    ),
    _Row(
        CallKind.FILE,
        FrameKind.INPUT_OUTPUT,
        (
            r"pathlib(?:/\w+)?\.py: (?:Path\.)?(?:read_|write_|open)",
            *(r"shutil\.py", r"tempfile\.py", r"fsspec/", r"h5py/", r"csv\.py", r"numpy/lib/\w*npyio\w*\.py"),
            _BUILT_IN + r"(?:read\w*|write\w*|open|fsync|stat|listdir|scandir)" + _NO_TENSOR,
        ),
    ),
    _Row(CallKind.TABLES, FrameKind.RUNNING, (r"pandas/", r"pyarrow/", r"sklearn/")),
    _Row(CallKind.WORKER_START, FrameKind.DATA, (_LOADER + r"(?:__init__|_shutdown_workers|__del__|_get_iterator)$",)),
    _Row(CallKind.WORKER_WAIT, FrameKind.DATA, (_LOADER + r"(?:_get_data|_try_get_data)$",)),
    _Row(CallKind.COLLATE, FrameKind.DATA, (r"torch/utils/data/_utils/collate\.py",)),
    _Row(CallKind.PIN, FrameKind.DATA, (r"torch/utils/data/_utils/pin_memory\.py",)),
    _Row(CallKind.NONE, FrameKind.DATA, (r"torch/utils/data/(?!distributed)\w+(?:/\w+)*\.py", r"torchdata/")),
    _Row(CallKind.WAIT, FrameKind.INPUT_OUTPUT, (r"selectors\.py",)),
    _Row(
        CallKind.WAIT,
        FrameKind.LOCK,
        (
            *(r"threading\.py: .*(?:wait|acquire|join|__enter__|_wait_for_tstate_lock)$", r"queue\.py"),
            *(r"concurrent/futures/_base\.py", r"multiprocessing/(?:connection|queues|synchronize|popen_\w+)\.py"),
            r"<built-in method (?:acquire|__enter__) of (?:_thread|_multiprocessing)",
        ),
    ),
    _Row(CallKind.WAIT, FrameKind.RUNNING, (r"asyncio/", r"concurrent/futures/", r"multiprocessing/(?:pool|managers)")),
    _Row(CallKind.SLEEP, FrameKind.SLEEP, (_BUILT_IN + r"u?sleep\b",)),
    _Row(CallKind.ITEM, FrameKind.RUNNING, (r"<built-in method item\b", r"<method '(?:item|tolist)'")),
    _Row(CallKind.GARBAGE, FrameKind.GARBAGE_COLLECTION, (_BUILT_IN + r"collect\b",)),
)
_COMPILED = tuple((row, re.compile(rf"(?:^|/)(?:{'|'.join(row.patterns)})")) for row in _TABLE)


@dataclass(frozen=True, slots=True)
class FunctionKinds:
    """One value per string of the trace, for names of Python functions.

    user: whether it is the user's.
    part: whether it is a part of another function.
    call: CallKind.
    frame: FrameKind.
    """

    user: Flags
    part: Flags
    call: Ints8
    frame: UInts8


@dataclass(frozen=True, slots=True)
class CodePlace:
    """A function, with its current or first line, 0 if unknown. file: "" if it has none."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        return self._with(self.file)

    @property
    def path(self) -> str:
        """Returns the file with "/" between folders, on any system."""
        return portable_path(self.file)

    @property
    def name(self) -> str:
        """Returns "path: function", or the function alone: the text in which patterns of names are searched."""
        return f"{self.path}: {self.function}" if self.file else self.function

    @property
    def shown(self) -> str:
        """Returns the function's name without the marks of functions inside functions."""
        return self.function.replace(".<locals>", "")

    @property
    def short(self) -> str:
        """Returns the place with the file from its package on, or its name alone."""
        return self._with(source_file(self.file))

    def _with(self, file: str) -> str:
        line = f":{self.line}" if self.line else ""
        return f"{self.shown} ({file}{line})" if file else self.shown


def is_users(place: CodePlace) -> bool:
    """Returns whether a function is in the user's own code."""
    if _TYPED.fullmatch(place.file):
        return place.file != "<string>" or _GENERATED.match(f"{place.line}: {place.function}") is None
    return bool(place.file) and _LIBRARY.search(place.name) is None


def framework_of(place: CodePlace) -> str:
    """Returns the package of a library's function; "" for those of torch, numpy or Python, or without a file."""
    package = re.split(r"/(?:site|dist)-packages/", place.path)[-1].partition("/")[0].removesuffix(".py")
    found = package != place.path.partition("/")[0] or package in _PACKAGES.split()
    return package if found and package not in _NO_FRAMEWORKS else ""


def library_call(place: CodePlace) -> tuple[CallKind, FrameKind]:
    """Returns the purpose of a library's function, and its thread's activity."""
    name = place.name
    row = next((row for row, pattern in _COMPILED if pattern.search(name)), None)
    return (row.call, row.frame) if row else (CallKind.NONE, FrameKind.RUNNING)


def function_kinds(context: Context) -> FunctionKinds:
    """Returns the kinds of each string as the name of a Python function."""
    count = len(context.trace.strings)
    user, part = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    found = FunctionKinds(user, part, np.zeros(count, np.int8), np.zeros(count, np.uint8))
    places = context.get(function_places)
    is_worker = any(_STARTS_WORKER.search(place.name) for place in places.values())  # by python -c
    for number, place in places.items():
        found.part[number] = _PART.search(place.function) is not None
        found.user[number] = is_users(place) and not (is_worker and place.name == "<string>: <module>")
        if not found.user[number]:
            found.call[number], found.frame[number] = library_call(place)
    return found


def code_place(text: str, line: int = 0) -> CodePlace:
    """Returns the place of a function by its name in the trace. line: 0 for the line of its definition."""
    found = [] if _NO_FILE.match(text) else [match for match in _LINE.finditer(text) if match.start()]
    ends = (match for match in found if text.endswith(_PYTHON_FILES, 0, match.start()))
    match = next(ends, found[0] if found else None)
    if match is None:
        return CodePlace("", text, 0)
    return CodePlace(text[: match.start()], text[match.end() :], line or int(match[1]))


def function_places(context: Context) -> Mapping[int, CodePlace]:
    """Returns the place of each name (number into Trace.strings) in the table python_function."""
    trace = context.trace
    return {
        number: code_place(trace.strings[number][:NAME_CHARS])
        for number in unique_values(trace.table("python_function")["name"]).tolist()
    }


def functions_named(context: Context, pattern: re.Pattern[str]) -> Flags:
    """Returns for each string whether it is a function of the trace with the pattern in its CodePlace.name."""
    flags = np.zeros(len(context.trace.strings), np.bool_)
    flags[[number for number, place in context.get(function_places).items() if pattern.search(place.name)]] = True
    return flags

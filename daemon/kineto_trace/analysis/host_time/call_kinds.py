"""What a library function is called for: waiting, files, copies and so on, told by its file and name."""

import re
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kineto_trace.model.context import Context


class CallKind(IntEnum):
    """What the code below a user's function does. NONE: the function itself, or a library that is not known here."""

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


_STACK = r"(?:format_stack|extract_stack|StackSummary)"
_LOADER = r"torch/utils/data/dataloader\.py[^:]*: (?:_MultiProcessingDataLoaderIter\.)?"
# Regular expressions that begin at a file's name, or at that of a folder above it. The first kind that fits counts.
_PATTERNS: tuple[tuple[CallKind, tuple[str, ...]], ...] = (
    (CallKind.ANOMALY, (r"torch/autograd/anomaly_mode", rf"traceback\.py[^:]*: {_STACK}")),
    (CallKind.RESET, (r"torch/_dynamo/__init__\.py[^:]*: reset", r"torch/__init__\.py[^:]*: compile$")),
    (
        CallKind.COMPILE,
        (r"torch/_dynamo/(?:convert_frame|symbolic_convert|output_graph|guards)", r"torch/_inductor/", r"torch/fx/"),
    ),
    (CallKind.TENSOR_PRINT, (r"torch/_tensor_str\.py",)),
    (
        CallKind.LOGGING,
        (r"logging/", r"loguru/", r"torch/utils/tensorboard/", r"tensorboardX?/", r"wandb/", r"mlflow/", r"tqdm/"),
    ),
    (CallKind.CHECKPOINT, (r"torch/serialization\.py", r"safetensors/", r"torch/distributed/checkpoint/")),
    (CallKind.COPY, (r"copy\.py[^:]*: ",)),
    (CallKind.JSON, (r"json/", r"yaml/", r"simplejson/", r"orjson")),
    (
        CallKind.PICKLE,
        (r"pickle\.py", r"multiprocessing/reductions?\.py", r"cloudpickle/", r"dill/"),
    ),
    (CallKind.SUBPROCESS, (r"subprocess\.py",)),
    (CallKind.IMPORT, (r"<frozen importlib", r"importlib/")),
    (
        CallKind.TOKENS,
        (r"re/", r"re\.py", r"sre_", r"regex/", r"tokenizers/", r"transformers/.*token", r"sentencepiece", r"nltk/"),
    ),
    (CallKind.ARCHIVE, (r"gzip", r"zipfile", r"tarfile", r"bz2", r"lzma", r"zlib", r"zstandard")),
    (
        CallKind.IMAGE,
        (r"PIL/", r"cv2/", r"torchvision/(?:transforms|io)", r"albumentations/", r"skimage/", r"imageio/", r"kornia/"),
    ),
    (
        CallKind.NETWORK,
        (r"socket\.py", r"ssl\.py", r"http/", r"urllib3?/", r"requests/", r"botocore/", r"aiohttp/", r"httpx/"),
    ),
    (
        CallKind.FILE,
        (r"pathlib\.py[^:]*: (?:Path\.)?(?:read_|write_|open)", r"shutil\.py", r"fsspec/", r"h5py/", r"csv\.py"),
    ),
    (CallKind.TABLES, (r"pandas/", r"pyarrow/", r"sklearn/")),
    (CallKind.WORKER_START, (_LOADER + r"(?:__init__|_shutdown_workers|__del__|_get_iterator)$",)),
    (CallKind.WORKER_WAIT, (_LOADER + r"(?:_get_data|_try_get_data)$",)),
    (CallKind.COLLATE, (r"torch/utils/data/_utils/collate\.py",)),
    (CallKind.PIN, (r"torch/utils/data/_utils/pin_memory\.py",)),
    (
        CallKind.WAIT,
        (
            r"threading\.py[^:]*: .*(?:wait|acquire|join|__enter__)",
            *(r"queue\.py", r"selectors\.py", r"concurrent/futures", r"asyncio/"),
            r"multiprocessing/(?:connection|queues|synchronize|pool|managers)",
        ),
    ),
    (CallKind.SLEEP, (r"<built-in (?:method|function) sleep",)),
    (CallKind.ITEM, (r"<built-in method item", r"<method '(?:item|tolist)'")),
    (CallKind.GARBAGE, (r"<built-in (?:method|function) collect",)),
)
_COMPILED = tuple((kind, re.compile(rf"(?:^|/)(?:{'|'.join(texts)})")) for kind, texts in _PATTERNS)

Numbers = npt.NDArray[np.int8]


def kind_of(text: str) -> CallKind:
    """Returns the kind of a function by its name in the trace."""
    return next((kind for kind, pattern in _COMPILED if pattern.search(text)), CallKind.NONE)


def call_kinds(context: Context) -> Numbers:
    """Returns for each string of the trace its CallKind as the name of a Python function."""
    strings = context.trace.strings
    found = np.zeros(len(strings), np.int8)
    for number in np.unique(context.trace.table("python_function")["name"]).tolist():
        found[number] = kind_of(strings[number])
    return found

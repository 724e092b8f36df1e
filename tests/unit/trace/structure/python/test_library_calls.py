"""Whose code a function is, and what a library's function is for."""

import numpy as np
import pytest
from kineto_trace.model.context import Context
from kineto_trace.structure.python.code_places import code_place
from kineto_trace.structure.python.library_calls import CallKind, FrameKind, function_kinds, is_users, library_call
from support.trace_files.traces import trace


@pytest.mark.parametrize(
    "name",
    [
        "/job/train.py(10): main",
        "train.py(10): main",
        "model/layers.py(3): Block.forward",
        "mypackage/model.py(3): forward",
        "/home/u/lib/data.py(1): <lambda>",
        "/home/me/torch/train.py(10): main",
        "/home/me/run (1)/train.py(12): f",
        r"C:\Users\me\Lib\train.py(12): f",
        "/srv/job/logging.py(3): write",
    ],
)
def test_files_of_the_program_are_the_users(name: str) -> None:
    assert is_users(code_place(name))


@pytest.mark.parametrize(
    "name",
    [
        "/venv/lib/python3.11/site-packages/torch/_tensor.py(566): backward",
        "/home/me/run (1)/lib/python3.11/site-packages/torch/_tensor.py(566): backward",
        "/usr/lib/python3/dist-packages/yaml/__init__.py(1): load",
        "/usr/lib/python3.11/json/encoder.py(2): encode",
        r"C:\Users\me\venv\Lib\site-packages\torch\_tensor.py(566): backward",
        r"C:\Python312\Lib\json\encoder.py(2): encode",
        r"torch\nn\modules\module.py(1501): _call_impl",
        "<frozen importlib._bootstrap>(1): _load",
        "torch/nn/modules/module.py(1501): _call_impl",
        "threading.py(973): _bootstrap",
        "<built-in method sleep of PyCapsule object>",
        "nn.Module: Linear_0",
        "a name without a file",
    ],
)
def test_packages_the_standard_library_and_built_in_functions_are_not(name: str) -> None:
    assert not is_users(code_place(name))


@pytest.mark.parametrize(
    ("name", "call", "frame"),
    [
        ("torch/nn/modules/module.py(1501): _call_impl", CallKind.NONE, FrameKind.RUNNING),
        ("/venv/lib/python3.12/site-packages/torch/optim/adam.py(214): Adam.step", CallKind.NONE, FrameKind.RUNNING),
        ("nn.Module: Linear_0", CallKind.NONE, FrameKind.RUNNING),
        ("<built-in function len>", CallKind.NONE, FrameKind.RUNNING),
        ("typing.py(359): inner", CallKind.NONE, FrameKind.RUNNING),
        ("<built-in function sleep>", CallKind.SLEEP, FrameKind.SLEEP),
        ("threading.py(320): Condition.wait", CallKind.WAIT, FrameKind.LOCK),
        (r"C:\Python312\Lib\threading.py(320): Condition.wait", CallKind.WAIT, FrameKind.LOCK),
        ("/usr/lib/python3.11/queue.py(154): Queue.get", CallKind.WAIT, FrameKind.LOCK),
        ("<built-in method acquire of _thread.lock object at 0x7f>", CallKind.WAIT, FrameKind.LOCK),
        ("asyncio/base_events.py(600): run_forever", CallKind.WAIT, FrameKind.RUNNING),
        ("<built-in method recv of socket object>", CallKind.NETWORK, FrameKind.INPUT_OUTPUT),
        ("<built-in function select>", CallKind.NETWORK, FrameKind.INPUT_OUTPUT),
        ("<built-in method select of type object at 0x7f>", CallKind.NONE, FrameKind.RUNNING),
        ("<built-in method select of Tensor object at 0x7f>", CallKind.NONE, FrameKind.RUNNING),
        ("<built-in method write of _io.TextIOWrapper object>", CallKind.FILE, FrameKind.INPUT_OUTPUT),
        ("urllib/request.py(200): urlopen", CallKind.NETWORK, FrameKind.INPUT_OUTPUT),
        ("urllib/parse.py(200): urlsplit", CallKind.NONE, FrameKind.RUNNING),
        ("torch/serialization.py(600): save", CallKind.CHECKPOINT, FrameKind.INPUT_OUTPUT),
        ("PIL/ImageFile.py(300): load", CallKind.IMAGE, FrameKind.INPUT_OUTPUT),
        ("torchvision/transforms/functional.py(30): resize", CallKind.IMAGE, FrameKind.RUNNING),
        ("json/encoder.py(200): encode", CallKind.JSON, FrameKind.RUNNING),
        ("<frozen importlib._bootstrap>(1): _load", CallKind.IMPORT, FrameKind.RUNNING),
        ("logging/__init__.py(1092): flush", CallKind.LOGGING, FrameKind.LOGGING),
        ("<built-in function print>", CallKind.LOGGING, FrameKind.LOGGING),
        ("torch/_tensor_str.py(600): _str", CallKind.TENSOR_PRINT, FrameKind.LOGGING),
        ("<built-in function collect>", CallKind.GARBAGE, FrameKind.GARBAGE_COLLECTION),
        ("torch/utils/data/dataloader.py(701): __next__", CallKind.NONE, FrameKind.DATA),
        ("torch/utils/data/dataloader.py(701): _get_data", CallKind.WORKER_WAIT, FrameKind.DATA),
        ("torch/utils/data/_utils/collate.py(120): collate", CallKind.COLLATE, FrameKind.DATA),
        ("torch/utils/data/distributed.py(100): set_epoch", CallKind.NONE, FrameKind.RUNNING),
        ("torch/autograd/graph.py(860): _engine_run_backward", CallKind.NONE, FrameKind.BACKWARD),
    ],
)
def test_a_library_function_is_told_by_its_name(name: str, call: CallKind, frame: FrameKind) -> None:
    assert library_call(code_place(name)) == (call, frame)


def test_a_users_file_is_no_library_that_has_the_same_name() -> None:
    names = ["/job/logging/text.py(1): write", "/job/copy.py(1): copy", "copy.py(1): deepcopy", "/job (1)/t.py(1): f"]
    context = Context(trace({"python_function": [{"name": name, "start": 0, "duration": 1} for name in names]}))
    kinds, name = context.get(function_kinds), context.trace.table("python_function")["name"]
    assert kinds.user[name].tolist() == [True, True, False, True]
    assert kinds.call[name].tolist() == [CallKind.NONE, CallKind.NONE, CallKind.COPY, CallKind.NONE]
    assert not np.any(kinds.frame)

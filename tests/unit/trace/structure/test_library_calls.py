"""Whose code a function is, and what a library's function is for."""

import re
from code import InteractiveInterpreter
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_trace.model.context import Context
from kineto_trace.structure.library_calls import (
    CallKind,
    CodePlace,
    FrameKind,
    code_place,
    framework_of,
    function_kinds,
    functions_named,
    is_users,
    library_call,
)
from support.trace_files.traces import trace

INDUCTOR = "/venv/lib/python3.12/site-packages/torch/_inductor/"
ANY_TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)
LIKE_A_NAME = st.text(st.sampled_from("a(1): .py/\\<>é"), min_size=1, max_size=30)
FILES = (ANY_TEXT | LIKE_A_NAME).map(lambda text: f"{text}.py")


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
        "<string>(1): <module>",
        "<string>(1): main",
        "<string>(2): Net.__init__",
        "<string>(4): <lambda>",
        "<stdin>(1): <module>",
        "<stdin>-0(1): <module>",
        "<python-input-3>(1): train",
        "<ipython-input-1-7caf60569135>(1): <cell line: 1>",
        "/tmp/ipykernel_18502/2629222579.py(1): <module>",
        "/tmp/ipython-input-16-54014459.py(78): f",
        r"C:\Users\me\AppData\Local\Temp\ipykernel_9/26.py(1): <module>",
        "/tmp/marimo_42/__marimo__cell_Hbol_.py(1): <module>",
        "<doctest train.main[0]>(1): <module>",
        "<command-3468532906296225>(26): <module>",
        "<timeit-src>(2): inner",
        "<magic-timeit>(1): inner",
        "<console>(1): f",
        "<pyshell#3>(1): f",
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
        "<frozen runpy>(65): _run_code",
        "<eval_with_key>.0(4): forward",
        "<attrs generated methods model.C>(22): __init__",
        "<__array_function__ internals>(177): concatenate",
        "<string>(2): __init__",
        "<string>(1): launcher",
        "/tmp/torchinductor_me/bf/cbfplt4vnixdbvtti7oyb5lky3snrxbjjnpei6z52p6hmu2rqdhm.py(205): Runner.call",
        "<string>(2): ___make_guard_fn.<locals>.guard",
        "torch/nn/modules/module.py(1501): _call_impl",
        "threading.py(973): _bootstrap",
        "<built-in method sleep of PyCapsule object>",
        "nn.Module: Linear_0",
        "a name without a file",
    ],
)
def test_packages_the_standard_library_and_built_in_functions_are_not(name: str) -> None:
    assert not is_users(code_place(name))


def test_what_python_generates_for_data_classes_and_named_tuples_is_not() -> None:
    @dataclass
    class Point:
        x: int

    functions = (Point.__init__, Point.__eq__, namedtuple("Pair", "a b").__new__)
    codes = [function.__code__ for function in functions]
    named = [f"{code.co_filename}({code.co_firstlineno}): {code.co_qualname}" for code in codes]
    assert [name[:9] for name in named] == ["<string>("] * 3
    assert [is_users(code_place(name)) for name in named] == [False] * 3


def test_code_that_is_executed_or_entered_at_a_prompt_is_the_users() -> None:
    found: dict[str, Any] = {}
    exec("def train():\n    pass\nstep = lambda: 0", found)
    InteractiveInterpreter(found).runsource("def entered(): pass", symbol="exec")
    for code in (found["train"].__code__, found["step"].__code__, found["entered"].__code__):
        assert is_users(code_place(f"{code.co_filename}({code.co_firstlineno}): {code.co_qualname}"))


@pytest.mark.parametrize(("starts", "expected"), [
    ("/usr/lib/python3.11/multiprocessing/spawn.py(105): spawn_main", False), ("/job/spawn.py(105): spawn_main", True)
])  # fmt: skip
def test_the_command_that_multiprocessing_starts_a_worker_with_is_not(starts: str, expected: bool) -> None:
    names = ["<string>(1): <module>", starts, "<string>(1): f"]
    context = Context(trace({"python_function": [{"name": name} for name in names]}))
    user = context.get(function_kinds).user[context.trace.table("python_function")["name"]]
    assert user.tolist() == [expected, expected, True]


@pytest.mark.parametrize(
    ("compiles", "name"),
    [
        (True, "torch/_dynamo/convert_frame.py(9): _compile"),
        (True, INDUCTOR + "compile_fx.py(9): compile_fx_inner"),
        (True, INDUCTOR + "scheduler.py(9): Scheduler.codegen"),
        (True, INDUCTOR + "runtime/triton_heuristics.py(9): CachingAutotuner.precompile"),
        (True, "torch/fx/graph.py(9): Graph.lint"),
        (False, INDUCTOR + "runtime/triton_heuristics.py(9): CachingAutotuner.run"),
        (False, INDUCTOR + "output_code.py(721): CompiledFxGraph.__call__"),
        (False, INDUCTOR + "codecache.py(9): CompiledFxGraph.__call__"),
        (False, INDUCTOR + "compile_fx.py(9): align_inputs_from_check_idxs.<locals>.run"),
        (False, INDUCTOR + "compile_fx.py(9): run"),
        (False, "torch/fx/graph_module.py(999): GraphModule.recompile.<locals>.call_wrapped"),
    ],
)
def test_what_compiles_is_told_from_what_calls_compiled_code(compiles: bool, name: str) -> None:
    assert library_call(code_place(name))[0] == (CallKind.COMPILE if compiles else CallKind.NONE)


@pytest.mark.parametrize(
    ("name", "call", "frame"),
    [
        ("torch/nn/modules/module.py(1501): _call_impl", CallKind.NONE, FrameKind.RUNNING),
        ("/venv/lib/python3.12/site-packages/torch/optim/adam.py(214): Adam.step", CallKind.NONE, FrameKind.RUNNING),
        ("nn.Module: Linear_0", CallKind.NONE, FrameKind.RUNNING),
        ("<built-in function len>", CallKind.NONE, FrameKind.RUNNING),
        ("typing.py(359): inner", CallKind.NONE, FrameKind.RUNNING),
        ("<built-in function sleep>", CallKind.SLEEP, FrameKind.SLEEP),
        ("torch/distributed/distributed_c10d.py(2810): all_reduce", CallKind.COLLECTIVE, FrameKind.RUNNING),
        ("torch/distributed/checkpoint/state_dict_saver.py(1): save", CallKind.CHECKPOINT, FrameKind.INPUT_OUTPUT),
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
        ("warnings.py(20): _showwarnmsg_impl", CallKind.LOGGING, FrameKind.LOGGING),
        ("<built-in function print>", CallKind.LOGGING, FrameKind.LOGGING),
        ("torch/_tensor_str.py(600): _str", CallKind.TENSOR_PRINT, FrameKind.LOGGING),
        ("lightning/pytorch/core/module.py(1): LightningModule.log", CallKind.LOGGING, FrameKind.LOGGING),
        ("lightning/pytorch/core/module.py(1): LightningModule.backward", CallKind.NONE, FrameKind.RUNNING),
        ("torch/nn/utils/clip_grad.py(1): clip_grad_norm_", CallKind.CLIP, FrameKind.RUNNING),
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


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("/venv/lib/python3.11/site-packages/transformers/trainer.py(1): Trainer.train", "transformers"),
        ("/usr/lib/python3/dist-packages/ignite/engine/engine.py(1): Engine.run", "ignite"),
        (r"C:\venv\Lib\site-packages\keras\src\models.py(1): fit", "keras"),
        ("transformers/trainer.py(1): Trainer.train", "transformers"),
        ("/venv/lib/python3.11/site-packages/single.py(1): f", "single"),
        ("/venv/lib/python3.11/site-packages/torch/optim/sgd.py(1): SGD.step", ""),
        ("torch/optim/sgd.py(1): SGD.step", ""),
        ("/usr/lib/python3.11/copy.py(1): deepcopy", ""),
        ("copy.py(1): deepcopy", ""),
        ("/job/train.py(1): main", ""),
        ("<built-in function print>", ""),
    ],
)
def test_the_package_of_a_framework_is_told_by_the_file(name: str, package: str) -> None:
    assert framework_of(code_place(name)) == package


def test_a_users_file_is_no_library_that_has_the_same_name() -> None:
    names = ["/job/logging/text.py(1): write", "/job/copy.py(1): copy", "copy.py(1): deepcopy", "/job (1)/t.py(1): f"]
    context = Context(trace({"python_function": [{"name": name, "start": 0, "duration": 1} for name in names]}))
    kinds, name = context.get(function_kinds), context.trace.table("python_function")["name"]
    assert kinds.user[name].tolist() == [True, True, False, True]
    assert kinds.call[name].tolist() == [CallKind.NONE, CallKind.NONE, CallKind.COPY, CallKind.NONE]
    assert not np.any(kinds.frame)


@pytest.mark.parametrize(
    ("text", "file", "line", "function"),
    [
        ("/job/train.py(10): main", "/job/train.py", 10, "main"),
        ("train.py(0): <module>", "train.py", 0, "<module>"),
        ("/home/me/run (1)/train.py(12): f", "/home/me/run (1)/train.py", 12, "f"),
        ("/home/me/runs (2): new/train.py(12): f", "/home/me/runs (2): new/train.py", 12, "f"),
        ("/home/me/a(3).py(12): f", "/home/me/a(3).py", 12, "f"),
        ("<string>(5): f", "<string>", 5, "f"),
        ("<frozen importlib._bootstrap>(1): x", "<frozen importlib._bootstrap>", 1, "x"),
        ("<eval_with_key>.12(5): forward", "<eval_with_key>.12", 5, "forward"),
        ("/usr/bin/torchrun(8): main", "/usr/bin/torchrun", 8, "main"),
        ("a.py(3): f.<locals>.<genexpr>", "a.py", 3, "f.<locals>.<genexpr>"),
        ("a.py(3): <lambda>", "a.py", 3, "<lambda>"),
        ("a.py(3): operator()(int): g", "a.py", 3, "operator()(int): g"),
        ("a.py(3): f(7): b.py(8): g", "a.py", 3, "f(7): b.py(8): g"),
        (r"C:\Users\me (1)\train.py(12): f", r"C:\Users\me (1)\train.py", 12, "f"),
        ("/home/é/模型.py(2): forwärts", "/home/é/模型.py", 2, "forwärts"),
        ("<built-in method sleep of PyCapsule object at 0x7f>", "", 0, None),
        ("<built-in method run of a.py(3): b object at 0x7f>", "", 0, None),
        ("<method 'item' of 'torch._C.TensorBase' objects>", "", 0, None),
        ("nn.Module: Linear_0", "", 0, None),
        ("nn.Module: a.py(3): b_0", "", 0, None),
        ("train.py", "", 0, None),
        ("main", "", 0, None),
        ("train.py(10)", "", 0, None),
        ("train.py(10): ", "", 0, None),
        ("(10): main", "", 0, None),
        (f"train.py({'9' * 5000}): main", "", 0, None),
        ("", "", 0, None),
    ],
)
def test_a_name_has_file_line_and_function(text: str, file: str, line: int, function: str | None) -> None:
    assert code_place(text) == CodePlace(file, text if function is None else function, line)


@given(FILES, st.integers(0, 999_999_999), ANY_TEXT | LIKE_A_NAME)
def test_a_python_file_is_found_whatever_the_names(file: str, line: int, function: str) -> None:
    if not re.search(r"\.py\([0-9]+\): ", file):
        assert code_place(f"/{file}({line}): {function}") == CodePlace(f"/{file}", function, line)


@given(ANY_TEXT | LIKE_A_NAME)
def test_every_text_has_a_place_that_can_be_shown(text: str) -> None:
    place = code_place(text)
    assert place.line == 0 or f"({place.line}): " in re.sub(r"\(0+(?=[0-9])", "(", text)
    assert str(place)
    assert place.short


def test_a_place_is_shown_with_the_line_that_ran() -> None:
    place = code_place("/job/train.py(10): fit.<locals>.step", 14)
    assert place == CodePlace("/job/train.py", "fit.<locals>.step", 14)
    assert (str(place), place.short) == ("fit.step (/job/train.py:14)", "fit.step (train.py:14)")


@pytest.mark.parametrize(
    ("text", "shown", "short"),
    [
        ("train.py(10): main", "main (train.py:10)", "main (train.py:10)"),
        ("train.py(0): main", "main (train.py)", "main (train.py)"),
        (r"C:\job\train.py(10): main", r"main (C:\job\train.py:10)", "main (train.py:10)"),
        (r"job\train.py(10): main", r"main (job\train.py:10)", "main (job/train.py:10)"),
        ("/v/site-packages/torch/a.py(1): f", "f (/v/site-packages/torch/a.py:1)", "f (torch/a.py:1)"),
        (r"/job/a\b.py(10): main", r"main (/job/a\b.py:10)", r"main (a\b.py:10)"),
        ("<built-in function sleep>", "<built-in function sleep>", "<built-in function sleep>"),
    ],
)
def test_a_place_is_shown_as_function_file_and_line(text: str, shown: str, short: str) -> None:
    assert (str(code_place(text)), code_place(text).short) == (shown, short)


def test_functions_are_found_by_path_and_function_on_any_system() -> None:
    names = ["/v (1)/torch/optim/adam.py(9): step", r"C:\v\torch\optim\adam.py(9): step", "torch/optim/sgd.py(9): f"]
    context = Context(trace({"python_function": [{"name": name, "start": 0, "duration": 1} for name in names]}))
    flags = functions_named(context, re.compile(r"(?:^|/)torch/optim/adam\.py: step$"))
    rows = np.flatnonzero(flags[context.trace.table("python_function")["name"]])
    assert rows.tolist() == [0, 1]

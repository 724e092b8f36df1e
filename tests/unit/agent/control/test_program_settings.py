"""The program's settings are read as they are, without imports, without side effects and without secrets."""

import sys
import threading
from types import ModuleType
from typing import Any

import pytest
from kineto_agent.control import program_settings as settings
from kineto_agent.control.program_settings import MAX_CHARS, program_settings
from kineto_agent.system.threads import Thread
from support.waiting import scaled


@pytest.fixture(autouse=True)
def _in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that asks gets to run, however busy the machine is."""
    monkeypatch.setattr(settings, "_TIMEOUT_S", scaled(20))


def test_nothing_is_imported_and_no_torch_has_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    found = program_settings((), {})
    assert set(sys.modules) == before
    assert {name.split(".")[0] for name in found} == {"python"}
    assert found["python.gc_enabled"] is True


def test_only_variables_of_the_allow_list_are_read() -> None:
    environ = {"OMP_NUM_THREADS": "4", "AWS_SECRET_ACCESS_KEY": "x", "NCCL_DEBUG": "INFO", "HF_TOKEN": "y", "PATH": "/"}
    found = program_settings((), environ)
    assert {name: value for name, value in found.items() if name.startswith("env.")} == {
        "env.OMP_NUM_THREADS": "4",
        "env.NCCL_DEBUG": "INFO",
    }


def test_long_and_many_values_are_cut() -> None:
    environ = {"NCCL_%d" % number: "\udc80" * 1000 for number in range(1000)}
    found = program_settings((), environ)
    assert sum(len(name) + len(str(value)) for name, value in found.items()) <= settings.MAX_ALL_CHARS
    assert found["env.NCCL_0"] == "?" * MAX_CHARS


def fake_torch(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    torch, library = ModuleType("torch"), ModuleType("torch._C")
    torch.__dict__["__version__"] = "2.4"
    library.__dict__.update({"get_default_dtype": lambda: "torch.float32", **functions})
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._C", library)


def test_a_getter_that_fails_costs_only_its_own_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Any:
        raise RuntimeError("not in this version")

    fake_torch(monkeypatch, is_anomaly_enabled=fails, get_num_threads=lambda: 3, _get_cudnn_benchmark=lambda: [1])
    found = program_settings((), {})
    assert {name: value for name, value in found.items() if name.startswith("torch.")} == {
        "torch.version": "2.4",
        "torch.default_dtype": "torch.float32",
        "torch.num_threads": 3,
    }


def test_getters_that_may_warn_are_not_called_where_others_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    fake_torch(
        monkeypatch,
        _get_float32_matmul_precision=lambda: called.append("warns"),
        _get_fp32_precision_getter=lambda backend, op: backend + "/" + op,
    )
    found = program_settings((), {})
    assert (found["torch.matmul_precision"], found["torch.conv_precision"], called) == ("cuda/matmul", "cuda/conv", [])
    fake_torch(monkeypatch, _get_float32_matmul_precision=lambda: "high")
    assert program_settings((), {})["torch.float32_matmul_precision"] == "high"


def test_a_module_whose_import_is_blocked_costs_no_other_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", None)
    found = program_settings((), {"OMP_NUM_THREADS": "4"})
    assert (found["python.gc_enabled"], found["env.OMP_NUM_THREADS"]) == (True, "4")


def test_frozen_objects_are_not_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[bool]()

    def count() -> int:
        asked.append(True)
        return 0

    monkeypatch.setattr("gc.get_freeze_count", count)
    assert program_settings((), {})["python.gc_threshold"] is not None
    assert asked == []


def test_what_compiling_did_is_counted_without_adding_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    from collections import Counter, defaultdict

    utils, frames = ModuleType("torch._dynamo.utils"), ModuleType("torch._dynamo.convert_frame")
    counters: Any = defaultdict(Counter)
    counters["graph_break"].update({"print": 2, "item": 1})
    utils.__dict__["counters"] = counters
    frames.__dict__["FRAME_COMPILE_COUNTER"] = Counter({0: 1, 1: 3})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    monkeypatch.setitem(sys.modules, "torch._dynamo.convert_frame", frames)
    found = program_settings((), {})
    assert {name: value for name, value in found.items() if name.startswith("dynamo.")} == {
        "dynamo.graph_breaks": 3, "dynamo.unique_graphs": 0, "dynamo.compiled_frames": 2, "dynamo.recompiles": 2,
    }  # fmt: skip
    assert list(counters) == ["graph_break"]


def test_a_getter_that_hangs_delays_the_capture_only_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, hangs = threading.Event(), threading.Event()

    class Waited(Thread):
        def join(self, timeout_s: float = -1) -> bool:
            assert timeout_s == settings._TIMEOUT_S
            assert reached.wait(scaled(20))
            return super().join(0)

    def hang() -> None:
        reached.set()
        hangs.wait(scaled(20))

    monkeypatch.setattr("kineto_agent.system.threads.Thread", Waited)
    fake_torch(monkeypatch, get_num_threads=hang)
    try:
        found = program_settings((), {})
    finally:
        hangs.set()
    assert found == {"torch.version": "2.4", "torch.default_dtype": "torch.float32"}


class SGD:
    def __init__(self, *groups: Any) -> None:
        self.param_groups = list(groups)


def test_optimizers_tell_their_parameters_and_how_they_update_them() -> None:
    first = SGD({"params": [1, 2], "foreach": None, "fused": None}, {"params": [3], "foreach": None, "fused": None})
    second = SGD({"params": [4], "foreach": False})
    third = SGD({"params": [5], "foreach": True, "fused": True}, {"params": [6], "foreach": True})  # two ways
    others = [SGD("no group"), SGD({"params": 7}), RuntimeError(), 7]
    held = [lambda thing=thing: thing for thing in (first, second, third, None, *others)]
    found = program_settings(held)
    assert {name: value for name, value in found.items() if name.startswith("optimizer.")} == {
        "optimizer.SGD.parameters": 3, "optimizer.SGD.implementation": "default",
        "optimizer.SGD_2.parameters": 1, "optimizer.SGD_2.implementation": "for-loop",
        "optimizer.SGD_3.parameters": 2, "optimizer.SGD_4.parameters": 0,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.torch
def test_a_real_optimizer_that_has_stepped_is_known() -> None:
    import torch
    from kineto_agent.steps.counting import StepCounter

    counter, model = StepCounter(), torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    counter.on_optimizer_step(optimizer, (), {})
    found = program_settings(counter.steppers())
    assert (found["optimizer.AdamW.parameters"], found["optimizer.AdamW.implementation"]) == (2, "fused")


@pytest.mark.torch
def test_a_new_thread_is_asked_so_that_the_number_of_threads_is_the_latest() -> None:
    import torch

    before = torch.get_num_threads()
    try:
        for wanted in (before + 1, before + 2):
            torch.set_num_threads(wanted)
            assert program_settings((), {})["torch.num_threads"] == wanted
    finally:
        torch.set_num_threads(before)


@pytest.mark.torch
def test_torch_does_not_warn_when_it_is_asked(recwarn: pytest.WarningsRecorder) -> None:
    import torch

    torch.set_float32_matmul_precision("high")
    try:
        recwarn.clear()
        found = program_settings((), {})
    finally:
        torch.set_float32_matmul_precision("highest")
    assert [str(warning.message) for warning in recwarn] == []
    assert found["torch.version"] == torch.__version__
    assert found["torch.anomaly_mode"] is False

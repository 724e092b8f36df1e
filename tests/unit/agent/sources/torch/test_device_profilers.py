import sys
from types import SimpleNamespace
from typing import Any, Optional

import pytest
from kineto_agent.sources.interface import SourceRequest
from kineto_agent.sources.torch import device_profilers, operators
from kineto_agent.sources.torch.device_profilers import DeviceProfiler

PRIVATE = DeviceProfiler(
    "PrivateUse1",
    "npu",
    ("kernel", "gpu_memcpy", "gpu_memset", "privateuse1_runtime", "privateuse1_driver"),
    last_resort=False,
)


class Registry:
    def __init__(self, registered: bool) -> None:
        self.registered = registered

    def has_factory(self) -> bool:
        return self.registered


def torch_with(
    monkeypatch: pytest.MonkeyPatch,
    *,
    backend: str = "privateuseone",
    registry: Optional[Registry] = None,
    xpu: Any = None,
    hip: Any = None,
) -> None:
    core = SimpleNamespace(_get_privateuse1_backend_name=lambda: backend)
    torch = SimpleNamespace(_C=core, version=SimpleNamespace(xpu=xpu, hip=hip), __version__="2.13.0")
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._C", core)
    monkeypatch.setattr(device_profilers, "_registry", [registry])


def test_without_torch_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "torch._C", "torch.xpu"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert device_profilers.find() is None


def test_a_renamed_backend_with_a_registered_profiler_offers_its_activities(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_with(monkeypatch, backend="npu", registry=Registry(True))
    assert device_profilers.find() == PRIVATE
    assert set(PRIVATE.types) < device_profilers.ALL_TYPES


@pytest.mark.parametrize(("backend", "registry"), [("npu", Registry(False)), ("npu", None)])
def test_a_backend_without_a_registered_profiler_offers_nothing(
    backend: str, registry: Optional[Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_with(monkeypatch, backend=backend, registry=registry)
    assert device_profilers.find() is None


def test_a_profiler_without_a_name_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_with(monkeypatch, registry=Registry(True))
    assert device_profilers.find() is None


@pytest.mark.parametrize(
    ("built", "initialised", "found"), [("20250", True, True), ("20250", False, False), (None, True, False)]
)
def test_intels_gpus_are_offered_once_the_program_uses_them(
    built: Optional[str], initialised: bool, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_with(monkeypatch, xpu=built)
    monkeypatch.setitem(sys.modules, "torch.xpu", SimpleNamespace(_initialized=initialised))
    device = device_profilers.find()
    assert (device is not None) is found
    assert device is None or (device.activity, device.last_resort, device.types[-2:]) == (
        "XPU",
        True,
        ("xpu_runtime", "xpu_driver"),
    )


@pytest.mark.parametrize(
    ("built", "initialised", "found"), [("7.0.1", True, True), ("7.0.1", False, False), (None, True, False)]
)
def test_amds_gpus_are_offered_likewise_under_cudas_names(
    built: Optional[str], initialised: bool, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_with(monkeypatch, hip=built)
    monkeypatch.setitem(sys.modules, "torch.cuda", SimpleNamespace(_initialized=initialised))
    device = device_profilers.find()
    assert (device is not None) is found
    assert device is None or (device.activity, device.last_resort, device.types[-1]) == ("CUDA", True, "cuda_runtime")


@pytest.mark.parametrize(("types", "yields"), [({"kernel", "cpu_op"}, True), ({"cpu_op"}, False)])
def test_only_a_request_for_its_activities_needs_torchs_profiler(
    types: "set[str]", yields: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_with(monkeypatch, backend="npu", registry=Registry(True))
    monkeypatch.setattr(operators, "_unfit", [])
    monkeypatch.setattr(operators, "library_path", lambda: "/x/libtorch_cpu.so")
    source = operators.TorchOpsSource()
    assert source.activity_types() == ["cpu_op", "user_annotation", *PRIVATE.types]
    assert source.last_resort() == frozenset()
    assert source.would_yield(SourceRequest(frozenset(types), 1 << 20, {})) is yields

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from kineto_agent.sources.interface import SourceRequest
from kineto_agent.sources.torch import operators
from kineto_agent.sources.torch.object_layouts import LAYOUTS
from kineto_agent.sources.torch.operators import TorchOpsSource, Way, buffer_bytes, release_of, way

MIB = 1 << 20


def request(**options: Any) -> SourceRequest:
    return SourceRequest(frozenset(("cpu_op",)), 64 * MIB, options)


def test_what_only_torchs_profiler_can_record_is_left_to_it() -> None:
    assert way({"with_flops": True}, "2.13.0", layout_known=True) == Way("with_flops needs it", False)
    assert way({"with_modules": True, "stack_trace": True}, "2.13.0", layout_known=True) == Way("", False)


def test_names_and_times_need_no_layout() -> None:
    assert way({}, "2.99.0", layout_known=False) == Way("", False)


def test_shapes_are_the_observers_where_the_layout_is_known() -> None:
    assert way({"record_shapes": True}, "2.13.0", layout_known=True) == Way("", True)
    refused = way({"record_shapes": True}, "2.99.0", layout_known=False)
    assert refused.profiler == ("record_shapes needs it, because the observer does not know the layout of torch 2.99.0")


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("2.13.0", (2, 13)),
        ("2.13.0+cu130", (2, 13)),
        ("2.7.1.post2", (2, 7)),
        ("2.8.0a0+5228986c39.nv25.6", (0, 0)),
        ("2.14.0.dev20261101", (0, 0)),
        ("2.13", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_only_a_release_has_the_layout_of_its_minor_version(version: str, release: Any) -> None:
    assert release_of(version) == release


def test_the_layouts_are_those_of_torch_2_4_to_2_15() -> None:
    assert sorted(LAYOUTS) == [(2, minor) for minor in range(4, 16)]
    assert all(len(layout.dtype_names) == layout.dtypes for layouts in LAYOUTS.values() for layout in layouts)


@pytest.mark.parametrize("limit_bytes", [64 * 1024, MIB, 8 * MIB, 64 * MIB, 512 * MIB, 4096 * MIB])
def test_buffers_are_whole_pages_and_neither_few_nor_too_many(limit_bytes: int) -> None:
    size = buffer_bytes(limit_bytes)
    assert size % 4096 == 0
    assert 16 <= limit_bytes // size <= 8192


def test_without_torch_nothing_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert TorchOpsSource().activity_types() == []


def test_a_torch_that_is_still_being_imported_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.13.0"))
    assert TorchOpsSource().activity_types() == []


def test_the_way_through_torchs_profiler_yields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.13.0", _C=None))
    source = TorchOpsSource()
    assert not source.would_yield(request())
    assert not source.would_yield(request(record_shapes=True))
    assert source.would_yield(request(with_flops=True))
    assert not source.would_yield(request(stack_trace=True, with_modules=True))  # the call tracer's
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="2.99.0", _C=None))
    assert not source.would_yield(request())
    assert source.would_yield(request(record_shapes=True))
    monkeypatch.setattr(operators, "_unfit", ["it cannot work"])
    assert source.would_yield(request())

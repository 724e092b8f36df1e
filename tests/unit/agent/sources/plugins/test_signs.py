import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
from kineto_agent.protocol.plugin_bundle import Signs
from kineto_agent.sources.plugins.signs import ProcessView

MAPS = """\
7f00-7f01 r-xp 00000000 08:01 123   /usr/lib/libnpu_runtime.so.7
7f01-7f02 r--p 00000000 08:01 124   /opt/with space/libother.so (deleted)
7f02-7f03 rw-p 00000000 00:00 0
7f03-7f04 r-xp 00000000 00:00 0     [vdso]
"""


@pytest.fixture
def view(tmp_path: Path) -> ProcessView:
    (tmp_path / "maps").write_text(MAPS)
    return ProcessView(str(tmp_path / "maps"))


@pytest.mark.parametrize(
    ("pattern", "found"),
    [("libnpu_runtime.so*", True), ("libnpu*", True), ("libother.so", True), ("libNPU*", False), ("runtime.so", False)],
)
def test_libraries_are_mapped_files_by_name(view: ProcessView, pattern: str, found: bool) -> None:
    assert view.matches(Signs(libraries=(pattern,))) == found


def test_maps_that_cannot_be_read_show_nothing() -> None:
    assert not ProcessView("/no/such/file").matches(Signs(libraries=("*",)))


def test_device_files_exist(view: ProcessView, tmp_path: Path) -> None:
    (tmp_path / "npu0").touch()
    assert view.matches(Signs(device_files=("%s/npu0" % tmp_path,)))
    assert view.matches(Signs(device_files=("/dev/no_such", "%s/npu[0-9]" % tmp_path)))
    assert not view.matches(Signs(device_files=("%s/npu?x" % tmp_path, "/no/such/folder/*")))


def test_variables_are_set_or_have_a_value(view: ProcessView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_MODE", "training")
    assert view.matches(Signs(environment=("NPU_MODE",)))
    assert view.matches(Signs(environment=("NPU_MODE=train*",)))
    assert not view.matches(Signs(environment=("NPU_MODE=eval", "NPU")))
    assert "NPU" not in os.environ


def test_modules_are_those_that_the_program_has_imported(view: ProcessView, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not view.matches(Signs(modules=("torch_npu",)))
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    assert view.matches(Signs(modules=("torch_npu",)))


def test_each_kind_of_sign_must_match(view: ProcessView) -> None:
    assert not view.matches(Signs(libraries=("libnpu*",), modules=("torch_npu",)))
    assert view.matches(Signs(libraries=("libnpu*",), modules=("sys",)))

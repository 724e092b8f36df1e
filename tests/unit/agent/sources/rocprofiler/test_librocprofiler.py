"""Which librocprofiler-sdk is used."""

from pathlib import Path
from typing import Optional

import pytest
from kineto_agent.sources.rocprofiler import gpu_activities


def maps(folder: Path, *libraries: str) -> str:
    path = folder / "maps"
    path.write_text("".join(f"7f00{n}000-7f00{n}fff r-xp 0 00:00 0 {name}\n" for n, name in enumerate(libraries)))
    return str(path)


def find(folder: Path, *libraries: str, variable: str = "") -> Optional[str]:
    environ = {"KINETO_ROCPROFILER_LIBRARY": variable} if variable else {}
    return gpu_activities.find(environ, maps(folder, *libraries))


def test_without_hip_there_is_nothing_to_trace(tmp_path: Path) -> None:
    assert find(tmp_path, "/lib/libc.so.6", variable="/x/librocprofiler-sdk.so.1") is None


@pytest.mark.parametrize("name", ["librocprofiler-sdk.so", "librocprofiler-sdk.so.1", "librocprofiler-sdk.so.1.3.5"])
def test_the_copy_that_is_loaded_is_used(tmp_path: Path, name: str) -> None:
    loaded = "/torch/lib/" + name
    assert find(tmp_path, "/torch/lib/libamdhip64.so", loaded, variable="/x/other.so") == loaded


def test_libraries_with_similar_names_are_others(tmp_path: Path) -> None:
    assert find(tmp_path, "/o/librocprofiler-sdk-rocattach.so.1", "/o/librocprofiler-sdk-tool.so.1") is None


@pytest.mark.parametrize("name", ["librocprofiler-sdk.so", "librocprofiler-sdk.so.1"])
def test_else_the_one_beside_hip(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert find(tmp_path, f"{tmp_path}/libamdhip64.so.7") == f"{tmp_path}/{name}"


def test_a_hip_of_before_rocm_7_has_none_beside_it(tmp_path: Path) -> None:
    assert find(tmp_path, f"{tmp_path}/libamdhip64.so.6") is None


def test_the_variable_names_one_where_none_is_loaded(tmp_path: Path) -> None:
    assert find(tmp_path, "/o/libamdhip64.so.7", variable="/mine/sdk.so") == "/mine/sdk.so"


def test_a_runtime_is_up_once_the_device_is_open(tmp_path: Path) -> None:
    assert not gpu_activities.runtime_is_up(str(tmp_path))
    (tmp_path / "3").symlink_to("/dev/kfd")
    (tmp_path / "4").touch()
    assert gpu_activities.runtime_is_up(str(tmp_path))
    assert not gpu_activities.runtime_is_up(str(tmp_path / "nowhere"))


def test_a_library_that_is_not_loaded_is_not_asked(tmp_path: Path) -> None:
    assert gpu_activities.state_of(str(tmp_path / "librocprofiler-sdk.so.1")) is None

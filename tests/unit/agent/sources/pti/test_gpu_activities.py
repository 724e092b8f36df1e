"""What the source offers, and whom it refuses without calling PTI."""

import sys
from pathlib import Path
from typing import Tuple

import pytest
from kineto_agent.sources.interface import SourceError, SourceRequest
from kineto_agent.sources.pti import gpu_activities
from kineto_agent.sources.pti.gpu_activities import XpuSource

LINE = "7f00000000-7f00001000 r-xp 00000000 fe:00 1234   "
LOADER, FRONT, CORE = "/usr/lib/libze_loader.so.1", "/venv/lib/libpti_view.so.1", "/venv/lib/pti/libpti.so"
TORCH = ("/venv/torch/lib/libtorch_cpu.so", "/venv/lib/libsycl.so.8")
REQUEST = SourceRequest(frozenset(("kernel",)), 1 << 20, {})
STARTED, FORKED = "1 (python) S 1 1 1 0 -1 4194304 0", "1 (python) S 1 1 1 0 -1 4194368 0"


def source(tmp_path: Path, *mapped: str, stat: str = STARTED) -> XpuSource:
    (tmp_path / "maps").write_text("".join(f"{LINE}{path}\n" for path in mapped))
    (tmp_path / "stat").write_text(stat)
    return XpuSource({}, str(tmp_path / "maps"), str(tmp_path / "stat"))


def refusal(asked: XpuSource) -> Tuple[str, str]:
    with pytest.raises(SourceError) as caught:
        asked.prepare(REQUEST)
    return caught.value.reason_code, caught.value.reason


@pytest.fixture(autouse=True)
def _unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.__dict__, gpu_activities._MARKER, raising=False)


def test_nothing_is_offered_without_level_zero_or_without_the_library(tmp_path: Path) -> None:
    assert source(tmp_path).activity_types() == []
    assert source(tmp_path, FRONT).activity_types() == []
    assert source(tmp_path, LOADER).activity_types() == []


def test_calls_of_sycl_are_offered_beside_torch_alone(tmp_path: Path) -> None:
    always = ["gpu_memcpy", "gpu_memset", "kernel", "overhead", "xpu_driver", "xpu_sync"]
    assert source(tmp_path, LOADER, FRONT).activity_types() == always
    assert source(tmp_path, LOADER, FRONT, *TORCH).activity_types() == sorted([*always, "xpu_runtime"])


def test_calls_waits_and_overhead_are_recorded_on_request_alone() -> None:
    assert XpuSource.on_request == {"xpu_driver", "xpu_sync", "overhead"}


def test_it_yields_to_the_programs_own_profiler(tmp_path: Path) -> None:
    assert source(tmp_path, LOADER, FRONT).would_yield(REQUEST)


def test_a_library_that_has_gone_is_named(tmp_path: Path) -> None:
    code, text = refusal(source(tmp_path, LOADER))
    assert code == "PTI_LIBRARY" and "libpti_view" in text


def test_another_user_of_pti_is_left_alone(tmp_path: Path) -> None:
    code, text = refusal(source(tmp_path, LOADER, FRONT, CORE))
    assert code == "PTI_BUSY" and "another library of this process is using PTI" in text


def test_torch_and_an_agent_before_us_are_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # This process has no Level Zero, which is what is asked next.
    assert refusal(source(tmp_path, LOADER, FRONT, CORE, *TORCH))[0] == "XPU_NOT_INITIALIZED"
    monkeypatch.setitem(sys.__dict__, gpu_activities._MARKER, 1)
    assert refusal(source(tmp_path, LOADER, FRONT, CORE))[0] == "XPU_NOT_INITIALIZED"


def test_a_forked_child_of_a_user_of_pti_is_refused(tmp_path: Path) -> None:
    code, text = refusal(source(tmp_path, LOADER, FRONT, CORE, *TORCH, stat=FORKED))
    assert code == "PTI_FORKED" and "spawn" in text


def test_a_forked_process_that_came_to_pti_by_itself_may_be_recorded(tmp_path: Path) -> None:
    assert refusal(source(tmp_path, LOADER, FRONT, stat=FORKED))[0] == "XPU_NOT_INITIALIZED"


def test_versions_are_compared_by_their_first_two_numbers() -> None:
    assert gpu_activities.version_pair("0.17.0") < (1, 1) <= gpu_activities.version_pair("1.1.0")

"""The native library: warnings, symbols, packaging."""

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from support.machine import native

EXPORTED = {
    "kc_abi", "kc_open", "kc_drain", "kc_prepare", "kc_keep_calls", "kc_subscribe", "kc_start", "kc_record_calls",
    "kc_yield", "kc_counts", "kc_others", "kc_stop", "kc_detach", "kc_hurry", "kc_close", "kc_device",
    "kc_result_text", "kc_serve",
    "kc_kit_abi", "kc_kit_open", "kc_kit_describe", "kc_kit_prepare", "kc_kit_start", "kc_kit_counts", "kc_kit_stop",
    "kc_kit_problem", "kc_kit_close", "kc_kit_result_text", "kc_rocprofiler_client",
    "kc_exit_guard_abi", "kc_exit_guard_prepare", "kc_exit_guard_place",
    "kc_pti_abi", "kc_pti_look", "kc_pti_version", "kc_pti_core",
    "kc_observer_abi", "kc_observer_open", "kc_observer_describe_tensor", "kc_observer_prepare",
    "kc_observer_start", "kc_observer_counts", "kc_observer_stop", "kc_observer_close",
    "kc_gate_up", "kc_gate_down",
    "kc_graphs_abi", "kc_graphs_open", "kc_graphs_describe_tensor", "kc_graphs_begin", "kc_graphs_seal",
    "kc_graphs_take", "kc_graphs_drop",
    "kc_tracer_abi", "kc_tracer_open", "kc_tracer_prepare", "kc_tracer_leave_out", "kc_tracer_start",
    "kc_tracer_look", "kc_tracer_counts", "kc_tracer_stop", "kc_tracer_close", "kc_tracer_forked",
    "kc_sampler_abi", "kc_sampler_open", "kc_sampler_look", "kc_sampler_read_names", "kc_sampler_read_text",
    "kc_sampler_runs",
    "kc_sampler_change_item", "kc_sampler_prepare", "kc_sampler_start", "kc_sampler_name", "kc_sampler_counts",
    "kc_sampler_ticks", "kc_sampler_stop", "kc_sampler_close",
    "kc_turns_abi", "kc_turns_begin", "kc_turns_poll",
}  # fmt: skip


@pytest.fixture
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_hook", native.COLLECTOR / "build_hook.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_collector_compiles_without_a_warning() -> None:
    assert native.collector().exists()


def test_only_the_interface_is_exported() -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(native.collector())], capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[-1] for line in listing.splitlines()} == EXPORTED


@pytest.mark.parametrize("path", native.collector_sources(), ids=lambda path: path.name)
def test_a_c_file_says_which_threads_run_it_and_where_it_blocks(path: Path) -> None:
    comment = path.read_text().split("*/")[0]
    assert comment.startswith("/*") and "\n * Threads: " in comment and "\n * Blocks: " in comment


def test_the_hook_finds_no_daemon_code_in_the_agents_own_project(hook: ModuleType) -> None:
    assert [library.target.name for library in hook.libraries(native.ROOT / "agent")] == [
        "libkineto_collector.so",
        "libkineto_rocprofiler.so",
    ]


def test_a_missing_compiler_is_explained(hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler -m64")
    with pytest.raises(hook.BuildError, match=r"tried no-such-compiler.*apt-get install gcc.*or name it in CC"):
        hook.find_compiler()


def test_a_compiler_with_arguments_is_understood(hook: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "cc -m64")
    assert hook.find_compiler() == ["cc", "-m64"]


def test_an_error_in_the_source_shows_the_compilers_words(hook: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "broken.c").write_text("int f(void) { return undeclared; }\n")
    with pytest.raises(hook.BuildError, match="undeclared"):
        hook.compile_library(hook.Library(tmp_path, tmp_path / "_native" / "libbroken.so"))
    assert list((tmp_path / "_native").iterdir()) == []


def test_a_library_is_replaced_by_a_rename(hook: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "fine.c").write_text("int f(void) { return 1; }\n")
    target = tmp_path / "_native" / "libfine.so"
    hook.compile_library(hook.Library(tmp_path, target))
    first = target.stat().st_ino
    with target.open("rb"):
        hook.compile_library(hook.Library(tmp_path, target))
        assert target.stat().st_ino != first

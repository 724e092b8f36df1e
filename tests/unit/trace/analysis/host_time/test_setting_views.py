"""Settings reach the view in every form of a trace, and only what is known to cost time is judged."""

from pathlib import Path
from typing import Any

import pytest
from kineto_trace.analysis.host_time.setting_views import MAY_SLOW, RULES, SLOWS, SettingFacts, verdict
from kineto_trace.catalog.view_runner import run_view
from kineto_trace.conversion.target_conversion import convert_target
from kineto_trace.open.trace_opener import open_trace
from support.agent.stack_records import PERIOD_NS, RUNNING, Sample, code, linetable, node, recording, write_recording
from support.trace_files.traces import START_NS, target

GIVEN: dict[str, Any] = {
    "torch.version": "2.13.0", "torch.num_threads": 8, "torch.deterministic_algorithms": True,
    "torch.anomaly_mode": False, "python.usable_cores": 2, "env.CUDA_LAUNCH_BLOCKING": "1", "env.NCCL_DEBUG": "INFO",
}  # fmt: skip


@pytest.mark.parametrize("form", ["columns", "trace.json.gz", "trace.pftrace"])
def test_settings_that_cost_time_come_first(tmp_path: Path, form: str) -> None:
    end = START_NS + PERIOD_NS
    target(window_start_ns=START_NS, window_end_ns=end, complete=True, settings=GIVEN).write(tmp_path)
    codes = {1: code(10, "t.py", "train", kind=10, table=linetable(11, first_line=10))}
    write_recording(tmp_path, recording([Sample(START_NS, 7, 1, RUNNING)], codes=codes, nodes={1: node(0, 1, 0)}))
    convert_target(tmp_path, formats=["chrome", "perfetto"])
    trace = open_trace(tmp_path / form)
    assert trace.target.settings == GIVEN
    found = run_view("settings", trace)
    assert [(row["setting"], row["value"], row["effect"]) for row in found.rows()] == [
        ("env.CUDA_LAUNCH_BLOCKING", "1", "slows"),
        ("torch.num_threads", "8", "slows"),
        ("torch.deterministic_algorithms", "True", "may slow"),
        ("env.NCCL_DEBUG", "INFO", None),
        ("python.usable_cores", "2", None),
        ("torch.anomaly_mode", "False", None),
        ("torch.version", "2.13.0", None),
    ]
    judgement = list(found.rows())[1]["judgement"]
    assert judgement == "operators on the CPU use 8 threads on 2 usable cores: they take turns"


def facts(*, cores: int = 8, on_gpu: bool = True, tf32: bool | None = True, convolves: bool = True) -> SettingFacts:
    return SettingFacts({"python.usable_cores": cores}, on_gpu, tf32, convolves)


@pytest.mark.parametrize(("name", "value", "given", "effect"), [
    ("torch.num_threads", 8, facts(), None),
    ("torch.num_threads", 1, facts(), None),
    ("torch.num_threads", 1, facts(on_gpu=False), MAY_SLOW),
    ("torch.matmul_precision", "none", facts(), MAY_SLOW),
    ("torch.matmul_precision", "tf32", facts(), None),
    ("torch.matmul_precision", "none", facts(tf32=False), None),  # a V100 has no TF32
    ("torch.matmul_precision", "none", facts(tf32=None), None),
    ("torch.cudnn_benchmark", False, facts(), MAY_SLOW),
    ("torch.cudnn_benchmark", False, facts(convolves=False), None),
    ("torch.cudnn_benchmark", True, facts(), None),
    ("torch.cudnn_enabled", False, facts(), MAY_SLOW),
    ("dynamo.recompiles", 3, facts(), MAY_SLOW),
    ("dynamo.recompiles", 0, facts(), None),
    ("python.monitoring_tools", "coverage", facts(), SLOWS),
    ("python.monitoring_tools", "", facts(), None),
    ("env.CUDA_LAUNCH_BLOCKING", "0", facts(), None),
    ("env.TORCH_DISTRIBUTED_DEBUG", "DETAIL", facts(), SLOWS),
    ("env.TORCH_DISTRIBUTED_DEBUG", "INFO", facts(), None),
    ("env.PYTORCH_JIT", "0", facts(), MAY_SLOW),
    ("optimizer.AdamW.implementation", "for-loop", facts(), MAY_SLOW),
    ("optimizer.AdamW.implementation", "default", facts(), None),
    ("optimizer.AdamW.implementation", "default", facts(on_gpu=False), MAY_SLOW),
    ("optimizer.AdamW.implementation", "fused", facts(on_gpu=False), None),
    ("optimizer.AdamW.parameters", 300, facts(on_gpu=False), None),
    ("env.UNKNOWN", "1", facts(), None),
])  # fmt: skip
def test_a_value_is_judged_by_what_it_does_here(name: str, value: Any, given: SettingFacts, effect: str | None) -> None:
    found = verdict(name, value, given)
    assert (found.effect if found is not None else None) == effect


@pytest.mark.parametrize("value", [True, False, 0, 1, -5, 3.5, "", "x", "1", "0"])
def test_no_value_of_any_setting_fails(value: Any) -> None:
    assert all(verdict(name, value, facts()) is None or verdict(name, value, facts()) for name in RULES)


def test_a_trace_without_settings_says_so(tmp_path: Path) -> None:
    target(window_start_ns=START_NS, window_end_ns=START_NS + 1, complete=True).write(tmp_path)
    write_recording(tmp_path, recording([], codes={}, nodes={}))
    convert_target(tmp_path, formats=["chrome"])
    assert run_view("settings", open_trace(tmp_path / "columns")).notes == (
        "the program's settings are not in this trace: kinetod records them, other tools do not",
    )

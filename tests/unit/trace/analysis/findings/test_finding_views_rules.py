"""Findings about one time: of the GPU's idle time in a function, and of what that function does meanwhile."""

import pytest
from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.findings import finding_views
from kineto_trace.analysis.findings.finding_views import findings
from support.trace_files.sampled_stacks import MAIN, THREAD, stack_rows
from support.trace_files.simulated.host_and_gpu import US, Program

COMPILES = Finding(
    name="recompilation", title="compiles", saving_ns=900 * US, advice="", evidence="", where="main (/job/train.py:10)"
)


@pytest.mark.parametrize(
    ("idle_ns", "told"),
    [
        (1_200 * US, [("recompilation", 1_200 * US)]),
        (700 * US, [("recompilation", 900 * US)]),
        (1_400 * US, [("host_python", 1_400 * US), ("recompilation", 900 * US)]),
    ],
)
def test_idle_time_in_a_function_that_compiles_is_told_once_unless_it_is_much_longer(
    idle_ns: int, told: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Program()
    made.host(4_000 * US)
    made.launch(100 * US)
    made.wait()
    made.rows["python_function"] = stack_rows([MAIN], thread=THREAD)
    idle = Finding(name="host_python", title="runs Python", saving_ns=idle_ns, advice="", evidence="", frame=1)
    monkeypatch.setattr(finding_views, "FINDERS", (lambda _context: iter([COMPILES, idle]),))
    found = findings(made.context()).findings
    assert [(finding.name, finding.saving_ns) for finding in found] == told

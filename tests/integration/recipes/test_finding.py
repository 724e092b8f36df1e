"""docs/how-to-add.md followed: a finding."""

from pathlib import Path

import pytest
from support.machine.source_tree import SourceTree, leads_to

pytestmark = pytest.mark.slow

MODULE = "daemon/kineto_trace/analysis/findings/idle_findings.py"
RULES = "daemon/kineto_trace/analysis/findings/finding_views.py"
FINDER = '''

def late_batches(context: Context) -> Iterator[Finding]:
    """Batches that come too late."""
    waits = context.get(time_causes).total("data_loading")
    if waits:
        yield Finding(
            name="late_batches",
            title="Batches come late",
            saving_ns=2 * waits,
            advice="Load them earlier.",
            evidence="the GPU waited",
            causes=("data_loading",),
        )
'''
USE = """
from kineto_trace.analysis.findings.finding_views import findings
from kineto_trace.model.context import Context
from support.trace_files.traces import trace

US = 1000
loads = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
rows = {
    "kernel": [{"name": "k", "start": at * US, "duration": 50 * US, "correlation": at + 1} for at in (0, 150)],
    "cuda_runtime": [
        {"name": "cudaLaunchKernel", "start": 149 * US, "duration": US, "correlation": 151, "thread": 1}
    ],
    "cpu_op": [{"name": loads, "start": 40 * US, "duration": 109 * US, "thread": 1}],
}
found = findings(Context(trace(rows, length_ns=200 * US)))
print({each.name: each.saving_ns for each in found.findings})
"""


def test_a_finding_takes_one_function_and_its_place_and_never_saves_more_than_was_lost(tmp_path: Path) -> None:
    tree = SourceTree(tmp_path)
    tree.insert(MODULE, 'ranks to cores) and the CPU quota of its container."\n)\n', FINDER)
    tree.insert(RULES, "FINDERS: tuple[Callable[[Context], Iterator[Finding]], ...] = (\n", "    late_batches,\n")
    tree.insert(RULES, "from kineto_trace.analysis.findings.idle_findings import (\n", "    late_batches,\n")
    assert "'late_batches': 99000" in tree.python("-c", USE)  # not twice that: the time of its causes is all there is
    assert all(leads_to("A finding", path) for path in tree.edited)

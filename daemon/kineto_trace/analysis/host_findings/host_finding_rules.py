"""All findings about the host, of one trace."""

from collections.abc import Callable, Iterator

from kineto_trace.analysis.finding import Finding
from kineto_trace.analysis.host_findings.forward_copies import forward_copies
from kineto_trace.analysis.host_findings.loading import loading
from kineto_trace.analysis.host_findings.small_operators import small_operators
from kineto_trace.analysis.host_findings.tensor_formats import layouts, number_types
from kineto_trace.analysis.host_findings.threads import garbage, gil, paging, processors
from kineto_trace.analysis.host_findings.torch_use import (
    anomaly_mode,
    compilation,
    graph_breaks,
    optimizer,
    second_backward,
)
from kineto_trace.analysis.host_findings.user_code import user_code
from kineto_trace.model.context import Context

HOST_RULES: tuple[Callable[[Context], Iterator[Finding]], ...] = (
    user_code,
    loading,
    gil,
    garbage,
    paging,
    processors,
    optimizer,
    anomaly_mode,
    compilation,
    graph_breaks,
    second_backward,
    small_operators,
    forward_copies,
    number_types,
    layouts,
)
USES_OF_TORCH = (  # also with a GPU
    "anomaly_mode",
    "recompilation",
    "compiled_in_the_loop",
    "compile_warm_up",
    "graph_breaks",
    "second_backward",
)


def host_findings(context: Context) -> list[Finding]:
    """Returns the findings about the host, the largest saving first."""
    found = [finding for rule in HOST_RULES for finding in rule(context)]
    return sorted(found, key=lambda finding: -finding.saving_ns)

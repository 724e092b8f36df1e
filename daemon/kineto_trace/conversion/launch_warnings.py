"""Whether the kernels of a trace have the calls that launched them."""

import numpy as np

from kineto_trace.arrays.id_sets import is_in
from kineto_trace.model.trace import API_TABLES, Trace

# Kernels launched just before the recording began run inside it: so many without a launch are no news.
TOLERATED_SHARE = 0.02


def launch_warnings(trace: Trace) -> tuple[str, ...]:
    """Warns if calls were recorded, but many kernels have no call with their correlation id."""
    kernels = trace.table("kernel")
    calls = [trace.table(kind)["correlation"] for kind in API_TABLES if len(trace.table(kind))]
    if not len(kernels) or not calls:
        return ()
    without = len(kernels) - int(np.count_nonzero(is_in(kernels["correlation"], np.concatenate(calls))))
    if without <= TOLERATED_SHARE * len(kernels):
        return ()
    declared = [trace.categories[kind] for kind in API_TABLES if kind in trace.categories] or API_TABLES
    # of a vendor that declares one type of calls, these were recorded
    advice = f" (name both {' and '.join(declared)} among the activities)" if len(declared) > 1 else ""
    return (
        f"{without:,} of {len(kernels):,} kernels have no launch in the trace: the calls that launched them were not "
        f"recorded{advice}",
    )

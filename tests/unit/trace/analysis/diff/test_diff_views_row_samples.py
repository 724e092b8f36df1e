"""What is compared between two traces, by name."""

import pytest
from kineto_trace.analysis.diff.diff_views import operator_samples
from kineto_trace.analysis.diff.step_noise import GPU, HOST
from support.trace_files.ranks import context, event, launched, step


def test_an_operator_inside_one_of_its_name_counts_once_in_its_total() -> None:
    events = [
        line
        for number in (1, 2)
        for line in (
            step(number, 1000 * number, 900),
            event("cpu_op", "aten::sum", 1000 * number + 10, 400),
            event("cpu_op", "aten::sum", 1000 * number + 20, 300),
            *launched("k", 1000 * number + 30, 1000 * number + 50, 70, number),
        )
    ]
    found = operator_samples(context(events), total=True)
    per_step = dict(zip(found.names, found.us.tolist(), strict=True))
    assert per_step["aten::sum", HOST] == pytest.approx([400, 400])
    assert per_step["aten::sum", GPU] == pytest.approx([70, 70])

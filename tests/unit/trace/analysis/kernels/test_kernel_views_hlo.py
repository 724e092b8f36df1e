"""What HLO operations cost, on GPUs and on the CPU, recorded or read from a file."""

from kineto_trace.analysis.kernels.kernel_views import hlo_ops
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from support.trace_files import traces

FUSION = '"hlo_op":"fusion.2","hlo_module":"jit_f","op_name":"jit(f)/add","source":"a.py:7"'


def some_kernels() -> Trace:
    return traces.trace(
        {
            "kernel": [
                {"name": "fusion_2", "start": 0, "duration": 2_000, "hlo": FUSION},
                {"name": "fusion_2", "start": 5_000, "duration": 4_000, "hlo": FUSION},
                {"name": "gemm", "start": 10_000, "duration": 3_000, "hlo": '"hlo_module":"jit_f"'},
                {"name": "other", "start": 20_000, "duration": 1_000, "hlo": ""},
            ],
            "cpu_op": [
                {"name": "dot.1", "start": 0, "duration": 500, "id": 1, "inputs": '"hlo_op":"dot.1","hlo_module":"g"'},
                {"name": "aten::add", "start": 0, "duration": 500, "id": 2, "inputs": '"Input Dims":[[2]]'},
            ],
        }
    )


def test_operations_come_with_module_line_and_share() -> None:
    answer = hlo_ops(Context(some_kernels()))
    keys = ("hlo_op", "hlo_module", "op_name", "source", "where", "runs", "total_us", "mean_us", "max_us", "share_pct")
    assert [tuple(row[key] for key in keys) for row in answer.rows()] == [
        ("fusion.2", "jit_f", "jit(f)/add", "a.py:7", "GPU", 2, 6.0, 3.0, 4.0, 60.0),
        (None, "jit_f", None, None, "GPU", 1, 3.0, 3.0, 3.0, 30.0),
        ("dot.1", "g", None, None, "CPU", 1, 0.5, 0.5, 0.5, 100.0),
    ]
    assert list(answer.notes) == ["10.0 % of the kernels' time belongs to no known HLO operation"]


def test_a_trace_without_hlo_says_so() -> None:
    answer = hlo_ops(Context(traces.trace({"kernel": [{"name": "k", "start": 0, "duration": 1, "hlo": ""}]})))
    assert answer.rows() == []
    assert list(answer.notes) == ["the trace has no HLO operations: they are recorded in JAX programs"]

"""docs/how-to-add.md followed: a view."""

from pathlib import Path

import pytest
from support.machine.source_tree import SourceTree, leads_to

pytestmark = pytest.mark.slow

MODULE = "daemon/kineto_trace/analysis/kernels/kernel_views.py"
VIEW = '''

@view("longest_kernel", columns(("name", "text", "", "its name"), ("duration_us", "float", "us", "how long it took")))
def longest_kernel(context: Context) -> Answer:
    """The run of a kernel that took longest."""
    table = context.trace.table("kernel")
    if not len(table):
        return Answer({"name": [], "duration_us": []}, [_NO_KERNELS])
    row = int(np.argmax(table["duration"]))
    return Answer({"name": [context.trace.strings[table["name"][row]]], "duration_us": [table["duration"][row] / 1000]})
'''
USE = """
import json
import kineto_trace as kt

names = {"name": "gemm", "cat": "kernel", "ph": "X", "pid": 0, "tid": 7, "ts": 1, "args": {"device": 0, "stream": 7}}
events = [{**names, "dur": 3}, {**names, "ts": 5, "dur": 8}]
with open("trace.json", "w") as file:
    json.dump({"traceEvents": events}, file)
print(kt.run_view("longest_kernel", "trace.json").table.to_pylist())
"""


def test_a_view_takes_one_function_and_then_has_its_result_its_sql_table_and_its_documentation(tmp_path: Path) -> None:
    tree = SourceTree(tmp_path)
    tree.insert(MODULE, tree.text(MODULE)[-80:], VIEW)
    assert "longest_kernel" in tree.python("docs/generate_views.py")
    assert "longest_kernel" in tree.python("-c", "from kineto_trace.sql.schema import sql_tables; print(sql_tables())")
    assert "'gemm', 'duration_us': 8.0" in tree.python("-c", USE)
    assert all(leads_to("A view", path) for path in tree.edited)

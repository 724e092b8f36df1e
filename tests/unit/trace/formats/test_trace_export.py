import gzip
import json
from pathlib import Path

import pytest
from kineto_trace.errors import FormatError
from kineto_trace.formats.trace_export import FORMATS, export_trace, format_of
from kineto_trace.open.trace_opener import open_trace
from support.trace_files.traces import target, trace

KERNEL = {"start": 0, "duration": 10, "name": "k", "stream": 7}


@pytest.mark.parametrize(
    ("name", "format_"),
    [
        ("t.json.gz", "chrome"),
        ("t.pt.trace.json", "chrome-json"),
        ("t.pftrace", "perfetto"),
        ("t.speedscope.json", "speedscope"),
        ("t.folded", "folded"),
        ("t.gpu.folded", "folded-gpu"),
    ],
)
def test_a_suffix_stands_for_a_format(name: str, format_: str) -> None:
    assert format_of(Path(name)) == format_


def test_an_unknown_suffix_or_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"t\.txt has no known trace suffix .*specify the format"):
        export_trace(trace({}), tmp_path / "t.txt")
    with pytest.raises(FormatError, match="no trace format is called 'pdf'; available: chrome, chrome-json, perfetto"):
        export_trace(trace({}), tmp_path / "t", "pdf")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_writes_a_small_trace_and_says_its_size(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"t{FORMATS[name].suffix}"
    written = export_trace(trace({"kernel": [KERNEL]}), path, name)
    files = [written.path] if written.path.is_file() else list(written.path.rglob("*"))
    assert written.size_bytes == sum(file.stat().st_size for file in files)
    assert not list(tmp_path.glob(".*"))


def test_the_tensorboard_plug_ins_folder_is_a_run_with_a_file_per_process(tmp_path: Path) -> None:
    whole = trace({"kernel": [KERNEL]}, target=target(host="node-1.example", capture_id="c0ffee"))
    written = export_trace(whole, tmp_path, "tensorboard")
    # run / host_pid . ms . pt.trace.json.gz
    assert written.path == tmp_path / "c0ffee" / "node-1.example_4242.1795163478000.pt.trace.json.gz"
    rows = json.loads(gzip.decompress(written.path.read_bytes()))["traceEvents"]
    assert [row["name"] for row in rows if row.get("cat") == "kernel"] == ["k"]


def test_names_of_hosts_and_captures_stay_inside_the_log_directory(tmp_path: Path) -> None:
    whole = trace({"kernel": [KERNEL]}, target=target(host="../up", capture_id="../../x"))
    written = export_trace(whole, tmp_path / "logs", "tensorboard")
    assert written.path.resolve().is_relative_to((tmp_path / "logs").resolve())


@pytest.mark.parametrize("name", ["chrome", "perfetto", "store"])
def test_whose_trace_it_is_comes_back_from_a_file(tmp_path: Path, name: str) -> None:
    whose = target(command=["python", "train.py", '--name="a b"\\'], job_id="4242_7")
    written = export_trace(trace({"kernel": [KERNEL]}, target=whose), tmp_path / f"t{FORMATS[name].suffix}", name)
    again = open_trace(written.path).target
    assert (again.command, again.job_id) == (whose.command, "4242_7")

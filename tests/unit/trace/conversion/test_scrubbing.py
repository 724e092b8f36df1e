"""A scrubbed trace has nothing private in it, and the same figures."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from kineto_trace import run_view
from kineto_trace.conversion.scrubbing import scrubbed
from kineto_trace.formats.trace_export import FORMATS, export_trace
from kineto_trace.model.trace import Trace
from kineto_trace.open.trace_opener import open_trace
from support.trace_files.traces import target, trace

DATA = Path(__file__).parents[3] / "data"
PRIVATE = ("alice", "gpu-box-7", "hf_abc", "acme", "10.0.0.7", "corp.com", "ticket")
EVENT: dict[str, Any] = {"ph": "X", "ts": 1.0, "dur": 5.0, "pid": 7, "tid": 8}


def foreign(folder: Path) -> Path:
    """A file of another tool that has private text wherever it can be."""
    call_stack = "/home/alice/acme/train.py(3): main;/venv/site-packages/torch/nn/linear.py(9): forward"
    events = [
        {**EVENT, "cat": "cpu_op", "name": "aten::mm", "args": {
            "Input Dims": [[4, 4]], "Concrete Inputs": ["", "3", "/home/alice/x"], "Call stack": call_stack,
            "customer": "acme", "nested": {"name": "acme", "size": 3}, "/home/alice/key": 1}},
        {**EVENT, "cat": "python_function", "name": "/home/alice/acme/train.py(3): main"},
        {**EVENT, "cat": "python_function", "name": r"C:\Users\alice\acme\work.py(4): work"},
        {**EVENT, "cat": "python_function", "name": "/home/alice/venv/lib/python3.12/site-packages/torch/a.py(1): f"},
        {**EVENT, "cat": "user_annotation", "name": "mail alice@corp.com about 10.0.0.7", "note": "ticket 7"},
        {**EVENT, "cat": "user_annotation", "name": "load s3://acme/data with hf_abcdefghijk on gpu-box-7.alice"},
        {"ph": "M", "pid": 7, "tid": 8, "name": "thread_name", "args": {"name": "alice-worker"}},
        {"ph": "M", "pid": "gpu-box-7", "tid": 8, "name": "process_labels", "args": {"labels": "CPU", "of": "acme"}},
    ]  # fmt: skip
    head = {
        "host_name": "gpu-box-7", "env": {"HF_TOKEN": "hf_abcdefghijk", "SIZE": 4}, "command": ["/home/alice/train.py"],
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "owner": "acme"}], "traceName": "/tmp/acme/trace.json",
        "labels": {"team": "acme"}, "record_shapes": 1,
    }  # fmt: skip
    path = folder / "given.json"
    path.write_text(json.dumps({**head, "traceEvents": events}))
    return path


def own() -> Trace:
    """A recording of kinetod's."""
    told = target(
        host="gpu-box-7", process_name="/home/alice/python", command=["python", "/home/alice/acme/train.py"],
        job_id="acme-1", labels={"team": "acme"}, resource={"k8s.pod.name": "acme-0"}, trace_parent="ticket",
        threads={8: "alice"}, settings={"torch.num_threads": 4, "env.HF_HOME": "/home/alice/hf"},
        kernel_counters={"times": [1, 2], "child_names": ["acme"], "quota_group": "/acme", "notes": ["acme"]},
        not_recorded={"kernel": "no libcupti in /home/alice"},
    )  # fmt: skip
    rows = {"cpu_op": [{"name": "aten::mm", "start": 0, "duration": 5}]}
    return trace(rows, target=told, notes=("/home/alice/acme/trace.json.gz is cut off",))


def text_of(path: Path) -> str:
    """All that a written trace contains, whatever its form."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    contents = [file.read_bytes() for file in files if file.is_file()]
    return "".join(
        (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode("latin-1") for content in contents
    )


@pytest.mark.parametrize("name", ["chrome", "chrome-json", "perfetto", "speedscope", "folded", "pprof", "otlp"])
@pytest.mark.parametrize("ours", [True, False], ids=["of kinetod", "of another tool"])
def test_nothing_private_is_in_any_format(name: str, ours: bool, tmp_path: Path) -> None:
    given = own() if ours else open_trace(foreign(tmp_path))
    written = export_trace(scrubbed(given), tmp_path / f"shared{FORMATS[name].suffix}", name).path
    found = text_of(written).lower()
    assert [word for word in PRIVATE if word in found] == []


def test_what_analyses_need_stays(tmp_path: Path) -> None:
    made = export_trace(scrubbed(open_trace(foreign(tmp_path))), tmp_path / "shared.json").path
    content = json.loads(made.read_text())
    op, main, windows, library, mail, load, thread, labels = content["traceEvents"]
    assert op["args"] == {
        "Input Dims": [[4, 4]], "Concrete Inputs": ["", "3", ""], "nested": {"size": 3}, "key": 1,
        "Call stack": "train.py(3): main;/site-packages/torch/nn/linear.py(9): forward",
    }  # fmt: skip
    assert main["name"] == "train.py(3): main"
    assert windows["name"] == "work.py(4): work"
    assert library["name"] == "/site-packages/torch/a.py(1): f"
    assert mail["name"] == "mail EMAIL about ADDRESS"
    assert load["name"] == "load URL with TOKEN on host.user"
    assert thread["args"]["name"] == "user-worker"
    assert labels["args"] == {"labels": "CPU"}
    assert (content["deviceProperties"], content["record_shapes"]) == ([{"id": 0, "name": "NVIDIA H200"}], 1)
    assert content["env"] == {"SIZE": 4}


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("jit(f)/transpose(jvp(main))/dot_general", None),
        ("void at::native::elementwise_kernel<128, 4, at::native::add<float>(int)>(int, std::array<char*, 2ul>)", None),
        ("ProfilerStep#12", None),
        ("Optimizer.step#AdamW.step", None),
        ("aten::div_", None),
        ("copies 1/2 of a/b", None),
        ("reads ~/acme/x.bin", "reads x.bin"),
        ("reads file:///home/alice/x", "reads URL"),
        ("reads \\\\acme\\share\\x.bin", "reads x.bin"),
        ("peer fe80:0:0:0:1::7 joins", "peer ADDRESS joins"),
        ("acme/model/train.py(3): main", "train.py(3): main"),
        ("torch/nn/modules/linear.py(3): forward", None),
    ],
)
def test_names_lose_what_is_private_alone(name: str, kept: str | None, tmp_path: Path) -> None:
    path = tmp_path / "given.json"
    event = {**EVENT, "cat": "python_function" if ".py(" in name else "user_annotation", "name": name}
    path.write_text(json.dumps({"traceEvents": [event]}))
    made = export_trace(scrubbed(open_trace(path)), tmp_path / "shared.json").path
    assert json.loads(made.read_text())["traceEvents"][0]["name"] == (kept or name)


@pytest.mark.parametrize("text", ["a" * 1_000_000, "a." * 500_000, "/a" * 500_000, "1:" * 500_000])
def test_long_texts_take_no_longer_than_they_are_long(text: str) -> None:
    given = trace({"cpu_op": [{"name": text, "start": 0, "duration": 5}]})
    assert len(scrubbed(given).strings) == len(given.strings)  # a hang fails by the limit of all tests


def test_a_recording_of_ours_is_still_one(tmp_path: Path) -> None:
    written = export_trace(scrubbed(own()), tmp_path / "shared.json").path
    found = open_trace(written).target
    assert (found.capture_id, found.settings, found.host) == (own().target.capture_id, {"torch.num_threads": 4}, "host")
    again = export_trace(scrubbed(open_trace(written)), tmp_path / "again.json").path
    assert open_trace(again).target == found


@pytest.mark.parametrize("view", ["time_causes", "operators", "kernels", "findings", "collectives"])
def test_figures_are_the_same(view: str, tmp_path: Path) -> None:
    for number, path in enumerate([DATA / "h200" / "ddp4" / "rank0.json.gz", DATA / "advice" / "pil_resize.json.gz"]):
        made = export_trace(scrubbed(open_trace(path)), tmp_path / f"{number}.json.gz").path
        assert str(run_view(view, made).rows()) == str(run_view(view, path).rows()).replace("app/", "")  # a folder

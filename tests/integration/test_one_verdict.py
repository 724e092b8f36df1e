"""The verdict on a trace is the same on every surface."""

import hashlib
import html
import json
import lzma
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.base.quantities import shortened
from kineto_trace.catalog.first_screen import FirstScreen, first_screen_of
from kineto_trace.formats.trace_export import export_trace
from kineto_trace.model.trace import Trace
from kineto_trace.open.trace_opener import open_trace
from kineto_trace.store.output_formats import COLUMNS_DIRECTORY, FILE_NAMES
from kineto_trace.store.parquet_folder import save_columns
from kinetoctl.base.common_options import CommonOptions
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.tracing import Outcome, Quiet, await_answer
from kinetoctl.output.capture_summary import show_capture
from kinetoctl.output.listing import MAX_CAUSE
from kinetod.captures.result.decode_pool import MAX_ANSWERS_WAITING
from kinetod.store.capture_store import Store, key_of
from support.service.cli import run_here
from support.service.daemon import running_daemon
from support.trace_files.sampled_stacks import BACKWARD, FORWARD, LOADER, MAIN, OPTIMIZER, PERIOD_NS, sampled_trace
from support.trace_files.step_traces import stepped
from support.trace_files.traces import trace
from support.waiting import until
from support.web.browsing import NO_DAEMON, browsing

H200 = Path(__file__).parents[1] / "data/h200"
STEP = [(*MAIN, LOADER)] * 4 + [FORWARD] * 3 + [(*MAIN, BACKWARD)] * 2 + [(*MAIN, OPTIMIZER)]
WAITS = ((*MAIN, "/usr/lib/python3.12/queue.py(154): Queue.get"), "idle idle_lock")
KERNELS = [{"name": "sgemm", "start": n * 1000, "duration": 900, "correlation": n + 1} for n in range(20)]
Make = Callable[[Path], None]


def ranks(*numbers: int) -> Make:
    def make(folder: Path) -> None:
        for number in numbers:
            shutil.copy(H200 / f"ddp4/rank{number}.json.gz", folder)

    return make


def recorded(name: str, kept: float = 1.0) -> Make:
    """What Kineto recorded. kept: the part of the file that is left."""

    def make(folder: Path) -> None:
        content = lzma.decompress((H200 / f"{name}-kineto.json.xz").read_bytes())
        (folder / "trace.json").write_bytes(content[: int(kept * len(content))])

    return make


def made(*traces: Trace, suffix: str = ".json.gz") -> Make:
    def make(folder: Path) -> None:
        for number, each in enumerate(traces):
            export_trace(each, folder / f"trace{number}{suffix}")

    return make


def job(*traces: Trace) -> Make:
    return made(*(replace(each, target=replace(each.target, rank=n, world_size=9)) for n, each in enumerate(traces)))


def run(number: int) -> Trace:
    """The same program once more, as another process."""
    each, ns = TRAINS, number * 2 * PERIOD_NS * len(STEP) * 4
    tables = {
        kind: replace(table, columns={**table.columns, "start": table["start"] + ns})
        for kind, table in each.tables.items()
    }
    return replace(
        each,
        tables=tables,
        target=replace(each.target, pid=4242 + number),
        window_start_ns=each.window_start_ns + ns,
        window_end_ns=each.window_end_ns + ns,
    )


SERVE = (*MAIN, "/job/serve.py(20): answer")
SERVES = [(*SERVE, "/job/serve.py(8): tokens_of")] * 6 + [(*SERVE, *FORWARD[-2:])] * 4
HANGS = sampled_trace([WAITS] * 50, steps=0, pid=1)
TRAINS = sampled_trace(STEP * 4, steps=4)
TRACES: dict[str, Make] = {
    **{f"a rank of a job: {number}": ranks(number) for number in range(4)},
    "a job of four ranks": ranks(0, 1, 2, 3),
    "a job of two of its ranks": ranks(1, 3),
    **{f"Kineto's trace of {name}": recorded(name) for name in ("mlp", "graph", "streams")},
    **{f"Kineto's trace of {name}, cut off": recorded(name, 0.6) for name in ("mlp", "graph", "streams")},
    "hardly anything of a trace": recorded("mlp", 0.02),
    "a training on the CPU": made(TRAINS),
    "the same in Perfetto's format": made(TRAINS, suffix=".pftrace"),
    "one step": made(sampled_trace(STEP, steps=1)),
    "no step": made(sampled_trace(STEP * 4, steps=0)),
    "a step that waits for data": made(sampled_trace([(*MAIN, LOADER)] * 10 + [FORWARD], steps=1)),
    "a start": made(sampled_trace([("/job/train.py(1): <module>",)] * 30, steps=0)),
    "samples of one function": made(sampled_trace([MAIN] * 40, steps=0)),
    "a hang": made(HANGS),
    "a job that hangs": job(HANGS, HANGS, sampled_trace([MAIN, FORWARD] * 25, steps=0)),
    "a job of which one rank hangs": job(TRAINS, HANGS),
    "a job on the CPU": job(TRAINS, TRAINS),
    "two runs": made(*map(run, range(2))),
    "three runs": made(*map(run, range(3))),
    "kernels alone": made(trace({"kernel": KERNELS})),
    "kernels without a pause": made(trace({"kernel": [{**each, "duration": 1000} for each in KERNELS]})),
    "operators alone": made(trace({"cpu_op": [{"name": "aten::mm", "duration": 5000, "thread": 1}]})),
    "an empty window": made(trace({"cpu_op": []})),
    "an inference on the CPU": made(sampled_trace(SERVES * 4, steps=0)),
    "an inference on a GPU": made(stepped({"aten::mm": [300.0] * 20}, {"gemm": [900.0] * 20}, annotated=False)),
}
LOADS = (
    "Load batches ahead of time and in parallel: DataLoader(num_workers=…, persistent_workers=True, prefetch_factor=…)."
)
LAUNCHES = (
    "Give the GPU more work per launch: torch.compile or CUDA graphs, a larger batch, fused optimizers, fewer tiny "
    "operators and less Python between them."
)
TYPES = "Use bfloat16 or float16, or TF32 for float32, or float8 for the largest products."
VERDICTS = {
    "a rank of a job: 0": (
        "A step takes 19.9 ms on average. Matrix products do not use the tensor cores. "
        f"{TYPES} That could save up to 10.4 ms a step (52 %, likely)."
    ),
    "a job of four ranks": (
        "A step takes 19.9 ms on average on each of 4 ranks. Matrix products do not use the tensor cores (on 4 of"
        " 4 ranks). "
        f"{TYPES} That could save up to 10.5 ms a step (52 %, likely)."
    ),
    "Kineto's trace of mlp": (
        "The GPU waits for the host to launch work. "
        f"{LAUNCHES} That could save up to 13 ms of the recorded time (53 %, likely)."
    ),
    "Kineto's trace of mlp, cut off": (
        "The file is truncated in the middle of an event, after 1937 events of an unknown number. Entire kinds of "
        "activity may be missing, so the shares of the time are unreliable: copy the file again, or record a new trace."
    ),
    "a training on the CPU": (
        "A step takes 100 ms on average. The DataLoader builds the next batch in the training process. "
        f"{LOADS} That could save up to 40 ms a step (40 %, likely)."
    ),
    "a start": (
        "100 % of the recorded time is everything else: your own Python code, or waits in it. Most promising, by "
        "a rough estimate: <module> (train.py:42) takes up part of the time. Make this line faster: replace "
        "element-by-element work with operations on whole arrays or tensors, cache results that would otherwise be "
        "recomputed, and run independent work in other processes."
    ),
    "a hang": "Nothing moved: the main thread waits for a lock in main (train.py:10).",
    "a job that hangs": "Nothing moved: the main thread waits for a lock in main (train.py:10) (on 2 of 3 ranks).",
    "a job of which one rank hangs": (
        "Nothing moved on rank 1: the main thread waits for a lock in main (train.py:10)."
    ),
    "operators alone": (
        "100 % of the recorded time is everything else: your own Python code, or waits in it. No finding would "
        "save half a per cent or more."
    ),
    "an empty window": "",
    "an inference on the CPU": (
        "100 % of the recorded time is everything else: your own Python code, or waits in it. Most promising, by a "
        "rough estimate: tokens_of (serve.py:42) takes up part of the time. Make this line faster: replace "
        "element-by-element work with operations on whole arrays or tensors, cache results that would otherwise be "
        "recomputed, and run independent work in other processes."
    ),
}
# What no daemon stores: files that were cut off, and captures of several runs.
CAPTURED = [name for name in TRACES if not re.search(r"cut off|hardly|runs", name)]
HOOK = '#!/bin/sh\ncat > "$1/new-$KINETO_CAPTURE_ID" && mv "$1/new-$KINETO_CAPTURE_ID" "$1/$KINETO_CAPTURE_ID"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "job").mkdir()
    yield tmp_path / "job"


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACES)
def test_the_verdict_is_the_same_on_every_surface(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    TRACES[name](folder)
    page = tmp_path / "report.html"
    result = run_here(capsys, NO_DAEMON, "report", str(folder), "-o", "json")
    (row,) = result.json()["verdict"]["rows"]
    verdict = row["verdict"] or ""
    text = run_here(capsys, NO_DAEMON, "report", str(folder)).stdout
    assert run_here(capsys, NO_DAEMON, "report", "--html", str(page), str(folder)).code == result.code
    with browsing([folder]) as browser:
        ids = re.findall(r'href="/c/(\w+)"', browser.ask("/").text)  # one, or one of each run
        shown = [in_page(browser.shown(f"/c/{trace_id}").text) for trace_id in ids]
    first = " ".join(text.split("\n\n")[0].splitlines())
    assert first == verdict or (not verdict and first.startswith(" What to change (findings)"))
    assert in_page(page.read_text()) == verdict and verdict in shown
    assert verdict == VERDICTS.get(name, verdict)


def in_page(text: str) -> str:
    found = re.search(r'<p class="verdict">(.*?)</p>', text, re.DOTALL)
    return html.unescape(found[1]).strip() if found else ""


@pytest.mark.slow
def test_the_verdict_of_a_capture_is_that_of_its_files_wherever_a_daemon_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected: dict[str, FirstScreen] = {}
    hook, heard, state = tmp_path / "hook", tmp_path / "heard", tmp_path / "state"
    hook.write_text(HOOK)
    hook.chmod(0o755)
    heard.mkdir()
    # a daemon that comes up after another one died ends its captures: it looks for the answers, then calls the hooks
    for begin in range(0, len(CAPTURED), MAX_ANSWERS_WAITING):
        for name in CAPTURED[begin : begin + MAX_ANSWERS_WAITING]:
            folder = tmp_path / name.replace(" ", "-")
            folder.mkdir()
            TRACES[name](folder)
            expected[leave(state, len(expected), folder)] = first_screen_of([folder])
        with running_daemon(state_dir=state, environ={"KINETOD_HOOKS_COMMAND": f"{hook} {heard}"}) as daemon:
            until(
                lambda: {path.name for path in heard.iterdir()} >= expected.keys(), "all hooks", 120, state=daemon.log
            )
            if len(expected) == len(CAPTURED):
                compare(expected, heard, daemon.address, capsys)


def leave(state: Path, number: int, folder: Path) -> str:
    """Leaves a capture with these traces in a store, as a daemon does that dies before its end. Returns its id."""
    capture = pb.Capture(id=f"20260101-000000-{number:03}-abcdef", created_ns=number + 1, host="gpu-7")
    capture.status, capture.owner_uid, capture.spec.duration_ns = pb.CAPTURE_STATUS_RUNNING, os.getuid(), 5
    formats = {"".join(Path(name).suffixes): known for known, name in FILE_NAMES.items()}
    paths = sorted(folder.iterdir())
    for rank, path in enumerate(paths):
        content, kind = path.read_bytes(), formats["".join(path.suffixes)]
        target = capture.targets.add(pid=100 + rank, start_time_ns=7, state=pb.TARGET_STATE_ENDED)
        target.verdict, target.process.pid = pb.VERDICT_DONE, target.pid
        digest = hashlib.sha256(content).hexdigest()
        target.files.add(format=kind, name=FILE_NAMES[kind], size_bytes=len(content), sha256=digest)
    with closing(Store(state)) as store:
        store.insert(capture, key="", request_hash="h")
        for target, path in zip(capture.targets, paths, strict=True):
            place = store.target_dir(capture.id, key_of(target))
            opened = open_trace(path)
            opened.target.write(place)
            save_columns(opened, place / COLUMNS_DIRECTORY)
            shutil.copy(path, place / target.files[0].name)
    return capture.id


def joined(shown: str) -> str:
    """In one line."""
    return " ".join(shown.splitlines())


def compare(expected: dict[str, FirstScreen], heard: Path, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Compares what hooks heard, the end of `trace`, `captures show`, `captures list` and the pages with the files."""
    settings = CommonOptions(address=address, output="table", color=False, quiet=True, timeout_s=30)
    listed = run_here(capsys, address, "captures", "list", "--limit", "100").stdout.splitlines()
    with Client(address) as client, browsing(address=address) as browser:
        home = browser.ask("/").text
        for capture_id, screen in expected.items():
            told = json.loads((heard / capture_id).read_text())["answer"]
            assert told == {"verdict": screen.verdict, "cause": screen.cause if screen.verdict else ""}
            outcome = Outcome(client.capture(capture_id))
            outcome.capture.ClearField("answer")  # which comes after the end
            await_answer(client, outcome, Quiet())
            show_capture(outcome.capture, {}, settings)
            ends = capsys.readouterr().out
            shows = run_here(capsys, address, "captures", "show", capture_id).stdout
            first = screen.verdict or f"capture {capture_id} on gpu-7: DONE"
            assert (joined(ends).startswith(first), joined(shows).startswith(first)) == (True, True)
            (line,) = (line for line in listed if line.startswith(capture_id))
            assert (shortened(screen.cause, MAX_CAUSE) or " - ") in line
            (row,) = (row for row in home.split("<tr>") if f"/c/{capture_id}" in row)
            cells = re.findall(r'<td class="prose cause" title="([^"]*)">([^<]*)<', row)
            assert tuple(map(html.unescape, cells[0])) == (screen.verdict, screen.cause)
            assert in_page(browser.shown(f"/c/{capture_id}").text) == screen.verdict

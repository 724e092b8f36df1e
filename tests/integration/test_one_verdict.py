"""The first sentence about a trace is the same on every surface."""

import html
import lzma
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kineto_trace.formats.trace_export import export_trace
from kineto_trace.model.trace import Trace
from support.service.cli import run_here
from support.trace_files.sampled_stacks import BACKWARD, FORWARD, LOADER, MAIN, OPTIMIZER, PERIOD_NS, sampled_trace
from support.trace_files.traces import trace
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
}


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
    assert " ".join(text.split("\n\n")[0].splitlines()) == verdict or not verdict
    assert in_page(page.read_text()) == verdict and verdict in shown


def in_page(text: str) -> str:
    found = re.search(r'<p class="verdict">(.*?)</p>', text, re.DOTALL)
    return html.unescape(found[1]).strip() if found else ""

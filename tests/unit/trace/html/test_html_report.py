import base64
import hashlib
import re
import time
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.analysis.overview.overview_views import step_breakdown
from kineto_trace.analysis.overview.step_breakdown import OTHER, ROLES, UNRECORDED
from kineto_trace.catalog.view_catalog import VIEWS
from kineto_trace.errors import FileError
from kineto_trace.html.report import MAX_ROWS, write_report
from kineto_trace.html.view_charts import chart
from kineto_trace.store.parquet_folder import save_columns
from kineto_trace.view_api.cell_texts import unit
from kineto_trace.view_api.result import make_result
from support.trace_files.traces import target, trace
from support.trace_files.training_ranks import Job, write_job

US = 1000
H200 = Path(__file__).parents[3] / "data/h200"
RECORDED_S = 1_795_346_176  # when ddp4 was
FIRST_SCREEN = ("Where the step time goes", "What to change", "What was not recorded", "Overview")
EVIL = "<script>alert('kernel')</script>&k"


class Page(HTMLParser):
    """Texts of all cells and headings, and what is loaded from elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.loaded: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.loaded += [
            value or "" for name, value in attrs if name in ("src", "href") and not (value or "").startswith("#")
        ]

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data.strip())


def stored(folder: Path, rank: int = 0, kernels: int = 3, name: str = EVIL) -> Path:
    rows: list[dict[str, Any]] = [
        {"name": f"{name}{n}", "start": 100 * n * US, "duration": 60 * US, "correlation": n + 1} for n in range(kernels)
    ]
    calls = [
        {"name": "cudaLaunchKernel", "start": 100 * n * US - 9, "duration": 5, "correlation": n + 1, "thread": 1}
        for n in range(kernels)
    ]
    made = trace(
        {"kernel": rows, "cuda_runtime": calls},
        length_ns=100 * kernels * US,
        target=target(rank=rank, world_size=2),
    )
    path = folder / f"rank{rank}"
    save_columns(made, path)
    return path


def test_the_page_shows_findings_and_tables_and_loads_nothing(tmp_path: Path) -> None:
    size, _results = write_report(tmp_path / "report.html", stored(tmp_path))
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert size == len(text.encode())
    assert page.loaded == []
    assert "The GPU waits for the host, and the trace does not show why" in page.texts
    assert "Where the step time goes" in page.texts
    assert {f"{EVIL}{n}" for n in range(3)} <= set(page.texts)
    assert "<script>alert" not in text
    assert not re.search(r"(?:src|href)=.?http|url\(|@import", text)


def test_views_without_rows_are_not_on_the_page(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", stored(tmp_path))
    text = (tmp_path / "report.html").read_text()
    found = re.findall(r'<section id="(\w+)"', text)
    assert "kernels" in found and "collective_summary" not in found and "memory_curve" not in found


def test_several_ranks_are_told_apart(tmp_path: Path) -> None:
    sources = [stored(tmp_path, rank) for rank in (0, 1)]
    write_report(tmp_path / "report.html", sources)
    texts = Page((tmp_path / "report.html").read_text()).texts
    assert {f"{tmp_path.name} (2 ranks)", "rank 0", "rank 1"} <= set(texts)


def test_a_job_of_many_ranks_says_who_is_slow_and_each_finding_once(tmp_path: Path) -> None:
    paths = write_job(tmp_path, Job(ranks=6, per_host=3, steps=2, layers=2, slow={5: 1.2}))
    write_report(tmp_path / "report.html", paths)
    texts = Page((tmp_path / "report.html").read_text()).texts
    assert {"Ranks", "Who waits for whom", "Steps over ranks"} <= set(texts)
    assert {"Where the step time goes", "What faster ranks or hidden transfers would save"} <= set(texts)
    assert any(text.startswith("slow: it computes") for text in texts)
    title = "Transfers between ranks are not hidden behind computation (on 6 of 6 ranks)"
    assert sum(text.strip() == title for text in texts) == 1
    write_report(tmp_path / "report.html", paths[0])
    assert "Ranks" not in Page((tmp_path / "report.html").read_text()).texts


def test_a_job_says_what_faster_ranks_would_save_or_why_that_is_unknown(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", H200 / "ddp4")
    texts = Page((tmp_path / "report.html").read_text()).texts
    title = texts.index("What faster ranks or hidden transfers would save", texts.index("What to change"))
    assert "rank 2 as fast as the others" in texts[title:]
    write_report(tmp_path / "report.html", [stored(tmp_path, rank) for rank in (0, 1)])
    texts = Page((tmp_path / "report.html").read_text()).texts
    assert any(text.endswith("so the ranks cannot be compared") for text in texts)


def test_each_part_of_a_step_has_a_colour_of_its_own() -> None:
    parts = [f"{role}_us" for role in (*ROLES, OTHER, UNRECORDED)]
    values: dict[str, list[Any]] = {column.name: [None] for column in step_breakdown.result_columns}
    values.update({"rank": [0], "step": ["all"], "complete": [True], **{part: [10.0] for part in parts}})
    drawn = str(chart(make_result("step_breakdown", step_breakdown.result_columns, values)))
    colours = re.findall(r'<i class="(series-\d)">', drawn)
    assert len(set(colours)) == len(colours) == len(parts)
    style = resources.files("kineto_trace.html").joinpath("page/style.css").read_text()
    assert all(f".{colour} " in style for colour in colours)


class Figures(HTMLParser):
    """The headings of columns and figures, and the buttons in them, which explain a figure."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.within: list[str] = []
        self.headings = 0
        self.buttons: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.within.append(tag)
        self.headings += tag == "th"
        if tag == "button":
            self.buttons.append({"in": self.within[-2], **dict(attrs)})

    def handle_endtag(self, tag: str) -> None:
        while self.within and self.within.pop() != tag:
            pass


def test_each_head_of_a_column_and_each_headline_figure_is_a_button_with_its_unit_and_definition(
    tmp_path: Path,
) -> None:
    write_report(tmp_path / "report.html", stored(tmp_path))
    found = Figures((tmp_path / "report.html").read_text())
    assert found.headings == sum(button["in"] == "th" for button in found.buttons) > 20
    assert {"th", "dt"} == {button["in"] for button in found.buttons}
    for button in found.buttons:
        view, _, name = (button["data-figure"] or "").partition(".")
        (column,) = (column for column in VIEWS[view].result_columns if column.name == name)
        assert (button["title"], button["data-unit"], button["type"]) == (column.meaning, unit(column), "button")
    figures = {button["data-figure"]: button for button in found.buttons if button["in"] == "dt"}
    assert figures["overview.kernel_us"]["data-unit"] == "time in µs, ms or s"


def test_each_section_has_the_rules_of_its_view_and_all_its_columns(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", stored(tmp_path))
    text = (tmp_path / "report.html").read_text()
    assert (
        text.count("<summary>Definitions and units</summary>") == text.count("<section ") - 1
    )  # what it lacks is a list
    texts = Page(text).texts
    assert VIEWS["kernels"].description in texts
    assert {column.meaning for column in VIEWS["gpu_utilization"].result_columns} <= set(texts)  # a chart alone


def test_the_page_begins_with_where_the_time_goes_what_to_change_and_what_was_not_recorded(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", stored(tmp_path))
    texts = Page((tmp_path / "report.html").read_text()).texts
    assert "kinetoctl trace --memory" in texts
    first = [texts.index(title, texts.index("Skip to the content") + 30) for title in FIRST_SCREEN]
    assert first == sorted(first)
    write_report(tmp_path / "job.html", [stored(tmp_path, rank) for rank in (0, 1)])
    texts = Page((tmp_path / "job.html").read_text()).texts
    assert texts[texts.index("allocations") + 1] == "rank 0-1"


def test_long_tables_end_and_say_so(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", stored(tmp_path, kernels=MAX_ROWS + 5))
    texts = Page((tmp_path / "report.html").read_text()).texts
    assert f"The first {MAX_ROWS} of {MAX_ROWS + 5} rows. All rows:" in texts
    assert "kinetoctl report --limit 0 --view kernels" in texts


def test_without_a_trace_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(FileError):
        write_report(tmp_path / "report.html", tmp_path / "missing.json")
    assert not (tmp_path / "report.html").exists()


def test_the_page_begins_with_facts_of_the_trace_and_leaves_out_what_it_does_not_have(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", H200 / "ddp4")
    texts = Page((tmp_path / "report.html").read_text()).texts
    said = texts[texts.index("process") : texts.index("Where the step time goes")]
    facts = dict(zip(said[::2], said[1::2], strict=True))
    assert facts["process"] == "python (pids 1231-1234)"
    assert (facts["host"], facts["GPU"], facts["ranks"]) == ("vm", "4 NVIDIA H200", "4")
    local = time.localtime(RECORDED_S).tm_gmtoff  # then, which summer time may tell from now
    assert facts["recorded"].endswith("2026-11-22 11:16:16 UTC)" if local else "11:16:16 UTC")
    assert (facts["framework"], facts["Python"], facts["CUDA"]) == ("torch 2.11.0+cu130", "3.12.3", "13.0")
    assert "command" not in texts and "job" not in texts


def test_the_browser_may_run_the_script_and_the_style_of_the_page_alone(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", stored(tmp_path))
    text = (tmp_path / "report.html").read_text()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    inline = {name: re.findall(f"<{name}>(.*?)</{name}>", text, re.DOTALL) for name in ("style", "script")}
    for name, (content,) in inline.items():
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{name}-src &#39;sha256-{digest}&#39;" in policy
    assert policy.startswith("default-src &#39;none&#39;;")
    assert not re.findall(r"<[^>]* style=", text)


def test_no_heading_of_a_column_is_a_raw_name(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", H200 / "ddp4")
    heads = re.findall(r"<th [^>]*><button [^>]*>([^<]*)</button>", (tmp_path / "report.html").read_text())
    assert heads and not [head for head in heads if "_" in head or head != head[:1].upper() + head[1:]]
    assert {"Algorithm bandwidth", "Copies", "Mean start skew", "GPU name"} <= set(heads)


def test_a_report_has_the_flame_graphs_that_its_traces_have_something_for(tmp_path: Path) -> None:
    write_report(tmp_path / "report.html", H200 / "ddp4")
    text = (tmp_path / "report.html").read_text()
    drawn = re.findall(r'<svg class="flame" [^>]*aria-label="([^"]*)"', text)
    assert drawn == ["Flame graph: Python functions", "Flame graph: Operators and annotations"]
    write_report(tmp_path / "report.html", stored(tmp_path))
    assert 'id="flame_graph"' not in (tmp_path / "report.html").read_text()

"""The report of `kinetoctl report --html` in a real browser: it loads without an error and fits every screen."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.html.report import write_report
from support.trace_files import synthetic
from support.trace_files.training_ranks import Job, write_job
from support.web.hostile_trace import ATTACKS, write_hostile

pytestmark = pytest.mark.slow
H200 = Path(__file__).parents[2] / "data/h200"
KINDS = ("one", "four", "sixteen", "cpu", "hostile")
SMALLEST_PX = 11  # of a text in a chart


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Reports of one rank, of four and sixteen, of a program without a GPU, and of a hostile trace."""
    folder = tmp_path_factory.mktemp("reports")
    one, cpu, job = folder / "one.json", folder / "cpu.json", folder / "job"
    one.write_text(synthetic.text(2_000))
    cpu.write_text(without_gpu(one.read_text()))
    job.mkdir()
    traces: dict[str, Any] = {
        "one": one,
        "four": H200 / "ddp4",
        "sixteen": write_job(job, Job(ranks=16, per_host=4, steps=2, layers=2, slow={5: 1.2})),
        "cpu": cpu,
        "hostile": write_hostile(folder / "hostile.json"),
    }
    for kind, trace in traces.items():
        write_report(folder / f"{kind}.html", trace)
    yield {kind: folder / f"{kind}.html" for kind in KINDS}


def without_gpu(text: str) -> str:
    trace: dict[str, Any] = json.loads(text)
    on_host = [
        each for each in trace["traceEvents"] if each.get("cat") in ("cpu_op", "user_annotation", "python_function")
    ]
    return json.dumps({"traceEvents": on_host})


def shown(new_tab: Any, report: Path, **options: Any) -> Any:
    tab = new_tab(**options)
    tab.go(report.as_uri())
    return tab


@pytest.mark.parametrize("kind", KINDS)
def test_a_report_loads_nothing_and_has_no_error(new_tab: Any, reports: dict[str, Path], kind: str) -> None:
    tab = shown(new_tab, reports[kind])
    assert tab.page.locator("h1").count() == 1
    assert tab.page.locator("section").count() > 3
    assert tab.page.locator(".chart svg").count() > 0
    assert (tab.problems, tab.elsewhere) == ([], [reports[kind].as_uri()])


def test_no_name_in_a_trace_acts(new_tab: Any, reports: dict[str, Path]) -> None:
    tab = shown(new_tab, reports["hostile"])
    assert tab.page.evaluate("typeof window.attacked") == "undefined"
    assert tab.page.evaluate("document.querySelectorAll('main img, main script, main meta, main a').length") == 0
    assert any(attack[:20] in tab.page.locator("#kernels tbody").inner_text() for attack in ATTACKS)


def test_a_script_that_slipped_into_the_page_would_not_run(
    new_tab: Any, reports: dict[str, Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.html"
    attack = "<script>window.attacked=1</script><img src=x onerror='window.attacked=1'>"
    broken.write_text(reports["one"].read_text().replace("<main", f"{attack}<main"))
    tab = shown(new_tab, broken)
    assert tab.page.evaluate("typeof window.attacked") == "undefined"
    tab.until_said("Content Security Policy")


@pytest.mark.parametrize("width", [360, 500, 1280, 3840])
def test_no_page_is_wider_than_its_screen_and_no_text_of_a_chart_too_small(
    new_tab: Any, reports: dict[str, Path], width: int
) -> None:
    for kind in KINDS:
        tab = shown(new_tab, reports[kind], viewport={"width": width, "height": 900})
        sizes = tab.page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
        assert sizes[0] <= sizes[1], kind
        clipped = tab.page.evaluate(
            "[...document.querySelectorAll('nav a')]"
            ".filter((each) => each.getBoundingClientRect().right > innerWidth).length"
        )
        assert clipped == 0, kind
        small = tab.page.evaluate(
            "[...document.querySelectorAll('.chart text, .chart-label, .chart-value, .key')]"
            f".filter((each) => parseFloat(getComputedStyle(each).fontSize) < {SMALLEST_PX}).length"
        )
        assert small == 0, kind
        tab.page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_reports_are_accessible(new_tab: Any, reports: dict[str, Path], axe: str, scheme: str) -> None:
    for kind in KINDS:
        tab = shown(new_tab, reports[kind], bypass_csp=True, color_scheme=scheme)
        tab.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        tab.page.evaluate(axe)
        found = tab.page.evaluate("axe.run().then((result) => result.violations)")
        assert [(each["id"], each["nodes"][0]["html"][:120]) for each in found] == [], kind


def test_columns_sort_and_explain_themselves_by_the_keyboard(new_tab: Any, reports: dict[str, Path]) -> None:
    tab = shown(new_tab, reports["one"])
    head = tab.page.locator("#kernels thead th", has_text="Calls")
    head.get_by_role("button").focus()
    assert "number of" in tab.page.locator("#explanation").inner_text().lower()
    tab.page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    place = tab.page.locator("#kernels thead th").all_inner_texts().index(head.inner_text())
    cells = tab.page.locator(f"#kernels tbody td:nth-child({place + 1})").all_inner_texts()
    assert [int(text.replace(",", "")) for text in cells] == sorted(
        (int(text.replace(",", "")) for text in cells), reverse=True
    )


def test_without_scripts_a_report_shows_everything(new_tab: Any, reports: dict[str, Path]) -> None:
    tab = shown(new_tab, reports["four"], java_script_enabled=False)
    tab.page.get_by_role("link", name="Kernels", exact=True).click()
    assert tab.page.locator("#kernels tbody tr").count() > 1
    tab.page.locator("#kernels summary").click()
    assert tab.page.locator("#kernels .terms").is_visible()


def test_a_finding_of_several_ranks_is_shown_once(new_tab: Any, reports: dict[str, Path]) -> None:
    tab = shown(new_tab, reports["four"])
    heads = tab.page.locator("#findings h3").all_text_contents()
    assert len(heads) == len(set(heads)) > 0
    assert all("on 4 of 4 ranks" in head for head in heads)
    assert tab.page.locator("#findings > .finding").count() == 3

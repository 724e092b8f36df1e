"""The templates that the report and the web page share."""

import subprocess
import sys
from typing import Any

from kineto_trace.html.templates import environment
from kineto_trace.view_api.cell_texts import view_sentence, view_title


def test_whoever_only_shows_results_loads_no_arrays() -> None:
    """The web page's server shows what its workers computed, and stays small."""
    code = "import sys, kineto_trace.html.templates; print(sorted({'numpy', 'pyarrow', 'duckdb'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_texts_of_a_trace_are_escaped_and_spelled_out() -> None:
    shared = environment().get_template("result.html").module
    assert str(shared.failed("<b>\u202e")).strip() == '<p class="failure" role="alert">&lt;b&gt;\\u202e</p>'  # type: ignore[attr-defined]


FINDING: dict[str, Any] = {
    "rank": 3, "finding": "loading_in_the_step", "title": "Batches are built in the step", "saving_us": 72_000.0,
    "saving_pct": 71.7, "saving_per_step_us": 36_000.0, "uncertainty_pct": None, "guess": False,
    "advice": "Use workers.", "evidence": "36 ms of each step", "op": None, "call_stack": None, "kernels": [],
    "where": "Images.__getitem__ (/job/train.py:13)",
}  # fmt: skip


def test_a_finding_promises_what_the_terminal_promises_and_names_the_line_to_change() -> None:
    shared: Any = environment().get_template("result.html").module
    text = str(shared.finding(FINDING, True))
    assert '<p class="gain">could save up to 36 ms a step (72 %, likely), on rank 3</p>' in text
    assert (
        '<p>In your code: <code><span class="place" title="Images.__getitem__ (/job/train.py:13)">'
        "Images.__getitem__ (train.py:13)</span></code></p>" in text
    )
    assert "In your code" not in str(shared.finding({**FINDING, "where": None}, False))


def test_tables_have_places_with_short_paths() -> None:
    shared: Any = environment().get_template("result.html").module
    column = {"name": "what", "type": "text", "unit": "", "meaning": ""}
    rows = [{"what": f"{'f' * length} (/job/train.py:13)"} for length in (4, 40)]
    for row in rows:
        text = str(shared.table({"view": "v", "columns": [column], "rows": [row], "notes": [], "total": 1}, "V"))
        assert f'title="{row["what"]}">{row["what"].replace("/job/", "")}</span>' in text


def test_a_view_is_called_by_its_title_and_otherwise_by_its_name() -> None:
    assert (view_title("rank_waits"), view_title("hot_lines")) == ("Who waits for whom", "Hot lines")
    assert (view_title("cuda_graphs"), view_title("comm_comp_overlap")) == (
        "CUDA graphs",
        "Communication computation overlap",
    )
    assert view_sentence("hot_lines", "One line\nafter another.\n\nMore.") == "One line after another."

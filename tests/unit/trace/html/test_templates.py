"""The templates that the report and the web page share."""

import subprocess
import sys

from kineto_trace.html.templates import environment
from kineto_trace.view_api.cell_texts import view_sentence, view_title


def test_whoever_only_shows_results_loads_no_arrays() -> None:
    """The web page's server shows what its workers computed, and stays small."""
    code = "import sys, kineto_trace.html.templates; print(sorted({'numpy', 'pyarrow', 'duckdb'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_texts_of_a_trace_are_escaped_and_spelled_out() -> None:
    shared = environment().get_template("result.html").module
    assert str(shared.failed("<b>\u202e")).strip() == '<p class="failure" role="alert">&lt;b&gt;\\u202e</p>'  # type: ignore[attr-defined]


def test_a_view_is_called_by_its_title_and_otherwise_by_its_name() -> None:
    assert (view_title("rank_waits"), view_title("hot_lines")) == ("Who waits for whom", "Hot lines")
    assert (view_title("cuda_graphs"), view_title("comm_comp_overlap")) == (
        "CUDA graphs",
        "Communication computation overlap",
    )
    assert view_sentence("hot_lines", "One line\nafter another.\n\nMore.") == "One line after another."

import xml.etree.ElementTree as Xml
from pathlib import Path

from kineto_trace.analysis.diff.diff_views import diff_ops
from kineto_trace.analysis.diff.regressions import Check, CheckOutcome
from kinetoctl.output.diff_summary import markdown, write_junit
from support.trace_files.step_traces import context, noisy

EVIL = "a|b`c`</code><script>\x1b[31m\nd"


def test_names_from_traces_stay_code_in_markdown() -> None:
    result = diff_ops(context({EVIL: noisy(100, 6, 1)}), context({EVIL: noisy(200, 6, 2)}))
    (line,) = [line for line in markdown({"ops": result}, {}).splitlines() if line.startswith("| ``")]
    assert line.startswith("| ``a\\|b`c`</code><script>\\x1b[31m\\x0ad`` | host | slower | ")


def test_names_from_traces_are_text_in_xml(tmp_path: Path) -> None:
    path = tmp_path / "x.xml"
    write_junit({"ops": [Check(EVIL, CheckOutcome.FAILED, f"{EVIL} \ud800 \ufffe \x00")]}, path)
    ((case,),) = Xml.parse(path).getroot()
    assert case.attrib["name"] == "a|b`c`</code><script>\\x1b[31m\\x0ad"
    assert (case[0].text or "").endswith("\\ud800 \\ufffe \\x00")

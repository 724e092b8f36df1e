"""What `kinetoctl diff` found, for people and for CI: a headline, Markdown and JUnit XML.

Names come from traces, so that they may hold anything: control characters are spelled out (XML cannot hold them at
all), and Markdown has names as code, in which nothing is a link or a tag.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as Xml

from kineto_trace.base.visible_text import one_line

from kinetoctl.client.file_errors import write_errors
from kinetoctl.output import units
from kinetoctl.output.cell_values import human

if TYPE_CHECKING:
    from kineto_trace.analysis.diff.regressions import Check
    from kineto_trace.view_api.result import Result

NOISE = "within noise"
ALWAYS_WHOLE = ("steps", "ranks")  # tables in which rows within the noise are of interest too
MARKDOWN_ROWS = 10
NAME_WIDTH = 100


def headline(results: Mapping[str, "Result"]) -> list[str]:
    """Says how the step time changed, if it was compared."""
    from kineto_trace.analysis.diff.regressions import described

    rows = results["steps"].rows() if "steps" in results and "verdict" in results["steps"].table.column_names else []
    return [f"step time: {described(row)}" for row in rows if row["name"] == "step"]


def without_noise(name: str, result: "Result") -> "Result":
    """The result without rows within the noise; a note counts them."""
    if name in ALWAYS_WHOLE or "verdict" not in result.table.column_names:
        return result
    keep = [verdict != NOISE for verdict in result.values("verdict")]
    hidden = len(keep) - sum(keep)
    if not hidden:
        return result
    told = f"{hidden:,} row{'s are' if hidden > 1 else ' is'} within the noise (--all shows them)"
    return replace(result, table=result.table.filter(keep), notes=(*result.notes, told))


def markdown(results: Mapping[str, "Result"], checks: Mapping[str, Sequence["Check"]]) -> str:
    """The checks, the headline and the largest changes as a document for a CI summary."""
    lines = ["## kinetoctl diff", ""]
    lines += [line.join(("**", "**")) + "\n" for line in headline(results)]
    for view, found in checks.items():
        lines += [f"- **{check.outcome}** {view}: {_code(check.row)} {_plain(check.message)}" for check in found]
    for name, result in results.items():
        if "verdict" not in result.table.column_names:
            continue
        rows = [row for row in result.rows() if name in ALWAYS_WHOLE or row["verdict"] != NOISE]
        lines += ["", f"### {name}", ""]
        if rows:
            lines += ["| name | time | verdict | baseline | other | difference |", "|---|---|---|--:|--:|--:|"]
        for row in rows[:MARKDOWN_ROWS]:
            share = "" if row["delta_pct"] is None else f" ({row['delta_pct']:+.1f} %)"
            times = [human(row[key], "us") for key in ("baseline_us", "other_us", "delta_us")]
            lines.append(f"| {_code(row['name'])} | {row['time']} | {row['verdict']} | {' | '.join(times)}{share} |")
        rest = len(result) - len(rows[:MARKDOWN_ROWS])
        lines += ["", f"{rest:,} more rows."] if rest else []
        lines += [f"- {_plain(note)}" for note in ("", *result.notes) if note]
    return "\n".join(lines) + "\n"


def write_markdown(results: Mapping[str, "Result"], checks: Mapping[str, Sequence["Check"]], path: Path) -> None:
    """Writes the document into a file of its own. Raises NotWritten."""
    from kineto_trace.base.atomic_files import write_atomically

    with write_errors(path):
        write_atomically(path, markdown(results, checks).encode("utf-8", "replace"))


def append_markdown(results: Mapping[str, "Result"], checks: Mapping[str, Sequence["Check"]], path: Path) -> None:
    """Adds the document to a file that others write into as well. Raises NotWritten."""
    with write_errors(path), path.open("a", encoding="utf-8", errors="replace") as file:
        file.write(markdown(results, checks))


def write_junit(checks: Mapping[str, Sequence["Check"]], path: Path) -> None:
    """Writes one test case for each check: a regression is a failure, what cannot be judged an error."""
    from kineto_trace.base.atomic_files import write_atomically

    suites = Xml.Element("testsuites")
    for view, found in checks.items():
        counts = {name: sum(check.outcome == outcome for check in found) for name, outcome in _ELEMENTS.items()}
        suite = Xml.SubElement(suites, "testsuite", name=f"kinetoctl diff {view}", tests=str(len(found)))
        suite.set("failures", str(counts["failure"]))
        suite.set("errors", str(counts["error"]))
        for check in found:
            case = Xml.SubElement(suite, "testcase", classname=f"kinetoctl.diff.{view}", name=_xml(check.row))
            kind = next((name for name, outcome in _ELEMENTS.items() if check.outcome == outcome), "system-out")
            told = Xml.SubElement(case, kind)
            told.text = _xml(check.message)
            if kind != "system-out":
                told.set("message", _xml(check.message))
    Xml.indent(suites)
    with write_errors(path):
        write_atomically(path, Xml.tostring(suites, encoding="utf-8", xml_declaration=True) + b"\n")


_ELEMENTS = {"failure": "failed", "error": "unknown"}  # of JUnit -> CheckOutcome


def _code(text: str) -> str:
    """A name as code in a table cell: with a fence longer than any in it, and no cell border."""
    shown = units.shortened(one_line(text), NAME_WIDTH).replace("|", "\\|")
    fence = "`" * (max(map(len, re.findall("`+", shown)), default=0) + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _xml(text: str) -> str:
    """A text with what XML 1.0 cannot hold spelled out."""
    return re.sub("[\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", one_line(text))


def _plain(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", one_line(text))

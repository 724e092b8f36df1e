"""What is shown of a trace when its name is typed."""

from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from kineto_trace.model.context import Context
from kineto_trace.model.trace import LazyColumns, Losses, Table, Trace, step_period_us
from support.counters.trace_samples import sample
from support.trace_files.traces import START_NS, target, trace

MS = 1_000_000
EVIL = "<img src=x onerror=alert(1)>\u202e\x1b[2J"


def steps(*starts_ms: float) -> list[dict[str, Any]]:
    return [
        {"name": f"ProfilerStep#{number}", "start": int(start * MS), "duration": MS}
        for number, start in enumerate(starts_ms)
    ]


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_a_trace_is_one_line_with_process_window_and_steps() -> None:
    made = trace(
        {"kernel": [{"name": "gemm"}] * 3, "user_annotation": steps(0, 10, 30, 50)},
        length_ns=60 * MS,
        target=target(rank=1, world_size=4),
    )
    text = "rank 1 of 4, python (pid 4242) on host"
    shown = f"<Trace of {text}, 60 ms from 2026-11-20 08:31:18 UTC, 7 activities, 3 steps began, 20 ms apart (median)>"
    assert repr(made) == shown
    assert repr(made.target) == f"<TargetInfo of {text}>"
    assert repr(Context(made)) == f"<Context of rank 1: {shown}>"
    assert repr(made.table("kernel")).startswith("<Table kernel: 3 rows; columns: start, duration, name, ")


def test_a_step_that_began_before_the_window_does_not_count() -> None:
    assert step_period_us(trace({"user_annotation": steps(0, 5, 20, 30)})) == (3, 12_500.0)
    assert step_period_us(trace({"user_annotation": steps(0, 5)})) is None
    assert step_period_us(trace({})) is None


def test_a_notebook_shows_gpus_kinds_and_what_was_lost() -> None:
    html = trace(
        {"kernel": [{"name": "gemm"}] * 1234, "cpu_op": [{"name": "mm"}]},
        devices=[{"name": "NVIDIA H200"}] * 4,
        losses=Losses(dropped=7),
        notes=[f"note {number}" for number in range(6)],
    )._repr_html_()
    for text in ("4 NVIDIA H200", "1,234 kernel, 1 cpu_op", "note: note 4", "and 2 more notes", "cap"):
        assert f">{text}<" in html


def test_no_text_of_a_trace_is_markup_or_turns_its_line_round() -> None:
    whose = target(process_name=EVIL, host=EVIL, framework=EVIL, capture_id=EVIL, python_version=EVIL)
    made = trace({}, target=whose, notes=[EVIL], devices=[{"name": EVIL}, {"name": {EVIL: 1}}])
    html = made._repr_html_()
    assert Tags(html).tags == {"div", "table", "tbody", "tr", "td"}
    assert Tags(html).attributes == {"style"}
    for text in (html, repr(made), repr(made.target)):
        assert "\u202e" not in text and "\x1b" not in text


@pytest.mark.parametrize("text", ["long " * 1_000_000, ""])
def test_what_is_shown_is_short_however_long_the_texts_are(text: str) -> None:
    whose = target(
        process_name=text, host=text, framework=text, command=[text] * 9, threads=dict.fromkeys(range(9), text)
    )
    made = trace({}, target=whose, notes=[text] * 9, devices=[{"name": text}] * 9)
    assert len(repr(made)) < 300
    assert len(made._repr_html_()) < 6000


@pytest.mark.parametrize("window", [(0, 0), (-(2**63), 2**63 - 1), (2**63 - 1, 0), (2**70, 2**71)])
def test_no_window_makes_it_fail(window: tuple[int, int]) -> None:
    made = trace({}, window_start_ns=window[0], window_end_ns=window[1])
    assert repr(made).startswith("<Trace of python (pid 4242) on host, ")
    assert made._repr_html_()


def test_columns_that_cannot_be_read_any_more_leave_the_steps_out() -> None:
    whole = trace({"user_annotation": steps(1, 2, 3)})
    assert "3 steps" in repr(whole)

    def gone(name: str) -> Any:
        raise OSError(name)

    table = Table("user_annotation", LazyColumns(list(whole.table("user_annotation").columns), 3, gone))
    broken = Trace(
        target=whole.target,
        strings=whole.strings,
        tables={"user_annotation": table},
        window_start_ns=START_NS,
        window_end_ns=START_NS,
    )
    assert repr(broken).endswith("3 activities>")


def test_a_name_beyond_the_strings_leaves_the_steps_out() -> None:
    whole = trace({"user_annotation": steps(1, 2, 3)})
    table = whole.table("user_annotation")
    wrong = Table("user_annotation", {**table.columns, "name": np.full(3, 10**6, np.int32)})
    assert "steps" not in repr(trace({}, tables={"user_annotation": wrong}))


def test_samples_of_counters_are_no_activities() -> None:
    assert repr(trace({"kernel": [{"name": "k"}], "counter": [sample(0, 900, 50)]})).endswith(", 1 activity>")

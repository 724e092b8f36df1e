"""Tables and bars of results in terminals of different widths."""

from typing import Any

import pytest
from kineto_trace.view_api.result import columns, make_result
from kinetoctl.output.console import captured
from kinetoctl.output.result_tables import ASCII_BLOCKS, MAX_BARS, _has_blocks, _Shown, _table, fit, share_bars
from kinetoctl.output.result_tables import _columns as shown_columns

LONG = "LanguageModelTrainer.prepare_the_next_batch (transformers/models/llama/modeling_llama.py:1318)"


def cause(name: str, share_pct: float, rank: int | None = None, device: int | None = 0) -> dict[str, Any]:
    return {"rank": rank, "device": device, "cause": name, "share_pct": share_pct}


def test_the_bar_of_a_trace_has_blocks_by_share_and_says_what_each_block_is() -> None:
    rows = [cause("data_loading", 50.0), cause("elementwise", 30.0), cause("others", 20.0)]
    assert share_bars(rows, 20) == [
        "██████████▓▓▓▓▓▓····",
        "█ 50 % data loading",
        "▓ 30 % elementwise",
        "· 20 % others",
    ]
    assert share_bars(rows, 60, ASCII_BLOCKS)[1:] == ["# 50 % data loading  = 30 % elementwise  . 20 % others"]


def test_a_bar_is_as_wide_as_it_may_be_whatever_the_shares() -> None:
    rows = [cause(f"cause{number}", 100 / 7) for number in range(7)]
    bar, *legend = share_bars(rows, 80)
    assert len(bar) == 80 and set(bar) == set("█▓▒░▚·")
    assert legend == [
        "█ 14 % cause0  ▓ 14 % cause1  ▒ 14 % cause2  ░ 14 % cause3  ▚ 14 % cause4",
        "· 29 % others",
    ]


def test_several_ranks_have_a_line_each_in_which_a_block_is_the_same_cause() -> None:
    rows = [cause("a", 75, 0), cause("b", 25, 0), cause("b", 50, 10), cause("a", 50, 10)]
    assert share_bars(rows, 20) == ["rank 0  █████████▓▓▓", "rank 10 ██████▓▓▓▓▓▓", "█ a  ▓ b"]
    lines = share_bars([cause("a", 100, rank) for rank in range(MAX_BARS + 3)], 80)
    assert lines[MAX_BARS:] == ["and 3 more: kinetoctl report --view time_causes", "█ a"]


def test_several_gpus_of_a_rank_have_a_line_each() -> None:
    assert share_bars([cause("a", 100, None, device) for device in (0, 1)], 16)[:2] == [
        "GPU 0 ██████████",
        "GPU 1 ██████████",
    ]
    assert share_bars([cause("a", 100, 3, device) for device in (0, 1)], 23)[0] == "rank 3 GPU 0 ██████████"


def test_without_time_there_is_no_bar() -> None:
    assert share_bars([], 80) == []


@pytest.mark.parametrize(("locale", "blocks"), [("C", False), ("POSIX", False), ("C.UTF-8", True), ("", True)])
def test_where_the_locale_is_c_blocks_are_ascii(monkeypatch: pytest.MonkeyPatch, locale: str, blocks: bool) -> None:
    monkeypatch.setenv("LC_ALL", locale)
    monkeypatch.delenv("LC_CTYPE", raising=False)
    monkeypatch.delenv("LANG", raising=False)
    assert _has_blocks() is blocks


@pytest.mark.parametrize(
    ("characters", "usual", "blocks"),
    [("C.UTF-8", "C", False), ("C.utf8", "POSIX", False), ("C.UTF-8", "", True), ("en_US.UTF-8", "C", True)],
)
def test_what_python_makes_of_the_locale_c_is_still_c(
    monkeypatch: pytest.MonkeyPatch, characters: str, usual: str, blocks: bool
) -> None:
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.setenv("LC_CTYPE", characters)
    monkeypatch.setenv("LANG", usual)
    assert _has_blocks() is blocks


def test_columns_that_do_not_fit_a_terminal_are_left_out_from_the_right() -> None:
    name = _Shown("NAME", ["x" * 200], False)
    numbers = [_Shown(f"COLUMN{place}", ["1"], True) for place in range(9)]
    chosen, text_width = fit([name, *numbers], 80)
    assert [column.title for column in chosen] == ["NAME", *(f"COLUMN{place}" for place in range(4))]  # 36 + 4 * 9 = 72
    assert sum(column.width(text_width) + 2 for column in chosen) - 2 <= 80


def test_in_a_narrow_terminal_function_and_line_stay_and_the_meaning_goes_first() -> None:
    share, step, least = (_Shown(name, ["100.0%"], True) for name in ("SHARE %", "STEP", "LEAST RANK"))
    meaning, what = _Shown("MEANING", ["m" * 60], False), _Shown("WHAT", ["w" * 36], False)
    table = [share, step, least, meaning, what, _Shown("CAUSE", ["data_loading"], False)]
    narrow = [[column.title for column in fit(table, width)[0]] for width in (200, 80, 67, 40)]
    assert narrow == [
        ["SHARE %", "STEP", "LEAST RANK", "MEANING", "WHAT", "CAUSE"],
        ["SHARE %", "STEP", "LEAST RANK", "WHAT", "CAUSE"],
        ["SHARE %", "STEP", "WHAT", "CAUSE"],
        ["WHAT", "CAUSE"],
    ]


def test_texts_take_the_width_that_is_left() -> None:
    name = _Shown("NAME", ["x" * 200], False)
    chosen, text_width = fit([name, _Shown("CALLS", ["1"], True)], 80)
    assert len(chosen) == 2
    assert text_width == 80 - 5 - 2


def test_a_place_that_is_too_long_for_its_column_takes_two_lines_and_is_never_cut() -> None:
    table = [_Shown("STEP", ["92.6 ms"] * 2, True), _Shown("WHAT", [LONG, "x" * 99], False, places=True)]
    fitting, text_width = fit(table, 80)
    assert captured(_table(fitting, text_width)) == [
        "   STEP  WHAT",
        "92.6 ms  LanguageModelTrainer.prepare_the_next_batch",
        "           (transformers/models/llama/modeling_llama.py:1318)",
        f"92.6 ms  {'x' * 46}…{'x' * 24}",
    ]


def test_columns_of_places_have_paths_from_the_package_on_but_not_in_answers_to_queries() -> None:
    schema, path = columns(("what", "text", "", ""), ("name", "text", "", "")), "main (/job/train.py:13)"
    values = {"what": [path], "name": [path]}
    assert [column.cells for column in shown_columns(make_result("time_causes", schema, values), 1)] == [
        ["main (train.py:13)"],
        [path],
    ]
    assert [column.cells for column in shown_columns(make_result("query", schema, values), 1)] == [[path], [path]]

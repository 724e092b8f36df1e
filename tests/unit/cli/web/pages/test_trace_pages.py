"""The pages of ranks, memory and counters: what they show of traces, and what they say of traces that lack it."""

import gzip
import json
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.store.parquet_folder import save_columns
from kineto_trace.view_api.cell_texts import view_title
from support.counters.trace_samples import sample
from support.trace_files.traces import START_NS, target, trace
from support.web.browsing import Browser, browsing
from support.web.hostile_trace import write_hostile

US = 1000


def of_rank(rank: int) -> dict[str, list[dict[str, Any]]]:
    """Three steps, the second one long on rank 1, with an operator that allocates."""
    lengths = [100, 900 if rank == 1 else 100, 100]
    starts = [sum(lengths[:at]) * US for at in range(3)]
    steps = [
        {
            "name": f"ProfilerStep#{number}",
            "start": start,
            "duration": length * US,
            "thread": 1,
            "finished": 1,
            "inputs": -1,
        }
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    ops = [{"name": "aten::linear", "start": 10, "duration": 50, "thread": 1, "id": 1, "finished": 1, "inputs": -1}]
    memory = [
        {"name": "[memory]", "start": at, "thread": 1, "bytes": size, "address": 1, "device_type": 1, "device": 0,
         "total_allocated": held, "total_reserved": 4096}
        for at, size, held in ((20, 1024, 1024), (200 * US, -1024, 0))
    ]  # fmt: skip
    return {"user_annotation": steps, "cpu_op": ops, "cpu_instant_event": memory}


def of(rank: int) -> TargetInfo:
    return target(rank=rank, window_start_ns=0, window_end_ns=0)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Of a job, a bare trace, the hostile one, the job's baseline, and one with samples of a GPU's counters."""
    folder = tmp_path_factory.mktemp("pages")
    for rank in range(2):
        save_columns(trace(of_rank(rank), target=of(rank)), folder / "job" / f"rank{rank}.kineto")
    save_columns(trace({"kernel": [{"name": "gemm", "duration": 5}]}, target=of(0)), folder / "bare.kineto")
    for rank in range(2):
        save_columns(trace(of_rank(rank), target=of(rank)), folder / "before" / f"rank{rank}.kineto")
    hostile = write_hostile(folder / "hostile.json")
    samples = [sample(at, at + 10, 50) for at in (0, 10, 40)]
    samples += [sample(at, at + 100, at, name=f"m{at}", metric=f"m{at}") for at in range(70)]
    sampled = trace({"kernel": [{"name": "gemm", "duration": 90}], "counter": samples}, target=of(0))
    save_columns(sampled, folder / "sampled.kineto")
    paths = [folder / "job", folder / "bare.kineto", hostile, folder / "before", folder / "sampled.kineto"]
    with browsing(paths) as found:
        yield found


def test_the_page_of_a_capture_leads_to_the_pages_of_its_parts(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/c/{ids[0]}").text
    for name in ("ranks", "memory", "counters"):
        assert f'href="/c/{ids[0]}/{name}"' in page


@pytest.mark.parametrize(
    ("page", "fields"),
    [("ranks", "rank=1&step=1-2&base={base}"), ("memory", "rank=1&base={base}"), ("counters", "rank=1")],
)
def test_the_json_behind_a_page_is_of_what_the_page_shows(
    browser: Browser, ids: list[str], page: str, fields: str
) -> None:
    chosen = fields.format(base=ids[3])
    shown = browser.shown(f"/c/{ids[0]}/{page}?{chosen}&limit=50").text
    assert f'href="/c/{ids[0]}/{page}.json?{escape(chosen)}"' in shown
    found = json.loads(browser.ask(f"/c/{ids[0]}/{page}.json?{chosen}").text)
    assert all(row["rank"] == 1 for each in found.values() for row in each["rows"] if "rank" in row and page != "ranks")


@pytest.mark.parametrize("number", ["x", "--1", "1.5", "9" * 5000])
@pytest.mark.parametrize(("page", "field"), [("memory", "rank"), ("flame", "step"), ("counters", "limit")])
def test_a_field_that_is_no_number_is_said(
    browser: Browser, ids: list[str], page: str, field: str, number: str
) -> None:
    found = browser.ask(f"/c/{ids[0]}/{page}?{field}={number}")
    assert (found.status, f"{field} must be a whole number, not" in found.text) == (400, True)


def test_a_slow_step_of_one_rank_is_seen_and_comes_first(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/c/{ids[0]}/ranks").text
    assert "rank 1, step 1: 900 µs" in page
    assert re.findall(r'heat-8"><title>([^<]*)', page) == ["rank 1, step 1: 900 µs"]
    rows = json.loads(browser.ask(f"/c/{ids[0]}/ranks.json").text)["rank_steps"]["rows"]
    assert (rows[0]["rank"], rows[0]["step"], len(rows)) == (1, "1", 6)
    assert f'href="/c/{ids[0]}/view/step_breakdown?rank=1"' in page
    assert f'href="/c/{ids[0]}/view/rank_steps?step=2"' in page


def test_ranks_and_steps_can_be_chosen_by_ranges(browser: Browser, ids: list[str]) -> None:
    rows = json.loads(browser.ask(f"/c/{ids[0]}/ranks.json?rank=1&step=1-2").text)["rank_steps"]["rows"]
    assert [(row["rank"], row["step"]) for row in rows] == [(1, "1"), (1, "2")]
    assert "is not a range of numbers" in browser.shown(f"/c/{ids[0]}/ranks?rank=x").text
    assert browser.ask(f"/c/{ids[0]}/ranks?value=name").status == 400


def test_unknown_waiting_is_said_to_be_unknown(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/c/{ids[0]}/ranks?value=waiting_us").text
    assert "kinetoctl trace --activities kernel,cpu_op" in page
    assert "heat-0" not in page


def test_a_trace_without_steps_says_how_to_get_them(browser: Browser, ids: list[str]) -> None:
    assert "kineto_agent.step()" in browser.shown(f"/c/{ids[1]}/ranks").text


def test_memory_shows_levels_holders_and_the_peak(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/c/{ids[0]}/memory?rank=0").text
    assert page.count("<figure") == 3
    assert "peak 1.0 KiB" in page
    assert "<title>aten::linear</title>" in page
    found = json.loads(browser.ask(f"/c/{ids[0]}/memory.json").text)
    assert list(found) == [
        *("memory_curve", "memory_fragmentation", "memory_holders", "memory_snapshot", "memory_peak_blocks"),
        *("memory_statistics", "memory_events"),
    ]
    assert {row["rank"] for row in found["memory_curve"]["rows"]} == {0, 1}


def test_a_stretch_of_time_restricts_what_came_and_went(browser: Browser, ids: list[str]) -> None:
    start = START_NS + 100 * US
    page = browser.shown(f"/c/{ids[0]}/memory?rank=0&t0={start}&t1={start + 200 * US}").text
    assert 'class="span"' in page
    assert f'<a href="/c/{ids[0]}/memory?rank=0">Show the whole time</a>' in page
    assert f"--set memory_events.start_ns={start}" in page

    def found(fields: str) -> tuple[int, int]:
        values = json.loads(browser.ask(f"/c/{ids[0]}/memory.json?rank=0&{fields}").text)
        assert len(values["memory_snapshot"]["rows"]) == 1
        return len(values["memory_events"]["rows"]), len(values["memory_statistics"]["rows"])

    assert found("") == (1, 1)
    assert found(f"t0={start}&t1={start + 200 * US}") == (1, 0)  # only its release
    assert found(f"t0={start}&t1={start + 50 * US}") == (0, 0)


def test_a_moment_shows_what_was_held_then(browser: Browser, ids: list[str]) -> None:
    at = START_NS + 150 * US
    page = browser.shown(f"/c/{ids[0]}/memory?rank=0&at={at}").text
    assert ">snapshot</text>" in page
    assert "aten::linear: 1.0 KiB, held for 150 µs" in page
    assert f'<a href="/c/{ids[0]}/memory?rank=0">Show the peak</a>' in page
    assert 'class="blocks"' not in browser.shown(f"/c/{ids[0]}/memory?rank=0&at={at + 100 * US}").text


def test_what_is_reserved_and_unused_is_said_first(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/c/{ids[0]}/memory?rank=0").text
    assert "<b>3.0 KiB (75.0%) was reserved but unused</b>" in page


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ("t0=9&t1=5", "t1 must be later than t0"),
        ("at=-1", "at must be a Unix time in ns, not -1"),
        (f"t0={1 << 63}", "t0 must be a Unix time in ns"),
        ("t1=now", "t1 must be a whole number, not"),
    ],
)
def test_times_that_are_none_are_refused(browser: Browser, ids: list[str], fields: str, said: str) -> None:
    found = browser.ask(f"/c/{ids[0]}/memory?{fields}")
    assert (found.status, said in found.text) == (400, True)


def test_counters_are_small_charts_with_their_units(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/c/{ids[0]}/counters").text
    assert "rank 1, GPU0: reserved" in page
    assert page.count("<figure>") == 4
    assert json.loads(browser.ask(f"/c/{ids[0]}/counters.json").text)["counters"]["rows"][0]["unit"] == "bytes"


def test_samples_of_hardware_counters_are_drawn_where_there_are_any(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/c/{ids[4]}/counters").text
    dram = page[page.index("rank 0, GPU0: DRAM") : page.index("rank 0, GPU0: m0")]
    assert dram.count("<polyline") == 2  # nothing is drawn from 20 to 40 ns
    assert page.count("<figure>") == 60
    assert "These are the first 60 of 71 counters. The tables have all of them." in page


def test_what_was_not_recorded_is_said_with_the_option_that_records_it(browser: Browser, ids: list[str]) -> None:
    assert "kinetoctl trace PID --memory" in browser.shown(f"/c/{ids[1]}/memory").text
    assert "kinetoctl trace --memory" in browser.shown(f"/c/{ids[1]}/counters").text


@pytest.mark.parametrize("name", ["ranks", "memory", "counters"])
def test_names_of_a_hostile_trace_are_text(browser: Browser, ids: list[str], name: str) -> None:
    found = browser.shown(f"/c/{ids[2]}/{name}")
    assert found.status == 200
    assert not re.search(r"<(img|script(?! src=\"/static/)|meta http)", found.text)
    assert "36481" not in found.text


def test_every_page_prints_the_command_behind_it(browser: Browser, ids: list[str], tmp_path: Path) -> None:
    for name, view in (("ranks", "rank_steps"), ("memory", "memory_curve"), ("counters", "counter_summary")):
        assert f"kinetoctl report --view {view}" in browser.ask(f"/c/{ids[0]}/{name}").text


@pytest.mark.parametrize("path", ["", "/ranks", "/memory", "/counters", "/view/kernel_breakdown", "/view/step_phases"])
def test_a_baseline_is_another_trace_or_another_rank(browser: Browser, ids: list[str], path: str) -> None:
    page = browser.shown(f"/c/{ids[0]}{path}").text
    chooser = page[page.index('<select name="base">') :]
    assert re.findall(r'<option value="(\w*)"', chooser[: chooser.index("</select>")]) == ["", *ids]


@pytest.mark.parametrize("page", ["", "/ranks", "/memory", "/counters", "/flame", "/view/step_phases"])
def test_two_ranks_of_one_capture_are_compared_and_the_choice_stays(
    browser: Browser, ids: list[str], page: str
) -> None:
    text = browser.shown(f"/c/{ids[0]}{page}?base={ids[0]}&base_rank=0").text
    chooser = text[text.index('<select name="base_rank">') :]
    chooser = chooser[: chooser.index("</select>")]
    assert re.findall(r'<option value="(\w*)"( selected)?', chooser) == [("", ""), ("0", " selected"), ("1", "")]
    assert "compared with rank 0 of" in text or page == "/flame"
    assert 'role="alert"' not in text


def test_the_slow_step_of_one_rank_is_a_difference_to_the_other(browser: Browser, ids: list[str]) -> None:
    view, fields = f"/c/{ids[0]}/view/profiler_steps", f"?rank=1&base={ids[0]}&base_rank=0"
    (row,) = json.loads(browser.ask(f"{view}.json{fields}").text)["profiler_steps_difference"]["rows"]
    assert (row["rank"], row["duration_baseline_us"], row["duration_other_us"]) == (1, 100.0, pytest.approx(1100 / 3))
    page = browser.shown(view + fields).text
    assert re.findall(r"duration, (baseline|this trace): ([^<]*)<", page) == [
        ("baseline", "100 µs"),
        ("this trace", "367 µs"),
    ]
    page = browser.shown(f"/c/{ids[0]}/view/step_breakdown{fields}").text
    assert "kinetoctl diff --by steps --rank 1 --base-rank 0" in page


def test_a_comparison_of_two_ranks_is_there_as_csv(browser: Browser, ids: list[str]) -> None:
    table = browser.ask(f"/c/{ids[0]}/view/diff_step_times.csv?rank=1&base={ids[0]}&base_rank=0").text
    step = next(line for line in table.splitlines() if line.startswith("step,"))
    assert float(step.split(",")[3]) == 100.0


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("", "--by steps --view time_causes --base-rank 0"),
        ("/ranks", "--view rank_steps --view ranks --view collective_summary --base-rank 0"),
        ("/memory", "--view memory_peak_blocks --view memory_statistics --rank 1 --base-rank 0"),
        ("/view/step_phases", "--view step_phases --rank 1 --base-rank 0"),
        ("/view/diff_kernel_names", "--by kernels --rank 1 --base-rank 0"),
    ],
)
def test_the_command_below_a_comparison_makes_it(browser: Browser, ids: list[str], page: str, command: str) -> None:
    text = browser.ask(f"/c/{ids[0]}{page}?rank=1&base={ids[0]}&base_rank=0").text
    assert f"kinetoctl diff {command} " in text


def test_a_baseline_without_that_rank_is_said(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/c/{ids[0]}/view/diff_step_times?rank=1&base={ids[0]}&base_rank=7").text
    assert "there is no trace of rank 7 in the baseline; available: 0, 1" in page
    assert browser.ask(f"/c/{ids[0]}/view/diff_step_times?base={ids[0]}&base_rank=x").status == 400


def test_pages_with_a_baseline_show_value_baseline_and_difference(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/c/{ids[0]}/memory?base={ids[3]}").text
    assert "What the peak consisted of compared with" in page
    found = json.loads(browser.ask(f"/c/{ids[0]}/memory.json?base={ids[3]}").text)
    rows = found["memory_peak_blocks_difference"]["rows"]
    assert {(row["held_other_bytes"], row["held_baseline_bytes"], row["held_delta_bytes"]) for row in rows} == {
        (1024.0, 1024.0, 0.0)
    }


def test_equal_steps_are_no_change(browser: Browser, ids: list[str]) -> None:
    found = json.loads(browser.ask(f"/c/{ids[0]}/ranks.json?base={ids[3]}").text)
    assert {row["step_verdict"] for row in found["rank_steps_difference"]["rows"]} <= {"within noise", "unknown"}
    page = browser.shown(f"/c/{ids[0]}?base={ids[3]}").text
    assert re.findall(r"<h3>(.*) compared with", page) == [view_title("step_breakdown"), view_title("time_causes")]
    assert not re.search(r">(slower|faster|longer|shorter)<", page)


def test_rows_that_cannot_be_compared_say_so(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/c/{ids[0]}/view/memory_curve?base={ids[3]}").text
    assert "which have no counterparts in another trace" in page
    assert "kinetoctl diff --by kernels" in browser.shown(f"/c/{ids[0]}/view/kernels?base={ids[3]}").text


def test_rows_lead_to_their_place_in_the_timeline(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/c/{ids[0]}/ranks").text
    (place,) = re.findall(rf'href="(/c/{ids[0]}/timeline\?rank=1&amp;t0=\d+&amp;t1=\d+)"', page)[:1]
    address = place.replace("&amp;", "&")
    shown = browser.ask(address).text
    assert "Show the whole trace" in shown
    assert address.replace("timeline", "timeline/trace").replace("&", "&amp;") in shown


def test_the_timeline_has_tracks_of_the_gpus_unless_they_are_not_wanted(browser: Browser, ids: list[str]) -> None:
    def counters(query: str) -> set[str]:
        found = gzip.decompress(browser.raw(f"/c/{ids[1]}/timeline/trace{query}"))
        return {each["name"] for each in json.loads(found)["traceEvents"] if each["ph"] == "C"}

    assert counters("") == {"GPU utilization (computed)"}
    assert counters("?tracks=none") == set()
    page = browser.ask(f"/c/{ids[1]}/timeline?tracks=none&t0=1&t1=9").text
    assert f'data-trace="/c/{ids[1]}/timeline/trace?t0=1&amp;t1=9&amp;tracks=none"' in page
    assert '<option value="none" selected>' in page


def test_the_timeline_gets_only_the_part_that_is_asked_for(browser: Browser, ids: list[str]) -> None:
    def steps(query: str) -> list[str]:
        found = gzip.decompress(browser.raw(f"/c/{ids[0]}/timeline/trace?rank=1&{query}"))
        return sorted({each["name"] for each in json.loads(found)["traceEvents"] if "Step#" in each["name"]})

    assert steps("") == ["ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2"]
    assert steps(f"t0={START_NS + 200 * US}&t1={START_NS + 300 * US}") == ["ProfilerStep#1"]
    assert steps("name=aten::linear") == ["ProfilerStep#0", "ProfilerStep#1"]  # 100 us around it
    assert browser.ask(f"/c/{ids[0]}/timeline?t0=5").status == 400
    assert browser.ask(f"/c/{ids[0]}/timeline/trace?name=nothing").status == 422

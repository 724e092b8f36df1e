"""Lists that are kept up to date, with entries that a test gives."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.base.common_options import CommonOptions
from kinetoctl.output.listing import PROCESS_COLUMNS, Entry, ListColumn, ListKind, ordered, rate, show, watch

KIND = ListKind(
    columns=(
        ListColumn(title="ID", cell=lambda item: item["id"]),
        ListColumn(title="AGE", cell=lambda item: item["age"], moves=True),
        ListColumn(title="STATE", cell=lambda item: item["state"]),
        ListColumn(title="NOTE", cell=lambda item: item.get("note", "-"), optional=True),
        ListColumn(title="MORE", cell=lambda item: "more", wide=True),
    ),
    key=lambda item: (item["id"],),
    document=dict,
    orders={"id": (lambda item: item["id"], False), "state": (lambda item: item["state"], True)},
)


@pytest.mark.parametrize(
    ("iteration_ns", "text"),
    [(125_000_000, "8"), (61_200_000, "16.34"), (1_000_000, "1,000"), (81_000, "12,345.7"), (0, "-")],
)
def test_iterations_per_second_are_written_out(iteration_ns: int, text: str) -> None:
    assert rate(pb.Process(iteration_ns=iteration_ns)) == text


def settings(output: str = "table", *, wide: bool = False) -> CommonOptions:
    return CommonOptions(address="", output=output, wide=wide, color=False, quiet=False, timeout_s=1.0)


def entry(name: str, age: str, state: str, **more: str) -> Entry:
    return Entry(item={"id": name, "age": age, "state": state, **more}, place={})


LOOKS = (
    [entry("a", "1s", "RUNNING")],
    [entry("a", "3s", "RUNNING"), entry("b", "0s", "RUNNING", note="x")],
    [entry("a", "5s", "DONE"), entry("b", "2s", "RUNNING", note="x")],
    [entry("b", "4s", "RUNNING", note="x")],
)


def looking(looks: Sequence[list[Entry]]) -> Callable[[], list[Entry]]:
    """Gives one look after the other; behind the last comes Ctrl-C."""

    def each() -> Iterator[list[Entry]]:
        yield from looks
        raise KeyboardInterrupt

    turns = each()
    return lambda: next(turns)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    asked: list[float] = []
    monkeypatch.setattr("kinetoctl.output.listing.time.sleep", asked.append)
    return asked


def test_in_a_pipe_each_change_is_a_line_and_an_age_is_no_change(
    capsys: pytest.CaptureFixture[str], pauses: list[float]
) -> None:
    watch(looking(LOOKS), KIND, settings(), 2.0)
    assert capsys.readouterr().out == (
        "CHANGE  ID  AGE  STATE  NOTE\n"
        "added  a  1s  RUNNING  -\n"
        "added  b  0s  RUNNING  x\n"
        "changed  a  5s  DONE  -\n"
        "gone  a  5s  DONE  -\n"
    )
    assert pauses == [2.0] * 4


def test_as_json_each_change_is_an_object_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    watch(looking(LOOKS), KIND, settings("json"), 2.0)
    documents = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["change"], each["id"]) for each in documents] == [
        ("added", "a"), ("added", "b"), ("changed", "a"), ("gone", "a"),
    ]  # fmt: skip


def test_in_a_terminal_the_last_table_stays(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    watch(looking(LOOKS), KIND, settings(), 2.0)
    output = capsys.readouterr().out
    assert output.startswith("\x1b[?1049h")  # a screen of its own, which is left at the end
    _, _, last = output.partition("\x1b[?1049l")
    assert "b   4s   RUNNING  x" in last
    assert "DONE" not in last


def test_columns_without_values_and_those_for_wide_tables_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    show(LOOKS[0], KIND, settings())
    show(LOOKS[1], KIND, settings(wide=True))
    assert capsys.readouterr().out == (
        "ID  AGE  STATE\na   1s   RUNNING\n"
        "ID  AGE  STATE    NOTE  MORE\na   3s   RUNNING  -     more\nb   0s   RUNNING  x     more\n"
    )


def test_an_order_may_be_reversed_and_without_one_entries_stay_as_they_came() -> None:
    entries = [entry("b", "", "2"), entry("a", "", "1")]

    def names(order: str | None, *, reverse: bool) -> str:
        return "".join(each.item["id"] for each in ordered(entries, KIND, order, reverse=reverse))

    assert [names(order, reverse=False) for order in (None, "id", "state")] == ["ba", "ab", "ba"]
    assert [names(order, reverse=True) for order in (None, "id", "state")] == ["ab", "ba", "ab"]


def test_with_several_hosts_the_first_changes_bring_the_heading(capsys: pytest.CaptureFixture[str]) -> None:
    look = [Entry(item={"id": "a", "age": "1s", "state": "DONE"}, host="n1", place={"host": "n1"})]
    watch(looking([[], look, look]), KIND, settings(), 2.0)
    assert capsys.readouterr().out == "CHANGE  HOST  ID  AGE  STATE  NOTE\nadded  n1  a  1s  DONE  -\n"


POLLS, TRACES = pb.KinetoPolling(last_poll_ns=1), pb.KinetoPolling(last_poll_ns=1, tracing=True)


@pytest.mark.parametrize(
    ("process", "kineto", "agent"),
    [
        (pb.Process(agent_state=pb.AGENT_STATE_NONE), "-", "NONE"),
        (pb.Process(agent_state=pb.AGENT_STATE_NONE, kineto=POLLS), "polls", "KINETO"),
        (pb.Process(agent_state=pb.AGENT_STATE_READY, kineto=POLLS), "polls", "READY"),
        (pb.Process(agent_state=pb.AGENT_STATE_NONE, kineto=TRACES), "traces", "KINETO"),
    ],
)
def test_a_process_whose_libkineto_polls_shows_it(process: pb.Process, kineto: str, agent: str) -> None:
    cells = {column.title: column.cell(process) for column in PROCESS_COLUMNS}
    assert (cells["KINETO"], cells["AGENT"]) == (kineto, agent)

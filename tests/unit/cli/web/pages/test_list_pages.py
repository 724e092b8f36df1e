"""Captures of one host and of many, as rows and facts of pages."""

import re
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.upload_manifest import FLEET_LABEL
from kinetoctl.base.common_options import CommonOptions
from kinetoctl.client.host_targets import Place
from kinetoctl.web.analyses.trace_library import TraceLibrary
from kinetoctl.web.http.web_messages import WebRequest, WebSession
from kinetoctl.web.pages.list_pages import (
    by_process,
    captures_page,
    facts,
    listed,
    live_page,
    row_of,
    running,
    status_of,
    target_facts,
)
from kinetoctl.web.pages.page_context import OfHost, OneDaemon, PageContext
from support.service.captures import done_target

FLEET = "20260101-000000-abcdef"


def part(
    host: str, number: int, *, fleet: str = "", status: pb.CaptureStatus = pb.CAPTURE_STATUS_DONE
) -> OfHost[pb.Capture]:
    """A capture of a host; the larger the number, the newer."""
    found = pb.Capture(
        id=f"20260101-00000{number}-000-{host}", created_ns=number, ended_ns=number + 5, status=status, host="own name"
    )
    found.targets.append(done_target(number))
    found.spec.labels["team"] = "vision"
    if fleet:
        found.spec.labels[FLEET_LABEL] = fleet
    return OfHost(Place(host, f"{host}:1"), found)


def test_captures_of_many_hosts_are_in_one_order_and_the_parts_of_one_are_one() -> None:
    parts = [part("a", 5), part("a", 3, fleet=FLEET), part("b", 4, fleet=FLEET), part("b", 6)]
    found = [(capture_id, [each.place.host for each in held]) for capture_id, held in listed(parts)]
    assert found == [(parts[3].item.id, ["b"]), (parts[0].item.id, ["a"]), (FLEET, ["b", "a"])]


def test_captures_of_one_process_are_below_its_newest_one() -> None:
    parts = [part("a", 5), part("a", 4), part("a", 3)]
    for each, start_ns in zip(parts, (70, 80, 70), strict=True):
        each.item.targets[0].pid, each.item.targets[0].start_time_ns = 7, start_ns
    rows = by_process(row_of(capture_id, held) for capture_id, held in listed(parts))
    assert [(row["id"], row["again"]) for row in rows] == [
        (parts[0].item.id, False), (parts[2].item.id, True), (parts[1].item.id, False),
    ]  # fmt: skip


def test_on_one_host_a_part_has_its_own_id() -> None:
    alone = part("", 1, fleet=FLEET)
    assert [capture_id for capture_id, _ in listed([alone])] == [alone.item.id]


@pytest.mark.parametrize("label", ["x", "../../live", "20260101-000000-a/b", "javascript:alert(1)"])
def test_a_label_that_is_no_id_makes_no_address(label: str) -> None:
    alone = part("a", 1, fleet=label)
    assert [capture_id for capture_id, _ in listed([alone])] == [alone.item.id]


def test_the_row_of_a_capture_of_many_hosts_has_all_of_it() -> None:
    parts = [part("b", 4, fleet=FLEET), part("a", 3, fleet=FLEET)]
    row = row_of(FLEET, parts)
    assert (row["hosts"], row["pids"], row["labels"]) == (["b", "a"], [4, 3], "team=vision")
    assert row["bytes"] == 2 * row_of("x", parts[:1])["bytes"]
    assert FLEET_LABEL in row_of(parts[0].item.id, parts[:1])["labels"]


def test_the_top_cause_of_a_capture_of_many_hosts_is_that_of_a_part_that_knows_it() -> None:
    parts = [part(host, 1, fleet=FLEET) for host in "abc"]
    for each in parts[1:]:
        each.item.answer.cause, each.item.answer.verdict = "It waits", "A step takes 2 ms. It waits."
    row = row_of(FLEET, parts)
    assert (row["cause"], row["verdict"]) == ("It waits (on b)", "On b: A step takes 2 ms. It waits.")
    parts[1].item.answer.cause = "It waits (on 2 of 3 ranks)"
    assert row_of(FLEET, parts)["cause"] == "It waits (on 2 of 3 ranks), on b"
    row = row_of(FLEET, parts[2:])
    assert (row["cause"], row["verdict"]) == ("It waits", "A step takes 2 ms. It waits.")
    assert row_of(FLEET, parts[:1])["cause"] == ""


RUNNING, DONE, FAILED = pb.CAPTURE_STATUS_RUNNING, pb.CAPTURE_STATUS_DONE, pb.CAPTURE_STATUS_FAILED


@pytest.mark.parametrize(
    ("states", "text"),
    [((DONE, DONE), "DONE"), ((DONE, RUNNING), "RUNNING"), ((DONE, FAILED), "PARTIAL"), ((FAILED, FAILED), "FAILED")],
)
def test_the_state_of_all_parts_claims_no_more_than_is_true(states: tuple[pb.CaptureStatus, ...], text: str) -> None:
    parts = [part(host, 1, status=status) for host, status in zip("ab", states, strict=True)]
    assert status_of(parts) == text
    assert running(parts) is (RUNNING in states)


def test_facts_and_verdicts_name_the_hosts() -> None:
    parts = [part("a", 3, fleet=FLEET), part("b", 4, fleet=FLEET)]
    found = dict(facts(parts))
    assert (found["hosts"], found["processes"], found["took"]) == ("a, b", "2", "6 ns")
    assert [each["name"].split()[0] for each in target_facts(parts)] == ["a", "b"]
    assert dict(facts([part("", 1)]))["host"] == "own name"


READY = pb.Process(pid=41, user="ada", agent_state=pb.AGENT_STATE_READY, command=["python", "train.py"], iterations=7)
BLOCKED = pb.Process(pid=42, user="ada", obstacle="its seccomp filter forbids <ptrace>", command=["python", "b.py"])


@dataclass
class Asked:
    """A client that notes what it was asked for."""

    found: list[pb.Process]
    asked: list[dict[str, Any]] = field(default_factory=list)
    stored: list[pb.Capture] = field(default_factory=list)

    def processes(self, _selector: pb.Selector, **options: Any) -> list[pb.Process]:
        self.asked.append(options)
        return self.found

    def captures(self, _labels: dict[str, str], **_options: Any) -> list[pb.Capture]:
        return self.stored


def context_of(client: Asked) -> PageContext:
    settings = CommonOptions(address="unix:/d.sock", output="table", color=False, quiet=True, timeout_s=1)
    return PageContext(
        settings=settings,
        library=TraceLibrary(settings),
        queue=None,  # type: ignore[arg-type]
        daemons=OneDaemon(lambda: nullcontext(client), settings.address),  # type: ignore[arg-type]
        ui_origin="",
    )


def page(client: Asked, **query: str) -> str:
    request = WebRequest(method="GET", path="/live", query=tuple(query.items()))
    return live_page(context_of(client), request, WebSession("secret", 0)).content.decode()  # type: ignore[union-attr]


def test_the_home_page_has_the_top_cause_of_each_capture_with_the_verdict_as_its_hint() -> None:
    known, other = part("", 2).item, part("", 1).item
    known.answer.CopyFrom(pb.CaptureAnswer(verdict="A step takes 2 ms. <It> waits.", cause="<It> waits"))
    answer = captures_page(
        context_of(Asked([], stored=[known, other])), WebRequest(method="GET", path="/", query=()), WebSession("s", 0)
    )
    text = answer.content.decode()  # type: ignore[union-attr]
    assert re.search(r'<th scope="col"><button type="button" class="sort">top cause</button></th>', text)
    assert '<td class="prose cause" title="A step takes 2 ms. &lt;It&gt; waits.">&lt;It&gt; waits</td>' in text
    assert '<td class="prose cause" title=""></td>' in text


def test_the_columns_are_those_of_ps_with_what_prevents_a_trace() -> None:
    text = page(Asked([READY, BLOCKED]))
    assert re.findall(r'class="sort">([^<]+)<', text) == [
        "pid", "user", "rank", "gpu", "age", "iter", "parent", "trace", "command",
    ]  # fmt: skip
    assert "no: its seccomp filter forbids &lt;ptrace&gt;" in text
    assert 'status-ready">ready' in text


def test_only_a_process_that_can_be_traced_has_a_button() -> None:
    assert re.findall(r'name="pid" value="(\d+)"', page(Asked([READY, BLOCKED]))) == ["41"]


def test_plain_and_all_ask_what_ps_asks() -> None:
    client = Asked([])
    assert "kinetoctl ps --address unix:/d.sock</code>" in page(client)
    assert "ps --address unix:/d.sock --all</code>" in page(client, all="1")
    assert client.asked == [
        {"include_without_agent": False, "trainers": True},
        {"include_without_agent": True, "trainers": True},
    ]

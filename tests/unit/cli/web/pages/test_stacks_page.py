"""Where processes stand, as a page, against a scripted daemon."""

import json
import re
from collections.abc import Iterator
from html import unescape
from urllib.parse import urlencode

import grpc
import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.web.pages import page_context, stacks_page
from support.service import stacks
from support.service.captures import process
from support.service.fake_profiler import Abort, FakeProfiler, FakeServer, serve
from support.service.stacks import at_lock, frame, gpu, in_collective, on_gpu, read, running, thread
from support.web.browsing import Browser, browsing

VERDICT = "Rank 1 is not in the all_reduce in which 7 ranks wait: it waits for a lock in load_next_batch (train.py:6)."
EVIL = '<script>alert("1")</script>\u202e'
EVERY_RANK = "/live/stacks?rank=all"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    profiler = FakeProfiler(stacks=[stacks.hanging()], pages=[pb.ListCapturesResponse()])
    with serve(profiler) as found:
        yield found


@pytest.fixture
def browser(server: FakeServer) -> Iterator[Browser]:
    with browsing(address=server.address) as found:
        server.profiler.requests.clear()
        yield found


def text_of(browser: Browser, path: str) -> str:
    """What a person reads on a page: its content without tags, one line for each that has any."""
    found = browser.ask(path)
    assert found.status == 200, found.text
    content = found.text.partition("<main")[2].partition(">")[2].partition("</main>")[0]
    lines = (" ".join(unescape(re.sub(r"<[^>]*>", " ", line)).split()) for line in content.splitlines())
    return "\n".join(line for line in lines if line)


def test_the_verdict_is_the_heading_and_the_odd_one_out_the_first_group(browser: Browser) -> None:
    page = browser.ask(EVERY_RANK)
    assert re.findall(r"<h1[^>]*><span>(.*)</span></h1>", page.text) == [VERDICT]
    assert re.findall("<h2>(.*)</h2>", page.text) == ["rank 1  pid 4243", "7 ranks: 0, 2-7"]
    lines = text_of(browser, EVERY_RANK).splitlines()
    place = lines.index("load_next_batch train.py:6 lock.acquire()")
    assert lines[place - 1].startswith("main thread · waits for a lock · thread 0 sleeping")
    assert lines[place + 1] == "main train.py:20 load_next_batch()"


def test_what_the_gpus_did_stands_below_the_main_thread_that_waits_for_them(
    server: FakeServer, browser: Browser
) -> None:
    server.profiler.stacks = [[read(on_gpu(), rank, gpus=[gpu(rank)]) for rank in range(2)]]
    lines = text_of(browser, EVERY_RANK).splitlines()
    assert lines[lines.index("train_step train.py:30 loss.item()") + 1].startswith("GPUs 0-1 are idle")


def test_idle_threads_are_folded_and_no_page_looks_again_by_itself(browser: Browser) -> None:
    page = browser.ask(EVERY_RANK)
    assert "<details><summary>7 threads outside the program&#39;s code</summary>\n<h3>7 threads pt_nccl" in page.text
    assert "Refresh" not in page.headers and "data-live" not in page.text
    assert page.headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("query", "selector", "words"),
    [
        ("pid=42", pb.Selector(pids=[42]), "42"),
        ("job=a+b%22", pb.Selector(job_ids=['a b"']), "--job-id 'a b\"'"),
        ("rank=all", pb.Selector(ranks=[-1]), "--rank all"),
    ],
)
def test_a_look_asks_what_its_command_asks_and_its_button_asks_the_same(
    server: FakeServer, browser: Browser, query: str, selector: pb.Selector, words: str
) -> None:
    page = browser.ask(f"/live/stacks?{query}").text
    assert server.profiler.requests == [pb.ReadStacksRequest(selector=selector)]
    assert f"kinetoctl stacks --address {server.address} {words}</code>" in unescape(page)
    ((name, value),) = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">\n<button>Look again', page)
    browser.ask(f"/live/stacks?{urlencode({name: unescape(value)})}")
    assert server.profiler.requests[1:] == server.profiler.requests[:1]


@pytest.mark.parametrize("query", ["", "pid=", "pid=x", "pid=99999999999", "pid=1.5", "rank=0", "rank=", "job="])
def test_a_look_at_nothing_in_particular_is_refused_without_asking(
    server: FakeServer, browser: Browser, query: str
) -> None:
    for path in ("/live/stacks", "/live/stacks.json"):
        assert browser.ask(f"{path}?{query}").status == 400
    assert server.profiler.requests == []


def test_a_second_look_says_for_how_long_who_stands_still(server: FakeServer, browser: Browser) -> None:
    server.profiler.stacks = [
        [read(first, 0, seconds=at), read(at_lock(), 1, seconds=at)]
        for at, first in ((100, running()), (107, in_collective()))
    ]
    assert "At first, a hang looks like a short wait" in text_of(browser, EVERY_RANK)
    second = text_of(browser, EVERY_RANK)
    assert re.findall("at every look for .*", second) == ["at every look for 7 s"]
    assert "At first, a hang" not in second


def test_what_could_not_be_read_stands_below_the_verdict(server: FakeServer, browser: Browser) -> None:
    guess = thread("waits for data from a socket", pb.WAIT_NETWORK)
    busy = Abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls", "TOO_MANY_CALLS")
    server.profiler.stacks = [[read(in_collective(), 0), read(guess, 1, reason="you may not read it"), busy]]
    lines = text_of(browser, EVERY_RANK).splitlines()
    place = lines.index("What could not be read")
    assert "the rest was not read: too many calls rank 1 pid 4243: you may not read it" in lines[place + 1]
    assert lines[-2:] == [
        "not read",
        "main thread, without its frames waits for data from a socket thread 0 sleeping 0 ns of CPU",
    ]


def test_no_text_of_a_process_becomes_a_part_of_the_page(server: FakeServer, browser: Browser) -> None:
    hostile = thread(EVIL, pb.WAIT_LOCK, frame(EVIL, 1, f"/{EVIL}.py", code=EVIL), number=7, name=EVIL)
    hostile.system_call = EVIL
    main = thread(EVIL, pb.WAIT_LOCK, frame(EVIL, 1, f"/{EVIL}.py", code=EVIL))
    idle = thread(EVIL, pb.WAIT_LOCK, number=8, name=EVIL)
    found = read(main, None, hostile, idle, pid=7, job=EVIL, reason=EVIL)
    found.process.command[:] = [EVIL]
    server.profiler.stacks = [[found]]
    page = browser.ask("/live/stacks?pid=7").text
    assert "<script>alert" not in page and "\u202e" not in page
    assert page.count("&lt;script&gt;") > 15
    assert "<script>alert" not in browser.ask("/live/stacks?job=" + "%3Cscript%3Ealert").text


@pytest.mark.parametrize(
    ("abort", "status"),
    [
        (Abort(grpc.StatusCode.NOT_FOUND, "no process matches pid 42", "NO_MATCH"), 404),
        (Abort(grpc.StatusCode.PERMISSION_DENIED, "it belongs to ada", "NOT_YOUR_PROCESS"), 403),
        (Abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls", "TOO_MANY_CALLS"), 422),
    ],
)
def test_what_the_daemon_refuses_is_a_page_that_says_why(
    server: FakeServer, browser: Browser, abort: Abort, status: int
) -> None:
    server.profiler.stacks = [[abort]]
    page = browser.ask("/live/stacks?pid=42")
    assert (page.status, abort.details in page.text) == (status, True)


def test_a_page_has_so_many_frames_and_the_main_threads_come_first(
    server: FakeServer, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [thread("runs", pb.WAIT_NONE, frame("copy", line), number=line) for line in range(1, 9)]
    server.profiler.stacks = [[read(at_lock(), 0, *others), read(in_collective(), 1, *others)]]
    monkeypatch.setattr(stacks_page, "MAX_FRAMES", 12)
    page = text_of(browser, EVERY_RANK)
    assert page.count("copy train.py:") == 3  # a thread counts as much as a frame
    assert "load_next_batch train.py:6" in page and "main train.py:12" in page
    assert "A page has at most 12 frames" in page


def test_stacks_of_many_bytes_are_read_in_part_and_the_page_says_so(
    server: FakeServer, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_context, "MAX_STACK_BYTES", 3 * stacks.hanging()[0].ByteSize())
    page = text_of(browser, EVERY_RANK)
    assert "the rest was not read: the answer is too large to read at once: select fewer processes" in page
    assert "2 ranks" in page or "3 ranks" in page


def test_in_json_a_look_is_what_the_command_prints(browser: Browser) -> None:
    assert 'href="/live/stacks.json?rank=all"' in browser.ask(EVERY_RANK).text
    found = json.loads(browser.ask("/live/stacks.json?rank=all").text)
    assert list(found) == ["verdict", "groups", "processes", "errors"]
    assert (found["verdict"], len(found["processes"])) == (VERDICT, 8)


def test_with_an_editor_the_paths_are_whole(server: FakeServer) -> None:
    with browsing(address=server.address, editor="vscode://file{path}:{line}") as browser:
        assert "load_next_batch /home/ada/train.py:6 lock.acquire()" in text_of(browser, EVERY_RANK)


def test_the_list_of_processes_leads_to_each_process_job_and_all_ranks(server: FakeServer, browser: Browser) -> None:
    server.profiler.processes = [process(pid, rank) for pid, rank in ((41, 0), (42, 1), (43, None))]
    for each in server.profiler.processes:
        each.job_id = "a/b" if each.pid < 43 else "c"
    found = re.findall(
        r'href="(/live/stacks\?[^"]+)">(?:What is it doing\?<span class="hidden"> )?([^<]+)<',
        browser.ask("/live").text,
    )
    assert found == [
        ("/live/stacks?rank=all", "every rank"),
        ("/live/stacks?job=a%2Fb", "job a/b"),
        ("/live/stacks?job=c", "job c"),
        *((f"/live/stacks?pid={pid}", f"Process {pid}") for pid in (41, 42, 43)),
    ]


def test_the_look_at_a_process_leads_to_that_at_its_job(server: FakeServer, browser: Browser) -> None:
    server.profiler.stacks = [[read(at_lock(), 1, job="4242")]]
    assert 'href="/live/stacks?job=4242">job 4242<' in browser.ask("/live/stacks?pid=4243").text
    assert "What is it doing?" not in browser.ask("/live/stacks?job=4242").text


def test_a_duration_that_is_none_comes_back_in_its_field_with_what_to_write(
    server: FakeServer, browser: Browser
) -> None:
    server.profiler.processes = [process()]
    fields = {"pid": "4242", "duration": "for ever & a day", "form_secret": browser.form_secret("/live")}
    answer = browser.ask("/live/trace", "POST", fields)
    assert answer.status == 400
    assert 'value="for ever &amp; a day"' in answer.text and 'aria-invalid="true"' in answer.text
    assert 'role="alert">Use a duration such as 500ms, 5s or 1min<' in answer.text
    assert "for example 500ms" in browser.ask("/live").text
    assert not any(isinstance(each, pb.CreateCaptureRequest) for each in server.profiler.requests)


def test_a_duration_that_is_too_long_comes_back_in_its_field_with_what_is_allowed(
    server: FakeServer, browser: Browser
) -> None:
    server.profiler.processes = [process()]
    limit = "2 h is longer than the 10 min that this daemon allows (kinetod --max-duration)"
    server.profiler.created = Abort(grpc.StatusCode.INVALID_ARGUMENT, f"spec.duration_ns: {limit}", "INVALID_REQUEST")
    fields = {"pid": "4242", "duration": "2h", "form_secret": browser.form_secret("/live")}
    answer = browser.ask("/live/trace", "POST", fields)
    assert answer.status == 400
    assert 'value="2h"' in answer.text and 'aria-invalid="true"' in answer.text
    assert f'role="alert">{limit}<' in answer.text and "spec." not in answer.text
    assert 'value="4242" aria-label="Trace process 4242"' in answer.text
    assert 'data-live="2000"' in browser.ask("/live/trace").text  # from which the list is refreshed


def test_a_request_that_is_refused_for_another_reason_is_no_matter_of_the_duration(
    server: FakeServer, browser: Browser
) -> None:
    server.profiler.processes = [process()]
    server.profiler.created = Abort(grpc.StatusCode.INVALID_ARGUMENT, "spec.selector: is empty", "INVALID_REQUEST")
    fields = {"pid": "4242", "duration": "2h", "form_secret": browser.form_secret("/live")}
    answer = browser.ask("/live/trace", "POST", fields)
    assert answer.status == 400 and "spec.selector: is empty" in answer.text and 'name="duration"' not in answer.text


def test_a_pid_that_none_can_be_is_a_form_that_was_not_understood(server: FakeServer, browser: Browser) -> None:
    server.profiler.processes = [process()]
    fields = {"pid": "99999999999", "duration": "1s", "form_secret": browser.form_secret("/live")}
    assert browser.ask("/live/trace", "POST", fields).status == 400

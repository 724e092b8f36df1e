"""The page of processes lists what `kinetoctl ps` lists, and offers a trace only of those that can be traced."""

import re
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.base.common_options import CommonOptions
from kinetoctl.web.analyses.trace_library import TraceLibrary
from kinetoctl.web.http.web_messages import WebRequest, WebSession
from kinetoctl.web.pages.live_page import live_page
from kinetoctl.web.pages.page_context import OneDaemon, PageContext

READY = pb.Process(pid=41, user="ada", agent_state=pb.AGENT_STATE_READY, command=["python", "train.py"], iterations=7)
BLOCKED = pb.Process(pid=42, user="ada", obstacle="its seccomp filter forbids <ptrace>", command=["python", "b.py"])


@dataclass
class Asked:
    """A client that notes what it was asked for."""

    found: list[pb.Process]
    asked: list[dict[str, Any]] = field(default_factory=list)

    def processes(self, _selector: pb.Selector, **options: Any) -> list[pb.Process]:
        self.asked.append(options)
        return self.found


def page(client: Asked, **query: str) -> str:
    settings = CommonOptions(address="unix:/d.sock", output="table", color=False, quiet=True, timeout_s=1)
    context = PageContext(
        settings=settings,
        library=TraceLibrary(settings),
        queue=None,  # type: ignore[arg-type]
        daemons=OneDaemon(lambda: nullcontext(client), settings.address),  # type: ignore[arg-type]
        ui_origin="",
    )
    request = WebRequest(method="GET", path="/live", query=tuple(query.items()))
    return live_page(context, request, WebSession("secret", 0)).content.decode()  # type: ignore[union-attr]


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

"""kinetod-web for several hosts, each with a real daemon: what they have together, and what is said of a dead one."""

import gzip
import html
import json
import os
import pwd
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.upload_manifest import FLEET_LABEL
from kinetoctl.web.shared import fleet_hosts
from kinetoctl.web.shared.doors import PageUser
from kinetoctl.web.shared.fleet_hosts import hosts_of_lists
from kinetod.store.capture_store import Store
from support.service.daemon import Daemon, running_daemon
from support.service.kept import ended_capture, file_path
from support.trace_files import synthetic
from support.waiting import scaled, until
from support.web.shared_web import SharedWeb, sharing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for captures of two other users"),
]

ADA, BEA = "daemon", "bin"  # users whom every host has
HOSTS = ("gpu-1", "gpu-2")
FLEET, DELETED = "20260101-000009-abcdef", "20260101-000008-abcdef"  # captures of both hosts
OF_BEA = "20260101-000003-000-cccccc"
SETTINGS = """
[access]
web_proxies = {proxies}
audit_file = "{folder}/audit"
"""


def own(host: str) -> str:
    """The id of Ada's own capture on this host."""
    return f"20260101-00000{HOSTS.index(host) + 1}-000-aaaaaa"


def part(host: str, of: str = FLEET) -> str:
    """The id of this host's part of a capture of both."""
    return f"{of[:15]}-000-bbbbb{HOSTS.index(host)}"


@dataclass(frozen=True)
class Fleet:
    """Two hosts and the pages of both. file: the list of hosts."""

    web: SharedWeb
    daemons: dict[str, Daemon]
    file: Path

    def calls(self, host: str, name: str, user: str) -> list[dict[str, Any]]:
        """The calls of this name for a user in the audit log of a host, of which there are or soon will be some."""
        log = self.file.parent / host / "audit"

        def found() -> list[dict[str, Any]]:
            lines = [json.loads(line) for line in log.read_text().splitlines()]
            return [line for line in lines if (line["call"], line.get("user")) == (name, user)]

        return until(found, f"{name} of {user} is in the audit log of {host}")

    def secret(self, user: str) -> str:
        """What a form of this user must repeat."""
        self.web.ask("/live", user)
        with self.web.running.spaces.entered(PageUser(user=user)) as space:
            return space.session.form_secret


def put(store: Store, number: int, capture_id: str, user: str, rank: int, fleet: str = "") -> None:
    """Stores an ended capture of one process with this rank."""
    content = gzip.compress(synthetic.text(2_000, rank=rank).encode())
    capture = ended_capture(number, content, uid=pwd.getpwnam(user).pw_uid, name=capture_id)
    capture.targets[0].process.rank = rank
    if fleet:
        capture.spec.labels[FLEET_LABEL] = fleet
    store.insert(capture, key="", request_hash="h")
    file_path(store, capture).write_bytes(content)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Bea has a capture on the second host only, where Ada's part of the capture of both has rank 1."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet_hosts, "ANSWER_S", scaled(20))  # the machine may be busy
        root, now_ns, daemons = Path(name), time.time_ns(), {}
        for number, host in enumerate(HOSTS):
            folder = root / host
            folder.mkdir()
            store = Store(folder / "state")
            put(store, now_ns + number, own(host), ADA, 0)
            put(store, now_ns + 10, part(host), ADA, number, fleet=FLEET)
            put(store, now_ns - 10, part(host, DELETED), ADA, number, fleet=DELETED)
            if number:
                put(store, now_ns + 5, OF_BEA, BEA, 0)
            store.close()
            config = folder / "config.toml"
            config.write_text(SETTINGS.format(folder=folder, proxies='["root"]'))
            daemons[host] = stack.enter_context(running_daemon("--config", str(config), state_dir=folder / "state"))
        file = root / "hosts"
        file.write_text("".join(f"{host} {daemon.address}\n" for host, daemon in daemons.items()))
        web = stack.enter_context(sharing("", hosts=hosts_of_lists([f"@{file}"])))
        yield Fleet(web, daemons, file)


def ranks(text: str) -> list[int]:
    """The ranks in the JSON of the view of ranks."""
    return [row["rank"] for row in json.loads(text)["ranks"]["rows"]]


def listed(text: str) -> list[tuple[str, str]]:
    """Id and host of each capture of the list."""
    return re.findall(
        r'<a href="/c/([\w-]+)">[\w-]+</a></td><td class="prose cause"[^>]*>[^<]*</td><td title="([^"]*)">', text
    )


def test_the_list_has_the_captures_of_all_hosts_newest_first(fleet: Fleet) -> None:
    page = fleet.web.ask("/", ADA)
    found = [(FLEET, "gpu-1, gpu-2"), (own("gpu-2"), "gpu-2"), (own("gpu-1"), "gpu-1"), (DELETED, "gpu-1, gpu-2")]
    assert listed(page.text) == found
    assert f"kinetoctl captures list --hosts @{fleet.file}" in html.unescape(page.text)
    assert "unanswered" not in page.text


def test_each_daemon_decides_what_a_user_sees(fleet: Fleet) -> None:
    assert listed(fleet.web.ask("/", BEA).text) == [(OF_BEA, "gpu-2")]
    assert fleet.web.shown(f"/c/{OF_BEA}", ADA).status == 404
    assert fleet.web.shown(f"/c/{FLEET}", BEA).status == 404
    for host in HOSTS:
        line = fleet.calls(host, "ListCaptures", BEA)[-1]
        assert (line["decision"], line["proxy"]["user"]) == ("allowed", "root")


def test_a_capture_of_many_hosts_has_the_verdicts_and_ranks_of_all(fleet: Fleet) -> None:
    page = fleet.web.shown(f"/c/{FLEET}", ADA)
    assert page.status == 200
    assert re.findall(r'<section aria-label="(\S+) ', page.text) == list(HOSTS)
    assert ranks(fleet.web.shown(f"/c/{FLEET}/view/ranks.json", ADA).text) == [0, 1]
    command = f"kinetoctl captures fetch --hosts {','.join(each.address for each in fleet.daemons.values())} {FLEET}"
    assert f"{command} && kinetoctl report kineto-{FLEET}" in html.unescape(page.text)
    captures = json.loads(fleet.web.ask(f"/c/{FLEET}.json", ADA).text)
    assert [(each["host"], each["id"]) for each in captures["captures"]] == [(host, part(host)) for host in HOSTS]


def test_a_dead_host_is_named_until_it_is_back_and_the_others_are_shown(fleet: Fleet) -> None:
    fleet.web.shown(f"/c/{FLEET}/view/ranks.json", ADA)
    fleet.daemons["gpu-2"].kill()
    began = time.monotonic()
    page = fleet.web.ask("/", ADA)
    assert time.monotonic() - began < scaled(30)
    assert listed(page.text)[:2] == [(FLEET, "gpu-1"), (own("gpu-1"), "gpu-1")]
    assert "gpu-2" not in dict(listed(page.text)).values()
    assert re.search(r"1 host is missing below:\s*<ul><li><b>gpu-2</b>: no daemon at unix:", page.text)
    (silent,) = json.loads(fleet.web.ask("/captures.json", ADA).text)["unanswered"]
    assert silent["host"] == "gpu-2"
    for path in ("/live", f"/c/{FLEET}", f"/c/{FLEET}/view/ranks"):
        assert "<b>gpu-2</b>: no daemon at" in fleet.web.shown(path, ADA).text
    assert ranks(fleet.web.shown(f"/c/{FLEET}/view/ranks.json", ADA).text) == [0]  # though the other was fetched
    missing = fleet.web.shown(f"/c/{own('gpu-2')}", ADA)
    assert missing.status == 502 and "gpu-2: no daemon at" in missing.text
    fleet.daemons["gpu-2"].start()
    until(lambda: (own("gpu-2"), "gpu-2") in listed(fleet.web.ask("/", ADA).text), "the host is shown again")


def test_what_a_user_may_not_see_any_more_on_one_host_is_not_shown_from_what_was_kept(fleet: Fleet) -> None:
    path = f"/c/{DELETED}/view/ranks.json"
    assert ranks(fleet.web.shown(path, ADA).text) == [0, 1]
    fleet.daemons["gpu-2"].stub().DeleteCapture(pb.DeleteCaptureRequest(id=part("gpu-2", DELETED)), timeout=scaled(20))
    assert ranks(fleet.web.shown(path, ADA).text) == [0]


def test_a_process_is_traced_on_its_own_host(fleet: Fleet) -> None:
    address = fleet.daemons["gpu-2"].address
    fields = {"pid": f"{os.getpid()}@{address}", "duration": "1s", "form_secret": fleet.secret(ADA)}
    assert fleet.web.ask("/live/trace", ADA, "POST", fields).status == 403
    assert [each["reason"] for each in fleet.calls("gpu-2", "CreateCapture", ADA)] == ["NOT_YOUR_PROCESS"]
    assert '"CreateCapture"' not in (fleet.file.parent / "gpu-1" / "audit").read_text()


def test_a_process_is_looked_at_on_its_own_host(fleet: Fleet) -> None:
    address = fleet.daemons["gpu-2"].address
    assert fleet.web.ask(f"/live/stacks?pid={os.getpid()}@{address}", ADA).status == 403
    assert [each["reason"] for each in fleet.calls("gpu-2", "ReadStacks", ADA)] == ["NOT_YOUR_PROCESS"]
    assert '"ReadStacks"' not in (fleet.file.parent / "gpu-1" / "audit").read_text()


@pytest.mark.parametrize("address", ["unix:/elsewhere.sock", "169.254.169.254:80", ""])
def test_no_other_address_is_asked(fleet: Fleet, address: str) -> None:
    fields = {"pid": f"{os.getpid()}@{address}", "duration": "1s", "form_secret": fleet.secret(ADA)}
    found = fleet.web.ask("/live/trace", ADA, "POST", fields)
    assert found.status == 404 and "do not show a host" in found.text
    found = fleet.web.ask(f"/live/stacks?pid={os.getpid()}@{address}", ADA)
    assert found.status == 404 and "do not show a host" in found.text

"""kinetod-web with a real daemon: each user sees what the daemon lets that user see, whoever else looks."""

import contextlib
import gzip
import json
import os
import pickle
import pwd
import re
import ssl
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.web.application import _ROUTES
from kinetoctl.web.shared.doors import PageUser, WebTlsFiles
from kinetod.store.capture_store import Store
from support.peers.certificates import Authority, Pair
from support.service.calls_as import CallsAs
from support.service.daemon import Daemon, error_of, running_daemon
from support.service.kept import put_capture
from support.targets.memory_snapshots import snapshot
from support.trace_files import synthetic
from support.waiting import scaled, until
from support.web.browsing import Page
from support.web.shared_web import SharedWeb, sharing

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for captures of two other users"),
]

ADA, BEA = "daemon", "bin"  # users whom every host has
OF_ADA, OF_BEA = "20260101-000001-000-aaaaaa", "20260101-000002-000-bbbbbb"
SETTINGS = """
[access]
web_proxies = ["root"]
audit_file = "{folder}/audit"
[access.certificates]
"URI:spiffe://cluster/ada" = "own as daemon"
"DNS:everything.cluster" = "viewer"
"CN:boss" = "admin"
"""


@dataclass(frozen=True)
class Setup:
    """A daemon with a capture of each user, and the pages with both doors."""

    daemon: Daemon
    web: SharedWeb
    folder: Path
    authority: Authority

    def audited(self, **wanted: object) -> dict[str, Any]:
        """The last line of the audit log with these values; the daemon writes it after it has answered."""

        def line() -> dict[str, Any] | None:
            lines = [json.loads(text) for text in (self.folder / "audit").read_text().splitlines()]
            return next((each for each in reversed(lines) if wanted.items() <= each.items()), None)

        return until(line, f"the audit log has {wanted}")

    def client(self, pair: Pair | None) -> ssl.SSLContext:
        """What a browser with this certificate connects with."""
        context = ssl.create_default_context(cadata=self.authority.certificate.decode())
        if pair is not None:
            file = self.folder / "client.pem"
            file.write_bytes(pair.certificate + pair.key)
            context.load_cert_chain(file)
        return context


@pytest.fixture(scope="module")
def setup() -> Iterator[Setup]:
    with tempfile.TemporaryDirectory() as name:
        folder, authority = Path(name), Authority()
        state = folder / "state"
        store = Store(state)
        for user, capture_id, kernels in ((ADA, OF_ADA, "gemm"), (BEA, OF_BEA, "conv")):  # each has others
            content = gzip.compress(synthetic.text(2_000).replace("gemm", kernels).encode())
            uid = pwd.getpwnam(user).pw_uid
            put_capture(store, time.time_ns(), content, uid=uid, name=capture_id, snapshot=pickle.dumps(snapshot()))
        store.close()
        config = folder / "config.toml"
        config.write_text(SETTINGS.format(folder=folder))
        server = authority.issue(dns="localhost")
        for file, pem in (("s.pem", server.certificate), ("s.key", server.key), ("ca.pem", authority.certificate)):
            (folder / file).write_bytes(pem)
        files = WebTlsFiles(certificate=folder / "s.pem", key=folder / "s.key", client_ca=folder / "ca.pem")
        with (
            running_daemon("--config", str(config), state_dir=state) as daemon,
            sharing(daemon.address, files=files) as web,
        ):
            yield Setup(daemon, web, folder, authority)


def test_each_user_has_the_own_captures_alone(setup: Setup) -> None:
    for user, own, other in ((ADA, OF_ADA, OF_BEA), (BEA, OF_BEA, OF_ADA)):
        for path in ("/", "/captures.json", "/sql"):
            text = setup.web.ask(path, user).text
            assert (own in text, other in text) == (True, False), (user, path, text)


@pytest.mark.parametrize(
    "path",
    [
        "/c/{}", "/c/{}.json", "/c/{}/view/kernels", "/c/{}/view/kernels.json", "/c/{}/timeline/trace",
        "/c/{}/snapshot", "/c/{}/snapshot.json",
        "/sql?c={}&sql=SELECT+1", "/sql.json?c={}&sql=SELECT+name+FROM+kernel",
    ],
)  # fmt: skip
def test_nothing_that_was_computed_or_fetched_for_one_user_reaches_another(setup: Setup, path: str) -> None:
    own = setup.web.shown(path.format(OF_ADA), ADA)
    assert own.status == 200, own.text
    other = setup.web.shown(path.format(OF_ADA), BEA)
    assert other.status in (404, 200)  # of pages with a form, only the part below it says so
    assert re.search(f"no capture.*{OF_ADA}|{OF_ADA}.*not exist", other.text)
    assert "gemm" not in other.text and "<td" not in other.text


def test_a_memory_snapshot_is_fetched_and_read_in_confinement(setup: Setup) -> None:
    page = setup.web.shown(f"/c/{OF_ADA}/snapshot", ADA).text
    assert "GPU0: 22 MiB reserved in 2 segments" in page
    assert f'href="/c/{OF_ADA}/snapshot"' in setup.web.shown(f"/c/{OF_ADA}", ADA).text


def test_a_baseline_of_another_user_is_not_compared_with(setup: Setup) -> None:
    setup.web.shown(f"/c/{OF_ADA}/view/kernels", ADA)
    found = setup.web.shown(f"/c/{OF_BEA}/view/diff_kernel_names?base={OF_ADA}", BEA)
    assert re.search(f"no capture.*{OF_ADA}|{OF_ADA}.*not exist", found.text), found.text


def test_what_a_user_may_not_see_any_more_is_not_served_from_what_was_kept(setup: Setup) -> None:
    capture_id = "20260101-000003-000-cccccc"
    assert setup.web.shown(f"/c/{capture_id}/timeline/trace", ADA).status == 404
    path = f"/c/{OF_BEA}/view/kernels.json"
    assert setup.web.shown(path, BEA).status == 200
    setup.daemon.stub().DeleteCapture(pb.DeleteCaptureRequest(id=OF_BEA), timeout=scaled(20))
    assert setup.web.shown(path, BEA).status == 404


def test_a_timeline_is_the_users_own_file(setup: Setup) -> None:
    found = setup.web.shown(f"/c/{OF_ADA}/timeline/trace", ADA)
    assert (found.status, found.headers["Content-Type"]) == (200, "application/octet-stream")


def test_a_form_needs_the_secret_of_its_user(setup: Setup) -> None:
    page = setup.web.ask("/live", ADA).text
    assert "2147483000" not in page
    fields = {"pid": "2147483000", "duration": "1s", "form_secret": "x"}
    assert setup.web.ask("/live/trace", ADA, "POST", fields).status == 403
    with setup.web.running.spaces.entered(PageUser(user=ADA)) as space:
        secret = space.session.form_secret
    assert setup.web.ask("/live/trace", BEA, "POST", fields | {"form_secret": secret}).status == 403
    assert "2147483000" in setup.web.ask("/live/trace", ADA, "POST", fields | {"form_secret": secret}).text
    elsewhere = setup.web.ask(
        "/live/trace", ADA, "POST", fields | {"form_secret": secret}, Origin="https://evil.example"
    )
    assert elsewhere.status == 403


def test_a_process_is_traced_with_the_rights_of_the_user_who_looks(setup: Setup) -> None:
    setup.web.ask("/live", ADA)
    with setup.web.running.spaces.entered(PageUser(user=ADA)) as space:
        secret = space.session.form_secret
    fields = {"pid": str(os.getpid()), "duration": "1s", "form_secret": secret}
    assert setup.web.ask("/live/trace", ADA, "POST", fields).status == 403
    assert setup.audited(call="CreateCapture", user=ADA, reason="NOT_YOUR_PROCESS")["decision"] == "denied"


def test_where_a_process_stands_is_asked_with_the_rights_of_the_user_who_looks(setup: Setup) -> None:
    for path in (f"/live/stacks?pid={os.getpid()}", f"/live/stacks.json?pid={os.getpid()}"):
        found = setup.web.ask(path, ADA)
        assert found.status == 403 and "pytest" not in found.text
    assert setup.audited(call="ReadStacks", user=ADA, reason="NOT_YOUR_PROCESS")["decision"] == "denied"


def test_the_audit_log_names_the_user_and_the_front_end(setup: Setup) -> None:
    setup.web.ask("/", ADA)
    line = setup.audited(call="ListCaptures", user=ADA)
    assert line["decision"] == "allowed"
    assert (line["uid"], line["via"]) == (pwd.getpwnam(ADA).pw_uid, "unix")
    assert line["proxy"] == {"uid": 0, "user": "root", "pid": os.getpid()}


@pytest.mark.parametrize("user", ["root", "no-such-user"])
def test_nobody_is_root_or_unknown_at_a_page(setup: Setup, user: str) -> None:
    assert setup.web.ask("/captures.json", user).status == 403
    assert setup.audited(reason="NOT_DELEGATED", asked_user=user)["decision"] == "denied"


@pytest.mark.parametrize("user", ["", "a b", "-x", "x" * 65, "../x"])
def test_a_proxy_that_names_nobody_is_refused(setup: Setup, user: str) -> None:
    assert setup.web.ask("/", user).status == 403


def test_a_user_may_be_named_once(setup: Setup) -> None:
    sent = f"GET / HTTP/1.1\r\nHost: web.example:8443\r\nX-Remote-User: {ADA}\r\nx-remote-user: {BEA}\r\n\r\n"
    with contextlib.closing(setup.web._connection(None)) as connection:
        connection.send(sent.encode())
        assert b" 403 " in connection.sock.recv(100)


def test_a_certificate_says_who_looks(setup: Setup) -> None:
    ada = setup.client(setup.authority.issue("whoever", uri="spiffe://cluster/ada"))
    text = setup.web.ask("/captures.json", tls=ada).text
    assert (OF_ADA in text, OF_BEA in text) == (True, False)
    everything = setup.client(setup.authority.issue(dns="everything.cluster"))
    assert OF_ADA in setup.web.ask("/captures.json", tls=everything).text


@pytest.mark.parametrize("names", [{"common_name": "nobody"}, {"common_name": "boss"}, {"ip": "10.0.0.1"}])
def test_other_certificates_see_nothing(setup: Setup, names: dict[str, str]) -> None:
    client = setup.client(setup.authority.issue(**names))  # type: ignore[arg-type]
    try:
        found = setup.web.ask("/captures.json", tls=client)
    except OSError:
        return
    assert found.status == 403


def test_a_user_cannot_be_named_at_the_tcp_door(setup: Setup) -> None:
    ada = setup.client(setup.authority.issue("whoever", uri="spiffe://cluster/ada"))
    for header in ("X_Remote_User", "x_remote_user"):
        named: dict[str, Any] = {header: BEA}
        found = setup.web.ask("/captures.json", tls=ada, **named)
        assert (found.status, OF_ADA in found.text) == (400, False)


def test_without_a_certificate_of_the_authority_there_is_no_page(setup: Setup) -> None:
    for pair in (None, Authority("another").issue("whoever", uri="spiffe://cluster/ada")):
        with pytest.raises(OSError):
            setup.web.ask("/", tls=setup.client(pair))


def test_metadata_of_an_ordinary_caller_is_refused_and_audited(setup: Setup) -> None:
    with CallsAs(61001) as mallory:
        answer = mallory.call(
            setup.daemon.address, "ListCaptures", pb.ListCapturesRequest(), metadata=[("kineto-for-user", ADA)]
        )
    assert (answer.code, answer.reason, answer.messages) == ("PERMISSION_DENIED", "NOT_DELEGATED", ())
    assert setup.audited(uid=61001, asked_user=ADA)["decision"] == "denied"


def test_metadata_that_names_two_users_is_refused(setup: Setup) -> None:
    stub = setup.daemon.stub()
    both = (("kineto-for-user", ADA), ("kineto-for-user", BEA))
    code, reason, _ = error_of(lambda: stub.ListCaptures(pb.ListCapturesRequest(), timeout=20, metadata=both))
    assert (code.name, reason) == ("PERMISSION_DENIED", "NOT_DELEGATED")


def test_a_proxy_that_is_not_configured_is_closed_unread(setup: Setup) -> None:
    with sharing(setup.daemon.address, proxies=(61002,)) as web, pytest.raises(OSError):
        web.ask("/", ADA)


def test_other_sites_may_link_to_pages_and_no_more(setup: Setup) -> None:
    linked: dict[str, Any] = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    linked["Sec_Fetch_Dest"] = "document"
    assert setup.web.ask("/", ADA, **linked).status == 200
    for change in ({"Sec_Fetch_Mode": "no-cors"}, {"Sec_Fetch_Dest": "iframe"}, {"Sec_Fetch_Dest": "script"}):
        assert setup.web.ask("/captures.json", ADA, **{**linked, **change}).status == 403
    assert setup.web.ask("/", ADA, Host="evil.example").status == 421


STRANGE_IDS = (
    OF_ADA, f"..%2f{OF_ADA}", f"{OF_BEA}%2f..%2f{OF_ADA}", f"%2e%2e/{OF_ADA}", f"{OF_ADA}%00", f"%2f{OF_ADA}",
    f"{OF_ADA}%0d%0aSet-Cookie:a=b", f".%2f{OF_ADA}", "..", "user-", "*", f"{OF_ADA[:-1]}%3f", OF_ADA.upper(),
)  # fmt: skip
STRANGE_FIELDS = (
    "", f"base={OF_ADA}", f"c={OF_ADA}&sql=SELECT+name+FROM+kernel", f"rank=0&base={OF_ADA}&base_rank=0",
    f"c={OF_BEA}&c={OF_ADA}&sql=SELECT+name+FROM+kernel", f"set.path=..%2f{OF_ADA}&tracks=none&name=gemm",
)  # fmt: skip


def within_rate(setup: Setup, path: str, method: str, form: dict[str, str] | None) -> Page | None:
    """Bea's answer; None if she has asked too often in a second."""
    answer = setup.web.ask(path, BEA, method, form)
    return None if answer.status == HTTPStatus.TOO_MANY_REQUESTS else answer


@pytest.mark.parametrize(("method", "pattern"), [(method, pattern.pattern) for method, pattern, _ in _ROUTES])
def test_no_route_gives_anything_of_another_user_or_to_another_site_whatever_is_asked(
    setup: Setup, method: str, pattern: str
) -> None:
    form = {"form_secret": "x"} if method == "POST" else None
    shown = re.sub(r"\(\?P<name>[^)]*\)", "kernels", pattern).replace("\\.", ".")
    paths = list(dict.fromkeys(re.sub(r"\(\?P<id>[^)]*\)", each, shown) for each in STRANGE_IDS))
    asked = [f"{paths[0]}?{fields}" for fields in STRANGE_FIELDS] + paths[1:]
    found = []
    for path in asked:
        found.append(until(partial(within_rate, setup, path, method, form), "it is answered"))
        assert "gemm" not in found[-1].text.replace("name=gemm", ""), path
    assert {each.status for each in found} <= {200, 400, 403, 404, 422}
    names = {name.lower() for each in found for name in each.headers}
    assert not {name for name in names if name.startswith("access-control-") or name == "set-cookie"}
    elsewhere: dict[str, Any] = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "cors", "Sec_Fetch_Dest": "empty"}
    assert setup.web.ask(paths[0], ADA, method, form, Host="evil.example").status == 421
    assert setup.web.ask(paths[0], ADA, method, form, Origin="https://evil.example", **elsewhere).status == 403


def test_pages_have_the_policy_and_no_session_cookie(setup: Setup) -> None:
    found = setup.web.ask("/", ADA)
    assert "script-src 'self'" in found.headers["Content-Security-Policy"]
    assert "frame-src 'none'" in found.headers["Content-Security-Policy"]
    assert "Set-Cookie" not in found.headers
    assert re.search("Captures", found.text)

"""Hooks of a real daemon: whoever is told gets the capture, and nobody who fails holds anything up."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.plain import plain
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.base import http_headers
from support.agent.scripted_agent import ScriptedAgent
from support.peers.receiver import Receiver, receiving
from support.service.daemon import Daemon, running_daemon, watch_to_end
from support.waiting import scaled, until

SECRET = b"a secret of some length"
SCRIPT = f"""#!{sys.executable}
import json, os, pathlib, sys
told = {{"capture": json.load(sys.stdin), "environ": dict(os.environ), "argv": sys.argv[1:]}}
path = pathlib.Path(sys.argv[1], told["capture"]["id"])
path.with_suffix(".new").write_text(json.dumps(told))
path.with_suffix(".new").rename(path)
sys.exit("told" if told["capture"]["spec"]["labels"].get("fail") else 0)
"""


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as running:
        yield running


@pytest.fixture(scope="module")
def told() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def daemon(receiver: Receiver, told: Path) -> Iterator[Daemon]:
    script, secret = told / "hook", told / "secret"
    script.write_text(SCRIPT)
    script.chmod(0o755)
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    environ = {
        "KINETOD_HOOKS_COMMAND": f"{script} {told}",
        "KINETOD_HOOKS_WEBHOOK": receiver.url,
        "KINETOD_HOOKS_WEBHOOK_SECRET": str(secret),
        "KINETOD_HOOKS_TIMEOUT": "20s",
    }
    with running_daemon(environ=environ) as started:
        yield started


@pytest.fixture
def agent(daemon: Daemon, receiver: Receiver) -> Iterator[ScriptedAgent]:
    """Afterwards the webhooks of the test have come, so that the next one sees its own."""
    with ScriptedAgent(daemon.agent_socket) as connected:
        connected.hello()
        yield connected
    ids = {capture.id for capture in daemon.stub().ListCaptures(pb.ListCapturesRequest(), timeout=scaled(10)).captures}
    until(lambda: ids <= {sent.headers["webhook-id"] for sent in receiver.received}, "all are told", state=daemon.log)


def capture(daemon: Daemon, agent: ScriptedAgent, **labels: str) -> pb.Capture:
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[os.getpid()]), duration_ns=10**9, labels=labels)
    created = daemon.stub().CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(10))
    agent.capture(samples=10)
    return watch_to_end(daemon.stub(), created.id)


def told_of(told: Path, capture_id: str) -> dict[str, Any]:
    until((told / capture_id).exists, f"the command is told of {capture_id}")
    found: dict[str, Any] = json.loads((told / capture_id).read_text())
    return found


def answered(daemon: Daemon, capture_id: str) -> pb.Capture:
    """The capture as it is stored once the hooks are told."""
    found: pb.Capture = daemon.stub().GetCapture(pb.GetCaptureRequest(id=capture_id), timeout=scaled(10))
    return found


def test_the_command_gets_the_capture_and_its_ids(daemon: Daemon, agent: ScriptedAgent, told: Path) -> None:
    ended = capture(daemon, agent, **{"kineto.fleet": "f1"})
    found = told_of(told, ended.id)
    assert found["capture"] == plain(answered(daemon, ended.id))
    environ = found["environ"]
    assert environ["KINETO_CAPTURE_ID"] == ended.id
    assert (environ["KINETO_CAPTURE_STATUS"], environ["KINETO_CAPTURE_FLEET"]) == ("DONE", "f1")
    assert environ["KINETO_CAPTURE_FOLDER"] == str(daemon.state_dir / "captures" / ended.id)
    assert "NOTIFY_SOCKET" not in environ
    assert found["argv"] == [str(told)]


def test_the_webhook_gets_it_signed_also_after_a_failure(
    daemon: Daemon, agent: ScriptedAgent, receiver: Receiver
) -> None:
    before = len(receiver.received)
    receiver.answers = [503]
    ended = capture(daemon, agent)
    until(lambda: len(receiver.received) == before + 2, "the second try", state=daemon.log)
    for sent in receiver.received[before:]:
        assert json.loads(sent.body) == plain(answered(daemon, ended.id))
        assert sent.headers["webhook-id"] == ended.id
        expected = http_headers.signed_headers(SECRET, ended.id, int(sent.headers["webhook-timestamp"]), sent.body)
        assert sent.headers["webhook-signature"] == expected["webhook-signature"]
    assert (
        f"hook {receiver.url} of capture {ended.id}, attempt 1: answered 503 Service Unavailable: not now"
        in daemon.log()
    )
    assert SECRET.decode() not in daemon.log()


def test_a_hook_that_fails_changes_no_verdict_and_is_in_the_log(
    daemon: Daemon, agent: ScriptedAgent, told: Path
) -> None:
    ended = capture(daemon, agent, fail="yes")
    assert ended.status == pb.CAPTURE_STATUS_DONE
    told_of(told, ended.id)
    line = f"hook {told}/hook of capture {ended.id}, attempt 1: exited with status 1: told"
    until(lambda: line in daemon.log(), "its end is logged", state=daemon.log)


@pytest.mark.slow
def test_what_a_stop_ends_is_told_too() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "told")
        environ = {"KINETOD_HOOKS_COMMAND": f"/bin/cp /dev/stdin {found}"}
        with running_daemon(environ=environ) as daemon, ScriptedAgent(daemon.agent_socket) as agent:
            agent.hello()
            spec = pb.CaptureSpec(selector=pb.Selector(pids=[os.getpid()]), duration_ns=60 * 10**9)
            daemon.stub().CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(10))
            agent.await_start()
            daemon.stop()
            assert json.loads(found.read_text())["targets"][0]["reason_code"] == "DAEMON_STOPPED", daemon.log()

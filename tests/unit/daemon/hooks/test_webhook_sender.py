"""One webhook: what is sent, and what becomes of each answer."""

import base64
import hashlib
import hmac
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetod.base import http_headers
from kinetod.hooks.http_post import ReceiverAnswer
from kinetod.hooks.webhook_sender import Delivery, deliver, main
from support.peers.certificates import Authority
from support.peers.receiver import Receiver, receiving

SECRET = b"a secret of some length"
NOW = 1_700_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[Receiver]:
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def receiver(server: Receiver) -> Receiver:
    server.received.clear()
    server.headers.clear()
    return server


def delivery(receiver: Receiver, secret_file: Path | None = None) -> Delivery:
    return Delivery(url=receiver.url, message_id="c1", secret_file=str(secret_file or ""), timeout_s=10)


def test_a_signed_post_can_be_verified(receiver: Receiver, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    assert deliver(delivery(receiver, file), b'{"id": "c1"}', NOW) == ReceiverAnswer()
    (sent,) = receiver.received
    assert (sent.path, sent.body) == ("/hook", b'{"id": "c1"}')
    assert sent.headers["content-type"] == "application/json"
    assert (sent.headers["webhook-id"], sent.headers["webhook-timestamp"]) == ("c1", str(NOW))
    digest = hmac.new(SECRET, f"c1.{NOW}.".encode() + sent.body, hashlib.sha256).digest()
    assert sent.headers["webhook-signature"] == f"v1,{base64.b64encode(digest).decode()}"


def test_without_a_secret_there_is_no_signature(receiver: Receiver) -> None:
    deliver(delivery(receiver), b"{}", NOW)
    assert "webhook-signature" not in receiver.received[0].headers


def test_the_example_of_standard_webhooks_has_its_signature() -> None:
    secret = http_headers.webhook_secret_in(b"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    found = http_headers.signed_headers(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert found["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize(("content", "problem"), [(b"short", "has 5 bytes"), (b"whsec_%%%", "invalid base64")])
def test_a_secret_that_is_none_is_refused(receiver: Receiver, tmp_path: Path, content: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        http_headers.webhook_secret_in(content)
    file = tmp_path / "secret"
    file.write_bytes(content)
    assert problem in deliver(delivery(receiver, file), b"{}", NOW).text
    assert receiver.received == []


@pytest.mark.parametrize(
    ("status", "again"), [(400, False), (404, False), (410, False), (408, True), (429, True), (500, True), (503, True)]
)
def test_what_a_receiver_refuses_is_tried_again_where_that_may_help(
    receiver: Receiver, status: int, again: bool
) -> None:
    receiver.answers, receiver.headers["Retry-After"] = [status], "7"
    answer = deliver(delivery(receiver), b"{}", NOW)
    assert (answer.again, answer.after_s) == (again, 7)
    assert answer.text.startswith(f"answered {status} ")
    assert answer.text.endswith(": not now")


def test_redirects_are_not_followed(receiver: Receiver) -> None:
    receiver.answers, receiver.headers["Location"] = [307], receiver.url
    answer = deliver(delivery(receiver), b"{}", NOW)
    assert "redirects are not followed" in answer.text
    assert not answer.again
    assert len(receiver.received) == 1


def test_who_does_not_listen_is_tried_again() -> None:
    answer = deliver(Delivery(url="http://127.0.0.1:9/", message_id="c1"), b"{}", NOW)
    assert answer.again
    assert "cannot be reached" in answer.text
    assert "refused" in answer.text


def test_certificates_are_checked(tmp_path: Path) -> None:
    authority, other = Authority(), Authority("other")
    for name, each in (("ca.pem", authority), ("other.pem", other)):
        (tmp_path / name).write_bytes(each.certificate)
    with receiving(tmp_path, authority) as receiver:
        for ca_file in ("", str(tmp_path / "other.pem")):
            answer = deliver(Delivery(url=receiver.url, message_id="c1", ca_file=ca_file), b"{}", NOW)
            assert "CERTIFICATE_VERIFY_FAILED" in answer.text
        known = str(tmp_path / "ca.pem")
        assert deliver(Delivery(url=receiver.url, message_id="c1", ca_file=known), b"{}", NOW) == ReceiverAnswer()
        address = receiver.url.replace("localhost", "127.0.0.1")
        assert (
            "CERTIFICATE_VERIFY_FAILED"
            in deliver(Delivery(url=address, message_id="c1", ca_file=known), b"{}", NOW).text
        )
        assert len(receiver.received) == 1


def test_the_process_reads_a_line_and_a_body_and_answers_a_line(receiver: Receiver) -> None:
    line = json.dumps({"url": receiver.url, "message_id": "c1"}).encode()
    output = io.StringIO()
    assert main(io.BytesIO(line + b"\n{}\n"), output) == 0
    assert json.loads(output.getvalue()) == {"text": "", "again": False, "after_s": 0.0}
    assert receiver.received[0].body == b"{}\n"

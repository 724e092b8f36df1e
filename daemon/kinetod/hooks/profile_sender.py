"""Pushes the profiles of one capture: `python -m kinetod.hooks.profile_sender`, a separate process, since names may
take long to resolve and receivers may hang.

Theory of operation
    It has the network and the headers with credentials, and never reads a trace: another process (profile_payload.py)
    builds each message, and this one passes on its bytes. Standard input has one line of JSON (ProfileDelivery);
    standard output immediately gets one line for each accepted target, {"sent": name}, so that an interrupted try is
    not repeated from its beginning, and at the end one line for the outcome.
"""

import gzip
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from kineto_trace.base.own_processes import safe_environment
from kineto_trace.store.output_formats import COLUMNS_DIRECTORY

from kinetod import __version__
from kinetod.base.http_headers import headers_in, secrets_in
from kinetod.base.safe_text import clean, redacted
from kinetod.config.addresses import ProfileForm, parse_profiles
from kinetod.hooks.http_post import ReceiverAnswer, post
from kinetod.sandbox.confinement import ENVIRONMENT, die_with_parent
from kinetod.supervise import child

MADE, FAILED = b"+", b"-"  # first byte from the process that builds a message
MAX_PAYLOAD_BYTES = 64 << 20
_MAX_ANSWER_BYTES = 64 << 10
_MAX_TEXT_CHARS = 300
_LEVEL = 1  # of gzip
_CONTENT_TYPES = {ProfileForm.OTLP_HTTP: "application/x-protobuf", ProfileForm.PYROSCOPE: "application/proto"}
_EXPORT = "/opentelemetry.proto.collector.profiles.v1development.ProfilesService/Export"
_USER_AGENT = f"kinetod/{__version__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileDelivery:
    """What to send, and where. folder: of the capture. targets: names of targets with a trace. sent: names of targets
    that need not be sent again.

    headers_file, ca_file: a path, or empty. memory_bytes, sandbox: for building a message, as for decoding.
    """

    address: str
    folder: str
    headers_file: str = ""
    ca_file: str = ""
    timeout_s: float = 30.0
    memory_bytes: int = 1 << 30
    sandbox: str = "available"
    targets: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)


class _Refused(Exception):
    """A target cannot be sent, for this reason."""

    def __init__(self, answer: ReceiverAnswer) -> None:
        super().__init__(answer.text)
        self.answer = answer


def deliver(delivery: ProfileDelivery, stdout: IO[str]) -> ReceiverAnswer:
    """Sends every target not sent yet. Stops at the first failure that may be temporary."""
    try:
        headers = headers_in(Path(delivery.headers_file).read_bytes()) if delivery.headers_file else {}
    except (OSError, ValueError) as exc:
        return ReceiverAnswer(text=f"the headers file {delivery.headers_file} cannot be used: {exc}", again=True)
    deadline = time.monotonic() + delivery.timeout_s
    problems = []
    for name in delivery.targets:
        if name in delivery.sent:
            continue
        target = Path(delivery.folder, "targets", name)
        try:
            if not (target / COLUMNS_DIRECTORY).is_dir():
                raise _Refused(ReceiverAnswer(text="its files are no longer in the store"))
            message = _message(target, delivery, deadline)
            if message:
                _send(message, delivery, headers, deadline)
        except _Refused as exc:
            text = f"target {name}: {exc}"
            if exc.answer.again:
                return ReceiverAnswer(text=text, again=True, after_s=exc.answer.after_s)
            problems.append(text)
            continue
        stdout.write(json.dumps({"sent": name}) + "\n")
        stdout.flush()
    return ReceiverAnswer(text="; ".join(problems))


def _message(target: Path, delivery: ProfileDelivery, deadline: float) -> bytes:
    """Returns the message about a target; b"" if it has no profile. Raises _Refused."""
    with tempfile.TemporaryDirectory(prefix="kinetod-profile-") as own:
        return _made(target, own, delivery, deadline)


def _made(target: Path, own: str, delivery: ProfileDelivery, deadline: float) -> bytes:
    seconds = _left(deadline)
    form = parse_profiles(delivery.address).form
    command = child.python(
        "kinetod.hooks.profile_payload",
        str(target),
        own,
        form.value,
        str(delivery.memory_bytes),
        str(int(seconds) + 1),
        delivery.sandbox,
    )
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**safe_environment(), **ENVIRONMENT},
    ) as process:
        late = threading.Timer(seconds, process.kill)
        late.start()
        assert process.stdout is not None
        said = process.stdout.read(MAX_PAYLOAD_BYTES + 2)
        if len(said) > MAX_PAYLOAD_BYTES + 1:
            process.kill()
        status = process.wait()
        late.cancel()
    if said[:1] == FAILED:
        why = clean(said[1:].decode("utf-8", "replace"), _MAX_TEXT_CHARS)
        raise _Refused(ReceiverAnswer(text=f"its profile cannot be created: {why}"))
    if len(said) > MAX_PAYLOAD_BYTES + 1:
        raise _Refused(ReceiverAnswer(text=f"its profile is larger than {MAX_PAYLOAD_BYTES >> 20} MiB"))
    if time.monotonic() >= deadline:
        raise _Refused(ReceiverAnswer(text=_LATE, again=True))
    if status or said[:1] != MADE:
        raise _Refused(ReceiverAnswer(text=f"its profile cannot be created: a process exited with status {status}"))
    return said[1:]


_LATE = "creating its profile took too long; raise hooks.timeout"


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise _Refused(ReceiverAnswer(text="hooks.timeout expired; the next attempt continues from here", again=True))
    return left


def _send(message: bytes, delivery: ProfileDelivery, headers: dict[str, str], deadline: float) -> None:
    """Sends a message. Raises _Refused."""
    address, secrets = parse_profiles(delivery.address), frozenset(secrets_in(headers))
    if address.form is ProfileForm.OTLP_GRPC:
        answer, said = _call(message, delivery, headers, _left(deadline))
    else:
        own = {
            "Content-Type": _CONTENT_TYPES[address.form],
            "Content-Encoding": "gzip",
            "User-Agent": _USER_AGENT,
        }
        answer, said = post(
            address.url,
            gzip.compress(message, _LEVEL),
            {**headers, **own},
            ca_file=delivery.ca_file,
            timeout_s=_left(deadline),
            answer_bytes=_MAX_ANSWER_BYTES,
            secrets=secrets,
        )
    if answer.text:
        raise _Refused(answer)
    if address.form is not ProfileForm.PYROSCOPE and (rejected := _rejected(said, secrets)):
        raise _Refused(ReceiverAnswer(text=rejected))


def _call(
    message: bytes, delivery: ProfileDelivery, headers: dict[str, str], timeout_s: float
) -> tuple[ReceiverAnswer, bytes]:
    """One call of OTLP over gRPC."""
    import grpc  # heavy, and other forms do not need it

    address = parse_profiles(delivery.address)
    options = (("grpc.primary_user_agent", _USER_AGENT), ("grpc.enable_retries", 0))
    if address.secure:
        try:
            authorities = Path(delivery.ca_file).read_bytes() if delivery.ca_file else _system_authorities()
        except OSError as exc:
            return ReceiverAnswer(text=f"the CA certificates cannot be read: {exc}", again=True), b""
        channel = grpc.secure_channel(address.url, grpc.ssl_channel_credentials(authorities), options)
    else:
        channel = grpc.insecure_channel(address.url, (*options, ("grpc.enable_http_proxy", 0)))
    again = {
        grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DATA_LOSS,
    }  # fmt: skip  # those that OTLP's specification calls retryable
    with channel:
        try:
            export: Any = channel.unary_unary(_EXPORT)  # bytes in, bytes out
            said: bytes = export(
                message, timeout=timeout_s, metadata=tuple(headers.items()), compression=grpc.Compression.Gzip
            )
        except grpc.RpcError as exc:
            code: Any = exc.code()
            details = redacted(str(exc.details()), secrets_in(headers))[:_MAX_TEXT_CHARS]
            return ReceiverAnswer(text=f"answered {code.name}: {details}", again=code in again), b""
    return ReceiverAnswer(), said


def _system_authorities() -> bytes | None:
    """Returns the authorities that this system trusts; None: use gRPC's own."""
    import ssl

    paths = ssl.get_default_verify_paths()
    return Path(paths.cafile).read_bytes() if paths.cafile else None


def _rejected(said: bytes, secrets: Collection[str]) -> str:
    """Returns why an OTLP receiver that accepted the request rejected profiles in it; "" if it rejected none."""
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2 as pb

    try:
        part = pb.ExportProfilesServiceResponse.FromString(said).partial_success
    except DecodeError:
        return ""  # it answered 200 with something outside the protocol
    if not part.rejected_profiles:
        return ""
    why = redacted(part.error_message, secrets)[:_MAX_TEXT_CHARS]
    return f"the receiver rejected {part.rejected_profiles} of its profiles{': ' if why else ''}{why}"


def main(stdin: IO[bytes], stdout: IO[str]) -> int:
    """Carries out the request on standard input."""
    delivery = ProfileDelivery(**json.loads(stdin.readline()))
    stdout.write(json.dumps(asdict(deliver(delivery, stdout))) + "\n")
    return 0


if __name__ == "__main__":
    die_with_parent()
    sys.exit(main(sys.stdin.buffer, sys.stdout))

"""gRPC requests of every method to a real daemon: strange fields, bytes that are no message, bytes that are no HTTP/2.

Beside the daemon's folder lie a secret, and in it links that lead there: no answer may have the secret in it, and at
the end nothing may have been changed, made or removed outside of the store.
"""

import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb
from support.agent.scripted_agent import ScriptedAgent, hello_message
from support.service.daemon import Daemon, running_daemon
from support.waiting import scaled

from fuzz import mutate
from fuzz.doors.link import Health
from fuzz.doors.loop import Case, Failure

SERVICE = pb.DESCRIPTOR.services_by_name["Profiler"]
METHODS = [method.name for method in SERVICE.methods]
WEIGHTS = [
    1 if name in ("WatchHost", "DiagnoseProcess", "WatchCounters", "ListCounters") else 8 for name in METHODS
]  # those that take long
SECRET = b"4c1d9f-the-secret-4c1d9f"
TIMEOUT_S = 15.0
LONG_S = 1.0  # of calls that last until the caller goes
REFUSALS = ("INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "ALREADY_EXISTS", "PERMISSION_DENIED",
            "RESOURCE_EXHAUSTED", "OUT_OF_RANGE", "UNAVAILABLE", "ABORTED", "UNIMPLEMENTED", "DATA_LOSS")  # fmt: skip
LONG = ("WatchHost", "WatchCapture", "WatchCounters")  # that end when the caller goes
LOOK_EVERY = 200
ARMED_NS = 20_000_000  # long enough to be started, at times
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_INT_KINDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


class ObligingAgent(threading.Thread):
    """An agent of this process that does every capture at once."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(daemon=True, name="obliging")
        self._daemon = daemon

    def run(self) -> None:
        """Carries out captures until the daemon goes."""
        with ScriptedAgent(self._daemon.agent_socket) as agent, suppress(BrokenPipeError, ConnectionResetError):
            agent.sock.settimeout(None)
            agent.hello()
            while (message := agent.receive()) is not None:
                if isinstance(message, wire.Describe):
                    agent.send(hello_message())
                if isinstance(message, wire.Start):
                    agent.start = message
                    writer = agent.announce()
                    agent.state("COLLECT")
                    agent.record(10)
                    agent.result()
                    writer.close()
                    agent.writer = None


class Calls:
    """One channel, and a socket for what is no gRPC."""

    name = "calls"

    def __init__(self, daemon: Daemon, outside: Path) -> None:
        self._daemon, self._outside = daemon, outside
        self._health = Health(daemon)
        self._played = 0
        self._known = [b""]  # ids of captures
        self._before = _tree(outside)

    def case(self, rng: random.Random) -> Case:
        """The method's name and the bytes of the request; "@N" in it stands for the N-th capture that there is."""
        if rng.random() < 0.05:
            return [b"", PREFACE * rng.randrange(2) + mutate.damaged(rng.choice(_PACKETS), rng)]
        (name,) = rng.choices(METHODS, WEIGHTS)
        request = getattr(pb, f"{name}Request")()
        strange = 0.5 if rng.random() < 0.7 else 0.1
        _fill(request, rng, strange)
        if name == "CreateCapture":
            _sensible(request.spec, rng)
        if name == "StartCapture" and rng.random() < 0.5:
            request = pb.StartCaptureRequest()
        data = request.SerializeToString()
        if rng.random() < 0.15:
            data = mutate.damaged(data, rng)
        if rng.random() < 0.02:
            name = mutate.text(rng)[:200]
        return [name.encode("utf-8", "replace"), data]

    def play(self, case: Case) -> str:
        """An answer or a refusal, in time."""
        name, data = case[0].decode("utf-8", "replace"), case[1]
        outcome = self._call(name, data) if case[0] else self._raw(data)
        self._played += 1
        if self._played % LOOK_EVERY == 0:
            self._health.look()
        return outcome

    def _call(self, name: str, data: bytes) -> str:
        data = self._with_id(name, data)
        try:
            path = f"/kineto.v1.Profiler/{name}" if name.isascii() and name.isprintable() else "/x"
            method: Any = self._daemon.channel().unary_stream(path)
            answers = method(data, timeout=LONG_S if name in LONG else scaled(TIMEOUT_S))
            for number, answer in enumerate(answers):
                if SECRET in answer:
                    raise Failure(f"{name} told the secret")
                if name == "CreateCapture":
                    self._known = [*self._known[-50:], pb.Capture.FromString(answer).id.encode()]
                if number >= 20 or (name in LONG and number):
                    answers.cancel()
                    break
        except grpc.RpcError as exc:
            code = exc.code().name
            if code == "CANCELLED" or code in REFUSALS:
                return f"{name} {code}" if name in METHODS else f"no method {code}"
            if (code == "DEADLINE_EXCEEDED" and name in LONG) or (code == "INTERNAL" and not _is_message(name, data)):
                return f"{name} {code}"
            self._health.look()  # says more, if it is an error of the daemon
            raise Failure(f"{name}: {code} {exc.details()}") from exc
        return f"{name} OK"

    def _with_id(self, name: str, data: bytes) -> bytes:
        """Half of the requests that are right name a capture that there is."""
        if name not in METHODS or not _is_message(name, data) or len(data) % 2:
            return data
        request = getattr(pb, f"{name}Request").FromString(data)
        for field in ("id", "capture_id"):
            if field in request.DESCRIPTOR.fields_by_name:
                setattr(request, field, self._known[len(data) // 2 % len(self._known)].decode())
        sent: bytes = request.SerializeToString()
        return sent

    def _raw(self, data: bytes) -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(LONG_S)
            link.connect(str(self._daemon.rpc_socket))
            try:
                link.sendall(data)
                link.shutdown(socket.SHUT_WR)
                while link.recv(65536):
                    continue
            except (BrokenPipeError, ConnectionResetError):
                return "no gRPC: reset"
            except TimeoutError:
                return "no gRPC: kept open"
        return "no gRPC: closed"

    def processes(self) -> dict[str, int]:
        """The process under test: the daemon."""
        return {"daemon": self._daemon.pid}

    def settle(self) -> None:
        """Nothing outside of the store is other than before."""
        self._health.look()
        if (after := _tree(self._outside)) != self._before:
            raise Failure(f"outside of the store: {self._before} became {after}")


def _is_message(name: str, data: bytes) -> bool:
    try:
        getattr(pb, f"{name}Request").FromString(data)
    except Exception:
        return False
    return True


def _fill(message: Message, rng: random.Random, share: float) -> None:
    """Sets fields, each with this probability, to strange values."""
    for field in cast(list[FieldDescriptor], message.DESCRIPTOR.fields):
        if rng.random() < share:
            _set(message, field, rng, share)


def _set(message: Message, field: FieldDescriptor, rng: random.Random, share: float) -> None:
    holder: Any = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        for _ in range(rng.choice((0, 1, 3, 40))):
            holder[_text(rng)] = _text(rng)
    elif field.message_type is not None and field.is_repeated:
        for _ in range(rng.choice((0, 1, 3, 40))):
            _fill(holder.add(), rng, share)
    elif field.message_type is not None:
        _fill(holder, rng, share)
    elif field.is_repeated:
        holder.extend(_scalar(field, rng) for _ in range(rng.choice((0, 1, 1, 2, 30, 5000))))
    else:
        setattr(message, field.name, _scalar(field, rng))


def _scalar(field: FieldDescriptor, rng: random.Random) -> Any:
    if field.cpp_type in _INT_KINDS:
        low, high = _INT_KINDS[field.cpp_type]
        usual = rng.choice((os.getpid(), 1, 10**6, 0))
        return min(max(mutate.number(rng), low), high) if rng.random() < 0.7 else usual
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return _text(rng)
    return rng.random() < 0.5


def _text(rng: random.Random) -> str:
    return mutate.text(rng).encode("utf-8", "ignore").decode()


def _sensible(spec: pb.CaptureSpec, rng: random.Random) -> None:
    """Mostly a capture of this process that ends at once: nobody else's may be attached to."""
    spec.no_attach = True
    if rng.random() < 0.7:
        spec.ClearField("selector")
        spec.selector.pids.append(os.getpid())
    if rng.random() < 0.7:
        spec.duration_ns = 10**6
    for field in ("warmup_ns", "start_time_ns", "buffer_limit_bytes", "activity_types", "formats", "arm_ns"):
        if rng.random() < 0.8:
            spec.ClearField(field)
    if rng.random() < 0.2:
        spec.arm_ns = ARMED_NS


_PACKETS = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    PREFACE,
    PREFACE + bytes.fromhex("000000040000000000"),
    PREFACE + bytes.fromhex("00000004000000000000000401050000000187838684"),
    PREFACE + bytes.fromhex("000004080000000000ffffffff") * 3,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
    b"KNTO\x01\x00\x01\x00" + bytes(64),
)


def _tree(folder: Path) -> dict[str, bytes]:
    """Everything below a folder but the daemon's own files."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@contextmanager
def opened(folder: Path) -> Iterator[Calls]:
    """The door, opened with a running daemon."""
    from fuzz.doors.link import SETTINGS

    outside = folder / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(SECRET)
    config = folder / "config.toml"
    config.write_text(SETTINGS)
    with running_daemon("--config", str(config)) as daemon:
        for place in (daemon.root, daemon.state_dir, daemon.state_dir / "captures"):
            (place / "link").symlink_to(outside)
        agent = ObligingAgent(daemon)
        agent.start()
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        yield Calls(daemon, outside)
        daemon.stop()
        agent.join(20)

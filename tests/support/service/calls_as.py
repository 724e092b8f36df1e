"""Calls to a daemon as another user of this host, from a process of that user.

with CallsAs(1001, groups=[2001]) as ada:
    answer = ada.call(daemon.address, "GetCapture", pb.GetCaptureRequest(id="…"))
    assert answer.code == "NOT_FOUND"
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb

from support.waiting import scaled

TIMEOUT_S = 20
OK = "OK"


@dataclass(frozen=True)
class Answer:
    """How a call ended: a status code's name, the reason and text of a refusal, the messages of an answer."""

    code: str
    reason: str = ""
    message: str = ""
    messages: tuple[Any, ...] = ()

    @property
    def only(self) -> Any:
        """The only message of the answer."""
        assert self.code == OK, self
        (message,) = self.messages
        return message


Metadata = Sequence[tuple[str, str]]


def call(channel: grpc.Channel, name: str, request: Message, *, most: int = 1000, metadata: Metadata = ()) -> Answer:
    """Makes a call; of a stream at most so many messages."""
    stub: Any = ProfilerStub(channel)
    try:
        found = getattr(stub, name)(request, timeout=scaled(TIMEOUT_S), metadata=tuple(metadata))
        if isinstance(found, Message):
            return Answer(OK, messages=(found,))
        messages = []
        for message in found:
            messages.append(message)
            if len(messages) == most:
                found.cancel()
                break
        return Answer(OK, messages=tuple(messages))
    except grpc.RpcError as exc:
        status = rpc_status.from_call(exc)  # type: ignore[arg-type]  # it is a Call too
        info = error_details_pb2.ErrorInfo()
        if status is not None and status.details:
            status.details[0].Unpack(info)
        return Answer(exc.code().name, info.reason, exc.details() or "")


class CallsAs:
    """A process of a user that makes calls."""

    def __init__(self, uid: int, *, groups: Sequence[int] = ()) -> None:
        kept = ["--groups", ",".join(map(str, groups))] if groups else ["--clear-groups"]
        capability = "-all,+dac_read_search"  # Python may lie in a folder of root
        rights = ("--inh-caps", capability, "--ambient-caps", capability)
        self._process = subprocess.Popen(
            ["setpriv", "--reuid", str(uid), "--regid", str(uid), *kept, *rights, sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": ":".join(filter(None, sys.path)), "GRPC_VERBOSITY": "NONE"},
        )

    @property
    def pid(self) -> int:
        """Pid of the process that makes the calls."""
        return self._process.pid

    def call(self, address: str, name: str, request: Message, *, most: int = 1000, metadata: Metadata = ()) -> Answer:
        """Does what the function `call` does, in that process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        text = json_format.MessageToDict(request)
        kind = type(request).__name__
        asked = {"address": address, "name": name, "kind": kind, "request": text, "most": most}
        asked["metadata"] = list(map(list, metadata))
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        messages = [json_format.ParseDict(message, getattr(pb, kind)()) for kind, message in answer.pop("messages")]
        return Answer(**answer, messages=tuple(messages))

    def __enter__(self) -> "CallsAs":
        return self

    def __exit__(self, *_exc: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(scaled(TIMEOUT_S))
        self._process.stdout.close()


def plain_python(uid: int) -> list[str]:
    """A command that runs Python as another user without any capability, so that this user may trace it."""
    python = shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin") or sys.executable
    return ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", str(Path(python).resolve())]


def _serve() -> None:
    channels: dict[str, grpc.Channel] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        address = asked["address"]
        if address not in channels:
            channels[address] = grpc.insecure_channel(address)
        request = json_format.ParseDict(asked["request"], getattr(pb, asked["kind"])())
        metadata = [(key, value) for key, value in asked["metadata"]]
        answer = call(channels[address], asked["name"], request, most=asked["most"], metadata=metadata)
        messages = [(type(each).__name__, json_format.MessageToDict(each)) for each in answer.messages]
        told = {"code": answer.code, "reason": answer.reason, "message": answer.message, "messages": messages}
        print(json.dumps(told), flush=True)
    for channel in channels.values():
        channel.close()


if __name__ == "__main__":
    _serve()

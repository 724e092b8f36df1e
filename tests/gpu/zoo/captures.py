"""Captures of the zoo's programs through a real kinetod, by the calls that kinetoctl makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from kineto_protos.v1 import profiler_pb2 as pb
from support.service.daemon import Daemon, watch_to_end, watch_until_it_collects

DEFAULTS = ""  # instead of a kind: what a capture records without --activities
CALL_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """What became of one capture: of its first target, and the worst verdict. Times are Unix ns, 0: not reached."""

    kind: str
    verdict: str
    reason_code: str = ""
    reason: str = ""
    warnings: tuple[str, ...] = ()
    kernels: int = 0
    records: int = 0
    requested_ns: int = 0
    begin_ns: int = 0
    end_ns: int = 0
    stored_ns: int = 0
    offered: tuple[str, ...] = field(default=())
    method: str = ""

    @property
    def first_record_s(self) -> float:
        """From the request to the first record that can be in the trace; 0: unknown."""
        return (self.begin_ns - self.requested_ns) / 1e9 if self.begin_ns else 0.0


def spec(pids: list[int], kind: str, duration_s: float, keep_agent_s: float | None) -> pb.CaptureSpec:
    """What is asked for. keep_agent_s: None: the daemon's default."""
    made = pb.CaptureSpec(selector=pb.Selector(pids=pids), duration_ns=int(duration_s * 1e9))
    if kind != DEFAULTS:
        made.activity_types.extend(kind.split(","))
    if keep_agent_s is not None:
        made.keep_agent_ns = int(keep_agent_s * 1e9)
    return made


class Tracer:
    """Takes captures; may be used by several threads."""

    def __init__(self, daemon: Daemon, duration_s: float) -> None:
        self.stub = daemon.stub()
        self.duration_s = duration_s

    def capture(
        self,
        pids: list[int],
        kind: str,
        keep_agent_s: float | None,
        collecting: Callable[[], object] | None = None,
    ) -> Capture:
        """One capture of these processes, to its end; its files are deleted. collecting: called once it records."""
        request = pb.CreateCaptureRequest(spec=spec(pids, kind, self.duration_s, keep_agent_s))
        try:
            created = self.stub.CreateCapture(request, timeout=CALL_S)
            if collecting is not None:
                watch_until_it_collects(self.stub, created.id, CALL_S)
                collecting()
            found = watch_to_end(self.stub, created.id, CALL_S)
            self.stub.DeleteCapture(pb.DeleteCaptureRequest(id=created.id), timeout=CALL_S)
        except grpc.RpcError as exc:
            return refused(kind, exc)
        return read(kind, found)


def refused(kind: str, error: grpc.RpcError) -> Capture:
    """What the daemon, or gRPC for it, has answered instead."""
    info = error_details_pb2.ErrorInfo()
    status = rpc_status.from_call(error)  # type: ignore[arg-type]  # it is a Call too
    if status is not None and status.details:
        status.details[0].Unpack(info)
    call: grpc.Call = error  # type: ignore[assignment]
    return Capture(
        kind=kind, verdict="REFUSED", reason_code=info.reason or call.code().name, reason=str(call.details())
    )


def read(kind: str, capture: pb.Capture) -> Capture:
    """The figures of a finished capture."""
    targets = sorted(capture.targets, key=lambda target: target.verdict == pb.VERDICT_DONE)
    worst = targets[0]
    activities = [target.summary.activities for target in targets]
    return Capture(
        kind=kind,
        verdict=pb.Verdict.Name(worst.verdict).removeprefix("VERDICT_"),
        reason_code=worst.reason_code,
        reason=worst.reason,
        warnings=tuple(warning for target in targets for warning in target.warnings),
        kernels=sum(counts.get("kernel", 0) for counts in activities),
        records=sum(sum(counts.values()) for counts in activities),
        requested_ns=worst.requested_ns or capture.created_ns,
        begin_ns=worst.summary.window_start_ns or worst.collecting_ns,
        end_ns=worst.summary.window_end_ns or worst.collected_ns,
        stored_ns=worst.stored_ns or capture.ended_ns,
        offered=tuple(worst.process.activity_types),
        method=worst.attach.method,
    )

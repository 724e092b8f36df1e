"""Decides who records in a process whose libkineto polls this daemon: kinetod's agent, its own libkineto, or nobody.

The request takes precedence over the setting dynolog.tracing, except that no request overrides "refuse". If neither
insists on the agent, a process that the agent cannot enter is left to its libkineto.
"""

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.attach.attach_types import Approval, AttachCode
from kinetod.base.errors import KinetodError, NotPermitted, Precondition, Reason
from kinetod.captures.kineto_target.config_text import unsupported
from kinetod.captures.kineto_target.kineto_recorder import KinetoRecorder
from kinetod.kineto_ipc.poller_registry import PollingProcess
from kinetod.processes.credentials import Credentials
from kinetod.processes.identity import ProcessKey

REFUSE, KINETO = "refuse", "kineto"  # values of dynolog.tracing
_NOT_THE_PROCESS = (AttachCode.GONE, AttachCode.REPLACED)  # reasons why libkineto cannot be asked either


class PolledTargets:
    """The rules for one request. setting: dynolog.tracing."""

    def __init__(self, recorder: KinetoRecorder | None, spec: pb.CaptureSpec, setting: str) -> None:
        self._recorder = recorder
        self._spec = spec
        self._setting = setting

    @property
    def only_kineto(self) -> bool:
        """Whether the request wants libkineto and nothing else."""
        return self._spec.recorder == pb.RECORDER_KINETO

    def process(self, key: ProcessKey) -> PollingProcess | None:
        """The process, if it polls."""
        return None if self._recorder is None else self._recorder.process(key)

    def chosen(self, key: ProcessKey, name: str) -> tuple[PollingProcess | None, KinetodError | None]:
        """The process if its libkineto should record, and the error if nobody may, or if libkineto was requested and
        cannot.

        name: of the process, for people.
        """
        polling = self.process(key)
        if polling is None:
            return None, self._not_polling(key, name) if self.only_kineto else None
        if self._setting == REFUSE:
            return None, NotPermitted(
                Reason.TRACING_REFUSED,
                f'{name} polls as it would poll Dynolog, and this daemon\'s dynolog.tracing = "refuse" forbids to '
                "trace such processes; ask whoever configures the daemon",
                pid=key.pid,
            )
        if self.only_kineto or (self._spec.recorder == pb.RECORDER_UNSPECIFIED and self._setting == KINETO):
            return polling, None
        return None, None

    def instead(self, key: ProcessKey, code: AttachCode | None = None) -> PollingProcess | None:
        """The process if its libkineto may record because no agent could be attached for this reason, or none is."""
        if self._spec.recorder == pb.RECORDER_AGENT or code in _NOT_THE_PROCESS:
            return None
        return self.process(key)

    def any_polls(self) -> bool:
        """Whether any process polls."""
        return self._recorder is not None and bool(self._recorder.pids())

    def recording(self, key: ProcessKey, name: str) -> Precondition | None:
        """The error for a process whose libkineto records for a capture."""
        capture_id = "" if self._recorder is None else self._recorder.capture_in(key)
        if not capture_id:
            return None
        text = f"capture {capture_id} is running in {name}; wait for its end or cancel it"
        return Precondition(Reason.BUSY, text, pid=key.pid, capture_id=capture_id)

    def busy(self, key: ProcessKey, name: str) -> Precondition | None:
        """The error for a process whose libkineto records, for a capture or another tool."""
        if (ours := self.recording(key, name)) is not None:
            return ours
        polling = self.process(key)
        if polling is not None and self._recorder is not None and self._recorder.is_tracing(polling):
            text = (
                f"the profiler of {name} is armed or records already, for the program itself or for a capture that was "
                "cancelled; trace again once it has ended"
            )
            return Precondition(Reason.BUSY, text, pid=key.pid)
        return None

    def no_longer(self, polling: PollingProcess, name: str) -> Precondition | None:
        """The error for a process that no longer polls."""
        if self.process(polling.key) is polling:
            return None
        text = f"{name} has just ended, executed another program or stopped asking for requests; try again"
        return Precondition(Reason.NOT_POLLING, text, pid=polling.key.pid)

    async def problem(self, key: ProcessKey, approval: Approval) -> KinetodError | None:
        """Why libkineto cannot carry this request out in this process, if so."""
        if text := unsupported(self._spec):
            return Precondition(Reason.LIBKINETO_UNAVAILABLE, f"process {key.pid}: {text}", pid=key.pid)
        assert self._recorder is not None  # it has been selected
        if text := await self._recorder.folders.problem(key, approval):
            return Precondition(Reason.LIBKINETO_UNAVAILABLE, text, pid=key.pid)
        return None

    def _not_polling(self, key: ProcessKey, name: str) -> Precondition:
        if self._recorder is None:
            how = "this daemon does not answer polls; set dynolog.ipc = true in its configuration"
        else:
            how = (
                "its libkineto does not ask this daemon for requests; start it with KINETO_USE_DAEMON=1 in its "
                "environment and wait until it has imported torch"
            )
        return Precondition(
            Reason.NOT_POLLING,
            f"{name} cannot be recorded by its own libkineto: {how}, or leave the recorder to kinetod (--recorder "
            "agent)",
            pid=key.pid,
        )


def polled_uid(polling: PollingProcess, approved: Credentials) -> str:
    """How the polling process differs from the approved one; empty if it does not."""
    return "" if polling.uid == approved.uid else f"its libkineto polled as uid {polling.uid}"


def nobody_polls() -> PolledTargets:
    """The rules of a daemon that answers no polls."""
    return PolledTargets(None, pb.CaptureSpec(), "agent")

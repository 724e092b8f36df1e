"""The interface of a capture to its targets, whoever records in them: an agent, or the process's own libkineto."""

from pathlib import Path
from typing import Protocol

from kineto_agent.protocol import wire
from kineto_protos.alignment import Aligned
from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.agents.agent_hub import ConnectedAgent
from kinetod.captures.result.verdict import Ending
from kinetod.captures.target.collection import STOP_GRACE_S


class TracedTarget(Protocol):
    """Runs one target of one capture; implemented by `target.target_run` and `kineto_target.kineto_run`.

    target: its public state. garbage: path to remove once the verdict is stored. clock: this host's, as measured by the
    caller. request: when and for how long to record; it may be changed until `begin`.
    """

    target: pb.Target
    garbage: Path | None
    clock: pb.ClockOffset | None

    @property
    def agent(self) -> ConnectedAgent | None:
        """The recording agent; None: libkineto, whose iterations are unknown."""

    @property
    def request(self) -> wire.Start:
        """The request for the recorder."""

    @request.setter
    def request(self, request: wire.Start) -> None: ...

    @property
    def is_over(self) -> bool:
        """Whether the target is ending or has ended."""

    def attach(self) -> None:
        """Marks the process as busy with this capture."""

    async def wait_until_begun(self) -> None:
        """Waits, before `run`, until `begin` is called or the target is over."""

    def begin(self) -> None:
        """Allows the recorder to be asked."""

    def align(self, aligned: Aligned) -> None:
        """Sets, before `begin`, the common iterations of this capture's targets."""

    def stop(self, ending: Ending, *, grace_s: float = STOP_GRACE_S) -> None:
        """Ends the recording, as far as the recorder can be stopped."""

    async def run(self) -> None:
        """Runs, after `attach`, until the target has its verdict. Raises only CancelledError."""

"""What a capture needs of each of its targets, whoever records there: an agent, or the process's own libkineto."""

from pathlib import Path
from typing import Protocol

from kineto_agent.protocol import wire
from kineto_protos.alignment import Aligned
from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.agents.agent_hub import ConnectedAgent
from kinetod.captures.result.verdict import Ending
from kinetod.captures.target.collection import STOP_GRACE_S


class TracedTarget(Protocol):
    """Runs one target of one capture: `target.target_run` and `kineto_target.kineto_run` have it.

    target: its public state. garbage: what to remove once the verdict is stored. clock: this host's, as the caller has
    measured it. request: when and for how long to record; it may be changed until `begin`.
    """

    target: pb.Target
    garbage: Path | None
    clock: pb.ClockOffset | None

    @property
    def agent(self) -> ConnectedAgent | None:
        """The agent that records; None: libkineto, whose iterations nobody can ask for."""

    @property
    def request(self) -> wire.Start:
        """What is asked for."""

    @request.setter
    def request(self, request: wire.Start) -> None: ...

    @property
    def is_over(self) -> bool:
        """Whether the target is ending or has ended."""

    def attach(self) -> None:
        """Makes the process busy with this capture."""

    async def armed(self) -> None:
        """Waits, before `run`, until `begin` is called or the target is over."""

    def begin(self) -> None:
        """Allows the recorder to be asked."""

    def align(self, aligned: Aligned) -> None:
        """Sets, before `begin`, the iterations that the targets of this capture have in common."""

    def stop(self, ending: Ending, *, grace_s: float = STOP_GRACE_S) -> None:
        """Ends the recording from our side, as far as the recorder can be stopped."""

    async def run(self) -> None:
        """Runs, after `attach`, until the target has its verdict. Raises only CancelledError."""

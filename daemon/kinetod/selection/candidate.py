"""A process as selection sees it: the kernel's facts, what is told to callers, and the agent in it."""

from dataclasses import dataclass

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.agents.agent_hub import ConnectedAgent
from kinetod.permissions.role_policy import Action, Caller, Thing, may
from kinetod.processes.identity import ProcessKey
from kinetod.processes.process_info import ProcessFacts


@dataclass(frozen=True, slots=True)
class Candidate:
    """A process and its agent, if that can be talked to."""

    key: ProcessKey
    process: pb.Process
    agent: ConnectedAgent | None
    facts: ProcessFacts

    def thing(self) -> Thing:
        """What decisions about it are made from."""
        return Thing(uid=self.facts.uid, plain=self.facts.plain, job=self.facts.job, pod=self.facts.pod)

    def visible_to(self, caller: Caller) -> bool:
        """Whether the caller may know of it."""
        return may(caller, Action.SEE_PROCESS, self.thing())

    def has_agent(self) -> bool:
        """Also one that we cannot talk to."""
        return self.process.agent_state != pb.AGENT_STATE_NONE

    def polls(self) -> bool:
        """Whether its libkineto asks this daemon for configurations."""
        return self.process.HasField("kineto")

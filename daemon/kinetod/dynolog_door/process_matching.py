"""Which processes a request of Dynolog means.

Theory of operation
    Dynolog knows the processes whose libkineto has registered with it; here every process that `kinetoctl trace` would
    take counts, and besides each whose libkineto polls this daemon. Dynolog's rules then are these:

    - pids: a process is meant if its own pid or one of an ancestor's is listed. Launchers and workers that only help
      the processes which train are left out, as everywhere here.
    - job id: the process must belong to the job, by its environment, by the kernel's control groups, or by what its
      libkineto says of itself.
    - neither: every process without a job that has an agent or polls. No agent is brought into a process that nobody
      has named. In Dynolog the job id 0 means processes without a job with pids as well; here a pid is enough.
    - process_limit: so many get the configuration, by pid; those that are being traced already do not count.

    A process that polls may have a PID namespace of its own, so what it says of its pids counts too. It can only make
    itself be traced by that, by whoever may trace it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.dynolog_door.requests import TraceAsked
from kinetod.kineto_ipc.polling_process import PollingProcess, PollingProcesses
from kinetod.permissions.role_policy import Caller
from kinetod.processes.identity import ProcessKey
from kinetod.selection.process_registry import Match, Registry

NO_JOB = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedProcesses:
    """What a request means, by pid. free: those that may be traced now, as many as the request allows.

    busy: how many others are being traced; beyond: how many are left out because of the request's process_limit.
    """

    free: tuple[int, ...] = ()
    busy: int = 0
    beyond: int = 0


class ProcessMatcher:
    """Finds the processes. polling: the processes that poll, where dynolog.ipc is on."""

    def __init__(self, registry: Registry, polling: PollingProcesses | None = None) -> None:
        self._registry = registry
        self._polling = polling

    async def matched(self, asked: TraceAsked, caller: Caller) -> MatchedProcesses:
        """The processes that the request means, of those that the caller may see."""
        keys = {each.pid: ProcessKey(each.pid, each.start_time_ns) for each in await self._traceable(asked, caller)}
        found = {pid: self._is_traced(key) for pid, key in keys.items()}
        claimed = self._claimed(asked) if self._polling is not None else {}
        missing = sorted(claimed.keys() - found.keys())
        for each in await self._registry.candidates(missing) if missing else ():
            if each.key == claimed[each.key.pid].key and each.visible_to(caller):
                found[each.key.pid] = self._is_traced(each.key)
        for pid, process in claimed.items():
            if pid in found:
                found[pid] = found[pid] or process.tracing
        return limited(found.items(), asked.process_limit)

    def _is_traced(self, key: ProcessKey) -> bool:
        agent = self._registry.agent(key)
        return agent is not None and bool(agent.capture_id)

    async def _traceable(self, asked: TraceAsked, caller: Caller) -> Iterable[pb.Process]:
        match = Match(
            pids=frozenset(pid for pid in asked.pids if pid > 0),
            children=bool(asked.pids),
            job_ids=frozenset({str(asked.job_id)} if asked.job_id != NO_JOB else ()),
        )
        if asked.pids and not match.pids:
            return ()
        found = await self._registry.processes(match, caller, include_without_agent=False)
        return found if match else (each for each in found if not each.job_id)

    def _claimed(self, asked: TraceAsked) -> dict[int, PollingProcess]:
        assert self._polling is not None
        return {each.key.pid: each for each in self._polling.all() if claims(each, asked)}


def claims(process: PollingProcess, asked: TraceAsked) -> bool:
    """Whether a process that polls says of itself that it is one of those that are meant."""
    if asked.pids and asked.pids.isdisjoint((process.key.pid, *process.pids)):
        return False
    return process.job_id == asked.job_id or (asked.job_id == NO_JOB and bool(asked.pids))


def limited(found: Iterable[tuple[int, bool]], process_limit: int) -> MatchedProcesses:
    """Splits (pid, whether it is being traced) by the limit of a request."""
    processes = sorted(found)
    free = [pid for pid, busy in processes if not busy]
    kept = free if process_limit < 0 else free[:process_limit]
    return MatchedProcesses(free=tuple(kept), busy=len(processes) - len(free), beyond=len(free) - len(kept))

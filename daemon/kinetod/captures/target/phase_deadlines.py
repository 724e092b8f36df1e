"""How long an agent may take for each step of a capture. Pure; results in seconds, times in Unix ns."""

from kineto_agent.protocol import wire
from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.config.settings import Config


def may_wait(start: wire.Start) -> bool:
    """Whether the agent may wait for the program's own profiler to finish."""
    return bool(start.options.get("wait_for_user_profiler"))


def after_acceptance(start: wire.Start, config: Config, now_ns: int) -> float:
    """Time until an agent that has accepted must make progress."""
    if start.iterations is not None or may_wait(start):
        return config.max_duration_ns / 1e9
    return _until_begin(start, config, now_ns)


def in_state(state: pb.TargetState, start: wire.Start, config: Config, now_ns: int) -> float:
    """Time until the agent must leave this state."""
    if state == pb.TARGET_STATE_PROCESS:
        return config.process_deadline_ns / 1e9
    if start.iterations is not None:
        return config.max_duration_ns / 1e9
    if state == pb.TARGET_STATE_WARMUP:
        return _until_begin(start, config, now_ns) + start.warmup_ns / 1e9
    return ((start.duration_ns or 0) + config.agent_deadline_ns) / 1e9


def _until_begin(start: wire.Start, config: Config, now_ns: int) -> float:
    begin_ns = start.start_time_ns - start.warmup_ns
    return (max(0, begin_ns - now_ns) + config.agent_deadline_ns) / 1e9

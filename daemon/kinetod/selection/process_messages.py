"""The public message of a process: the kernel's facts, and what its agent and its libkineto said."""

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.agents.agent_hub import ConnectedAgent
from kinetod.kineto_ipc.polling_process import PollingProcess
from kinetod.processes.process_info import ProcessFacts


def to_proto(facts: ProcessFacts) -> pb.Process:
    """A process without an agent."""
    process = pb.Process(
        pid=facts.key.pid,
        start_time_ns=facts.key.start_time_ns,
        user=facts.user,
        uid=facts.uid,
        command=facts.command,
        gpus=facts.gpus,
        job_id=facts.job_id,
        framework=facts.framework,
        parent_pid=facts.parent_pid,
        agent_state=pb.AGENT_STATE_NONE,
        iterations=-1,
    )
    if facts.rank is not None:
        process.rank = facts.rank
    if facts.world_size is not None:
        process.world_size = facts.world_size
    if facts.container is not None:
        process.container_id = facts.container.id
        process.pod_uid = facts.container.pod_uid
    if facts.names is not None:
        process.pod_namespace, process.pod_name = facts.names.namespace, facts.names.pod
        process.container_name = facts.names.container
    process.trace_parent = facts.trace_parent
    process.resource.update(facts.resource)
    return process


def add_agent(process: pb.Process, agent: ConnectedAgent) -> None:
    """Adds what the agent said of itself."""
    hello = agent.hello
    if hello.rank is not None:
        process.rank = hello.rank
    if hello.world_size is not None:
        process.world_size = hello.world_size
    process.job_id = hello.job_id or process.job_id
    process.framework = hello.framework or process.framework
    process.python_version = hello.python_version
    process.agent_version = hello.agent_version
    process.iterations = hello.iterations
    process.iteration_ns = hello.iteration_ns
    process.busy_capture_id = agent.capture_id or hello.busy_capture_id
    process.agent_state = pb.AGENT_STATE_BUSY if process.busy_capture_id else pb.AGENT_STATE_READY
    process.activity_types.extend(agent.activity_types())
    process.attached = agent.attached is not None
    if not process.command:
        process.command.extend(hello.argv)


def add_polling(process: pb.Process, polling: PollingProcess) -> None:
    """Adds what the polls of its libkineto said."""
    process.kineto.last_poll_ns = polling.last_poll_ns
    process.kineto.tracing = polling.tracing
    process.kineto.job_id = polling.job_id

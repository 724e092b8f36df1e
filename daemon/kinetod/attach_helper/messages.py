"""Messages between the front end and the attach helper: one SOCK_SEQPACKET packet is one message.

Theory of operation
    A packet is a head (magic, version) and one JSON object, whose `type` is one of the structures below. Everything has
    a bound, and unknown fields are refused, so that no request is half understood. The caller sends a request and waits
    for its answer before it sends the next one; an `Attached` or `Connected` carries one descriptor (SCM_RIGHTS), and a
    `PollSockets` or a `TraceFileReply` may.

    A caller with another version gets a `Refused` with the code VERSION, in the service's version. Front end and helper
    come from one package, so this happens only during an upgrade.
"""

from typing import Annotated, Any

import msgspec

from kinetod.kineto_files.interface import MAX_FOLDER_CHARS
from kinetod.kineto_files.own_folder import FILE_PATTERN, NAME_PATTERN
from kinetod.kineto_ipc.network_namespaces import MAX_NAMESPACES
from kinetod.processes.process_info import (
    MAX_ATTRIBUTES,
    MAX_NAME_CHARS,
    MAX_TRACE_PARENT_CHARS,
    MAX_VALUE_CHARS,
    Framework,
)
from kinetod.supervise.helper_connection import PacketFormat

VERSION = 7
MAX_REQUEST_BYTES = 16 << 10
MAX_ANSWER_BYTES = 64 << 10
MAX_PROCESSES = 20  # in one query for facts: the answer fits into a packet
MAX_TOOLS = 64  # likewise
MAX_GPUS = 64
MAX_SERVED = 2 * MAX_NAMESPACES  # those with a socket, and those without one that were tried recently
MAX_PLUGINS = 16
MAX_SIGNS_BYTES = 8 << 10  # for all plug-ins together: the query fits into a packet
MAX_DEADLINE_MS = 60_000
_MAX_PID = 1 << 22  # the kernel's own bound
Pid = Annotated[int, msgspec.Meta(gt=0, le=_MAX_PID)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Short = Annotated[str, msgspec.Meta(max_length=128)]
Small = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Digest = Annotated[str, msgspec.Meta(max_length=64)]
Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
AttributeName = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
AttributeValue = Annotated[str, msgspec.Meta(max_length=MAX_VALUE_CHARS)]
Large = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
PluginName = Annotated[str, msgspec.Meta(max_length=16)]
FolderName = Annotated[str, msgspec.Meta(pattern=NAME_PATTERN)]
FileName = Annotated[str, msgspec.Meta(pattern=FILE_PATTERN)]
Patterns = Annotated[tuple[Annotated[str, msgspec.Meta(max_length=200)], ...], msgspec.Meta(max_length=16)]


class BadMessage(Exception):
    """The packet is not one of the expected messages. The message text says why."""


class WrongVersion(BadMessage):
    """The packet has another protocol version."""

    def __init__(self, theirs: int) -> None:
        both = f"it speaks version {theirs} of the attach helper's protocol, but this side speaks version {VERSION}"
        super().__init__(both)
        self.theirs = theirs


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    pass


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A process: Unix nanoseconds of its start, relative to `boot_time_ns` of the request."""

    pid: Pid
    start_time_ns: Nanoseconds


class AgentFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The daemon's knowledge of the process's agent (diagnosis.KnownAgent)."""

    state: Short = ""
    version: Short = ""
    attached: bool = False
    capture_id: Short = ""
    attaching: bool = True


class Approved(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The credentials that the front end has approved (credentials.Credentials), as far as it can see them."""

    uids: tuple[Id, Id, Id, Id]
    gids: tuple[Id, Id, Id, Id]
    capabilities: Large
    dumpable: bool | None
    user_namespace: Large | None
    executable: tuple[Large, Large] | None
    program: Digest


class Attach(_Message, frozen=True, tag="attach"):
    """Injects the agent. Answered by AttachReply or RefusedReply. administrator: whether the front end asks for one."""

    target: Target
    approved: Approved
    administrator: bool
    boot_time_ns: Nanoseconds
    deadline_ms: Annotated[int, msgspec.Meta(gt=0, le=MAX_DEADLINE_MS)]


class Diagnose(_Message, frozen=True, tag="diagnose"):
    """Inspects a process, touching nothing. Answered by Diagnosed or RefusedReply."""

    target: Target
    boot_time_ns: Nanoseconds
    agent: AgentFacts


class ReadStacks(_Message, frozen=True, tag="read_stacks"):
    """Asks where the threads of a process stand. Answered by StacksReply or RefusedReply."""

    target: Target
    boot_time_ns: Nanoseconds


class SignsItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """accelerator_signs.OutsideSigns: patterns of names and paths, and names of variables, never their values."""

    plugin: PluginName
    libraries: Patterns
    variables: Patterns
    open_files: Patterns


class Look(_Message, frozen=True, tag="look"):
    """Asks for facts that only a process's owner may read. Answered by Seen, which omits processes that may not be
    inspected.

    signs: of the front end's plug-ins, to be looked for in Python processes.
    """

    targets: Annotated[tuple[Target, ...], msgspec.Meta(min_length=1, max_length=MAX_PROCESSES)]
    boot_time_ns: Nanoseconds
    signs: Annotated[tuple[SignsItem, ...], msgspec.Meta(max_length=MAX_PLUGINS)] = ()


class Search(_Message, frozen=True, tag="search"):
    """Asks for other profilers in processes. Answered by Found, which omits processes that may not be inspected."""

    targets: Annotated[tuple[Target, ...], msgspec.Meta(min_length=1, max_length=MAX_PROCESSES)]
    boot_time_ns: Nanoseconds


class Toolkit(_Message, frozen=True, tag="toolkit"):
    """Asks which libcupti a process without Python should load, and for its job variables. Answered by Tools or
    RefusedReply.
    """

    target: Target
    boot_time_ns: Nanoseconds


class DeviceCode(_Message, frozen=True, tag="device_code"):
    """Asks whether a process's device code launches CUDA graphs. Answered by LaunchesReply or RefusedReply."""

    target: Target
    boot_time_ns: Nanoseconds


class Kubelet(_Message, frozen=True, tag="kubelet"):
    """Asks for a connection to the kubelet's pod-resources socket, which is root's. Answered by Connected or
    RefusedReply.
    """


class OpenPollSocket(_Message, frozen=True, tag="open_poll_socket"):
    """Asks for a poll socket in one more network namespace. served: inodes of namespaces that have one.

    Answered by PollSockets or RefusedReply.
    """

    served: Annotated[tuple[Id, ...], msgspec.Meta(max_length=MAX_SERVED)]


class MakeFolder(_Message, frozen=True, tag="make_folder"):
    """Makes the helper's own folder, for one trace, inside the one where a process's libkineto may write.

    file: the name libkineto will use. until_s: Unix time at which the helper removes leftovers. only_try: remove the
    folder at once. Answered by FolderMade or RefusedReply.
    """

    target: Target
    approved: Approved
    administrator: bool
    boot_time_ns: Nanoseconds
    file: FileName
    until_s: Id
    only_try: bool


class _OfFolder(_Message, frozen=True):
    target: Target
    boot_time_ns: Nanoseconds
    name: FolderName
    file: FileName


class LookIntoFolder(_OfFolder, frozen=True, tag="look_into_folder"):
    """Asks whether the file exists. Answered by FolderSeen or RefusedReply."""


class OpenTraceFile(_OfFolder, frozen=True, tag="open_trace_file"):
    """Asks for the complete file, for reading. Answered by TraceFileReply or RefusedReply."""


class RemoveFolder(_OfFolder, frozen=True, tag="remove_folder"):
    """Removes the file, complete or not, and the folder. Answered by FolderRemoved or RefusedReply."""


FolderUse = LookIntoFolder | OpenTraceFile | RemoveFolder


Request = (
    Attach
    | Diagnose
    | ReadStacks
    | Look
    | Search
    | Toolkit
    | DeviceCode
    | Kubelet
    | OpenPollSocket
    | MakeFolder
    | FolderUse
)


class AttachReply(_Message, frozen=True, tag="attached"):
    """The agent runs; the channel's descriptor comes with it."""

    method: Short
    stopped_ns: Nanoseconds
    latency_ns: Nanoseconds


class Connected(_Message, frozen=True, tag="connected"):
    """The connection's descriptor comes with it; the helper reads and writes nothing on it."""


class PollSockets(_Message, frozen=True, tag="poll_sockets"):
    """inhabited: the network namespaces that should have a socket. namespace: where a socket was created, whose
    descriptor comes with it, or could not be (`problem` says why); 0: all are served.
    """

    inhabited: Annotated[tuple[Id, ...], msgspec.Meta(max_length=MAX_NAMESPACES)]
    namespace: Id
    problem: Annotated[str, msgspec.Meta(max_length=1000)]


class Diagnosed(_Message, frozen=True, tag="diagnosed"):
    """The diagnosis as encoded by diagnosis.encode."""

    diagnosis: dict[str, Any]


class StacksReply(_Message, frozen=True, tag="stacks"):
    """The stacks as encoded by thread_stacks.encode are in memory whose descriptor comes with it."""


class PrivateFactsItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """process_info.PrivateFacts, with the pid of the process."""

    pid: Pid
    gpus: Annotated[tuple[Small, ...], msgspec.Meta(max_length=MAX_GPUS)]
    rank: Small | None
    world_size: Small | None
    job_id: Short
    job_step: Annotated[str, msgspec.Meta(max_length=32)]
    is_python: bool
    framework: Framework
    plugins: Annotated[tuple[PluginName, ...], msgspec.Meta(max_length=MAX_PLUGINS)]
    own_user_namespace: bool
    uid: Id | None
    program: Digest
    trace_parent: Annotated[str, msgspec.Meta(max_length=MAX_TRACE_PARENT_CHARS)]
    resource: Annotated[dict[AttributeName, AttributeValue], msgspec.Meta(max_length=MAX_ATTRIBUTES)]


class Seen(_Message, frozen=True, tag="seen"):
    """The facts of the processes that the question named and that still exist."""

    facts: Annotated[tuple[PrivateFactsItem, ...], msgspec.Meta(max_length=MAX_PROCESSES)]


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A profiler in a process: at most the fields of profiler_scan.ProfilingTool, and no file name."""

    pid: Pid
    product: Short
    gpus: Annotated[tuple[Small, ...], msgspec.Meta(max_length=MAX_GPUS)]


class Found(_Message, frozen=True, tag="found"):
    """searched: the requested processes that were inspected."""

    searched: Annotated[tuple[Pid, ...], msgspec.Meta(max_length=MAX_PROCESSES)]
    tools: Annotated[tuple[Tool, ...], msgspec.Meta(max_length=MAX_TOOLS)]


class Tools(_Message, frozen=True, tag="tools"):
    """cupti: a path as the process sees it; empty: none. environ: its variables that self_description reads."""

    cupti: Annotated[str, msgspec.Meta(max_length=4096)]
    environ: Annotated[dict[Short, Annotated[str, msgspec.Meta(max_length=256)]], msgspec.Meta(max_length=32)]


class LaunchesReply(_Message, frozen=True, tag="launches"):
    """file: one with such code, as the process sees it; empty: none found."""

    file: Annotated[str, msgspec.Meta(max_length=4096)]


class FolderMade(_Message, frozen=True, tag="folder_made"):
    """path: of the helper's folder, as the process sees it."""

    path: Annotated[str, msgspec.Meta(max_length=MAX_FOLDER_CHARS + 64)]


class FolderSeen(_Message, frozen=True, tag="folder_seen"):
    """interface.Sight."""

    writing_bytes: Large | None
    whole: bool


class TraceFileReply(_Message, frozen=True, tag="trace_file"):
    """The file's descriptor comes with it, unless `refused` says why the file is not from that process's libkineto."""

    refused: Annotated[str, msgspec.Meta(max_length=1000)]


class FolderRemoved(_Message, frozen=True, tag="folder_removed"):
    """Both are gone."""


class RefusedReply(_Message, frozen=True, tag="refused"):
    """code: an AttachCode; CALLER, REQUEST or VERSION if the caller or the request itself was refused."""

    code: Short
    reason: Annotated[str, msgspec.Meta(max_length=4000)]


FolderAnswer = FolderMade | FolderSeen | TraceFileReply | FolderRemoved


Facts = Diagnosed | StacksReply | Seen | Found | Tools | LaunchesReply


Answer = AttachReply | Connected | PollSockets | Facts | FolderAnswer | RefusedReply


_requests: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)


_answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)


_PACKETS = PacketFormat(
    b"KATT", VERSION, BadMessage, "a packet that is not a message of the attach helper's protocol", WrongVersion
)


def encode(message: Request | Answer) -> bytes:
    """Encodes a message as one packet."""
    return _PACKETS.encode(message)


def request(packet: bytes) -> Request:
    """Decodes a caller's request. Raises BadMessage."""
    return _PACKETS.decode(packet, _requests, MAX_REQUEST_BYTES)


def answer(packet: bytes) -> Answer:
    """Decodes the service's answer. Raises BadMessage."""
    return _PACKETS.decode(packet, _answers, MAX_ANSWER_BYTES)


class Denial(Exception):
    """A request is refused. The message is the answer to the caller."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code

from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AgentState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AGENT_STATE_UNSPECIFIED: _ClassVar[AgentState]
    AGENT_STATE_NONE: _ClassVar[AgentState]
    AGENT_STATE_READY: _ClassVar[AgentState]
    AGENT_STATE_BUSY: _ClassVar[AgentState]
    AGENT_STATE_INCOMPATIBLE: _ClassVar[AgentState]

class Recorder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RECORDER_UNSPECIFIED: _ClassVar[Recorder]
    RECORDER_AGENT: _ClassVar[Recorder]
    RECORDER_KINETO: _ClassVar[Recorder]

class TargetState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TARGET_STATE_UNSPECIFIED: _ClassVar[TargetState]
    TARGET_STATE_PENDING: _ClassVar[TargetState]
    TARGET_STATE_WARMUP: _ClassVar[TargetState]
    TARGET_STATE_COLLECT: _ClassVar[TargetState]
    TARGET_STATE_PROCESS: _ClassVar[TargetState]
    TARGET_STATE_STORE: _ClassVar[TargetState]
    TARGET_STATE_ENDED: _ClassVar[TargetState]

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNSPECIFIED: _ClassVar[Verdict]
    VERDICT_DONE: _ClassVar[Verdict]
    VERDICT_PARTIAL: _ClassVar[Verdict]
    VERDICT_FAILED: _ClassVar[Verdict]
    VERDICT_CANCELLED: _ClassVar[Verdict]

class CaptureStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CAPTURE_STATUS_UNSPECIFIED: _ClassVar[CaptureStatus]
    CAPTURE_STATUS_RUNNING: _ClassVar[CaptureStatus]
    CAPTURE_STATUS_DONE: _ClassVar[CaptureStatus]
    CAPTURE_STATUS_PARTIAL: _ClassVar[CaptureStatus]
    CAPTURE_STATUS_FAILED: _ClassVar[CaptureStatus]
    CAPTURE_STATUS_CANCELLED: _ClassVar[CaptureStatus]

class UploadState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UPLOAD_STATE_UNSPECIFIED: _ClassVar[UploadState]
    UPLOAD_STATE_WAITING: _ClassVar[UploadState]
    UPLOAD_STATE_RUNNING: _ClassVar[UploadState]
    UPLOAD_STATE_RETRYING: _ClassVar[UploadState]
    UPLOAD_STATE_UPLOADED: _ClassVar[UploadState]

class PluginState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLUGIN_STATE_UNSPECIFIED: _ClassVar[PluginState]
    PLUGIN_STATE_ON: _ClassVar[PluginState]
    PLUGIN_STATE_OFF: _ClassVar[PluginState]
    PLUGIN_STATE_REFUSED: _ClassVar[PluginState]

class CheckStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHECK_STATUS_UNSPECIFIED: _ClassVar[CheckStatus]
    CHECK_STATUS_OK: _ClassVar[CheckStatus]
    CHECK_STATUS_NOTE: _ClassVar[CheckStatus]
    CHECK_STATUS_PROBLEM: _ClassVar[CheckStatus]
    CHECK_STATUS_UNKNOWN: _ClassVar[CheckStatus]

class Wait(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAIT_UNSPECIFIED: _ClassVar[Wait]
    WAIT_NONE: _ClassVar[Wait]
    WAIT_STOPPED: _ClassVar[Wait]
    WAIT_COLLECTIVE: _ClassVar[Wait]
    WAIT_GPU: _ClassVar[Wait]
    WAIT_WORKER: _ClassVar[Wait]
    WAIT_GIL: _ClassVar[Wait]
    WAIT_LOCK: _ClassVar[Wait]
    WAIT_QUEUE: _ClassVar[Wait]
    WAIT_THREAD: _ClassVar[Wait]
    WAIT_IMPORT: _ClassVar[Wait]
    WAIT_PROCESS: _ClassVar[Wait]
    WAIT_FILE: _ClassVar[Wait]
    WAIT_NETWORK: _ClassVar[Wait]
    WAIT_SLEEP: _ClassVar[Wait]
    WAIT_EVENTS: _ClassVar[Wait]
    WAIT_KERNEL: _ClassVar[Wait]

class ThreadState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    THREAD_STATE_UNSPECIFIED: _ClassVar[ThreadState]
    THREAD_STATE_RUNNING: _ClassVar[ThreadState]
    THREAD_STATE_SLEEPING: _ClassVar[ThreadState]
    THREAD_STATE_UNINTERRUPTIBLE: _ClassVar[ThreadState]
    THREAD_STATE_STOPPED: _ClassVar[ThreadState]
    THREAD_STATE_TRACED: _ClassVar[ThreadState]
    THREAD_STATE_ENDED: _ClassVar[ThreadState]
AGENT_STATE_UNSPECIFIED: AgentState
AGENT_STATE_NONE: AgentState
AGENT_STATE_READY: AgentState
AGENT_STATE_BUSY: AgentState
AGENT_STATE_INCOMPATIBLE: AgentState
RECORDER_UNSPECIFIED: Recorder
RECORDER_AGENT: Recorder
RECORDER_KINETO: Recorder
TARGET_STATE_UNSPECIFIED: TargetState
TARGET_STATE_PENDING: TargetState
TARGET_STATE_WARMUP: TargetState
TARGET_STATE_COLLECT: TargetState
TARGET_STATE_PROCESS: TargetState
TARGET_STATE_STORE: TargetState
TARGET_STATE_ENDED: TargetState
VERDICT_UNSPECIFIED: Verdict
VERDICT_DONE: Verdict
VERDICT_PARTIAL: Verdict
VERDICT_FAILED: Verdict
VERDICT_CANCELLED: Verdict
CAPTURE_STATUS_UNSPECIFIED: CaptureStatus
CAPTURE_STATUS_RUNNING: CaptureStatus
CAPTURE_STATUS_DONE: CaptureStatus
CAPTURE_STATUS_PARTIAL: CaptureStatus
CAPTURE_STATUS_FAILED: CaptureStatus
CAPTURE_STATUS_CANCELLED: CaptureStatus
UPLOAD_STATE_UNSPECIFIED: UploadState
UPLOAD_STATE_WAITING: UploadState
UPLOAD_STATE_RUNNING: UploadState
UPLOAD_STATE_RETRYING: UploadState
UPLOAD_STATE_UPLOADED: UploadState
PLUGIN_STATE_UNSPECIFIED: PluginState
PLUGIN_STATE_ON: PluginState
PLUGIN_STATE_OFF: PluginState
PLUGIN_STATE_REFUSED: PluginState
CHECK_STATUS_UNSPECIFIED: CheckStatus
CHECK_STATUS_OK: CheckStatus
CHECK_STATUS_NOTE: CheckStatus
CHECK_STATUS_PROBLEM: CheckStatus
CHECK_STATUS_UNKNOWN: CheckStatus
WAIT_UNSPECIFIED: Wait
WAIT_NONE: Wait
WAIT_STOPPED: Wait
WAIT_COLLECTIVE: Wait
WAIT_GPU: Wait
WAIT_WORKER: Wait
WAIT_GIL: Wait
WAIT_LOCK: Wait
WAIT_QUEUE: Wait
WAIT_THREAD: Wait
WAIT_IMPORT: Wait
WAIT_PROCESS: Wait
WAIT_FILE: Wait
WAIT_NETWORK: Wait
WAIT_SLEEP: Wait
WAIT_EVENTS: Wait
WAIT_KERNEL: Wait
THREAD_STATE_UNSPECIFIED: ThreadState
THREAD_STATE_RUNNING: ThreadState
THREAD_STATE_SLEEPING: ThreadState
THREAD_STATE_UNINTERRUPTIBLE: ThreadState
THREAD_STATE_STOPPED: ThreadState
THREAD_STATE_TRACED: ThreadState
THREAD_STATE_ENDED: ThreadState

class Process(_message.Message):
    __slots__ = ("pid", "start_time_ns", "user", "uid", "command", "gpus", "rank", "world_size", "job_id", "framework", "python_version", "agent_state", "agent_version", "busy_capture_id", "activity_types", "iterations", "attached", "container_id", "pod_uid", "pod_namespace", "pod_name", "container_name", "parent_pid", "obstacle", "iteration_ns", "kineto", "trace_parent", "resource", "standing", "stalled_ns")
    class ResourceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PID_FIELD_NUMBER: _ClassVar[int]
    START_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    FRAMEWORK_FIELD_NUMBER: _ClassVar[int]
    PYTHON_VERSION_FIELD_NUMBER: _ClassVar[int]
    AGENT_STATE_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    BUSY_CAPTURE_ID_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_TYPES_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_ID_FIELD_NUMBER: _ClassVar[int]
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    POD_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POD_NAME_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_NAME_FIELD_NUMBER: _ClassVar[int]
    PARENT_PID_FIELD_NUMBER: _ClassVar[int]
    OBSTACLE_FIELD_NUMBER: _ClassVar[int]
    ITERATION_NS_FIELD_NUMBER: _ClassVar[int]
    KINETO_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    STALLED_NS_FIELD_NUMBER: _ClassVar[int]
    pid: int
    start_time_ns: int
    user: str
    uid: int
    command: _containers.RepeatedScalarFieldContainer[str]
    gpus: _containers.RepeatedScalarFieldContainer[int]
    rank: int
    world_size: int
    job_id: str
    framework: str
    python_version: str
    agent_state: AgentState
    agent_version: str
    busy_capture_id: str
    activity_types: _containers.RepeatedScalarFieldContainer[str]
    iterations: int
    attached: bool
    container_id: str
    pod_uid: str
    pod_namespace: str
    pod_name: str
    container_name: str
    parent_pid: int
    obstacle: str
    iteration_ns: int
    kineto: KinetoPolling
    trace_parent: str
    resource: _containers.ScalarMap[str, str]
    standing: StandingCall
    stalled_ns: int
    def __init__(self, pid: _Optional[int] = ..., start_time_ns: _Optional[int] = ..., user: _Optional[str] = ..., uid: _Optional[int] = ..., command: _Optional[_Iterable[str]] = ..., gpus: _Optional[_Iterable[int]] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., job_id: _Optional[str] = ..., framework: _Optional[str] = ..., python_version: _Optional[str] = ..., agent_state: _Optional[_Union[AgentState, str]] = ..., agent_version: _Optional[str] = ..., busy_capture_id: _Optional[str] = ..., activity_types: _Optional[_Iterable[str]] = ..., iterations: _Optional[int] = ..., attached: bool = ..., container_id: _Optional[str] = ..., pod_uid: _Optional[str] = ..., pod_namespace: _Optional[str] = ..., pod_name: _Optional[str] = ..., container_name: _Optional[str] = ..., parent_pid: _Optional[int] = ..., obstacle: _Optional[str] = ..., iteration_ns: _Optional[int] = ..., kineto: _Optional[_Union[KinetoPolling, _Mapping]] = ..., trace_parent: _Optional[str] = ..., resource: _Optional[_Mapping[str, str]] = ..., standing: _Optional[_Union[StandingCall, _Mapping]] = ..., stalled_ns: _Optional[int] = ...) -> None: ...

class StandingCall(_message.Message):
    __slots__ = ("call", "since_ns", "capture_id")
    CALL_FIELD_NUMBER: _ClassVar[int]
    SINCE_NS_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_ID_FIELD_NUMBER: _ClassVar[int]
    call: str
    since_ns: int
    capture_id: str
    def __init__(self, call: _Optional[str] = ..., since_ns: _Optional[int] = ..., capture_id: _Optional[str] = ...) -> None: ...

class KinetoPolling(_message.Message):
    __slots__ = ("last_poll_ns", "tracing", "job_id")
    LAST_POLL_NS_FIELD_NUMBER: _ClassVar[int]
    TRACING_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    last_poll_ns: int
    tracing: bool
    job_id: int
    def __init__(self, last_poll_ns: _Optional[int] = ..., tracing: bool = ..., job_id: _Optional[int] = ...) -> None: ...

class Selector(_message.Message):
    __slots__ = ("pids", "command_regex", "user", "ranks", "job_ids", "gpus", "children", "helpers", "job_step", "pod_uids", "container_ids")
    PIDS_FIELD_NUMBER: _ClassVar[int]
    COMMAND_REGEX_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    HELPERS_FIELD_NUMBER: _ClassVar[int]
    JOB_STEP_FIELD_NUMBER: _ClassVar[int]
    POD_UIDS_FIELD_NUMBER: _ClassVar[int]
    CONTAINER_IDS_FIELD_NUMBER: _ClassVar[int]
    pids: _containers.RepeatedScalarFieldContainer[int]
    command_regex: str
    user: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    job_ids: _containers.RepeatedScalarFieldContainer[str]
    gpus: _containers.RepeatedScalarFieldContainer[int]
    children: bool
    helpers: bool
    job_step: str
    pod_uids: _containers.RepeatedScalarFieldContainer[str]
    container_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pids: _Optional[_Iterable[int]] = ..., command_regex: _Optional[str] = ..., user: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ..., job_ids: _Optional[_Iterable[str]] = ..., gpus: _Optional[_Iterable[int]] = ..., children: bool = ..., helpers: bool = ..., job_step: _Optional[str] = ..., pod_uids: _Optional[_Iterable[str]] = ..., container_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ListProcessesRequest(_message.Message):
    __slots__ = ("selector", "include_without_agent", "trainers")
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_WITHOUT_AGENT_FIELD_NUMBER: _ClassVar[int]
    TRAINERS_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    include_without_agent: bool
    trainers: bool
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ..., include_without_agent: bool = ..., trainers: bool = ...) -> None: ...

class ListProcessesResponse(_message.Message):
    __slots__ = ("processes",)
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedCompositeFieldContainer[Process]
    def __init__(self, processes: _Optional[_Iterable[_Union[Process, _Mapping]]] = ...) -> None: ...

class IterationWindow(_message.Message):
    __slots__ = ("count", "start", "roundup", "warmup")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ROUNDUP_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    count: int
    start: int
    roundup: int
    warmup: int
    def __init__(self, count: _Optional[int] = ..., start: _Optional[int] = ..., roundup: _Optional[int] = ..., warmup: _Optional[int] = ...) -> None: ...

class Options(_message.Message):
    __slots__ = ("record_shapes", "with_stack", "with_modules", "with_flops", "profile_memory", "stack_sample_hz", "stack_trace", "wait_for_user_profiler", "execution_trace")
    RECORD_SHAPES_FIELD_NUMBER: _ClassVar[int]
    WITH_STACK_FIELD_NUMBER: _ClassVar[int]
    WITH_MODULES_FIELD_NUMBER: _ClassVar[int]
    WITH_FLOPS_FIELD_NUMBER: _ClassVar[int]
    PROFILE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    STACK_SAMPLE_HZ_FIELD_NUMBER: _ClassVar[int]
    STACK_TRACE_FIELD_NUMBER: _ClassVar[int]
    WAIT_FOR_USER_PROFILER_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_TRACE_FIELD_NUMBER: _ClassVar[int]
    record_shapes: bool
    with_stack: bool
    with_modules: bool
    with_flops: bool
    profile_memory: bool
    stack_sample_hz: int
    stack_trace: bool
    wait_for_user_profiler: bool
    execution_trace: bool
    def __init__(self, record_shapes: bool = ..., with_stack: bool = ..., with_modules: bool = ..., with_flops: bool = ..., profile_memory: bool = ..., stack_sample_hz: _Optional[int] = ..., stack_trace: bool = ..., wait_for_user_profiler: bool = ..., execution_trace: bool = ...) -> None: ...

class CaptureSpec(_message.Message):
    __slots__ = ("selector", "duration_ns", "iterations", "warmup_ns", "start_time_ns", "activity_types", "options", "buffer_limit_bytes", "formats", "labels", "no_attach", "keep_agent_ns", "or_duration_ns", "arm_ns", "recorder", "counters")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    WARMUP_NS_FIELD_NUMBER: _ClassVar[int]
    START_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_TYPES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FORMATS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    NO_ATTACH_FIELD_NUMBER: _ClassVar[int]
    KEEP_AGENT_NS_FIELD_NUMBER: _ClassVar[int]
    OR_DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    ARM_NS_FIELD_NUMBER: _ClassVar[int]
    RECORDER_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    duration_ns: int
    iterations: IterationWindow
    warmup_ns: int
    start_time_ns: int
    activity_types: _containers.RepeatedScalarFieldContainer[str]
    options: Options
    buffer_limit_bytes: int
    formats: _containers.RepeatedScalarFieldContainer[str]
    labels: _containers.ScalarMap[str, str]
    no_attach: bool
    keep_agent_ns: int
    or_duration_ns: int
    arm_ns: int
    recorder: Recorder
    counters: CounterRequest
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ..., duration_ns: _Optional[int] = ..., iterations: _Optional[_Union[IterationWindow, _Mapping]] = ..., warmup_ns: _Optional[int] = ..., start_time_ns: _Optional[int] = ..., activity_types: _Optional[_Iterable[str]] = ..., options: _Optional[_Union[Options, _Mapping]] = ..., buffer_limit_bytes: _Optional[int] = ..., formats: _Optional[_Iterable[str]] = ..., labels: _Optional[_Mapping[str, str]] = ..., no_attach: bool = ..., keep_agent_ns: _Optional[int] = ..., or_duration_ns: _Optional[int] = ..., arm_ns: _Optional[int] = ..., recorder: _Optional[_Union[Recorder, str]] = ..., counters: _Optional[_Union[CounterRequest, _Mapping]] = ...) -> None: ...

class CreateCaptureRequest(_message.Message):
    __slots__ = ("spec", "idempotency_key")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    spec: CaptureSpec
    idempotency_key: str
    def __init__(self, spec: _Optional[_Union[CaptureSpec, _Mapping]] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class ClockOffset(_message.Message):
    __slots__ = ("offset_ns", "uncertainty_ns")
    OFFSET_NS_FIELD_NUMBER: _ClassVar[int]
    UNCERTAINTY_NS_FIELD_NUMBER: _ClassVar[int]
    offset_ns: int
    uncertainty_ns: int
    def __init__(self, offset_ns: _Optional[int] = ..., uncertainty_ns: _Optional[int] = ...) -> None: ...

class IterationStart(_message.Message):
    __slots__ = ("pid", "start", "warmup")
    PID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    WARMUP_FIELD_NUMBER: _ClassVar[int]
    pid: int
    start: int
    warmup: int
    def __init__(self, pid: _Optional[int] = ..., start: _Optional[int] = ..., warmup: _Optional[int] = ...) -> None: ...

class StartCaptureRequest(_message.Message):
    __slots__ = ("id", "start_time_ns", "iterations", "clock")
    ID_FIELD_NUMBER: _ClassVar[int]
    START_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    id: str
    start_time_ns: int
    iterations: _containers.RepeatedCompositeFieldContainer[IterationStart]
    clock: ClockOffset
    def __init__(self, id: _Optional[str] = ..., start_time_ns: _Optional[int] = ..., iterations: _Optional[_Iterable[_Union[IterationStart, _Mapping]]] = ..., clock: _Optional[_Union[ClockOffset, _Mapping]] = ...) -> None: ...

class GetClockRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Clock(_message.Message):
    __slots__ = ("received_ns", "sent_ns")
    RECEIVED_NS_FIELD_NUMBER: _ClassVar[int]
    SENT_NS_FIELD_NUMBER: _ClassVar[int]
    received_ns: int
    sent_ns: int
    def __init__(self, received_ns: _Optional[int] = ..., sent_ns: _Optional[int] = ...) -> None: ...

class SourceCounts(_message.Message):
    __slots__ = ("source", "records", "bytes", "dropped", "way")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    WAY_FIELD_NUMBER: _ClassVar[int]
    source: str
    records: int
    bytes: int
    dropped: int
    way: str
    def __init__(self, source: _Optional[str] = ..., records: _Optional[int] = ..., bytes: _Optional[int] = ..., dropped: _Optional[int] = ..., way: _Optional[str] = ...) -> None: ...

class Overhead(_message.Message):
    __slots__ = ("start_ns", "stop_ns", "detach_ns", "agent_cpu_ns", "step_ratio", "least_step_ratio")
    START_NS_FIELD_NUMBER: _ClassVar[int]
    STOP_NS_FIELD_NUMBER: _ClassVar[int]
    DETACH_NS_FIELD_NUMBER: _ClassVar[int]
    AGENT_CPU_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_RATIO_FIELD_NUMBER: _ClassVar[int]
    LEAST_STEP_RATIO_FIELD_NUMBER: _ClassVar[int]
    start_ns: int
    stop_ns: int
    detach_ns: int
    agent_cpu_ns: int
    step_ratio: float
    least_step_ratio: float
    def __init__(self, start_ns: _Optional[int] = ..., stop_ns: _Optional[int] = ..., detach_ns: _Optional[int] = ..., agent_cpu_ns: _Optional[int] = ..., step_ratio: _Optional[float] = ..., least_step_ratio: _Optional[float] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("method", "latency_ns", "stopped_ns")
    METHOD_FIELD_NUMBER: _ClassVar[int]
    LATENCY_NS_FIELD_NUMBER: _ClassVar[int]
    STOPPED_NS_FIELD_NUMBER: _ClassVar[int]
    method: str
    latency_ns: int
    stopped_ns: int
    def __init__(self, method: _Optional[str] = ..., latency_ns: _Optional[int] = ..., stopped_ns: _Optional[int] = ...) -> None: ...

class TraceFile(_message.Message):
    __slots__ = ("format", "name", "size_bytes", "sha256", "damage", "verified_ns")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    DAMAGE_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_NS_FIELD_NUMBER: _ClassVar[int]
    format: str
    name: str
    size_bytes: int
    sha256: str
    damage: str
    verified_ns: int
    def __init__(self, format: _Optional[str] = ..., name: _Optional[str] = ..., size_bytes: _Optional[int] = ..., sha256: _Optional[str] = ..., damage: _Optional[str] = ..., verified_ns: _Optional[int] = ...) -> None: ...

class LineStat(_message.Message):
    __slots__ = ("line", "count")
    LINE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    line: int
    count: int
    def __init__(self, line: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class KernelStat(_message.Message):
    __slots__ = ("name", "count", "total_ns", "lines", "waiting")
    NAME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    name: str
    count: int
    total_ns: int
    lines: _containers.RepeatedCompositeFieldContainer[LineStat]
    waiting: int
    def __init__(self, name: _Optional[str] = ..., count: _Optional[int] = ..., total_ns: _Optional[int] = ..., lines: _Optional[_Iterable[_Union[LineStat, _Mapping]]] = ..., waiting: _Optional[int] = ...) -> None: ...

class SampleStates(_message.Message):
    __slots__ = ("running", "waiting", "idle", "unknown")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    idle: int
    unknown: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., idle: _Optional[int] = ..., unknown: _Optional[int] = ...) -> None: ...

class ThreadStat(_message.Message):
    __slots__ = ("thread", "name", "cpu_ns", "cpu_fraction")
    THREAD_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CPU_NS_FIELD_NUMBER: _ClassVar[int]
    CPU_FRACTION_FIELD_NUMBER: _ClassVar[int]
    thread: int
    name: str
    cpu_ns: int
    cpu_fraction: float
    def __init__(self, thread: _Optional[int] = ..., name: _Optional[str] = ..., cpu_ns: _Optional[int] = ..., cpu_fraction: _Optional[float] = ...) -> None: ...

class Summary(_message.Message):
    __slots__ = ("activities", "gpu_busy_fraction", "top_kernels", "top_functions", "window_start_ns", "window_end_ns", "out_of_window", "top_ops", "iterations", "first_iteration", "python_samples", "native_threads")
    class ActivitiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ACTIVITIES_FIELD_NUMBER: _ClassVar[int]
    GPU_BUSY_FRACTION_FIELD_NUMBER: _ClassVar[int]
    TOP_KERNELS_FIELD_NUMBER: _ClassVar[int]
    TOP_FUNCTIONS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_START_NS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_END_NS_FIELD_NUMBER: _ClassVar[int]
    OUT_OF_WINDOW_FIELD_NUMBER: _ClassVar[int]
    TOP_OPS_FIELD_NUMBER: _ClassVar[int]
    ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ITERATION_FIELD_NUMBER: _ClassVar[int]
    PYTHON_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NATIVE_THREADS_FIELD_NUMBER: _ClassVar[int]
    activities: _containers.ScalarMap[str, int]
    gpu_busy_fraction: float
    top_kernels: _containers.RepeatedCompositeFieldContainer[KernelStat]
    top_functions: _containers.RepeatedCompositeFieldContainer[KernelStat]
    window_start_ns: int
    window_end_ns: int
    out_of_window: int
    top_ops: _containers.RepeatedCompositeFieldContainer[KernelStat]
    iterations: int
    first_iteration: int
    python_samples: SampleStates
    native_threads: _containers.RepeatedCompositeFieldContainer[ThreadStat]
    def __init__(self, activities: _Optional[_Mapping[str, int]] = ..., gpu_busy_fraction: _Optional[float] = ..., top_kernels: _Optional[_Iterable[_Union[KernelStat, _Mapping]]] = ..., top_functions: _Optional[_Iterable[_Union[KernelStat, _Mapping]]] = ..., window_start_ns: _Optional[int] = ..., window_end_ns: _Optional[int] = ..., out_of_window: _Optional[int] = ..., top_ops: _Optional[_Iterable[_Union[KernelStat, _Mapping]]] = ..., iterations: _Optional[int] = ..., first_iteration: _Optional[int] = ..., python_samples: _Optional[_Union[SampleStates, _Mapping]] = ..., native_threads: _Optional[_Iterable[_Union[ThreadStat, _Mapping]]] = ...) -> None: ...

class Target(_message.Message):
    __slots__ = ("pid", "start_time_ns", "process", "state", "verdict", "reason_code", "reason", "counts", "overhead", "files", "summary", "state_since_ns", "warnings", "requested_ns", "collecting_ns", "collected_ns", "stored_ns", "attach", "recorder", "standing")
    PID_FIELD_NUMBER: _ClassVar[int]
    START_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    STATE_SINCE_NS_FIELD_NUMBER: _ClassVar[int]
    WARNINGS_FIELD_NUMBER: _ClassVar[int]
    REQUESTED_NS_FIELD_NUMBER: _ClassVar[int]
    COLLECTING_NS_FIELD_NUMBER: _ClassVar[int]
    COLLECTED_NS_FIELD_NUMBER: _ClassVar[int]
    STORED_NS_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    RECORDER_FIELD_NUMBER: _ClassVar[int]
    STANDING_FIELD_NUMBER: _ClassVar[int]
    pid: int
    start_time_ns: int
    process: Process
    state: TargetState
    verdict: Verdict
    reason_code: str
    reason: str
    counts: _containers.RepeatedCompositeFieldContainer[SourceCounts]
    overhead: Overhead
    files: _containers.RepeatedCompositeFieldContainer[TraceFile]
    summary: Summary
    state_since_ns: int
    warnings: _containers.RepeatedScalarFieldContainer[str]
    requested_ns: int
    collecting_ns: int
    collected_ns: int
    stored_ns: int
    attach: Attach
    recorder: Recorder
    standing: StandingCall
    def __init__(self, pid: _Optional[int] = ..., start_time_ns: _Optional[int] = ..., process: _Optional[_Union[Process, _Mapping]] = ..., state: _Optional[_Union[TargetState, str]] = ..., verdict: _Optional[_Union[Verdict, str]] = ..., reason_code: _Optional[str] = ..., reason: _Optional[str] = ..., counts: _Optional[_Iterable[_Union[SourceCounts, _Mapping]]] = ..., overhead: _Optional[_Union[Overhead, _Mapping]] = ..., files: _Optional[_Iterable[_Union[TraceFile, _Mapping]]] = ..., summary: _Optional[_Union[Summary, _Mapping]] = ..., state_since_ns: _Optional[int] = ..., warnings: _Optional[_Iterable[str]] = ..., requested_ns: _Optional[int] = ..., collecting_ns: _Optional[int] = ..., collected_ns: _Optional[int] = ..., stored_ns: _Optional[int] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., recorder: _Optional[_Union[Recorder, str]] = ..., standing: _Optional[_Union[StandingCall, _Mapping]] = ...) -> None: ...

class CaptureAnswer(_message.Message):
    __slots__ = ("verdict", "cause")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    verdict: str
    cause: str
    def __init__(self, verdict: _Optional[str] = ..., cause: _Optional[str] = ...) -> None: ...

class Capture(_message.Message):
    __slots__ = ("id", "spec", "status", "targets", "created_ns", "ended_ns", "host", "pinned", "owner_uid", "local_bytes", "upload", "armed_until_ns", "clock", "counters", "answer")
    ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    CREATED_NS_FIELD_NUMBER: _ClassVar[int]
    ENDED_NS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    OWNER_UID_FIELD_NUMBER: _ClassVar[int]
    LOCAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    ARMED_UNTIL_NS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    id: str
    spec: CaptureSpec
    status: CaptureStatus
    targets: _containers.RepeatedCompositeFieldContainer[Target]
    created_ns: int
    ended_ns: int
    host: str
    pinned: bool
    owner_uid: int
    local_bytes: int
    upload: Upload
    armed_until_ns: int
    clock: ClockOffset
    counters: _containers.RepeatedCompositeFieldContainer[RecordedCounters]
    answer: CaptureAnswer
    def __init__(self, id: _Optional[str] = ..., spec: _Optional[_Union[CaptureSpec, _Mapping]] = ..., status: _Optional[_Union[CaptureStatus, str]] = ..., targets: _Optional[_Iterable[_Union[Target, _Mapping]]] = ..., created_ns: _Optional[int] = ..., ended_ns: _Optional[int] = ..., host: _Optional[str] = ..., pinned: bool = ..., owner_uid: _Optional[int] = ..., local_bytes: _Optional[int] = ..., upload: _Optional[_Union[Upload, _Mapping]] = ..., armed_until_ns: _Optional[int] = ..., clock: _Optional[_Union[ClockOffset, _Mapping]] = ..., counters: _Optional[_Iterable[_Union[RecordedCounters, _Mapping]]] = ..., answer: _Optional[_Union[CaptureAnswer, _Mapping]] = ...) -> None: ...

class Upload(_message.Message):
    __slots__ = ("state", "url", "bytes", "total_bytes", "failures", "error", "next_try_ns", "uploaded_ns", "manifest_sha256")
    STATE_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NEXT_TRY_NS_FIELD_NUMBER: _ClassVar[int]
    UPLOADED_NS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_SHA256_FIELD_NUMBER: _ClassVar[int]
    state: UploadState
    url: str
    bytes: int
    total_bytes: int
    failures: int
    error: str
    next_try_ns: int
    uploaded_ns: int
    manifest_sha256: str
    def __init__(self, state: _Optional[_Union[UploadState, str]] = ..., url: _Optional[str] = ..., bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., failures: _Optional[int] = ..., error: _Optional[str] = ..., next_try_ns: _Optional[int] = ..., uploaded_ns: _Optional[int] = ..., manifest_sha256: _Optional[str] = ...) -> None: ...

class WatchCaptureRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class CaptureEvent(_message.Message):
    __slots__ = ("snapshot", "target")
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    snapshot: Capture
    target: Target
    def __init__(self, snapshot: _Optional[_Union[Capture, _Mapping]] = ..., target: _Optional[_Union[Target, _Mapping]] = ...) -> None: ...

class GetCaptureRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ListCapturesRequest(_message.Message):
    __slots__ = ("labels", "page_size", "page_token")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LABELS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    labels: _containers.ScalarMap[str, str]
    page_size: int
    page_token: str
    def __init__(self, labels: _Optional[_Mapping[str, str]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListCapturesResponse(_message.Message):
    __slots__ = ("captures", "next_page_token")
    CAPTURES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    captures: _containers.RepeatedCompositeFieldContainer[Capture]
    next_page_token: str
    def __init__(self, captures: _Optional[_Iterable[_Union[Capture, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CancelCaptureRequest(_message.Message):
    __slots__ = ("id", "keep_partial")
    ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_PARTIAL_FIELD_NUMBER: _ClassVar[int]
    id: str
    keep_partial: bool
    def __init__(self, id: _Optional[str] = ..., keep_partial: bool = ...) -> None: ...

class DeleteCaptureRequest(_message.Message):
    __slots__ = ("id", "keep_uploaded")
    ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_UPLOADED_FIELD_NUMBER: _ClassVar[int]
    id: str
    keep_uploaded: bool
    def __init__(self, id: _Optional[str] = ..., keep_uploaded: bool = ...) -> None: ...

class DeleteCaptureResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PinCaptureRequest(_message.Message):
    __slots__ = ("id", "pinned")
    ID_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    id: str
    pinned: bool
    def __init__(self, id: _Optional[str] = ..., pinned: bool = ...) -> None: ...

class VerifyCaptureRequest(_message.Message):
    __slots__ = ("id", "uploaded")
    ID_FIELD_NUMBER: _ClassVar[int]
    UPLOADED_FIELD_NUMBER: _ClassVar[int]
    id: str
    uploaded: bool
    def __init__(self, id: _Optional[str] = ..., uploaded: bool = ...) -> None: ...

class FileCheck(_message.Message):
    __slots__ = ("pid", "format", "name", "uploaded", "size_bytes", "problem")
    PID_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UPLOADED_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    pid: int
    format: str
    name: str
    uploaded: bool
    size_bytes: int
    problem: str
    def __init__(self, pid: _Optional[int] = ..., format: _Optional[str] = ..., name: _Optional[str] = ..., uploaded: bool = ..., size_bytes: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class FetchTraceRequest(_message.Message):
    __slots__ = ("capture_id", "pid", "format", "offset")
    CAPTURE_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    capture_id: str
    pid: int
    format: str
    offset: int
    def __init__(self, capture_id: _Optional[str] = ..., pid: _Optional[int] = ..., format: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class TraceChunk(_message.Message):
    __slots__ = ("offset", "data", "file")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    file: TraceFile
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ..., file: _Optional[_Union[TraceFile, _Mapping]] = ...) -> None: ...

class GetHostRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Gpu(_message.Message):
    __slots__ = ("index", "uuid", "name", "memory_bytes")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    index: int
    uuid: str
    name: str
    memory_bytes: int
    def __init__(self, index: _Optional[int] = ..., uuid: _Optional[str] = ..., name: _Optional[str] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class Host(_message.Message):
    __slots__ = ("hostname", "version", "started_ns", "now_ns", "gpus", "gpu_note", "driver_version", "store_path", "store_free_bytes", "store_used_bytes", "agents", "captures_running", "agent_socket", "max_duration_ns", "default_buffer_limit_bytes", "plugins")
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STARTED_NS_FIELD_NUMBER: _ClassVar[int]
    NOW_NS_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    GPU_NOTE_FIELD_NUMBER: _ClassVar[int]
    DRIVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    STORE_PATH_FIELD_NUMBER: _ClassVar[int]
    STORE_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    CAPTURES_RUNNING_FIELD_NUMBER: _ClassVar[int]
    AGENT_SOCKET_FIELD_NUMBER: _ClassVar[int]
    MAX_DURATION_NS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_BUFFER_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    PLUGINS_FIELD_NUMBER: _ClassVar[int]
    hostname: str
    version: str
    started_ns: int
    now_ns: int
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    gpu_note: str
    driver_version: str
    store_path: str
    store_free_bytes: int
    store_used_bytes: int
    agents: int
    captures_running: int
    agent_socket: str
    max_duration_ns: int
    default_buffer_limit_bytes: int
    plugins: _containers.RepeatedCompositeFieldContainer[Plugin]
    def __init__(self, hostname: _Optional[str] = ..., version: _Optional[str] = ..., started_ns: _Optional[int] = ..., now_ns: _Optional[int] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ..., gpu_note: _Optional[str] = ..., driver_version: _Optional[str] = ..., store_path: _Optional[str] = ..., store_free_bytes: _Optional[int] = ..., store_used_bytes: _Optional[int] = ..., agents: _Optional[int] = ..., captures_running: _Optional[int] = ..., agent_socket: _Optional[str] = ..., max_duration_ns: _Optional[int] = ..., default_buffer_limit_bytes: _Optional[int] = ..., plugins: _Optional[_Iterable[_Union[Plugin, _Mapping]]] = ...) -> None: ...

class Plugin(_message.Message):
    __slots__ = ("name", "package", "version", "activity_types", "state", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ACTIVITY_TYPES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    package: str
    version: str
    activity_types: _containers.RepeatedScalarFieldContainer[str]
    state: PluginState
    reason: str
    def __init__(self, name: _Optional[str] = ..., package: _Optional[str] = ..., version: _Optional[str] = ..., activity_types: _Optional[_Iterable[str]] = ..., state: _Optional[_Union[PluginState, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class WatchHostRequest(_message.Message):
    __slots__ = ("interval_ns", "selector", "include_without_agent")
    INTERVAL_NS_FIELD_NUMBER: _ClassVar[int]
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_WITHOUT_AGENT_FIELD_NUMBER: _ClassVar[int]
    interval_ns: int
    selector: Selector
    include_without_agent: bool
    def __init__(self, interval_ns: _Optional[int] = ..., selector: _Optional[_Union[Selector, _Mapping]] = ..., include_without_agent: bool = ...) -> None: ...

class HostSample(_message.Message):
    __slots__ = ("time_ns", "hostname", "version", "cpus", "cpu_busy", "cpu_iowait", "load_1m", "memory_total_bytes", "memory_available_bytes", "swap_total_bytes", "swap_used_bytes", "disk_read_bytes_per_second", "disk_written_bytes_per_second", "network_receive_bytes_per_second", "network_transmit_bytes_per_second", "store_free_bytes", "agents", "captures_running", "gpus", "gpu_libraries", "processes")
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    CPU_BUSY_FIELD_NUMBER: _ClassVar[int]
    CPU_IOWAIT_FIELD_NUMBER: _ClassVar[int]
    LOAD_1M_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWAP_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWAP_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_READ_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DISK_WRITTEN_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NETWORK_RECEIVE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NETWORK_TRANSMIT_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STORE_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    CAPTURES_RUNNING_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    GPU_LIBRARIES_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    time_ns: int
    hostname: str
    version: str
    cpus: int
    cpu_busy: float
    cpu_iowait: float
    load_1m: float
    memory_total_bytes: int
    memory_available_bytes: int
    swap_total_bytes: int
    swap_used_bytes: int
    disk_read_bytes_per_second: float
    disk_written_bytes_per_second: float
    network_receive_bytes_per_second: float
    network_transmit_bytes_per_second: float
    store_free_bytes: int
    agents: int
    captures_running: int
    gpus: _containers.RepeatedCompositeFieldContainer[GpuSample]
    gpu_libraries: _containers.RepeatedCompositeFieldContainer[GpuLibrary]
    processes: _containers.RepeatedCompositeFieldContainer[ProcessSample]
    def __init__(self, time_ns: _Optional[int] = ..., hostname: _Optional[str] = ..., version: _Optional[str] = ..., cpus: _Optional[int] = ..., cpu_busy: _Optional[float] = ..., cpu_iowait: _Optional[float] = ..., load_1m: _Optional[float] = ..., memory_total_bytes: _Optional[int] = ..., memory_available_bytes: _Optional[int] = ..., swap_total_bytes: _Optional[int] = ..., swap_used_bytes: _Optional[int] = ..., disk_read_bytes_per_second: _Optional[float] = ..., disk_written_bytes_per_second: _Optional[float] = ..., network_receive_bytes_per_second: _Optional[float] = ..., network_transmit_bytes_per_second: _Optional[float] = ..., store_free_bytes: _Optional[int] = ..., agents: _Optional[int] = ..., captures_running: _Optional[int] = ..., gpus: _Optional[_Iterable[_Union[GpuSample, _Mapping]]] = ..., gpu_libraries: _Optional[_Iterable[_Union[GpuLibrary, _Mapping]]] = ..., processes: _Optional[_Iterable[_Union[ProcessSample, _Mapping]]] = ...) -> None: ...

class GpuSample(_message.Message):
    __slots__ = ("gpu", "vendor", "pci_bus_id", "device", "works", "utilization", "memory_utilization", "memory_used_bytes", "power_watts", "power_limit_watts", "temperature_celsius", "sm_clock_hertz", "memory_clock_hertz", "pcie_transmit_bytes_per_second", "pcie_receive_bytes_per_second", "nvlink_transmit_bytes_per_second", "nvlink_receive_bytes_per_second", "ecc_uncorrected", "xid_errors", "graphics_active", "sm_active", "sm_occupancy", "tensor_active", "dram_active", "fp64_active", "fp32_active", "fp16_active")
    class XidErrorsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    GPU_FIELD_NUMBER: _ClassVar[int]
    VENDOR_FIELD_NUMBER: _ClassVar[int]
    PCI_BUS_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    WORKS_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    POWER_WATTS_FIELD_NUMBER: _ClassVar[int]
    POWER_LIMIT_WATTS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_CELSIUS_FIELD_NUMBER: _ClassVar[int]
    SM_CLOCK_HERTZ_FIELD_NUMBER: _ClassVar[int]
    MEMORY_CLOCK_HERTZ_FIELD_NUMBER: _ClassVar[int]
    PCIE_TRANSMIT_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PCIE_RECEIVE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NVLINK_TRANSMIT_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    NVLINK_RECEIVE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ECC_UNCORRECTED_FIELD_NUMBER: _ClassVar[int]
    XID_ERRORS_FIELD_NUMBER: _ClassVar[int]
    GRAPHICS_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    SM_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    SM_OCCUPANCY_FIELD_NUMBER: _ClassVar[int]
    TENSOR_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    DRAM_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    FP64_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    FP32_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    FP16_ACTIVE_FIELD_NUMBER: _ClassVar[int]
    gpu: Gpu
    vendor: str
    pci_bus_id: str
    device: str
    works: bool
    utilization: float
    memory_utilization: float
    memory_used_bytes: int
    power_watts: float
    power_limit_watts: float
    temperature_celsius: float
    sm_clock_hertz: float
    memory_clock_hertz: float
    pcie_transmit_bytes_per_second: float
    pcie_receive_bytes_per_second: float
    nvlink_transmit_bytes_per_second: float
    nvlink_receive_bytes_per_second: float
    ecc_uncorrected: int
    xid_errors: _containers.ScalarMap[int, int]
    graphics_active: float
    sm_active: float
    sm_occupancy: float
    tensor_active: float
    dram_active: float
    fp64_active: float
    fp32_active: float
    fp16_active: float
    def __init__(self, gpu: _Optional[_Union[Gpu, _Mapping]] = ..., vendor: _Optional[str] = ..., pci_bus_id: _Optional[str] = ..., device: _Optional[str] = ..., works: bool = ..., utilization: _Optional[float] = ..., memory_utilization: _Optional[float] = ..., memory_used_bytes: _Optional[int] = ..., power_watts: _Optional[float] = ..., power_limit_watts: _Optional[float] = ..., temperature_celsius: _Optional[float] = ..., sm_clock_hertz: _Optional[float] = ..., memory_clock_hertz: _Optional[float] = ..., pcie_transmit_bytes_per_second: _Optional[float] = ..., pcie_receive_bytes_per_second: _Optional[float] = ..., nvlink_transmit_bytes_per_second: _Optional[float] = ..., nvlink_receive_bytes_per_second: _Optional[float] = ..., ecc_uncorrected: _Optional[int] = ..., xid_errors: _Optional[_Mapping[int, int]] = ..., graphics_active: _Optional[float] = ..., sm_active: _Optional[float] = ..., sm_occupancy: _Optional[float] = ..., tensor_active: _Optional[float] = ..., dram_active: _Optional[float] = ..., fp64_active: _Optional[float] = ..., fp32_active: _Optional[float] = ..., fp16_active: _Optional[float] = ...) -> None: ...

class GpuLibrary(_message.Message):
    __slots__ = ("name", "state", "detail")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    detail: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class GpuUse(_message.Message):
    __slots__ = ("gpu", "vendor", "memory_bytes", "utilization")
    GPU_FIELD_NUMBER: _ClassVar[int]
    VENDOR_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    gpu: int
    vendor: str
    memory_bytes: int
    utilization: float
    def __init__(self, gpu: _Optional[int] = ..., vendor: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., utilization: _Optional[float] = ...) -> None: ...

class ProcessSample(_message.Message):
    __slots__ = ("process", "cpu", "memory_bytes", "gpus")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    process: Process
    cpu: float
    memory_bytes: int
    gpus: _containers.RepeatedCompositeFieldContainer[GpuUse]
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., cpu: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., gpus: _Optional[_Iterable[_Union[GpuUse, _Mapping]]] = ...) -> None: ...

class CounterMetric(_message.Message):
    __slots__ = ("name", "label", "unit")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    name: str
    label: str
    unit: str
    def __init__(self, name: _Optional[str] = ..., label: _Optional[str] = ..., unit: _Optional[str] = ...) -> None: ...

class LeftOutMetric(_message.Message):
    __slots__ = ("name", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: str
    why: str
    def __init__(self, name: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class CounterSet(_message.Message):
    __slots__ = ("name", "metrics", "left_out", "problem")
    NAME_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    name: str
    metrics: _containers.RepeatedCompositeFieldContainer[CounterMetric]
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOutMetric]
    problem: str
    def __init__(self, name: _Optional[str] = ..., metrics: _Optional[_Iterable[_Union[CounterMetric, _Mapping]]] = ..., left_out: _Optional[_Iterable[_Union[LeftOutMetric, _Mapping]]] = ..., problem: _Optional[str] = ...) -> None: ...

class CounterGpu(_message.Message):
    __slots__ = ("gpu", "chip", "pci_bus_id", "reason_code", "reason", "sets", "base_metrics")
    GPU_FIELD_NUMBER: _ClassVar[int]
    CHIP_FIELD_NUMBER: _ClassVar[int]
    PCI_BUS_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SETS_FIELD_NUMBER: _ClassVar[int]
    BASE_METRICS_FIELD_NUMBER: _ClassVar[int]
    gpu: Gpu
    chip: str
    pci_bus_id: str
    reason_code: str
    reason: str
    sets: _containers.RepeatedCompositeFieldContainer[CounterSet]
    base_metrics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, gpu: _Optional[_Union[Gpu, _Mapping]] = ..., chip: _Optional[str] = ..., pci_bus_id: _Optional[str] = ..., reason_code: _Optional[str] = ..., reason: _Optional[str] = ..., sets: _Optional[_Iterable[_Union[CounterSet, _Mapping]]] = ..., base_metrics: _Optional[_Iterable[str]] = ...) -> None: ...

class ListCountersRequest(_message.Message):
    __slots__ = ("base_metrics",)
    BASE_METRICS_FIELD_NUMBER: _ClassVar[int]
    base_metrics: bool
    def __init__(self, base_metrics: bool = ...) -> None: ...

class ListCountersResponse(_message.Message):
    __slots__ = ("gpus", "backend", "library_version")
    GPUS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    LIBRARY_VERSION_FIELD_NUMBER: _ClassVar[int]
    gpus: _containers.RepeatedCompositeFieldContainer[CounterGpu]
    backend: str
    library_version: str
    def __init__(self, gpus: _Optional[_Iterable[_Union[CounterGpu, _Mapping]]] = ..., backend: _Optional[str] = ..., library_version: _Optional[str] = ...) -> None: ...

class WatchCountersRequest(_message.Message):
    __slots__ = ("gpus", "set", "metrics", "interval_ns", "period_ns")
    GPUS_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_NS_FIELD_NUMBER: _ClassVar[int]
    PERIOD_NS_FIELD_NUMBER: _ClassVar[int]
    gpus: _containers.RepeatedScalarFieldContainer[int]
    set: str
    metrics: _containers.RepeatedScalarFieldContainer[str]
    interval_ns: int
    period_ns: int
    def __init__(self, gpus: _Optional[_Iterable[int]] = ..., set: _Optional[str] = ..., metrics: _Optional[_Iterable[str]] = ..., interval_ns: _Optional[int] = ..., period_ns: _Optional[int] = ...) -> None: ...

class CounterMeans(_message.Message):
    __slots__ = ("gpus",)
    GPUS_FIELD_NUMBER: _ClassVar[int]
    gpus: _containers.RepeatedCompositeFieldContainer[GpuCounters]
    def __init__(self, gpus: _Optional[_Iterable[_Union[GpuCounters, _Mapping]]] = ...) -> None: ...

class GpuCounters(_message.Message):
    __slots__ = ("gpu", "uuid", "start_ns", "end_ns", "samples", "metrics", "means", "maxima", "left_out", "lost_ns", "dropped_samples", "reason_code", "reason")
    GPU_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    MEANS_FIELD_NUMBER: _ClassVar[int]
    MAXIMA_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    LOST_NS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REASON_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    gpu: int
    uuid: str
    start_ns: int
    end_ns: int
    samples: int
    metrics: _containers.RepeatedCompositeFieldContainer[CounterMetric]
    means: _containers.RepeatedScalarFieldContainer[float]
    maxima: _containers.RepeatedScalarFieldContainer[float]
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOutMetric]
    lost_ns: int
    dropped_samples: int
    reason_code: str
    reason: str
    def __init__(self, gpu: _Optional[int] = ..., uuid: _Optional[str] = ..., start_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., samples: _Optional[int] = ..., metrics: _Optional[_Iterable[_Union[CounterMetric, _Mapping]]] = ..., means: _Optional[_Iterable[float]] = ..., maxima: _Optional[_Iterable[float]] = ..., left_out: _Optional[_Iterable[_Union[LeftOutMetric, _Mapping]]] = ..., lost_ns: _Optional[int] = ..., dropped_samples: _Optional[int] = ..., reason_code: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CounterRequest(_message.Message):
    __slots__ = ("set", "metrics", "interval_ns")
    SET_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_NS_FIELD_NUMBER: _ClassVar[int]
    set: str
    metrics: _containers.RepeatedScalarFieldContainer[str]
    interval_ns: int
    def __init__(self, set: _Optional[str] = ..., metrics: _Optional[_Iterable[str]] = ..., interval_ns: _Optional[int] = ...) -> None: ...

class RecordedCounters(_message.Message):
    __slots__ = ("gpu", "metrics", "left_out", "samples", "gaps", "lost_ns", "dropped_samples", "reason_code", "reason", "start_ns", "end_ns")
    GPU_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    LOST_NS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REASON_CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    gpu: Gpu
    metrics: _containers.RepeatedCompositeFieldContainer[CounterMetric]
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOutMetric]
    samples: int
    gaps: int
    lost_ns: int
    dropped_samples: int
    reason_code: str
    reason: str
    start_ns: int
    end_ns: int
    def __init__(self, gpu: _Optional[_Union[Gpu, _Mapping]] = ..., metrics: _Optional[_Iterable[_Union[CounterMetric, _Mapping]]] = ..., left_out: _Optional[_Iterable[_Union[LeftOutMetric, _Mapping]]] = ..., samples: _Optional[int] = ..., gaps: _Optional[int] = ..., lost_ns: _Optional[int] = ..., dropped_samples: _Optional[int] = ..., reason_code: _Optional[str] = ..., reason: _Optional[str] = ..., start_ns: _Optional[int] = ..., end_ns: _Optional[int] = ...) -> None: ...

class Check(_message.Message):
    __slots__ = ("name", "status", "detail", "advice")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    name: str
    status: CheckStatus
    detail: str
    advice: str
    def __init__(self, name: _Optional[str] = ..., status: _Optional[_Union[CheckStatus, str]] = ..., detail: _Optional[str] = ..., advice: _Optional[str] = ...) -> None: ...

class DiagnoseProcessRequest(_message.Message):
    __slots__ = ("pid",)
    PID_FIELD_NUMBER: _ClassVar[int]
    pid: int
    def __init__(self, pid: _Optional[int] = ...) -> None: ...

class Diagnosis(_message.Message):
    __slots__ = ("process", "method", "checks")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    process: Process
    method: str
    checks: _containers.RepeatedCompositeFieldContainer[Check]
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., method: _Optional[str] = ..., checks: _Optional[_Iterable[_Union[Check, _Mapping]]] = ...) -> None: ...

class DiagnoseHostRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HostDiagnosis(_message.Message):
    __slots__ = ("hostname", "checks")
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    hostname: str
    checks: _containers.RepeatedCompositeFieldContainer[Check]
    def __init__(self, hostname: _Optional[str] = ..., checks: _Optional[_Iterable[_Union[Check, _Mapping]]] = ...) -> None: ...

class ReadStacksRequest(_message.Message):
    __slots__ = ("selector",)
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("function", "file", "line", "code", "own")
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    function: str
    file: str
    line: int
    code: str
    own: bool
    def __init__(self, function: _Optional[str] = ..., file: _Optional[str] = ..., line: _Optional[int] = ..., code: _Optional[str] = ..., own: bool = ...) -> None: ...

class ThreadStack(_message.Message):
    __slots__ = ("thread", "name", "main", "state", "cpu_ns", "system_call", "holds_gil", "wait", "waits", "frames", "left_out")
    THREAD_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAIN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CPU_NS_FIELD_NUMBER: _ClassVar[int]
    SYSTEM_CALL_FIELD_NUMBER: _ClassVar[int]
    HOLDS_GIL_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    thread: int
    name: str
    main: bool
    state: ThreadState
    cpu_ns: int
    system_call: str
    holds_gil: bool
    wait: Wait
    waits: str
    frames: _containers.RepeatedCompositeFieldContainer[Frame]
    left_out: int
    def __init__(self, thread: _Optional[int] = ..., name: _Optional[str] = ..., main: bool = ..., state: _Optional[_Union[ThreadState, str]] = ..., cpu_ns: _Optional[int] = ..., system_call: _Optional[str] = ..., holds_gil: bool = ..., wait: _Optional[_Union[Wait, str]] = ..., waits: _Optional[str] = ..., frames: _Optional[_Iterable[_Union[Frame, _Mapping]]] = ..., left_out: _Optional[int] = ...) -> None: ...

class ProcessStacks(_message.Message):
    __slots__ = ("process", "time_ns", "threads", "left_out", "reason", "gpus")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    TIME_NS_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    process: Process
    time_ns: int
    threads: _containers.RepeatedCompositeFieldContainer[ThreadStack]
    left_out: int
    reason: str
    gpus: _containers.RepeatedCompositeFieldContainer[GpuSample]
    def __init__(self, process: _Optional[_Union[Process, _Mapping]] = ..., time_ns: _Optional[int] = ..., threads: _Optional[_Iterable[_Union[ThreadStack, _Mapping]]] = ..., left_out: _Optional[int] = ..., reason: _Optional[str] = ..., gpus: _Optional[_Iterable[_Union[GpuSample, _Mapping]]] = ...) -> None: ...

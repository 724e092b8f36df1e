"""Who may do what, as one table and one function. Pure.

Theory of operation
    A caller has roles. Every call is one action, on the host, on processes or on a capture. The object of the action
    has a relation to the caller: it is the caller's own, belongs to one of the caller's jobs or pods, or is anything at
    all. GRANTS says which relation each role needs for each action; everything else is denied, and a call missing from
    CALLS is denied to everybody.

    - own       processes and captures of the caller's uid
    - jobs      processes of other uids, but root's, in batch jobs that belong to the caller
    - pods      processes in pods that Kubernetes lets the caller exec into; captures of the caller's own
    - viewer    sees and fetches everything, starts and changes nothing
    - admin     everything

    For tracing, a process counts as the caller's own, or as part of a job or pod, only if the kernel too would let its
    user trace it: not a set-uid or set-gid program, nor one that has made itself undumpable. The daemon may be root and
    must not lend its rights.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from kinetod.base.errors import KinetodError


class Role(StrEnum):
    """A role that a caller may have."""

    OWN = "own"
    JOBS = "jobs"
    PODS = "pods"
    VIEWER = "viewer"
    ADMIN = "admin"


class Via(StrEnum):
    """How a caller is connected, and therefore identified."""

    UNIX = "unix"  # SO_PEERCRED
    LOOPBACK = "loopback"  # the uid of the other end's socket, by the kernel's table of connections
    TLS = "tls"  # a client certificate
    KUBERNETES = "kubernetes"  # a token that the API server knows
    DYNOLOG = "dynolog"  # Dynolog's clients: identified as above on this host, not at all on others


class Action(StrEnum):
    """Actions of calls."""

    SEE_HOST = "see the host"
    SEE_PROCESS = "see a process"
    TRACE = "trace a process"
    SEE_CAPTURE = "see and fetch a capture"
    SAMPLE_COUNTERS = "sample the counters of a GPU"
    CHANGE_CAPTURE = "start, cancel, delete or pin a capture"


class Relation(StrEnum):
    """The relation of a process or capture to a caller."""

    OWN = "own"
    JOB = "in the caller's jobs"
    POD = "in pods that they may exec into"
    ANY = "any"


CALLS: Mapping[str, Action] = {
    "GetHost": Action.SEE_HOST,
    "GetClock": Action.SEE_HOST,
    "WatchHost": Action.SEE_PROCESS,
    "ListProcesses": Action.SEE_PROCESS,
    "DiagnoseProcess": Action.SEE_PROCESS,
    "DiagnoseHost": Action.SEE_HOST,
    "ReadStacks": Action.TRACE,
    "ListCounters": Action.SEE_HOST,
    "WatchCounters": Action.SAMPLE_COUNTERS,
    "CreateCapture": Action.TRACE,
    "StartCapture": Action.CHANGE_CAPTURE,
    "WatchCapture": Action.SEE_CAPTURE,
    "GetCapture": Action.SEE_CAPTURE,
    "ListCaptures": Action.SEE_CAPTURE,
    "FetchTrace": Action.SEE_CAPTURE,
    "VerifyCapture": Action.SEE_CAPTURE,
    "CancelCapture": Action.CHANGE_CAPTURE,
    "DeleteCapture": Action.CHANGE_CAPTURE,
    "PinCapture": Action.CHANGE_CAPTURE,
}

GRANTS: Mapping[Action, Mapping[Role, Relation]] = {
    Action.SEE_HOST: dict.fromkeys(Role, Relation.ANY),
    Action.SEE_PROCESS: {
        Role.OWN: Relation.OWN,
        Role.JOBS: Relation.JOB,
        Role.PODS: Relation.POD,
        Role.VIEWER: Relation.ANY,
        Role.ADMIN: Relation.ANY,
    },
    Action.TRACE: {
        Role.OWN: Relation.OWN,
        Role.JOBS: Relation.JOB,
        Role.PODS: Relation.POD,
        Role.ADMIN: Relation.ANY,
    },
    # On all processes of the GPU, since its counters cover them all and are then unavailable to others.
    Action.SAMPLE_COUNTERS: {
        Role.OWN: Relation.OWN,
        Role.JOBS: Relation.JOB,
        Role.PODS: Relation.POD,
        Role.ADMIN: Relation.ANY,
    },
    Action.SEE_CAPTURE: {
        Role.OWN: Relation.OWN,
        Role.JOBS: Relation.OWN,
        Role.PODS: Relation.OWN,
        Role.VIEWER: Relation.ANY,
        Role.ADMIN: Relation.ANY,
    },
    Action.CHANGE_CAPTURE: {
        Role.OWN: Relation.OWN,
        Role.JOBS: Relation.OWN,
        Role.PODS: Relation.OWN,
        Role.ADMIN: Relation.ANY,
    },
}
# Actions decided for each process, also by its job and pod.
PROCESS_ACTIONS = frozenset(action for action, granted in GRANTS.items() if Relation.JOB in granted.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller. uid is None for a certificate that maps to no user of this host; for a user of Kubernetes it is their
    number in the store.
    """

    uid: int | None
    user: str
    roles: frozenset[Role]
    via: Via
    pid: int | None = None  # of the connecting process, for the audit log only
    name: str = ""  # of the certificate
    address: str = ""  # of the other end, where it has one
    jobs: frozenset[str] = frozenset()  # that belong to this user
    pods: frozenset[str] = frozenset()  # by UID, that Kubernetes lets this user exec into
    refusal: KinetodError | None = None  # the error for this request: the caller is identified, but refused
    proxy: "Caller | None" = None  # the web front end that calls for this user

    @property
    def key(self) -> str:
        """The key by which limits are counted."""
        return f"uid {self.uid}" if self.uid is not None else f"certificate {self.name}"

    def __str__(self) -> str:
        if self.proxy is not None:
            return f"{replace(self, proxy=None)} through {self.proxy}"
        if self.via is Via.KUBERNETES:
            return f"the Kubernetes user {self.user}"
        text = f"{self.user} (uid {self.uid})" if self.uid is not None else f"the certificate {self.name}"
        return text if not self.name or self.uid is None else f"{text}, certificate {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A process or a capture. uid is None if its owner is unknown; job and pod come from its control groups."""

    uid: int | None
    plain: bool = True  # the kernel lets its user trace it
    job: str = ""
    pod: str = ""  # its UID


def sees_all(caller: Caller, action: Action) -> bool:
    """Whether the caller may do this to anything."""
    return any(GRANTS[action].get(role) is Relation.ANY for role in caller.roles)


def may(caller: Caller, action: Action, resource: Resource) -> bool:
    """Decides whether the caller may do this to the resource."""
    relations = _relations(caller, action, resource)
    return any(GRANTS[action].get(role) in relations for role in caller.roles)


def may_at_all(caller: Caller, action: Action) -> bool:
    """Whether the caller may do this to anything at all."""
    return any(role in GRANTS[action] for role in caller.roles)


def _relations(caller: Caller, action: Action, resource: Resource) -> set[Relation]:
    relations = {Relation.ANY}
    if resource.uid is None or (action in (Action.TRACE, Action.SAMPLE_COUNTERS) and not resource.plain):
        return relations
    if resource.uid == caller.uid:
        relations.add(Relation.OWN)
    if resource.job and resource.job in caller.jobs and resource.uid != 0:
        relations.add(Relation.JOB)
    if resource.pod and resource.pod in caller.pods:
        relations.add(Relation.POD)
    return relations


def needed(action: Action) -> str:
    """Names, for error messages, the roles that may do this to anything."""
    roles = [role for role, relation in GRANTS[action].items() if relation is Relation.ANY]
    return " or ".join(f"the role {role}" for role in roles)


def listed(roles: Iterable[Role]) -> str:
    """Lists roles for error messages."""
    return ", ".join(sorted(roles)) or "none"

"""Finds the container and Kubernetes pod of a process from the kernel's control groups.

Theory of operation
    Container runtimes name a control group after the container's id of 64 digits, below that of the pod, which
    kubelet names after the pod's UID:

    /kubepods.slice/…-pod8f2c….slice/cri-containerd-ID.scope   systemd driver (crio-ID, docker-ID, libpod-ID alike)
    /kubepods/burstable/pod8f2c…/ID                           cgroupfs driver
    /…-pod8f2c….slice:cri-containerd:ID                       containerd without the systemd driver its kubelet uses
    /docker/ID, /system.slice/docker-ID.scope, /machine.slice/libpod-ID.scope     without Kubernetes

    This applies to cgroup v1 and v2. A pod's container counts, not one started inside it.

    The names of the pod and its container are not in the path. Some pods have them in variables; the authority is the
    kubelet, which the `owners` passed to metrics_gpus.GpuCollector query.

    `container_in` and the names are for display and joins, not for decisions: a user with a delegated control group may
    make folders of any name in it, and chooses the variables. `pod_in` is for decisions: it takes the outermost pod,
    below the kubelet's own group at the root of the hierarchy, where only the kubelet makes folders. In its own control
    group namespace the daemon sees paths relative to the group of its pod: `/../../…`.
"""

import contextlib
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CONTAINERD, CRIO, DOCKER, PODMAN = "containerd", "cri-o", "docker", "podman"
_RUNTIMES = {"cri-containerd": CONTAINERD, "crio": CRIO, "docker": DOCKER, "libpod": PODMAN}
_UID = r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"  # the latter: a static pod's
_POD = re.compile(rf"(?:.*[-:])?pod({_UID})(?:\.slice)?")
_CONTAINER = re.compile(r"(?:(cri-containerd|crio|docker|libpod)[-:])?([0-9a-f]{64})(?:\.scope)?")
_PARENTS = {"docker": DOCKER, "libpod_parent": PODMAN}
# Common names of the variables that the downward API fills. HOSTNAME is set by the runtime.
POD_VARIABLES = ("POD_NAME", "K8S_POD_NAME", "MY_POD_NAME", "HOSTNAME")
NAMESPACE_VARIABLES = ("POD_NAMESPACE", "K8S_NAMESPACE", "K8S_POD_NAMESPACE", "MY_POD_NAMESPACE")
CONTAINER_VARIABLES = ("CONTAINER_NAME", "K8S_CONTAINER_NAME", "MY_CONTAINER_NAME")
# The kubelet's own groups, and those between it and its pods, which come first in paths from another pod's group.
_KUBELETS = re.compile(
    rf"kubelet|kubelet\.slice|kubepods|(kubelet-)?kubepods(-burstable|-besteffort)?(-pod({_UID}))?\.slice(:.*)?"
    rf"|burstable|besteffort|pod({_UID})"
)
_POD_DEPTH = 4  # kubelet.slice, kubelet-kubepods.slice, …-burstable.slice, …-podUID.slice
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")  # RFC 1123, as Kubernetes wants it
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A process's container. runtime: CONTAINERD, CRIO, DOCKER, PODMAN; empty: unknown from the path."""

    id: str = ""  # 64 hexadecimal digits; empty if the container's own group is not visible
    runtime: str = ""
    pod_uid: str = ""  # with dashes, as the API server writes it; empty: no pod


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names as in Kubernetes; empty if unknown."""

    pod: str = ""
    namespace: str = ""
    container: str = ""


def container_in(cgroups: str) -> Container | None:
    """The container named in the text of /proc/PID/cgroup; None: the process is in none."""
    found = None
    for line in cgroups.split("\n"):
        one = _in_path(line.split(":", 2)[-1])
        if one is not None and (found is None or _known(one) > _known(found)):
            found = one
    return found


def _known(container: Container) -> int:
    return sum(map(bool, (container.id, container.runtime, container.pod_uid)))


def _in_path(path: str) -> Container | None:
    pod_uid = container_id = runtime = parent = ""
    for part in path.split("/"):
        slice_name, _, inner = part.partition(":") if ":" in part else (part, "", "")
        if match := _POD.fullmatch(slice_name):
            # anything before this is the node itself
            pod_uid, container_id, runtime = match[1].replace("_", "-"), "", ""
        if not container_id and (match := _CONTAINER.fullmatch(inner or part)):
            container_id, runtime = match[2], _RUNTIMES.get(match[1] or "", _PARENTS.get(parent, ""))
        parent = part
    if not pod_uid and not container_id:
        return None
    return Container(id=container_id, runtime=runtime, pod_uid=pod_uid)


def pod_in(cgroups: str) -> str:
    """The UID of the pod in the text of /proc/PID/cgroup, with dashes; empty: in no pod created by the kubelet."""
    found = {_decided(line.split(":", 2)[-1].split("/")) for line in cgroups.split("\n")} - {""}
    return found.pop() if len(found) == 1 else ""


def _decided(parts: list[str]) -> str:
    inner = list(itertools.dropwhile(lambda part: part in ("", ".."), parts))
    if not inner or not _KUBELETS.fullmatch(inner[0]):
        return ""
    for part in inner[:_POD_DEPTH]:
        if match := _POD.fullmatch(part.partition(":")[0]):
            return match[1].replace("_", "-")
    return ""


def is_pod_uid(text: str) -> bool:
    """Whether the text is a pod UID as the API server writes it, or a static pod's."""
    return "_" not in text and re.fullmatch(_UID, text) is not None


def is_container_id(text: str) -> bool:
    """Whether the text is a container id, or its first digits as runtimes shorten it."""
    return re.fullmatch(r"[0-9a-f]{12,64}", text) is not None


def container_of(pid: int, proc: Path = PROC) -> Container | None:
    """The container of a process. Blocking, but never waits for another process."""
    return container_in(read_cgroups(pid, proc))


def read_cgroups(pid: int, proc: Path = PROC) -> str:
    """The text of /proc/PID/cgroup; empty if there is no such process."""
    with contextlib.suppress(OSError), (proc / str(pid) / "cgroup").open("rb") as file:
        return file.read(_MAX_BYTES).decode("utf-8", "replace")
    return ""


def names_in(environ: Mapping[str, str], hostname: str = "") -> Names:
    """Names from the environment of a process in a pod. hostname: this host's, which pods on its network share."""

    def first(variables: tuple[str, ...]) -> str:
        values = (environ.get(name, "") for name in variables)
        return next((value for value in values if value != hostname and _NAME.fullmatch(value)), "")

    return Names(pod=first(POD_VARIABLES), namespace=first(NAMESPACE_VARIABLES), container=first(CONTAINER_VARIABLES))


def names_of(pid: int, hostname: str, proc: Path = PROC) -> Names:
    """Names for a process in a pod, if its environment may be read. Blocking: a hostile process can delay it."""
    with contextlib.suppress(OSError), (proc / str(pid) / "environ").open("rb") as file:
        text = file.read(_MAX_BYTES).decode("utf-8", "replace")
        return names_in(dict(entry.partition("=")[::2] for entry in text.split("\0")), hostname)
    return Names()

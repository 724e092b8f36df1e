"""Where a capture of many hosts runs: hosts named on the command line, listed in a file, or known to the job's
scheduler. Each becomes a Place.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kineto_protos import endpoints
from kineto_protos.endpoints import ADDRESS_FIELD, DEFAULT_TEMPLATE, HOST_FIELD, KINETOD_NAMESPACE
from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.client.kube import (
    KubeOptions,
    KubeTarget,
    kube_places,
)
from kinetoctl.client.slurm import Run, SlurmJob, expand, few, node_addresses, run_slurm
from kinetoctl.errors import UsageProblem

MAX_FILE_CHARS = 1 << 22
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Place:
    """One daemon to ask, and what to select there.

    host: its name for people; address: gRPC address of its daemon; selector: conditions for processes on this host,
    to which those of the command line are added.
    """

    host: str
    address: str
    selector: pb.Selector = field(default_factory=pb.Selector)

    @property
    def selects(self) -> bool:
        """Whether it selects processes itself."""
        return self.selector.ByteSize() > 0

    def selected(self, condition: pb.Selector) -> pb.Selector:
        """The selector of this host with the conditions of the command line added.

        Raises UsageProblem if a condition is one that the place sets itself: both could not hold.
        """
        given = {field.name for field, _ in condition.ListFields()}
        if twice := [field.name for field, _ in self.selector.ListFields() if field.name in given]:
            option = f"--{twice[0].removesuffix('s').replace('_', '-')}"
            raise UsageProblem(
                f"{option}: the job or pod that you named already sets this condition; use only one of them"
            )
        both = pb.Selector()
        both.CopyFrom(self.selector)
        both.MergeFrom(condition)
        return both


def parse_template(text: str) -> str:
    """A template of an address with {host} or {address} in it. Raises ValueError."""
    if HOST_FIELD not in text and ADDRESS_FIELD not in text:
        raise ValueError(
            f"expected an address with {HOST_FIELD} or {ADDRESS_FIELD} in it, like {DEFAULT_TEMPLATE}, got {text!r}"
        )
    endpoints.parse_address(filled(text, "h"))
    return text


def filled(address_template: str, host: str, address: str = "") -> str:
    """The address of a host's daemon. address: that of the host, if the cluster knows one."""
    return address_template.replace(HOST_FIELD, host).replace(ADDRESS_FIELD, address or host)


def template(given: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """The template from which addresses of daemons are made. Raises ValueError."""
    if given:
        return given
    variable = endpoints.HOST_ADDRESS_VARIABLE
    try:
        return parse_template(environ.get(variable) or DEFAULT_TEMPLATE)
    except ValueError as exc:
        raise ValueError(f"{variable}: {exc}") from exc


def place_of(text: str, address_template: str, selector: pb.Selector | None = None) -> Place:
    """The daemon of a host: by its name, by `name:port`, or by the address of its socket. Raises ValueError."""
    selector = pb.Selector() if selector is None else selector
    if _HOST.fullmatch(text):
        return Place(text, filled(address_template, text), selector)
    try:
        return Place(text, endpoints.parse_address(text), selector)
    except ValueError:
        raise ValueError(f"expected a host name, host:port or unix:/path, got {text!r:.200}") from None


def parse_hosts(text: str, address_template: str) -> list[Place]:
    """The hosts of a list a,b,c or of a file, FILE or @FILE. Raises ValueError."""
    if not text.startswith("@"):
        if "," in text:
            return [place_of(part.strip(), address_template) for part in text.split(",") if part.strip()]
        if not Path(text).exists():
            raise ValueError(f"expected a file of hosts or a list like a,b,c; there is no file {text!r:.200}")
    path = Path(text.removeprefix("@"))
    try:
        with path.open(encoding="utf-8", errors="replace") as stream:
            content = stream.read(MAX_FILE_CHARS + 1)
    except OSError as exc:
        raise ValueError(f"cannot read {path}: {exc.strerror}") from exc
    if len(content) > MAX_FILE_CHARS:
        raise ValueError(f"{path} is too large for a list of hosts (limit: 4 MiB)")
    found = list(_of_lines(content.splitlines(), path, address_template))
    if not found:
        raise ValueError(f"{path} contains no hosts")
    return found


def _of_lines(lines: Iterable[str], path: Path, address_template: str) -> Iterator[Place]:
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        try:
            if len(words) == 1:
                yield place_of(words[0], address_template)
            elif len(words) == 2:
                yield Place(words[0], endpoints.parse_address(words[1]))
            elif words:
                raise ValueError(f"expected `name` or `name address`, got {line.strip()!r:.200}")
        except ValueError as exc:
            raise ValueError(f"{path} line {number}: {exc}") from exc


def distinct(found: Sequence[Place]) -> list[Place]:
    """The places without duplicates, in their order. Raises ValueError if a host has several addresses."""
    kept: dict[tuple[str, str, bytes], Place] = {}
    addresses: dict[str, str] = {}
    for place in found:
        known = addresses.setdefault(place.host, place.address)
        if known != place.address:
            raise ValueError(f"the host {place.host} has two addresses, {known} and {place.address}")
        kept.setdefault((place.host, place.address, place.selector.SerializeToString(deterministic=True)), place)
    return list(kept.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions:
    """The hosts that a command line names; if all fields are empty, the one daemon at --address.

    hosts: by name; lists: each as `parse_hosts` takes it; host_address: template of a daemon's address;
    slurm_job: a job, on those of its nodes that `hosts` and `lists` name, or on all. kube…: see KubeOptions.
    """

    hosts: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    host_address: str | None = None
    slurm_job: SlurmJob | None = None
    kube: tuple[KubeTarget, ...] = ()
    kube_selector: str | None = None
    kube_context: str | None = None
    kubeconfig: str | None = None
    kinetod_namespace: str | None = None


def places(options: PlaceOptions, tell: Callable[[str], None]) -> list[Place]:
    """All places that the options name, in their order; empty if they name no host. Raises ValueError, CliError.

    tell: receives notes for the user. Every new way to name hosts adds its places here.
    """
    address_template = template(options.host_address)
    found = [place_of(host, address_template) for host in options.hosts]
    for text in options.lists:
        found += parse_hosts(text, address_template)
    if options.slurm_job is not None:
        found = of_slurm_job(options.slurm_job, address_template, found, tell)
    return distinct([*found, *of_pods(options, tell)])


def of_pods(options: PlaceOptions, tell: Callable[[str], None]) -> list[Place]:
    """The places of the pods that --kube names. Raises ValueError, CliError."""
    kube = KubeOptions(
        targets=options.kube,
        selector=options.kube_selector or "",
        context=options.kube_context,
        kubeconfig=options.kubeconfig,
        namespace=options.kinetod_namespace or KINETOD_NAMESPACE,
    )
    if not kube.targets:
        if kube.selector:
            raise ValueError("-l needs a namespace: add --kube NAMESPACE")
        return []
    return [Place(each.node, each.address, each.selector) for each in kube_places(kube, tell)]


def of_slurm_job(
    job: SlurmJob, address_template: str, named: Sequence[Place], tell: Callable[[str], None], run: Run = run_slurm
) -> list[Place]:
    """The places of a Slurm job. named: only these, at their addresses; empty for all.

    Raises ValueError, NoSuchJob, JobNotRunning, SlurmFailed.
    """
    expanded = expand(job, run=run)
    for note in expanded.notes:
        tell(note)
    nodes = {node.name: node.selector for node in expanded.nodes}
    if strangers := [place.host for place in named if place.host not in nodes]:
        raise ValueError(f"Slurm job {job.text} is not running on {few(strangers)}, but on {few(nodes)}")
    if named:
        return [replace(place, selector=nodes[place.host]) for place in named]
    addresses = node_addresses(list(nodes), run=run) if ADDRESS_FIELD in address_template else {}
    return [
        Place(name, filled(address_template, name, addresses.get(name, "")), selector)
        for name, selector in nodes.items()
    ]

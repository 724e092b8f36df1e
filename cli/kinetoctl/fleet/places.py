"""Where a capture of many hosts runs: hosts that are named on the command line, one below the other in a file, or
known to whatever runs the job. Each becomes a Place.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kineto_protos import endpoints
from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.parsing import parse_address

HOST_FIELD = "{host}"
DEFAULT_TEMPLATE = f"{HOST_FIELD}:50051"
MAX_FILE_CHARS = 1 << 22
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class Place:
    """One daemon to ask, and what to select there.

    host: its name for people; address: gRPC address of its daemon; selector: what is meant on this host, to which
    the conditions of the command line are added.
    """

    host: str
    address: str
    selector: pb.Selector = field(default_factory=pb.Selector)

    def selected(self, condition: pb.Selector) -> pb.Selector:
        """What to select there with the conditions of the command line."""
        both = pb.Selector()
        both.CopyFrom(self.selector)
        both.MergeFrom(condition)
        return both


def parse_template(text: str) -> str:
    """An address with {host} in it. Raises ValueError."""
    if HOST_FIELD not in text:
        raise ValueError(f"expected an address with {HOST_FIELD} in it, like {DEFAULT_TEMPLATE}, got {text!r}")
    parse_address(text.replace(HOST_FIELD, "h"))
    return text


def template(given: str | None = None, environ: Mapping[str, str] = os.environ) -> str:
    """How the address of a host's daemon is made from the host's name. Raises ValueError."""
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
        return Place(text, address_template.replace(HOST_FIELD, text), selector)
    try:
        return Place(text, parse_address(text), selector)
    except ValueError:
        raise ValueError(f"expected the name of a host, host:port or unix:/path, got {text!r:.200}") from None


def parse_hosts(text: str, address_template: str) -> list[Place]:
    """The hosts of a,b,c or of the file in FILE or @FILE. Raises ValueError."""
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
        raise ValueError(f"{path} is too long for a file of hosts")
    found = list(_of_lines(content.splitlines(), path, address_template))
    if not found:
        raise ValueError(f"{path} names no host")
    return found


def _of_lines(lines: Iterable[str], path: Path, address_template: str) -> Iterator[Place]:
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        try:
            if len(words) == 1:
                yield place_of(words[0], address_template)
            elif len(words) == 2:
                yield Place(words[0], parse_address(words[1]))
            elif words:
                raise ValueError(f"expected `name` or `name address`, got {line.strip()!r:.200}")
        except ValueError as exc:
            raise ValueError(f"{path} line {number}: {exc}") from exc


def distinct(found: Sequence[Place]) -> list[Place]:
    """Each place once, in their order. Raises ValueError if one name stands for several addresses."""
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
    """What a command line says of hosts; all empty: the one daemon at --address.

    hosts: by name; lists: each as `parse_hosts` takes it; host_address: from a host's name to its daemon's address.
    """

    hosts: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    host_address: str | None = None


def places(options: PlaceOptions) -> list[Place]:
    """All places that the options name, in their order; none: nothing names a host. Raises ValueError.

    Every further way to name hosts adds its places here.
    """
    address_template = template(options.host_address)
    found = [place_of(host, address_template) for host in options.hosts]
    for text in options.lists:
        found += parse_hosts(text, address_template)
    return distinct(found)

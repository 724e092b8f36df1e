"""Confines the upload worker: it needs the network and credentials, and nothing else of the daemon's user.

Theory of operation
    Called before the first thread and the first byte from a store. It keeps: the captures; the code of this Python and
    the system's libraries, to read; what resolving names, checking certificates and finding credentials takes; TCP and
    UDP. All else of the daemon's user is gone: keys and other files, the attach helper's socket and every other Unix
    socket, other processes, capabilities, new rights. Where the kernel lacks a part, the others still hold.
    Programs that credentials come from can be started, and are confined in the same way.
"""

import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path

from kinetod.base.capabilities import drop_capabilities
from kinetod.sandbox import landlock, seccomp_filter
from kinetod.sandbox.confinement import code, no_new_rights

_NONE = (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE)
_SYSTEM = (
    "/etc/resolv.conf", "/etc/hosts", "/etc/host.conf", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/services",
    "/etc/protocols", "/etc/passwd", "/etc/localtime", "/etc/mime.types", "/etc/ssl", "/etc/pki",
    "/etc/crypto-policies", "/etc/ca-certificates", "/usr/share", "/usr/local/share", "/proc/cpuinfo",
    "/proc/meminfo", "/proc/sys", "/sys/devices/system/cpu", "/run/systemd/resolve", "/bin", "/usr/bin", "/lib",
    "/lib64", "/usr/lib",
)  # fmt: skip
_HOME = (".aws", ".azure", ".config/gcloud", ".boto")  # where libraries of stores look, and keep tokens
_CERTIFICATES = ("SSL_CERT_DIR", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")  # variables that may name folders
_DAEMONS_OWN = "KINETOD_"  # its settings name its keys


def confine(state_dir: Path, folders: tuple[str, ...], environ: Mapping[str, str] = os.environ) -> None:
    """Confines this process for good. folders: local ones that captures are uploaded to. Raises OSError."""
    for which in _NONE:
        resource.setrlimit(which, (0, 0))
    drop_capabilities()
    no_new_rights()
    if version := landlock.abi():
        landlock.restrict(_rules(state_dir.resolve(), folders, environ), version, network=True)
    if seccomp_filter.available():
        seccomp_filter.install(seccomp_filter.without_others)


def _rules(state_dir: Path, folders: tuple[str, ...], environ: Mapping[str, str]) -> Iterator[tuple[Path, int]]:
    yield from code(state_dir)
    for name in _SYSTEM:
        yield Path(name), landlock.READ | landlock.EXECUTE
    yield (state_dir / "captures").resolve(), landlock.OWN
    for folder in folders:
        yield Path(folder).resolve(), landlock.OWN
    if home := environ.get("HOME"):
        for name in _HOME:
            yield Path(home, name), landlock.OWN
    for name, value in environ.items():
        path = Path(value)
        named = path.is_file() or (name in _CERTIFICATES and path.is_dir())
        if named and path.is_absolute() and not name.startswith(_DAEMONS_OWN):
            yield path, landlock.READ
            if path.is_symlink():  # a token that is renewed: the link will lead to another file
                yield path.parent, landlock.READ

"""Describes the agent's process: the Hello, within the limits of a frame."""

import os
import sys
from typing import Dict, List, Mapping, Optional

from kineto_agent.protocol import wire
from kineto_agent.system.descriptors import read_file
from kineto_agent.version import __version__

_MAX_ARGV_BYTES = 8 * 1024  # in JSON a byte may take six
_MAX_ARGUMENT_BYTES = 2 * 1024
_MAX_TEXT_CHARS = 256
_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_WORLD_SIZE = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def hello(
    sources: Dict[str, List[str]],
    iterations: int,
    busy_capture_id: str,
    environ: Mapping[str, str] = os.environ,
    *,
    iteration_ns: int = 0,
    stalled_ns: int = 0,
) -> wire.Hello:
    """A Hello that describes this process as it is now."""
    return wire.Hello(
        agent_version=__version__,
        pid=os.getpid(),
        python_version="%d.%d.%d" % sys.version_info[:3],
        framework=framework(),
        rank=_number(environ, _RANK),
        world_size=_number(environ, _WORLD_SIZE),
        job_id=job_id(environ),
        iterations=iterations,
        sources=sources,
        argv=command_line(),
        busy_capture_id=busy_capture_id,
        iteration_ns=iteration_ns,
        plugins=wire.PLUGIN_INTERFACE,
        stalled_ns=stalled_ns,
    )


def framework() -> str:
    """Framework and version, for example "torch 2.11.0+cu130"; "" if none is imported."""
    version = getattr(sys.modules.get("torch"), "__version__", None)
    return ("torch %s" % version)[:_MAX_TEXT_CHARS] if version is not None else ""


def job_id(environ: Mapping[str, str]) -> str:
    """Slurm's job id or torchrun's run id; "" if neither is set."""
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    text = environ.get("SLURM_JOB_ID") or ("" if run == "none" else run)  # "none" is torchrun's default
    return _printable(os.fsencode(text))[:_MAX_TEXT_CHARS]


def _number(environ: Mapping[str, str], names: "tuple[str, ...]") -> Optional[int]:
    for name in names:
        text = environ.get(name, "")
        if text.isascii() and text.isdigit() and len(text) < 10:
            return int(text)
    return None


def command_line(path: str = "/proc/self/cmdline") -> List[str]:
    """The arguments of this process; long arguments and long lists are truncated."""
    try:
        data = read_file(path, _MAX_ARGV_BYTES + 1)
    except OSError:
        return []
    cut = len(data) > _MAX_ARGV_BYTES
    arguments = data[:_MAX_ARGV_BYTES].split(b"\0")
    if not cut and arguments[-1] == b"":
        arguments.pop()
    texts = [_printable(argument[:_MAX_ARGUMENT_BYTES]) for argument in arguments]
    return [*texts, "..."] if cut else texts


def _printable(data: bytes) -> str:
    """Decode to text that every reader can encode again."""
    return data.decode("utf-8", "replace")

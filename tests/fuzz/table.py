"""The list of fuzzing targets: which door each one is, and what it may take.

A target in Python is a module of fuzz.targets with `play(data)`, which raises only if the product did what it must not,
and `seeds()`. A target in C is a file of tests/fuzz/native, beside the sources that it needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests" / "fuzz" / "corpus"
NATIVE = ROOT / "tests" / "fuzz" / "native"
SERVICE = ROOT / "daemon" / "native"
AGENT = ROOT / "agent" / "native"
LONG_RUN_MB = 4096  # ASan keeps something of each input that Python plays: 600 MiB of 25,000


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One door. Findings: what takes longer than slowest_s for one input, or more than memory_mb in all."""

    name: str
    door: str  # for docs/fuzzing.md
    slowest_s: int = 10
    memory_mb: int = 1024
    longest: int = 16_000  # bytes of an input


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeTarget(Target):
    """In C. sources: folders' files or files; folder: of the headers."""

    folder: Path
    sources: tuple[str, ...] = ("**/*.c",)
    fake_cupti: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonTarget(Target):
    """In Python. packages: what libFuzzer sees the branches of. folder: of its module, below fuzz.targets."""

    packages: tuple[str, ...]
    folder: str = ""

    @property
    def module(self) -> str:
        """The module's full name."""
        return ".".join(filter(None, ("fuzz.targets", self.folder, self.name)))


NATIVE_TARGETS = (
    NativeTarget(
        name="codec", door="raw records of a target into columns, columns into text", folder=SERVICE,
        sources=("codec/decode_records.c", "codec/intern_keys.c", "codec/write_rows.c", "codec/spill.c"),
    ),
    NativeTarget(
        name="chrome", door="the reader of Chrome traces, in pieces of any size", folder=SERVICE,
        sources=("chrome/*.c",),
    ),
    NativeTarget(
        name="perfetto", door="the reader of Perfetto traces", folder=SERVICE,
        sources=("perfetto/read_*.c", "chrome/intern_text.c"),
    ),
    NativeTarget(
        name="perfetto_write", door="lanes and packets of events with any times", folder=SERVICE,
        sources=("perfetto/write_packets.c",),
    ),
    NativeTarget(
        name="nest", door="trees of events with any times, against a slow copy of the rules", folder=SERVICE,
        sources=("codec/build_tree.c",),
    ),
    NativeTarget(
        name="paths", door="longest paths of any graph, against trying all of them", folder=SERVICE,
        sources=("codec/longest_paths.c",),
    ),
    NativeTarget(
        name="walk", door="records with a declared schema: where each one begins, in any framing", folder=SERVICE,
        sources=("codec/walk_records.c", "codec/spill.c"),
    ),
    NativeTarget(
        name="spill", door="the decoder's memory in a pool and a file: any order of requests", folder=SERVICE,
        sources=("codec/spill.c",),
    ),
    NativeTarget(
        name="serve", door="packets from a daemon to the collector in a process without Python", folder=AGENT,
        fake_cupti=True,
    ),
    NativeTarget(
        name="call_site", door="machine code of a library, in which the collector looks for a call", folder=AGENT,
        sources=("patching/call_site.c",),
    ),
)  # fmt: skip

_SERVICE, _TRACE = ("kinetod",), ("kineto_trace",)
_PROCESSES = "processes"  # what a hostile process shows
PYTHON_TARGETS = (
    PythonTarget(
        name="link_frame", door="frames of agents and daemons, and how the other side handles them",
        packages=("kineto_agent", "kinetod"),
    ),
    PythonTarget(name="plugin_bundle", door="plug-ins that a daemon sends to an agent", packages=("kineto_agent",)),
    PythonTarget(name="arena", door="shared memory that a target hands over", packages=_SERVICE),
    PythonTarget(
        name="spool", door="target.json and raw records of every source, through the decoder", packages=_TRACE,
        longest=60_000, memory_mb=LONG_RUN_MB,
    ),
    PythonTarget(name="decoder_answer", door="answers of a decoder that was taken over", packages=_SERVICE),
    PythonTarget(name="trace_file", door="opening trace files of every format, plain and compressed",
                 packages=_TRACE),
    PythonTarget(name="chrome_again", door="Chrome traces: read, written as JSON, and read back the same",
                 packages=_TRACE, memory_mb=LONG_RUN_MB),
    PythonTarget(name="columns", door="stored traces: trace.json, Parquet, strings", packages=_TRACE, longest=60_000),
    PythonTarget(name="manifest", door="manifests of uploaded captures, and reports of their hosts' clocks",
                 packages=_TRACE),
    PythonTarget(name="requests", door="gRPC requests: captures, selectors, labels", packages=_SERVICE),
    PythonTarget(name="dynolog_rpc", door="requests of Dynolog's clients, and the configurations in them",
                 packages=("kinetod", "kineto_protos"), folder="other_tools"),
    PythonTarget(name="helper_messages", door="messages between front end and attach helper, both ways",
                 packages=_SERVICE),
    PythonTarget(name="attach_policy", door="attach.toml", packages=_SERVICE),
    PythonTarget(name="config", door="config.toml and environment variables", packages=_SERVICE),
    PythonTarget(name="proc", door="/proc of a hostile process: status, stat, maps, cgroup, environ, cmdline, auxv",
                 packages=_SERVICE, folder=_PROCESSES),
    PythonTarget(name="image", door="ELF images in the memory of a hostile process", packages=_SERVICE,
                 folder=_PROCESSES),
    PythonTarget(name="device_code", door="ELF files with device code", packages=_SERVICE, folder=_PROCESSES),
    PythonTarget(name="seccomp", door="seccomp filters of a hostile process", packages=_SERVICE, folder=_PROCESSES),
    PythonTarget(name="cluster", door="answers of the API server, the kubelet and Slurm",
                 packages=("kinetod", "kinetoctl")),
    PythonTarget(name="polls", door="datagrams of processes that poll as libkineto does", packages=_SERVICE,
                 folder="other_tools"),
    PythonTarget(name="writer", door="messages between front end and writer service, both ways, and writer.toml",
                 packages=_SERVICE, folder="other_tools"),
    PythonTarget(
        name="counters", door="packets of kinetod-counters, both ways, files of its samples, and AMD's table of a GPU",
        packages=("kinetod", "kineto_trace.spool"), folder="other_tools",
    ),
    PythonTarget(name="receiver", door="answers of webhooks' receivers, as HTTP", packages=_SERVICE),
    PythonTarget(
        name="daemon_answer", door="strings of another host's daemon, as kinetoctl shows it", packages=("kinetoctl",),
    ),
    PythonTarget(name="words", door="libkineto.conf, option values, strings for the terminal",
                 packages=("kinetoctl", "kineto_trace", "kineto_protos")),
)  # fmt: skip
TARGETS: tuple[Target, ...] = (*NATIVE_TARGETS, *PYTHON_TARGETS)


def corpus(target: Target) -> Sequence[Path]:
    """Its inputs in the repository."""
    return sorted((CORPUS / target.name).iterdir())

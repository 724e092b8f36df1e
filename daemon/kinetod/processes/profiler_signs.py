"""Signs that identify other profilers, and the resources that each holds. Pure.

CUPTI has one subscriber per process, so nobody else can record the CUDA calls and GPU activities of a process that a
tool traces. Hardware counters belong to a whole GPU: before Hopper, only one tool can use them. Our traces need none.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Holds(StrEnum):
    """Resources that a tool withholds from others."""

    PROCESS = "process"  # CUPTI in the processes that it traces
    COUNTERS = "counters"  # the hardware counters of GPUs
    BOTH = "both"
    PERHAPS = "perhaps"  # its library is loaded, as in programs that profile nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A tool. programs: names of its own processes; libraries: file names mapped into processes that it traces."""

    product: str
    holds: Holds
    programs: tuple[str, ...] = ()
    libraries: str = "(?!)"  # a regular expression for the beginning of the name; this one matches nothing


# Every reader of counters maps these, tools as well as programs that a tool measures.
COUNTERS_USER = Sign(
    product="CUPTI's hardware counters", holds=Holds.COUNTERS, libraries=r"libnvperf_(host|target)\.so"
)
DCGM, EXPORTER = "DCGM", "dcgm-exporter"
SIGNS: Sequence[Sign] = (
    Sign(
        product=DCGM,
        holds=Holds.COUNTERS,
        programs=("nv-hostengine",),
        libraries=r"libdcgmmoduleprofiling\.so",
    ),
    Sign(product=EXPORTER, holds=Holds.COUNTERS, programs=("dcgm-exporter",)),
    Sign(
        product="Nsight Systems",
        holds=Holds.PROCESS,
        programs=("nsys", "nsys-launcher"),
        libraries=r"libToolsInjection(Proxy)?(32|64)?\.so",
    ),
    Sign(
        product="Nsight Compute",
        holds=Holds.BOTH,
        programs=("ncu", "nv-nsight-cu-cli"),
        libraries=r"libcuda-injection\.so|libTreeLauncher\w*\.so",
    ),
    Sign(product="nvprof", holds=Holds.PROCESS, programs=("nvprof",), libraries=r"libcuinj(32|64)\.so"),
    Sign(
        product="Compute Sanitizer",
        holds=Holds.PROCESS,
        programs=("compute-sanitizer",),
        libraries=r"libsanitizer-(collection|public)\.so",
    ),
    Sign(product="Triton's Proton", holds=Holds.PERHAPS, libraries=r"libproton\.so"),
    COUNTERS_USER,
)
CUPTI_USER = Sign(product="a program with its own CUPTI", holds=Holds.PERHAPS, libraries=r"libcupti\.so")
# Libraries that always load CUPTI, and our own.
_HARMLESS = re.compile(r"libtorch|libtensorflow|xla_cuda|libjax|libkineto_collector|_pywrap_tensorflow")
_COMM_CHARS = 15  # the kernel truncates names of programs
_LIBRARIES = [(sign, re.compile(sign.libraries)) for sign in SIGNS]
_ALL = re.compile("|".join(f"(?:{each.libraries})" for each in (*SIGNS, CUPTI_USER)))
BY_PRODUCT = {sign.product: sign for sign in (*SIGNS, CUPTI_USER)}


def of_program(names: Iterable[str]) -> Sign | None:
    """The tool whose own program has one of these names."""
    wanted = set(names)
    for sign in SIGNS:
        if any({program, program[:_COMM_CHARS]} & wanted for program in sign.programs):
            return sign
    return None


def of_libraries(names: Sequence[str]) -> list[tuple[Sign, str]]:
    """Profilers whose libraries a process has mapped, each with its first match. names: the mapped files."""
    suspects = [name for name in names if _ALL.match(name)]
    found = []
    for sign, pattern in _LIBRARIES:
        library = next((name for name in suspects if pattern.match(name)), "")
        if library:
            found.append((sign, library))
    if not found and suspects and not any(map(_HARMLESS.match, names)):
        found.append((CUPTI_USER, suspects[0]))
    return found

"""The settings of [counters]: what samples hardware counters of GPUs; a part of settings.Config."""

from dataclasses import dataclass
from pathlib import Path

from kinetod.config.addresses import checked_socket_path
from kinetod.config.default_paths import COUNTERS_SOCKET, default_counters_socket
from kinetod.config.foreign_tools_settings import ForeignToolsConfig
from kinetod.config.setting import HostDefault, setting
from kinetod.config.value_kinds import Choice, ExistingFile, Maybe, ParsedText


@dataclass(frozen=True, slots=True, kw_only=True)
class CountersConfig(ForeignToolsConfig):  # classes with slots can only be combined in a chain
    """Hardware counters."""

    # By hand: a line of facts and one of meaning for each setting.
    # fmt: off
    counters_socket: Path | None = setting(
        "counters.socket", Maybe(ParsedText("path", checked_socket_path)),
        HostDefault(
            default_counters_socket, f"{COUNTERS_SOCKET} if this user may use it", f'"{COUNTERS_SOCKET}"',
        ),
        meaning="socket of the kinetod-counters service; empty: the daemon starts kinetod-counters by itself, with its "
        "own rights, when somebody asks for counters",
    )
    counters_backend: str = setting(
        "counters.backend", Choice("auto", "amdgpu", "cupti", "cupti-python", "level-zero"), "auto",
        meaning="what samples in a kinetod-counters that the daemon starts: auto: all that the host has GPUs for; "
        "cupti: NVIDIA's GPUs, by its own use of libcupti; cupti-python: the same by NVIDIA's package (pip install "
        "'kinetod[cupti]'); amdgpu: AMD's GPUs, by the kernel's driver; level-zero: Intel's, by Level Zero's tools",
    )
    counters_library: Path | None = setting(
        "counters.library", Maybe(ExistingFile()), None,
        meaning="the library that such a kinetod-counters loads for its backend, with auto the libcupti; empty: that "
        "of the wheel nvidia-cuda-cupti, else the host's",
    )
    # fmt: on

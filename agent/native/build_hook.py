"""Compiles the native libraries with the system's C compiler.

Used in two ways: hatchling calls `NativeBuildHook` when a wheel is built or an editable install is made
(of the whole project, or of `agent/` alone), and `python agent/native/build_hook.py` rebuilds the
libraries in place. The libraries have no Python ABI: one wheel serves every CPython of its platform.

The compiler is `$CC`, else the first of cc, gcc and clang; `$CFLAGS` and `$LDFLAGS` are appended.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, Dict, List, NamedTuple

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script, outside a build
    BuildHookInterface = object  # type: ignore[assignment,misc]

AGENT = Path(__file__).resolve().parent.parent

COMPILE_FLAGS = ("-std=c11", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra")
# nodelete: vendor threads may call into the collector at any time, so it is never unloaded.
LINK_FLAGS = ("-shared", "-Wl,-z,defs", "-Wl,-z,nodelete", "-ldl", "-lm")


class BuildError(RuntimeError):
    """A native library could not be built. The text says why and what to do."""


class Library(NamedTuple):
    """One shared library: every C file below `sources`, whose includes are relative to it, becomes `target`."""

    sources: Path
    target: Path


def libraries(project: Path) -> List[Library]:
    """The libraries of the project rooted at `project` (the whole checkout, or `agent/`) that have sources."""
    known = [Library(AGENT / "native", AGENT / "kineto_agent" / "_native" / "libkineto_collector.so")]
    known.append(Library(AGENT / "native_tools", AGENT / "kineto_agent" / "_native" / "libkineto_rocprofiler.so"))
    daemon = project / "daemon"
    known.append(Library(daemon / "native", daemon / "kineto_trace" / "_native" / "libkineto_codec.so"))
    known.append(Library(daemon / "native_counters", daemon / "kinetod" / "_native" / "libkineto_counters.so"))
    return [library for library in known if any(library.sources.rglob("*.c"))]


def find_compiler() -> List[str]:
    """The C compiler as an argument list. Raises BuildError if there is none."""
    chosen = os.environ.get("CC", "").strip()
    candidates = [chosen] if chosen else ["cc", "gcc", "clang"]
    for candidate in candidates:
        command = shlex.split(candidate)
        if shutil.which(command[0]):
            return command
    raise BuildError(
        "no C compiler found (tried %s): the agent's collector and the trace codec are C11. "
        "Install one (Debian/Ubuntu: apt-get install gcc libc6-dev) or name it in CC." % ", ".join(candidates)
    )


def compile_library(library: Library) -> None:
    """Build one library and put it in place by a rename, so that a process using the old one is not disturbed."""
    sources = [str(path) for path in sorted(library.sources.rglob("*.c"))]
    library.target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=str(library.target.parent)) as folder:
        built = Path(folder) / library.target.name
        command = [*find_compiler(), *COMPILE_FLAGS, *shlex.split(os.environ.get("CFLAGS", ""))]
        command += ["-iquote", str(library.sources), *sources]
        command += ["-o", str(built), *LINK_FLAGS, *shlex.split(os.environ.get("LDFLAGS", ""))]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            raise BuildError("building %s failed:\n%s\n%s" % (library.target.name, shlex.join(command), done.stdout))
        if done.stdout:
            sys.stderr.write(done.stdout)
        built.replace(library.target)


def build(project: Path) -> List[Path]:
    """Build every library of `project`; returns the files made."""
    if not sys.platform.startswith("linux"):
        raise BuildError("the native libraries need Linux (memfd, eventfd, /proc); this is %s" % sys.platform)
    made = []
    for library in libraries(project):
        compile_library(library)
        made.append(library.target)
    return made


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling's entry: compiles before a wheel or an editable install is assembled."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: Dict[str, Any]) -> None:
        """Compile, and tag the wheel for this platform and for any CPython 3."""
        if self.target_name != "wheel":
            return
        build(Path(self.root))
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + platform


def main() -> int:
    """Rebuild in place."""
    try:
        made = build(AGENT.parent)
    except BuildError as exc:
        sys.stderr.write("error: %s\n" % exc)
        return 1
    sys.stdout.write("".join("%s\n" % os.path.relpath(str(path)) for path in made))
    return 0


if __name__ == "__main__":
    sys.exit(main())

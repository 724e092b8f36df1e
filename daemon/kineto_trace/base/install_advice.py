"""What to run to install a missing package, given how kinetod itself is installed here. No index has kinetod."""

import json
import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from urllib.parse import unquote, urlsplit

PRODUCT = "kinetod"
# Written into the environment by deploy/packages/build.sh, and by deploy/supply/install.sh for packages and the image.
_OF_PACKAGES, _OF_OUR_BUILDS = "share/doc/kinetod", "share/sbom/kinetod.cdx.json"


def install_advice(package: str, *, prefix: Path = Path(sys.prefix), python: str = sys.executable) -> str:
    """Returns "run …": the command that installs a package from PyPI where this Python finds it.

    package: its name, which options of pip may precede. prefix: the environment that `python` belongs to. In a
    container image the advice is what to add to the image, because what is installed in a container does not last.
    """
    program = shlex.quote(python)
    if (prefix / _OF_OUR_BUILDS).is_file():  # an environment without pip
        command = f"pip --python {program} install {package}"
        packaged = (prefix / _OF_PACKAGES).is_dir()
        return f"run sudo {command}" if packaged else f"build an image FROM this one with USER root and RUN {command}"
    if find_spec("pip") is None and which("uv"):
        return f"run uv pip install --python {program} {package}"
    return f"run {program} -m pip install {package}"


def _origin() -> str | None:
    """Returns where pip got the installed kinetod from: `direct_url.json` of PEP 610."""
    from importlib.metadata import PackageNotFoundError, distribution  # slow to import, and rarely needed

    try:
        return distribution(PRODUCT).read_text("direct_url.json")
    except PackageNotFoundError:
        return None


def reinstall_advice(
    *, prefix: Path = Path(sys.prefix), origin: Callable[[], str | None] = _origin, python: str = sys.executable
) -> str:
    """Returns how to install kinetod again, with all of its parts. origin: returns `direct_url.json`, or None."""
    if (prefix / _OF_OUR_BUILDS).is_file():
        packaged = (prefix / _OF_PACKAGES).is_dir()
        return f"install the package {PRODUCT} again" if packaged else "pull the image again"
    found = json.loads(origin() or "{}")
    path = shlex.quote(unquote(urlsplit(found.get("url", "")).path))
    if "archive_info" in found:
        return install_advice(f"--force-reinstall {path}", prefix=prefix, python=python)
    if "dir_info" in found:
        editable = "-e " if found["dir_info"].get("editable") else ""
        return install_advice(editable + path, prefix=prefix, python=python)
    return f"install {PRODUCT} again from its checkout or wheel"

"""The unmodified `dyno`, built from Dynolog's sources and Debian's packages of the crates that it needs.

Theory of operation
    The sources are no part of this repository: DYNOLOG_VARIABLE names a checkout of facebookincubator/dynolog. The
    three crates that dyno names (anyhow, clap 3, serde_json) and all that these need are packages of Debian bookworm,
    which unpack to a registry that cargo takes in place of crates.io. Nothing is installed, and nothing outside of the
    folder changes.
"""

import os
import shutil
import subprocess
from pathlib import Path

DYNOLOG_VARIABLE = "DYNOLOG_SOURCES"
_PACKAGES = ("librust-anyhow-dev", "librust-clap-3-dev", "librust-serde-json-dev")
_FETCH_S, _BUILD_S = 300, 1200


class DynoMissing(Exception):
    """It cannot be built here; the text says why."""


def sources() -> Path:
    """The checkout of Dynolog. Raises DynoMissing."""
    named = os.environ.get(DYNOLOG_VARIABLE, "")
    if not named:
        raise DynoMissing(f"{DYNOLOG_VARIABLE} names no checkout of facebookincubator/dynolog (make dyno DYNOLOG=path)")
    if not (Path(named) / "cli" / "Cargo.toml").is_file():
        raise DynoMissing(f"{named} has no cli/Cargo.toml")
    return Path(named)


def built(folder: Path) -> Path:
    """The program, built below an empty folder. Raises DynoMissing."""
    found = sources()
    if shutil.which("cargo") is None:
        raise DynoMissing("there is no cargo")
    registry = _registry(folder)
    shutil.copytree(found / "cli", folder / "cli")
    settings = folder / "cli" / ".cargo" / "config.toml"
    settings.parent.mkdir()
    settings.write_text(
        f'[source.crates-io]\nreplace-with = "debian"\n[source.debian]\ndirectory = "{registry}"\n[build]\njobs = 1\n'
    )
    environ = {**os.environ, "CARGO_HOME": str(folder / "home"), "CARGO_TARGET_DIR": str(folder / "target")}
    _run(["cargo", "build", "--quiet", "--offline"], _BUILD_S, cwd=folder / "cli", environ=environ)
    return folder / "target" / "debug" / "dyno"


def _registry(folder: Path) -> Path:
    """Fetches and unpacks the packages. Raises DynoMissing."""
    packages, root = folder / "packages", folder / "root"
    packages.mkdir()
    listed = _run(["apt-get", "install", "--print-uris", "-qq", *_PACKAGES], _FETCH_S)
    files = [line.split()[1] for line in listed.splitlines() if line.startswith("'")]
    names = sorted({name.partition("_")[0].replace("%2b", "+") for name in files if name.startswith("librust-")})
    if not names:
        raise DynoMissing(f"apt knows no packages of {', '.join(_PACKAGES)}; run apt-get update")
    _run(["apt-get", "download", "-qq", *names], _FETCH_S, cwd=packages)
    for package in packages.glob("*.deb"):
        _run(["dpkg-deb", "--extract", str(package), str(root)], _FETCH_S)
    return root / "usr" / "share" / "cargo" / "registry"


def _run(command: list[str], timeout_s: int, cwd: Path | None = None, environ: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise DynoMissing(f"{command[0]}: {exc}") from exc
    if done.returncode:
        raise DynoMissing(f"{command[0]} {command[1]} failed: {done.stderr.strip()[-500:]}")
    return done.stdout

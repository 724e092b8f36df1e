"""The manifests of deploy/kubernetes, rendered by kubectl, and as they lie there."""

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
MANIFESTS = ROOT / "deploy/kubernetes"
OVERLAYS = ("base", "overlays/amd", "overlays/everything", "overlays/nvidia")
Manifest = dict[str, Any]


@functools.cache
def kustomize_version() -> tuple[int, int] | None:
    """Version of the kustomize in kubectl; (2, 0) if it does not tell, None without kubectl."""
    if shutil.which("kubectl") is None:
        return None
    done = subprocess.run(["kubectl", "version", "--client"], capture_output=True, text=True, check=False, timeout=60)
    found = re.search(r"Kustomize Version: v(\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else (2, 0)


def rendered(overlay: str) -> list[Manifest]:
    """What `kubectl apply -k` would send. Skips the test where kubectl cannot render it."""
    version = kustomize_version()
    if version is None:
        pytest.skip("no kubectl (Debian's kubernetes-client renders the base)")
    if overlay != "base" and version < (4, 0):
        pytest.skip(f"kubectl's kustomize {version[0]}.{version[1]} knows no patches and components: kubectl 1.21 does")
    return list(_rendered(overlay))


@functools.cache
def _rendered(overlay: str) -> tuple[Manifest, ...]:
    done = subprocess.run(
        ["kubectl", "kustomize", str(MANIFESTS / overlay)],
        env={**os.environ, "KUBECONFIG": os.devnull},
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def resource_files() -> Iterator[tuple[Path, Manifest]]:
    """Whole resources, without patches, as they are listed in base and components."""
    for kustomization in sorted(MANIFESTS.glob("*/**/kustomization.yaml")):
        for name in yaml.safe_load(kustomization.read_text()).get("resources", []):
            if name.endswith(".yaml"):
                path = kustomization.parent / name
                yield path, yaml.safe_load(path.read_text())


def base_daemon_set() -> Manifest:
    """The DaemonSet as the file has it; no renderer is needed."""
    loaded = yaml.safe_load((MANIFESTS / "base/daemon-set.yaml").read_text())
    assert isinstance(loaded, dict)
    return loaded


_KEYS = ("name", "mountPath", "containerPort")  # by which the API joins lists of these objects


def patched(daemon_set: Manifest, component: str) -> Manifest:
    """With a component's patch, as the API joins them (a strategic merge); no renderer is needed."""
    patch = yaml.safe_load((MANIFESTS / "components" / component / "daemon-set.yaml").read_text())
    joined = _joined(daemon_set, patch)
    assert isinstance(joined, dict)
    return joined


def _joined(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _joined(old[key], value) if key in old else value for key, value in new.items()}}
    if isinstance(old, list) and isinstance(new, list) and new and isinstance(new[0], dict):
        key = next(each for each in reversed(_KEYS) if each in new[0])
        found = {each[key]: each for each in old}
        found |= {each[key]: _joined(found.get(each[key], {}), each) for each in new}
        return list(found.values())
    return new


def only(manifests: list[Manifest], kind: str) -> Manifest:
    """The only manifest of this kind."""
    (found,) = (each for each in manifests if each["kind"] == kind)
    return found


def containers(daemon_set: Manifest) -> dict[str, Manifest]:
    """Containers by name, init containers included."""
    pod = daemon_set["spec"]["template"]["spec"]
    return {each["name"]: each for each in (*pod["initContainers"], *pod["containers"])}

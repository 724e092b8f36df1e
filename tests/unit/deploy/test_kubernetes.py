"""The manifests: rendered by kubectl, held against the API's schemas, kinetod's own settings and the documentation."""

import contextlib
import copy
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import tomllib
import yaml
from click.testing import CliRunner
from kineto_agent import __version__
from kineto_protos import endpoints
from kinetoctl.client.kube import TOKENS_PORT
from kinetoctl.kinetod_web import VARIABLES as WEB_VARIABLES
from kinetoctl.kinetod_web import command as kinetod_web_command
from kinetoctl.web.shared.fleet_hosts import hosts_of_service
from kinetod.__main__ import command as kinetod_command
from kinetod.attach_helper import allow_list
from kinetod.attach_helper.__main__ import command as attach_command
from kinetod.counters.__main__ import command as counters_command
from support.peers.kubernetes import (
    MANIFESTS,
    OVERLAYS,
    ROOT,
    Manifest,
    base_daemon_set,
    containers,
    only,
    patched,
    rendered,
    resource_files,
)

OLDEST, NEWEST = "1.30", kubernetes_validate.latest_version()  # appArmorProfile came with 1.30
NOT_KUBERNETES_OWN = {"PodMonitor"}  # the Prometheus operator's
FRONT_END = 64970
FORWARDED = {"tokens"}  # by the API server, to the pod's loopback: no policy is about it
FILES = dict(resource_files())
CONTAINERS = containers(base_daemon_set())
DOCS = (ROOT / "docs/kubernetes.md").read_text()


def validate(manifest: Manifest, version: str) -> None:
    if manifest["kind"] not in NOT_KUBERNETES_OWN:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(MANIFESTS)))
def test_each_resource_is_what_the_api_s_schema_says(path: Path, version: str) -> None:
    validate(FILES[path], version)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_kubectl_renders_is_what_the_api_s_schema_says(overlay: str) -> None:
    for manifest in rendered(overlay):
        validate(manifest, NEWEST)


COMPONENTS = sorted(path.parent.name for path in MANIFESTS.glob("components/*/daemon-set.yaml"))


@pytest.mark.parametrize("names", [*([name] for name in COMPONENTS), COMPONENTS], ids=" ".join)
def test_the_daemon_set_with_components_is_what_the_api_s_schema_says(names: list[str]) -> None:
    daemon_set = base_daemon_set()
    for name in names:
        daemon_set = patched(daemon_set, name)
    for version in (OLDEST, NEWEST):
        validate(daemon_set, version)
    found = containers(daemon_set)
    assert found.keys() - CONTAINERS.keys() == {"counters"} & set(names) and found["attach"] == CONTAINERS["attach"]
    volumes = {volume["name"] for volume in daemon_set["spec"]["template"]["spec"]["volumes"]}
    assert {mount["name"] for each in found.values() for mount in each["volumeMounts"]} <= volumes


def test_with_permission_kinetod_serves_tokens_where_clients_look_and_its_account_is_mounted(tmp_path: Path) -> None:
    front_end = containers(patched(base_daemon_set(), "permission"))["kinetod"]
    environ = {each["name"]: each.get("value", "node-1") for each in front_end["env"]}
    shutil.copy(MANIFESTS / "base/config.toml", tmp_path)
    arguments = ["--config", str(tmp_path / "config.toml"), "--check-config"]
    result = CliRunner().invoke(kinetod_command, arguments, env=environ, standalone_mode=False)
    assert result.exception is None and result.return_value == 0, (result.exception, result.output)
    settings = dict(line.partition(" = ")[::2] for line in result.output.splitlines())
    (port,) = (port for port in front_end["ports"] if port["name"] == TOKENS_PORT)
    assert f"127.0.0.1:{port['containerPort']}" in settings["access.kubernetes_listen"]
    assert settings["access.kubernetes"].startswith("true")
    assert any(f'"{mount["mountPath"]}"' in settings["kubernetes.account_dir"] for mount in front_end["volumeMounts"])


def test_a_field_that_does_not_exist_is_noticed() -> None:
    wrong = copy.deepcopy(base_daemon_set())
    wrong["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="hostPid"):
        validate(wrong, NEWEST)


# ---------------------------------------------------------------- permissions


def test_the_front_end_has_no_right_at_all() -> None:
    security = containers(base_daemon_set())["kinetod"]["securityContext"]
    assert security == {
        "runAsNonRoot": True,
        "runAsUser": FRONT_END,
        "runAsGroup": FRONT_END,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_the_helper_has_the_capabilities_of_its_systemd_unit_and_no_others() -> None:
    unit = (ROOT / "deploy/systemd/kinetod-attach.service").read_text()
    (listed,) = re.findall(r"^CapabilityBoundingSet=(.*)$", unit, re.MULTILINE)
    capabilities = containers(base_daemon_set())["attach"]["securityContext"]["capabilities"]
    assert capabilities == {"drop": ["ALL"], "add": [name.removeprefix("CAP_") for name in listed.split()]}


def test_the_sampler_of_counters_has_no_right_at_all_and_asks_for_no_gpu() -> None:
    sampler = containers(patched(base_daemon_set(), "counters"))["counters"]
    assert sampler["securityContext"] == {
        "runAsUser": 0,
        "runAsGroup": FRONT_END,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert {mount["name"] for mount in sampler["volumeMounts"]} == {"counters-socket", "temporary"}
    assert {name for kind in sampler["resources"].values() for name in kind} == {"cpu", "memory"}


def test_the_front_end_asks_and_the_probe_looks_where_the_sampler_of_counters_listens() -> None:
    found = containers(patched(base_daemon_set(), "counters"))
    sampler, front_end = found["counters"], found["kinetod"]
    program, *arguments = sampler["command"]
    known = {text for each in counters_command.params for text in each.opts}
    assert Path(program).name == "kinetod-counters"
    assert {argument.partition("=")[0] for argument in arguments} <= known
    options = dict(argument.split("=") for argument in arguments)
    environ = {each["name"]: each["value"] for each in front_end["env"]}
    assert environ == {"KINETOD_COUNTERS_SOCKET": options["--socket"]}
    assert int(options["--caller"]) == front_end["securityContext"]["runAsUser"]
    for probe in ("startupProbe", "livenessProbe"):
        assert sampler[probe]["exec"]["command"][-1] == f"counters:{options['--socket']}"
    (mount,) = (each for each in front_end["volumeMounts"] if each["name"] == "counters-socket")
    assert mount["readOnly"] is True and options["--socket"].startswith(f"{mount['mountPath']}/")


def test_the_helper_has_no_seccomp_filter_of_its_own() -> None:
    security = containers(base_daemon_set())["attach"]["securityContext"]
    assert security["seccompProfile"] == {"type": "Unconfined"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_container_is_privileged_nor_in_the_node_s_network(overlay: str) -> None:
    daemon_set = only(rendered(overlay), "DaemonSet")
    pod = daemon_set["spec"]["template"]["spec"]
    assert pod["hostPID"] is True
    assert not {"hostNetwork", "hostIPC", "shareProcessNamespace"} & pod.keys()
    for container in containers(daemon_set).values():
        assert "privileged" not in container["securityContext"]
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["resources"].keys() == {"requests", "limits"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_pod_gets_these_folders_of_the_node_and_no_others(overlay: str) -> None:
    volumes = only(rendered(overlay), "DaemonSet")["spec"]["template"]["spec"]["volumes"]
    paths = sorted(volume["hostPath"]["path"] for volume in volumes if "hostPath" in volume)
    assert paths == ["/run/kineto", "/run/kineto-agent", "/var/lib/kineto", "/var/lib/kubelet/pod-resources"]


def test_no_folder_of_the_node_lies_in_one_in_which_the_front_end_could_replace_it() -> None:
    volumes = {each["name"]: each for each in base_daemon_set()["spec"]["template"]["spec"]["volumes"]}
    paths = {name: Path(each["hostPath"]["path"]) for name, each in volumes.items() if "hostPath" in each}
    writable = {paths[mount["name"]] for mount in CONTAINERS["kinetod"]["volumeMounts"]
                if mount["name"] in paths and not mount.get("readOnly")}  # fmt: skip
    assert writable and not [path for path in paths.values() if writable & set(path.parents)]


def test_only_the_helper_reaches_the_kubelet_and_only_the_front_end_has_an_account() -> None:
    permission = yaml.safe_load((MANIFESTS / "components/permission/daemon-set.yaml").read_text())["spec"]["template"]
    (front_end,) = permission["spec"]["containers"]
    assert front_end["name"] == "kinetod"
    mounts = {name: {mount["name"] for mount in each["volumeMounts"]} for name, each in CONTAINERS.items()}
    assert [name for name, found in mounts.items() if "pod-resources" in found] == ["attach"]
    found = allow_list.load(MANIFESTS / "base/attach.toml")
    (mount,) = (each for each in CONTAINERS["attach"]["volumeMounts"] if each["name"] == "pod-resources")
    assert mount["readOnly"] is True and str(found.kubelet_socket).startswith(f"{mount['mountPath']}/")


def test_kinetod_may_ask_who_somebody_is_what_they_may_and_for_pods_and_nothing_else() -> None:
    files = {path.name: manifest for path, manifest in FILES.items() if path.parent.name == "permission"}
    rules = files["cluster-role.yaml"]["rules"]
    assert [(rule["resources"], rule["verbs"]) for rule in rules] == [
        (["tokenreviews"], ["create"]),
        (["subjectaccessreviews"], ["create"]),
        (["pods"], ["list"]),
    ]
    binding, account = files["cluster-role-binding.yaml"], only(list(FILES.values()), "ServiceAccount")
    (subject,) = binding["subjects"]
    assert (binding["roleRef"]["name"], subject["name"]) == ("kinetod", account["metadata"]["name"])


@pytest.mark.parametrize("overlay", sorted({*OVERLAYS} - {"overlays/everything"}))
def test_without_components_nothing_may_ask_the_api_server(overlay: str) -> None:
    manifests = rendered(overlay)
    assert not {each["kind"] for each in manifests} & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}
    assert only(manifests, "ServiceAccount")["automountServiceAccountToken"] is False
    assert only(manifests, "DaemonSet")["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_without_components_nobody_gets_through_the_network() -> None:
    network = only(rendered("base"), "NetworkPolicy")["spec"]
    assert network["policyTypes"] == ["Ingress", "Egress"] and not {"ingress", "egress"} & network.keys()
    assert not any("ports" in each for each in containers(base_daemon_set()).values())


# ---------------------------------------------------------------- the web page


def web_pod() -> Any:
    """The pod of kinetod-web."""
    return FILES[MANIFESTS / "components/web/deployment.yaml"]["spec"]["template"]["spec"]


def test_the_web_page_has_no_right_no_folder_of_the_node_and_no_account() -> None:
    (container,) = web_pod()["containers"]
    security = dict(container["securityContext"])
    assert security.pop("runAsUser") == security.pop("runAsGroup") == web_pod()["securityContext"]["fsGroup"]
    assert security == {
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"]["runAsUser"] != FRONT_END
    assert web_pod()["automountServiceAccountToken"] is False
    assert not {"hostPID", "hostNetwork", "hostIPC"} & web_pod().keys()
    assert {kind for volume in web_pod()["volumes"] for kind in volume} == {"name", "secret", "emptyDir"}
    assert container["resources"].keys() == {"requests", "limits"}


def test_the_web_page_starts_with_the_options_of_its_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    (container,) = web_pod()["containers"]
    environ = {each["name"]: each["value"] for each in container["env"]}
    served: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def serve(options: Any, settings: Any) -> Iterator[None]:
        served.append((options, settings))
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("kinetoctl.web.shared.serving.running_shared", serve)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    result = CliRunner().invoke(kinetod_web_command, [], env=environ, standalone_mode=False)
    assert served, (result.exception, result.output)
    ((options, _),) = served
    assert set(environ) <= {*WEB_VARIABLES, *endpoints.CLIENT_VARIABLES}
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(Path(value).parent) for value in environ.values() if value.startswith("/")} <= mounts
    assert [port["containerPort"] for port in container["ports"]] == [options.tcp.port]
    workers = 2 * options.limits.memory_bytes
    assert workers < int(container["resources"]["limits"]["memory"].removesuffix("Gi")) << 30


def test_the_web_page_asks_the_daemons_service_by_the_name_that_their_certificates_have() -> None:
    environ = {each["name"]: each["value"] for each in web_pod()["containers"][0]["env"]}
    service = FILES[MANIFESTS / "components/remote/service.yaml"]
    name = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc"
    assert environ["KINETOD_WEB_SERVICE"] == f"{name}:{service['spec']['ports'][0]['port']}"
    assert service["spec"]["clusterIP"] == "None"
    source = hosts_of_service(name, 50051)
    assert source.environ[endpoints.TLS_NAME_VARIABLE] == name
    assert f"`{name}`" in DOCS


def test_the_daemons_let_the_web_page_call_for_its_users_and_nobody_else() -> None:
    front_end = containers(patched(base_daemon_set(), "web"))["kinetod"]
    environ = {each["name"]: each["value"] for each in front_end["env"]}
    service = FILES[MANIFESTS / "components/web/service.yaml"]["metadata"]
    assert environ == {"KINETOD_ACCESS_WEB_PROXIES": f"DNS:{service['name']}.{service['namespace']}.svc"}
    assert f"`{service['name']}.{service['namespace']}.svc`" in DOCS


# ---------------------------------------------------------------- what belongs together


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_policies_services_and_monitors_mean_the_pods_and_ports_that_there_are(overlay: str) -> None:
    manifests = rendered(overlay)
    pods = [each["spec"]["template"] for each in manifests if each["kind"] in ("DaemonSet", "Deployment")]
    ports = {
        pod["metadata"]["labels"]["app.kubernetes.io/name"]: {
            port["name"] for container in pod["spec"]["containers"] for port in container.get("ports", [])
        }
        for pod in pods
    }
    meant: dict[str, set[str]] = {name: set() for name in ports}

    def selected(labels: dict[str, str]) -> set[str]:
        (pod,) = (each for each in pods if labels.items() <= each["metadata"]["labels"].items())
        return meant[pod["metadata"]["labels"]["app.kubernetes.io/name"]]

    for manifest in manifests:
        spec: Any = manifest.get("spec", {})
        if manifest["kind"] == "NetworkPolicy":
            own = selected(spec["podSelector"]["matchLabels"])
            own |= {port["port"] for rule in spec.get("ingress", []) for port in rule["ports"]}
            own |= FORWARDED if manifest["metadata"]["name"] == "kinetod-permission" else set()
            for rule in spec.get("egress", []):
                for peer in rule.get("to", []):
                    others = selected(peer["podSelector"]["matchLabels"])
                    others |= {port["port"] for port in rule["ports"]}
        elif manifest["kind"] == "Service":
            own = selected(spec["selector"])
            own |= {port["targetPort"] for port in spec["ports"]}
        elif manifest["kind"] == "PodMonitor":
            own = selected(spec["selector"]["matchLabels"])
            own |= {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]}
    assert meant == ports


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kinetod_accepts_its_configuration(overlay: str, tmp_path: Path) -> None:
    manifests = rendered(overlay)
    (tmp_path / "config.toml").write_text(only(manifests, "ConfigMap")["data"]["config.toml"])
    front_end = containers(only(manifests, "DaemonSet"))["kinetod"]
    environ = {each["name"]: each.get("value", "node-1") for each in front_end.get("env", [])}
    for name, value in environ.items():
        if value.startswith("/etc/kinetod-tls/"):  # the Secret's
            environ[name] = str(tmp_path / Path(value).name)
            (tmp_path / Path(value).name).touch(mode=0o440)
    arguments = ["--config", str(tmp_path / "config.toml"), "--check-config"]
    result = CliRunner().invoke(kinetod_command, arguments, env=environ, standalone_mode=False)
    assert result.exception is None and result.return_value == 0, (result.exception, result.output)
    settings = dict(line.partition(" = ")[::2] for line in result.output.splitlines())
    for name in ("server.agent_socket", "attach.helper_socket", "store.state_dir"):
        path = re.search(r'"(.*?)"', settings[name])
        assert path and any(
            path[1].startswith(f"{mount['mountPath']}/") or path[1] == mount["mountPath"]
            for mount in front_end["volumeMounts"]
        ), (name, settings[name])


def test_captures_end_before_the_kubelet_evicts_anybody_for_them() -> None:
    config = tomllib.loads((MANIFESTS / "base/config.toml").read_text())
    assert config["store"]["min_free_percent"] > 15  # imagefs.available, the highest of the kubelet's defaults


def test_the_helper_serves_the_front_end_and_only_containers_of_root() -> None:
    found = allow_list.load(MANIFESTS / "base/attach.toml")
    assert (FRONT_END in found.callers, found.callers.ranges, found.root) == (
        True,
        ((FRONT_END, FRONT_END),),
        allow_list.IN_CONTAINERS,
    )


def test_the_containers_start_programs_with_options_that_there_are() -> None:
    found = containers(base_daemon_set())
    known = {name: {text for each in command.params for text in each.opts} for name, command in (
        ("kinetod", kinetod_command), ("kinetod-attach", attach_command),
    )}  # fmt: skip
    for container in ("kinetod", "attach"):
        program, *arguments = found[container]["command"]
        assert {argument.partition("=")[0] for argument in arguments} <= known[Path(program).name]


def test_probes_ask_where_the_containers_listen() -> None:
    found = containers(base_daemon_set())
    helper = next(each for each in found["attach"]["command"] if each.startswith("--socket="))
    config = (MANIFESTS / "base/config.toml").read_text()
    addresses = {name: {probe["exec"]["command"][-1] for key, probe in each.items() if key.endswith("Probe")}
                 for name, each in found.items()}  # fmt: skip
    assert addresses == {
        "folders": set(),
        "kinetod": {"unix:/run/kineto/kinetod.sock"},
        "attach": {f"seqpacket:{helper.removeprefix('--socket=')}"},
    }
    assert '"unix:/run/kineto/kinetod.sock"' in config
    assert f'"{helper.removeprefix("--socket=")}"' in config


def test_the_image_is_of_this_version() -> None:
    (image,) = yaml.safe_load((MANIFESTS / "base/kustomization.yaml").read_text())["images"]
    assert image["newTag"] == __version__


# ---------------------------------------------------------------- the documentation


def test_every_permission_overlay_and_component_is_explained() -> None:
    found = containers(base_daemon_set())
    volumes = base_daemon_set()["spec"]["template"]["spec"]["volumes"]
    names = {
        capability for each in found.values() for capability in each["securityContext"]["capabilities"].get("add", [])
    }
    names |= {volume["hostPath"]["path"] for volume in volumes if "hostPath" in volume} | {"hostPID"}
    names |= {str(path.parent.relative_to(MANIFESTS)) for path in MANIFESTS.glob("*/*/kustomization.yaml")}
    assert {name for name in names if f"`{name}`" not in DOCS} == set()

"""Plug-ins are loaded in processes: whatever one does there, the others are taken, and its reason is kept."""

import asyncio
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest
from kineto_agent.protocol.plugin_bundle import PluginFile, Signs, unpack
from kinetod.attach.attach_types import Finding
from kinetod.plugins import plugin_loader
from kinetod.plugins.plugin_loader import KnownPlugins, LoadedPlugin, findings, load, of_process
from kinetod.processes.accelerator_signs import OutsideSigns
from support.service.daemon import REPOSITORY
from support.service.plugin_packages import install
from support.service.plugin_sources import MODULE
from support.waiting import scaled


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    folder.chmod(0o755)
    path = [str(REPOSITORY / part) for part in ("agent", "daemon", "cli", "protos", "tests")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*path, str(folder)]))
    monkeypatch.syspath_prepend(str(folder))
    return folder


def package(site: Path, text: str, name: str = "toy", value: str = "") -> Path:
    made = site.parent / f"made_{name}" / f"plugin_{name}"
    made.mkdir(parents=True)
    (made / "__init__.py").write_text(text)
    return install(site, made, name, value or f"plugin_{name}:PLUGIN", distribution=f"kinetod-{name}", version="1.5")


def loaded(*allowed: str, deadline_s: float = 30, command: Sequence[str] = plugin_loader.COMMAND) -> KnownPlugins:
    return asyncio.run(load(allowed, deadline_s=scaled(deadline_s), command=command))


def refusal(plugins: KnownPlugins, name: str = "toy") -> str:
    (found,) = (plugin for plugin in plugins.known if plugin.name == name)
    assert found.is_allowed
    return found.refused


def test_without_an_allow_list_nothing_runs(site: Path) -> None:
    package(site, "raise SystemExit")
    plugins = loaded(command=["/no/such/program"])
    assert plugins.parcel is None
    assert plugins.known == (LoadedPlugin(name="toy", package="kinetod-toy", version="1.5", is_allowed=False),)


def test_an_allowed_one_is_packed_for_agents(site: Path) -> None:
    package(site, MODULE)
    plugins = loaded("toy")
    assert plugins.known == (
        LoadedPlugin(name="toy", package="kinetod-toy", version="1.5", activity_types=("toy_kernel",)),
    )
    assert plugins.activity_types == {"toy_kernel"}
    assert plugins.parcel is not None
    assert plugins.parcel.message.names == ["toy"]
    (plugin,) = unpack(os.pread(plugins.parcel.descriptor, 1 << 20, 0))
    os.close(plugins.parcel.descriptor)
    assert (plugin.name, plugin.signs) == ("toy", Signs(modules=("sys",)))
    file: PluginFile = plugin.files["source.py"]
    assert len(file.pieces) > 1  # it is compiled piece by piece
    assert not file.annotations
    assert max(text.count("\n") for _, text in file.pieces) < 50


@pytest.mark.parametrize(
    ("signs", "seen"),
    [
        ("modules=('torch_toy',)", ()),
        ("libraries=('libtoy.so*',), modules=('torch_toy',)", (OutsideSigns("toy", libraries=("libtoy.so*",)),)),
    ],
)
def test_the_signs_that_are_seen_from_outside_are_kept_for_lists(
    site: Path, signs: str, seen: tuple[OutsideSigns, ...]
) -> None:
    package(site, f"{MODULE}PLUGIN = PLUGIN._replace(signs=sources.Signs({signs}))")
    plugins = loaded("toy")
    assert (refusal(plugins), plugins.signs) == ("", seen)


def test_more_signs_than_can_be_looked_for_are_refused(site: Path) -> None:
    many = "tuple('lib%s%d.so' % ('\u20ac' * 180, number) for number in range(16))"
    package(site, f"{MODULE}PLUGIN = PLUGIN._replace(signs=sources.Signs(libraries={many}))")
    plugins = loaded("toy")
    assert refusal(plugins) == (
        "it cannot be sent to agents: the signs of all plug-ins (1) take 8823 bytes, but the limits are 16 "
        "plug-ins and 8192 bytes; use fewer plug-ins, or declare fewer or shorter patterns"
    )
    assert (plugins.parcel, plugins.signs) == (None, ())


BAD = {
    "raise RuntimeError('no licence')": "loading it raised RuntimeError: no licence",
    "raise SystemExit(7)": "loading it raised SystemExit: 7",
    "import os; os._exit(3)": "the process that loads it failed (exit status 3): no message",
    "import os; os.kill(os.getpid(), 11)": "the process that loads it failed (exit status -11): no message",
    "import time; time.sleep(600)": "loading it took longer than ",
    "PLUGIN = 7": "interface_version is None, but this kinetod supports version 1",
    MODULE
    + "PLUGIN = PLUGIN._replace(interface_version=2)": "interface_version is 2, but this kinetod supports version 1",
    MODULE + "PLUGIN = PLUGIN._replace(detach='maybe')": "detach: 'maybe' is not one of full, idle, never",
    "OTHER = 1": "loading it raised AttributeError: module 'plugin_toy' has no attribute 'PLUGIN'",
    "print('x' * 100000)\nimport sys\nsys.stdout.write('{}\\n')\n" + MODULE: "",
}


@pytest.mark.parametrize("text", BAD)
def test_one_that_fails_is_left_out_with_its_reason(site: Path, text: str) -> None:
    package(site, text)
    plugins = loaded("toy", deadline_s=2 if "sleep" in text else 30)
    assert refusal(plugins).startswith(BAD[text])
    assert bool(refusal(plugins)) == (plugins.parcel is None)


def test_the_others_are_taken(site: Path) -> None:
    package(site, "raise RuntimeError")
    package(site, MODULE + "PLUGIN = PLUGIN._replace(name='tin', schema=PLUGIN.schema._replace(name='tin', "
            "types={'tin_kernel': PLUGIN.schema.types['toy_kernel']}, "
            "records={1: PLUGIN.schema.records[1]._replace(type='tin_kernel')}))", "tin")  # fmt: skip
    plugins = loaded("toy", "tin", "none")
    assert plugins.parcel is not None
    assert plugins.parcel.message.names == ["tin"]
    os.close(plugins.parcel.descriptor)
    assert refusal(plugins, "none").startswith("no package installed with kinetod has an entry point 'none'")
    assert plugins.refusals() == [
        "the plug-in toy is not used: loading it raised RuntimeError: ",
        f"the plug-in none is not used: {refusal(plugins, 'none')}",
    ]


def test_one_whose_files_others_could_change_is_not_even_imported(site: Path, tmp_path: Path) -> None:
    copy = package(site, f"open({str(tmp_path / 'ran')!r}, 'w')\n{MODULE}")
    (copy / "__init__.py").chmod(0o666)
    text = refusal(loaded("toy"))
    spoiled = f"{copy / '__init__.py'} can be changed by others (mode 0666); run"
    assert text.startswith(f"other users could change it: {spoiled}")
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_nor_one_of_another_user(site: Path) -> None:
    copy = package(site, MODULE)
    os.chown(copy, 12345, 0)
    assert refusal(loaded("toy")).startswith(f"other users could change it: {copy} belongs to uid 12345")


def test_two_packages_of_one_name_are_refused(site: Path) -> None:
    package(site, MODULE)
    made = site.parent / "again" / "plugin_again"
    made.mkdir(parents=True)
    (made / "__init__.py").write_text(MODULE)
    install(site, made, "toy", "plugin_again:PLUGIN", distribution="kinetod-again")
    assert refusal(loaded("toy")) == (
        "several packages have a plug-in with this name (kinetod-again 1.0, kinetod-toy 1.5); uninstall all but one"
    )


def test_an_entry_point_must_have_the_name_of_its_plug_in(site: Path) -> None:
    package(site, MODULE, "tin")
    text = refusal(loaded("tin"), "tin")
    assert text == "its name is 'toy', but its entry point is 'tin'; use the same name for both"


def test_the_process_that_loads_may_be_missing() -> None:
    assert refusal(loaded("toy", command=["/no/such/program"])).startswith("the process that loads it failed: ")
    assert refusal(loaded("toy", command=["echo", "{}"])).startswith("it cannot be sent to agents: ")
    text = refusal(loaded("toy", command=["echo", "nonsense"]))
    assert text.startswith("the process that loads it returned an invalid answer: ")


TOY = LoadedPlugin(name="toy", version="1.5", activity_types=("kernel", "toy_sync"))
OFF = LoadedPlugin(name="tin", is_allowed=False)
REFUSED = LoadedPlugin(name="tan", refused="it is broken")
SIGNS = (OutsideSigns("toy", libraries=("libtoy.so",)),)
ADVICE = (
    "fix it so that `kinetoctl plugin check tan` accepts it on this host, or remove it from plugins.sources; "
    "then restart kinetod"
)


def said(found: Sequence[Finding]) -> list[tuple[str, str]]:
    return [(each.status.name, each.detail) for each in found]


def test_of_the_host() -> None:
    found = list(findings(KnownPlugins(known=(TOY, OFF, REFUSED))))
    assert said(found) == [
        ("PROBLEM", "tan is not used: it is broken"),
        ("OK", "toy 1.5 (kernel, toy_sync); installed, but not in plugins.sources: tin"),
    ]
    assert [each.advice for each in found] == [ADVICE, ""]
    assert said(list(findings(KnownPlugins()))) == [("OK", "none are installed")]


@pytest.mark.parametrize(
    ("signs", "seen", "offers", "status", "text"),
    [
        (SIGNS, ["toy"], None, "OK", "would record kernel, toy_sync: the process shows the signs of its accelerator"),
        (SIGNS, [], None, "OK", "no sign of its accelerator is visible from outside"),
        (SIGNS, None, None, "UNKNOWN", "only an agent in the process can see its signs"),
        ((), [], None, "UNKNOWN", "only an agent in the process can see its signs"),
        (SIGNS, [], {"toy": ["kernel"], "cupti": ["kernel"]}, "OK", "records kernel"),
        (
            SIGNS,
            ["toy"],
            {"toy": []},
            "OK",
            "records nothing now: the agent finds no sign of its accelerator, or the plug-in declined",
        ),
        (SIGNS, ["toy"], {"cupti": ["kernel"]}, "OK", "the agent in the process does not have it"),
    ],
)
def test_of_a_process_the_agent_says_which_serve_it_or_else_their_signs(
    signs: tuple[OutsideSigns, ...],
    seen: Collection[str] | None,
    offers: Mapping[str, Sequence[str]] | None,
    status: str,
    text: str,
) -> None:
    (found,) = of_process(KnownPlugins(known=(TOY,), signs=signs), seen=seen, offers=offers)
    assert (found.name, found.status.name, found.detail) == ("plugins", status, f"toy 1.5: {text}")


def test_of_a_process_a_refused_one_is_a_note_because_traces_work_without_it() -> None:
    found = list(of_process(KnownPlugins(known=(OFF, REFUSED)), seen=(), offers=None))
    assert said(found) == [
        ("NOTE", "tan is not used: it is broken"),
        ("OK", "installed, but not in plugins.sources: tin"),
    ]
    assert found[0].advice == ADVICE
    assert said(list(of_process(KnownPlugins(), seen=(), offers=None))) == [("OK", "none are installed")]

"""What doctor says about plug-ins, of the host and of a process."""

from collections.abc import Collection, Mapping, Sequence

import pytest
from kinetod.attach.finding import Finding
from kinetod.plugins.plugin_findings import findings, of_process
from kinetod.plugins.plugin_loader import KnownPlugins, LoadedPlugin
from kinetod.processes.accelerator_signs import OutsideSigns

TOY = LoadedPlugin(name="toy", version="1.5", activity_types=("kernel", "toy_sync"))
OFF = LoadedPlugin(name="tin", is_allowed=False)
REFUSED = LoadedPlugin(name="tan", refused="it is broken")
SIGNS = (OutsideSigns("toy", libraries=("libtoy.so",)),)
ADVICE = (
    "correct that until `kinetoctl plugin check tan` accepts it on this host, or take it out of plugins.sources; "
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
        (SIGNS, [], None, "OK", "no sign of its accelerator is seen from outside"),
        (SIGNS, None, None, "UNKNOWN", "only an agent in the process sees its signs"),
        ((), [], None, "UNKNOWN", "only an agent in the process sees its signs"),
        (SIGNS, [], {"toy": ["kernel"], "cupti": ["kernel"]}, "OK", "records kernel"),
        (
            SIGNS,
            ["toy"],
            {"toy": []},
            "OK",
            "records nothing now: the agent finds no sign of its accelerator, or the plug-in declines",
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

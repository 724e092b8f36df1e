"""From names of hosts to the daemons that are asked."""

from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.client.host_targets import Place, PlaceOptions, distinct, parse_hosts, place_of, places, template

SOCKETS = "unix:/run/{host}.sock"


def named(options: PlaceOptions) -> list[tuple[str, str]]:
    return [(place.host, place.address) for place in places(options, lambda _note: None)]


def test_hosts_get_the_address_that_the_template_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KINETO_HOST_ADDRESS", raising=False)
    assert named(PlaceOptions(hosts=("n1",), lists=("n2,n3",))) == [
        ("n1", "n1:50051"), ("n2", "n2:50051"), ("n3", "n3:50051"),
    ]  # fmt: skip
    assert named(PlaceOptions(hosts=("n1",), host_address=SOCKETS)) == [("n1", "unix:/run/n1.sock")]


def test_the_variable_says_the_template_unless_the_option_does() -> None:
    environ = {"KINETO_HOST_ADDRESS": SOCKETS}
    assert template(None, environ) == SOCKETS
    assert template("{host}:1", environ) == "{host}:1"
    with pytest.raises(ValueError, match=r"^KINETO_HOST_ADDRESS: expected an address with \{host\} or"):
        template(None, {"KINETO_HOST_ADDRESS": "node:50051"})


def test_a_host_may_be_an_address() -> None:
    assert [place_of(text, SOCKETS).address for text in ("n1:7", "unix:/x")] == ["n1:7", "unix:/x"]
    with pytest.raises(ValueError, match="expected a host name, host:port or unix:/path, got 'a b'"):
        place_of("a b", SOCKETS)


def test_a_file_has_names_addresses_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("# rack 1\nn1\n\nn2   unix:/n2.sock  # borrowed\n")
    for text in (str(path), f"@{path}"):
        found = parse_hosts(text, "{host}:1")
        assert [(place.host, place.address) for place in found] == [("n1", "n1:1"), ("n2", "unix:/n2.sock")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("n1\nn2 slots=8\n", r"nodes line 2: expected unix:/path/to/socket or host:port, got 'slots=8'"),
        ("n1 n1:1 x\n", r"nodes line 1: expected `name` or `name address`, got 'n1 n1:1 x'"),
        ("# nobody\n", r"nodes contains no host"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "nodes"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        parse_hosts(str(path), SOCKETS)


def test_a_list_that_is_neither_file_nor_list_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a file of hosts or a list like a,b,c; there is no file"):
        parse_hosts(str(tmp_path / "none"), SOCKETS)
    with pytest.raises(ValueError, match=r"cannot read .*none: No such file"):
        parse_hosts(f"@{tmp_path / 'none'}", SOCKETS)


def test_a_host_that_is_named_twice_is_asked_once() -> None:
    assert [place.host for place in distinct([Place("a", "a:1"), Place("b", "b:1"), Place("a", "a:1")])] == ["a", "b"]
    with pytest.raises(ValueError, match="the host a has two addresses, a:1 and a:2"):
        distinct([Place("a", "a:1"), Place("a", "a:2")])


def test_the_command_lines_conditions_are_added_to_what_a_place_selects() -> None:
    place = Place("a", "a:1", pb.Selector(job_ids=["42"]))
    assert place.selected(pb.Selector(ranks=[3])) == pb.Selector(job_ids=["42"], ranks=[3])
    assert place.selector == pb.Selector(job_ids=["42"])
    assert (place.selects, Place("a", "a:1").selects) == (True, False)

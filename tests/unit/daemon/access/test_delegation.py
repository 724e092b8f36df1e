"""For whom a front end says that it calls."""

import pytest
from kineto_protos.call_values import CERTIFICATE_KEY, MAX_NAMES, USER_KEY
from kinetod.access.delegation import Behalf, behalf, is_asked, is_web_proxy
from kinetod.permissions.role_policy import Via

NAMES = tuple(b"DNS:a%d.example" % number for number in range(MAX_NAMES + 1))


@pytest.mark.parametrize(
    ("users", "names", "found"),
    [
        ([b"ada"], [], Behalf(user="ada")),
        ([], NAMES[:2], Behalf(certificates=("DNS:a0.example", "DNS:a1.example"))),
        ([], NAMES[:MAX_NAMES], Behalf(certificates=tuple(name.decode() for name in NAMES[:MAX_NAMES]))),
        ([], NAMES, None),
        ([b"ada", b"ada"], [], None),
        ([b"ada"], NAMES[:1], None),
        ([b"ada bob"], [], None),
        ([b"\xff"], [], None),
        ([b""], [], None),
        ([], [NAMES[0], b"a\tb"], None),
        ([], [b""], None),
    ],
)
def test_a_call_is_for_one_user_or_one_certificate(
    users: list[bytes], names: list[bytes], found: Behalf | None
) -> None:
    asked = {USER_KEY: users, CERTIFICATE_KEY: names}
    assert behalf(asked) == found
    assert is_asked(asked)


def test_a_call_that_names_nobody_is_for_its_caller() -> None:
    assert not is_asked({})
    assert not is_asked({USER_KEY: (), "authorization": (b"token",)})
    assert behalf({}) is None


@pytest.mark.parametrize(
    ("via", "name", "may"),
    [
        (Via.UNIX, "web", True),
        (Via.TLS, "web", True),
        (Via.LOOPBACK, "web", False),
        (Via.KUBERNETES, "web", False),
        (Via.DYNOLOG, "web", False),
        (Via.UNIX, "ada", False),
        (Via.TLS, "", False),
    ],
)
def test_front_ends_speak_for_others_where_it_is_known_who_they_are(via: Via, name: str, may: bool) -> None:
    assert is_web_proxy(via, name, ("web",)) is may

"""Who looks: what a certificate says, and what a proxy says."""

import datetime
import ssl
import tempfile

import pytest
from kinetoctl.web.shared.page_user import PageUser, UnknownUser, of_certificate, of_header
from support.peers.certificates import Authority


def user_of(**names: str) -> PageUser:
    """The user of a certificate with these names."""
    pem = Authority().issue(**names, lasts=datetime.timedelta(days=1)).certificate.decode()
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(pem)
        file.flush()
        decoded = ssl._ssl._test_decode_cert(file.name)  # type: ignore[attr-defined]
    return of_certificate(decoded, ssl.PEM_cert_to_DER_cert(pem))


def test_the_names_of_a_certificate_come_in_the_order_in_which_they_count() -> None:
    found = user_of(common_name="boss", dns="host.example", uri="spiffe://a/ada")
    assert found.certificates == ("URI:spiffe://a/ada", "DNS:host.example")
    assert found.metadata == tuple(("kineto-for-certificate", name) for name in found.certificates)


def test_a_common_name_counts_only_without_other_names() -> None:
    assert user_of(common_name="ada").certificates == ("CN:ada",)
    for other in ({"ip": "10.0.0.1"}, {"registered_id": "1.2.3.4"}):
        with pytest.raises(UnknownUser):
            user_of(common_name="ada", **other)


@pytest.mark.parametrize("name", ["Jürgen", "a\tb", ""])
def test_names_that_cannot_be_told_to_the_daemon_are_nobody(name: str) -> None:
    with pytest.raises(UnknownUser):
        of_certificate({"subject": ((("commonName", name),),)}, b"")


def test_too_many_names_are_nobody() -> None:
    with pytest.raises(UnknownUser):
        of_certificate({"subjectAltName": (("DNS", "a.example"),) * 17}, b"\x06\x03\x55\x1d\x11")


def test_a_proxy_names_one_user() -> None:
    assert of_header(["ada"]).metadata == (("kineto-for-user", "ada"),)
    for values in ([], ["ada", "ada"], ["ada, bea"], ["a\tb"], ["ada "], ["\xff"], [""]):
        with pytest.raises(UnknownUser):
            of_header(values)

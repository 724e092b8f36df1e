"""Certificates of a small authority, made anew for each test."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """A certificate authority."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(self._name, self._name, self._key.public_key(), DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.certificate = _pem(builder.sign(self._key, hashes.SHA256()))

    def issue(
        self,
        common_name: str = "",
        *,
        uri: str = "",
        dns: str = "",
        ip: str = "",
        registered_id: str = "",
        lasts: datetime.timedelta = DAY,
    ) -> Pair:
        """A certificate for both ends. lasts: from now; negative: it has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)] if common_name else []
        builder = _builder(x509.Name(attributes), self._name, key.public_key(), lasts)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri)] if uri else []
        names += [x509.DNSName(dns)] if dns else []
        names += [x509.IPAddress(ipaddress.ip_address(ip))] if ip else []
        names += [x509.RegisteredID(x509.ObjectIdentifier(registered_id))] if registered_id else []
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=not attributes)
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = builder.add_extension(usages, critical=False).sign(self._key, hashes.SHA256())
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Pair(_pem(certificate), private)

    def channel(self, address: str, client: Pair | None) -> grpc.Channel:
        """A channel to a server whose certificate of this authority has the name localhost."""
        credentials = grpc.ssl_channel_credentials(
            self.certificate, client.key if client else None, client.certificate if client else None
        )
        return grpc.secure_channel(address, credentials, options=(("grpc.ssl_target_name_override", "localhost"),))


def write_server_files(folder: Path, server: Pair, client_ca: bytes) -> None:
    """Write server.pem, server.key and clients.pem, each replaced as a whole."""
    for name, data in (("server.pem", server.certificate), ("server.key", server.key), ("clients.pem", client_ca)):
        new = folder / f"{name}.new"
        new.write_bytes(data)
        new.chmod(0o600)
        new.rename(folder / name)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lasts: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 10 * DAY)
        .not_valid_after(now + lasts)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)

"""A certificate authority and the certificates that it issues, for servers and clients on loopback."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


class Authority:
    """Signs certificates; `num_days` counts from now, and all are valid since yesterday."""

    def __init__(self, name: str, num_days: float = 100) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(name, name, self._key, num_days)
        self.certificate = builder.add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        ).sign(self._key, hashes.SHA256())
        self._name = name

    def write(self, folder: Path) -> Path:
        """Write `ca.crt`, and return its path."""
        path = folder / "ca.crt"
        path.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))
        return path

    def issue(
        self,
        folder: Path,
        name: str,
        *,
        uses: Sequence[x509.ObjectIdentifier] = (CLIENT, SERVER),
        names: Sequence[x509.GeneralName] = (),
        num_days: float = 100,
    ) -> tuple[Path, Path]:
        """Write `tls.crt` and `tls.key` of a certificate with this common name, in place of earlier ones, for
        localhost and `names`; return their paths."""
        key = ec.generate_private_key(ec.SECP256R1())
        places = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1")), *names]
        builder = _builder(name, self._name, key, num_days)
        builder = builder.add_extension(x509.SubjectAlternativeName(places), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        if uses:
            builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        cert_file, key_file = folder / "tls.crt", folder / "tls.key"
        cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_file.touch(mode=0o600)
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return cert_file, key_file


def _builder(
    name: str, issuer: str, key: ec.EllipticCurvePrivateKey, num_days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=num_days))
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])

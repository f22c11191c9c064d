"""Certificates: of the gateway, of the authority of its clients, and of the connections inside."""

from __future__ import annotations

import ssl
import stat
from collections.abc import Generator, Iterator
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.x509.oid import ExtendedKeyUsageOID

from cluster.config import LOOPBACK
from cluster.doctor.access import DAY_S, GROUP, SOON_DAYS
from cluster.doctor.check_context import Check, CheckContext
from cluster.doctor.checks import CheckResult, error, note, ok, warning

_RENEW = "renew the files: a running process reads them again"
# What was read after the results that were found on the way; empty: it could not be read.
# The library's exceptions besides `ValueError`.
_UNREADABLE = (
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
    UnsupportedAlgorithm,
    TypeError,
)

_Reading = Generator[CheckResult, None, tuple[x509.Certificate, ...]]


def gateway_tls(context: CheckContext) -> Iterator[CheckResult]:
    """Check the gateway's certificate: readable, with its key, valid, and for which names."""
    gateway = context.config.gateway
    cert_file, key_file = gateway.tls_cert_file, gateway.tls_key_file
    if cert_file is None or key_file is None:
        if gateway.host not in LOOPBACK:
            yield _without_tls(context)
        return
    chain = yield from _pair("gateway.tls_cert_file", cert_file, "gateway.tls_key_file", key_file)
    if chain:
        seen = f"the gateway's certificate is for {_names(chain[0])}"
        yield _validity(seen, chain[0], context, "clients refuse it")


def _without_tls(context: CheckContext) -> CheckResult:
    seen = f"the gateways speak no TLS, and listen on {context.config.gateway.host}"
    remedy = "gateway.tls_cert_file and tls_key_file, or a network that only clients reach"
    if context.config.auth.mode == "required":
        why = "API keys, tokens, prompts and answers can be read on the way, and the keys used by others"
        return warning(seen, why, remedy)
    return note(seen, "prompts and answers can be read on the way", remedy)


def client_authority(context: CheckContext) -> Iterator[CheckResult]:
    """Check the authority that signs client certificates, and that somebody has a name."""
    settings = context.config.auth.certificates
    if settings is None:
        return
    found = yield from _authorities("auth.certificates.ca_file", settings.ca_file)
    for certificate in found:
        seen = f"auth.certificates.ca_file: {_subject(certificate)}"
        yield _validity(seen, certificate, context, "client certificates are refused")
    if found and not settings.identities:
        yield warning(
            "auth.certificates.identities is empty",
            "no client certificate has a name that is known here",
            "list names (CN, or SAN as DNS or URI) with tenant and roles",
        )


def inner_tls(context: CheckContext) -> Iterator[CheckResult]:
    """Check the certificate of the connections inside: a pair, of the authority, for both sides, valid."""
    settings = context.config.inner_tls
    if settings is None:
        if context.config.transfer.data_host not in LOOPBACK:
            yield note(
                "the connections between hosts are not encrypted (no inner_tls)",
                "prompts, answers and KV can be read on the way; nobody without the secret is let in",
                "inner_tls with cert_file, key_file and ca_file, or a network that only the cluster reaches",
            )
        return
    chain = yield from _pair(
        "inner_tls.cert_file", settings.cert_file, "inner_tls.key_file", settings.key_file
    )
    authorities = yield from _authorities("inner_tls.ca_file", settings.ca_file)
    if not chain or not authorities:
        return
    seen, harm = f"inner_tls.cert_file: {_subject(chain[0])}", "the cluster's processes refuse each other"
    if not any(_has_issued(issuer, chain[0]) for issuer in (*chain[1:], *authorities)):
        yield error(
            f"{seen} is not signed by an authority of ca_file",
            harm,
            "give the authority that signed it, or a certificate of that authority",
        )
    if missing := _missing_uses(chain[0]):
        yield error(
            f"{seen} is not for {' and '.join(missing)} authentication",
            f"{harm}: each of them is client and server",
            "a certificate with both extended key usages, or with none",
        )
    yield _validity(seen, chain[0], context, harm)
    for authority in authorities:
        yield _validity(f"inner_tls.ca_file: {_subject(authority)}", authority, context, harm)


def _pair(cert_field: str, cert_file: Path, key_field: str, key_file: Path) -> _Reading:
    """Read the chain of `cert_file`, whose first certificate has the key in `key_file`."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file)
        chain = _read(cert_file)
        mode = stat.S_IMODE(key_file.stat().st_mode)
    except (OSError, ValueError) as problem:  # ssl.SSLError is an OSError
        yield error(
            f"{cert_field} {cert_file} with {key_field} {key_file}: {problem}",
            "what needs them does not start",
            "name a PEM chain, its own certificate first, and the PEM key of that one, without a password",
        )
        return ()
    if mode & 0o007:
        yield warning(
            f"{key_field} {key_file} has the mode {mode:04o}",
            "every user of this machine can read the key, and pass for its owner",
            f"`chmod 600 {key_file}`",
        )
    return tuple(chain)


def _read(path: Path) -> list[x509.Certificate]:
    """Return the certificates of a PEM file; `ValueError` when a part of one cannot be read, which is parsed
    only on access."""
    try:
        found = x509.load_pem_x509_certificates(path.read_bytes())
        for certificate in found:
            parts = certificate.extensions, certificate.subject, certificate.issuer, certificate.public_key()
            assert all(part is not None for part in parts)
    except _UNREADABLE as problem:
        raise ValueError(str(problem)) from problem
    return found


def _authorities(field: str, path: Path) -> _Reading:
    try:
        found = _read(path)
    except (OSError, ValueError) as problem:
        yield error(f"{field} {path}: {problem}", "what needs it does not start", "name a PEM file")
        return ()
    if others := [certificate for certificate in found if not _is_authority(certificate)]:
        yield error(
            f"{field}: {_subject(others[0])} is no authority",
            "certificates that it has signed are refused",
            "give the certificate of the authority (basicConstraints CA:TRUE)",
        )
    return tuple(found)


def _validity(seen: str, certificate: x509.Certificate, context: CheckContext, harm: str) -> CheckResult:
    now = datetime.fromtimestamp(context.clock.wall(), UTC)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    days = (ends - now).total_seconds() / DAY_S
    seen = f"{seen}, valid until {ends:%Y-%m-%d}"
    figures = {"days_left": round(days, 1)}
    if days <= 0:
        return error(f"{seen}: expired", harm, _RENEW, **figures)
    if begins > now:
        return error(
            f"{seen}: not valid before {begins:%Y-%m-%d %H:%M} UTC", harm, "see to the clock, or wait"
        )
    if days < SOON_DAYS:
        return warning(f"{seen}, {days:.0f} days from now", f"then {harm}", _RENEW, **figures)
    return ok(seen, **figures)


def _names(leaf: x509.Certificate) -> str:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return "no name (it has no subjectAltName, so that most clients refuse it)"
    return ", ".join(str(name.value) for name in names)


def _subject(certificate: x509.Certificate) -> str:
    return certificate.subject.rfc4514_string() or "a certificate without a subject"


def _is_authority(certificate: x509.Certificate) -> bool:
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _has_issued(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _missing_uses(certificate: x509.Certificate) -> list[str]:
    """Return those of client and server that the certificate is not for."""
    try:
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return []
    wanted = {"client": ExtendedKeyUsageOID.CLIENT_AUTH, "server": ExtendedKeyUsageOID.SERVER_AUTH}
    return [name for name, use in wanted.items() if use not in uses]


CHECKS = (
    Check(
        "tls",
        GROUP,
        "Whether the gateway's certificate and key are readable, belong together and are valid",
        gateway_tls,
    ),
    Check(
        "client-authority",
        GROUP,
        "Whether the authority of client certificates is readable and valid, and which names are known",
        client_authority,
    ),
    Check(
        "inner-tls",
        GROUP,
        "Whether the certificate of `inner_tls` is valid for its key, its authority and both sides",
        inner_tls,
    ),
)

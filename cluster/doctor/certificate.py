"""The gateway's certificate: readable, with its key, valid, and for which names."""

from __future__ import annotations

import ssl
import stat
from collections.abc import Iterator
from datetime import UTC, datetime

from cryptography import x509

from cluster.doctor.checks import Check, CheckContext, Verdict, error, note, ok, warning
from cluster.doctor.network import LOOPBACK

_SOON_DAYS = 14.0
_DAY_S = 86_400.0
_NOT_STARTED = "the gateways do not start"


def tls(case: CheckContext) -> Iterator[Verdict]:
    gateway = case.config.gateway
    cert_file, key_file = gateway.tls_cert_file, gateway.tls_key_file
    if cert_file is None or key_file is None:
        if gateway.host not in LOOPBACK:
            yield note(
                f"the gateways speak no TLS, and listen on {gateway.host}",
                "prompts and answers can be read on the way, and whoever reaches the port is served",
                "gateway.tls_cert_file and tls_key_file, or a network that only clients reach",
            )
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file)
        leaf = x509.load_pem_x509_certificates(cert_file.read_bytes())[0]
        mode = stat.S_IMODE(key_file.stat().st_mode)
    except (OSError, ValueError) as problem:  # ssl.SSLError is an OSError
        yield error(
            f"gateway.tls_cert_file {cert_file} with tls_key_file {key_file}: {problem}",
            _NOT_STARTED,
            "name a PEM chain, the gateway's own first, and the PEM key of that one, without a password",
        )
        return
    if mode & 0o007:
        yield warning(
            f"gateway.tls_key_file {key_file} has the mode {mode:04o}",
            "every user of this machine can read the key, and pass for the gateway",
            f"`chmod 600 {key_file}`",
        )
    yield from _validity(leaf, datetime.fromtimestamp(case.clock.wall(), UTC))


def _validity(leaf: x509.Certificate, now: datetime) -> Iterator[Verdict]:
    begins, ends = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    days = (ends - now).total_seconds() / _DAY_S
    seen = f"the gateway's certificate is for {_names(leaf)}, valid until {ends:%Y-%m-%d}"
    why, remedy = "clients refuse it", "renew the files: a running gateway reads them again"
    if days <= 0:
        yield error(f"{seen}: expired", why, remedy, days_left=round(days, 1))
    elif begins > now:
        yield error(f"{seen}: not valid before {begins:%Y-%m-%d %H:%M} UTC", why, "see to the clock, or wait")
    elif days < _SOON_DAYS:
        yield warning(f"{seen}, {days:.0f} days from now", f"then {why}", remedy, days_left=round(days, 1))
    else:
        yield ok(seen, days_left=round(days, 1))


def _names(leaf: x509.Certificate) -> str:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return "no name (it has no subjectAltName, so that most clients refuse it)"
    return ", ".join(str(name.value) for name in names)


CHECKS = (
    Check("tls", "network and Ray", "The gateway's certificate and key: a pair, readable, not expired", tls),
)

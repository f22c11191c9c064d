"""Credentials of callers: API keys, JSON web tokens, sessions, resume tokens, names in certificates; the
files that keys are kept in; and the audit log, which shows none of them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import jwt
from certificates import write_certificate
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from doctor_harness import config_of, context_of

from cluster.api.grpc_server import Certificate
from cluster.doctor import tls
from cluster.errors import ForbiddenError, InvalidRequestError, StartError, UnauthenticatedError
from cluster.identity.api_key_file import add_key, parse_keys
from cluster.identity.audit import AuditEntry, AuditLog
from cluster.identity.authenticator import Authenticator, Credentials
from cluster.identity.certificates import names_of_auth_context
from cluster.identity.config import AuditConfig, AuthConfig
from cluster.identity.identity import Identity
from cluster.identity.jwt_tokens import parse_issuer_keys
from cluster.identity.key_roots import parse_key_roots
from cluster.identity.relay_tokens import RelayedCaller, RelayTokens
from cluster.identity.resume_tokens import ResumeTokens
from cluster.identity.sessions import Sessions
from cluster.serve.machine import Machine
from kvtransfer.common.clock import ManualClock, SystemClock
from kvtransfer.rpc.trust import Trust
from tests.fuzz.mutation import EDGE_TEXTS, any_text, any_tree, mutate_bytes, mutate_text, mutate_tree
from tests.fuzz.target import FindingError, Target, outcome

# Unix time of the clock of all targets.
NOW = 1_800_000_000.0
# Who issues the tokens, and for whom.
ISSUER, AUDIENCE = "https://issuer.example", "tandem"


def open_targets(stack: ExitStack, folder: Path) -> list[Target]:
    """Return the targets of credentials and of the files behind them."""
    callers = _Callers(folder)
    audit = _Audit(stack, folder / "audit")
    return [
        Target("API key", callers.api_key, 400),
        Target("JSON web token", callers.web_token, 200),
        Target("session cookie", callers.session, 300),
        Target("resume token", callers.resume_token, 400),
        Target("relay token", callers.relay_token, 400),
        Target("names in a certificate", callers.certificate, 400),
        Target("files of a certificate", _CertificateFiles(folder).run, 40),
        Target("file of API keys", callers.key_file, 60),
        Target("file of an issuer's keys", callers.issuer_file, 150),
        Target("file of key roots", _key_roots, 400),
        Target("audit log", audit.run, 300),
    ]


class _Callers:
    """An authenticator with keys, an issuer and certificates, and honest credentials of each kind."""

    def __init__(self, folder: Path) -> None:
        draw = Random(15)
        created = datetime.fromtimestamp(NOW, UTC)
        keys_file = folder / "keys.yaml"
        self._keys = [
            add_key(keys_file, draw.randbytes, tenant="a", roles=("user",), created=created),
            add_key(
                keys_file,
                draw.randbytes,
                tenant="b",
                roles=("viewer", "operator"),
                created=created,
                expires=created + timedelta(days=30),
                max_priority=7,
                models=("m",),
                note="of b",
            ),
        ]
        self._keys_text = keys_file.read_bytes()
        self._signing = {
            "RS256": rsa.generate_private_key(65537, 2048),
            "ES256": ec.generate_private_key(ec.SECP256R1()),
            "EdDSA": ed25519.Ed25519PrivateKey.generate(),
        }
        self._strange = ec.generate_private_key(ec.SECP256R1())
        issuer_file = folder / "issuer.pem"
        self._pem = b"".join(_pem(key) for key in self._signing.values())
        issuer_file.write_bytes(self._pem)
        self._jwks = {"keys": [json.loads(_to_jwk(key)) for key in self._signing.values()]}
        certificates = {
            "ca_file": "ca.crt",
            "identities": [{"name": "spiffe://b/admin", "tenant": "b", "roles": ["operator"]}],
        }
        self._config = AuthConfig.model_validate(
            {
                "mode": "required",
                "keys_file": keys_file,
                "jwt": {"keys_file": issuer_file, "issuer": ISSUER, "audience": AUDIENCE},
                "certificates": certificates,
                "tenants": {"a": {"max_priority": 3, "models": ["m"]}},
            }
        )
        clock = ManualClock(NOW)
        self._authenticator = Authenticator(self._config, clock)
        self._resume = ResumeTokens(Trust(bytes(32)), clock, 60.0)
        self._relay = RelayTokens(Trust(bytes(32)), clock)
        self._sessions = Sessions(Trust.of(bytes(32)), self._authenticator, clock)

    def _identify(self, authorization: str) -> Identity | None:
        try:
            return self._authenticator.identify(Credentials(authorization=authorization))
        except UnauthenticatedError:
            return None

    def api_key(self, rng: Random) -> str:
        """A text that is not exactly a key opens nothing."""
        key = rng.choice(self._keys)
        text = f"Bearer {key}"
        if rng.random() < 0.8:
            text = mutate_text(rng, text, [f"Bearer {each}" for each in self._keys])
        identity = self._identify(text)
        if identity is None:
            return "refused"
        if text.partition(" ")[2].strip() not in self._keys or identity.method != "key":
            raise FindingError(f"{text!r} is {identity}")
        return "ok"

    def web_token(self, rng: Random) -> str:
        """Only a token that the issuer has signed, with the claims that it needs, names anybody."""
        algorithm = rng.choice(list(self._signing))
        claims: dict[str, Any] = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "exp": NOW + 600,
            "sub": "somebody",
            "tenant": "a",
            "roles": ["user", "viewer"],
        }
        header: dict[str, Any] = {"alg": algorithm, "typ": "JWT"}
        if rng.random() < 0.5:
            changed = mutate_tree(rng, claims)
            claims = changed if isinstance(changed, dict) else claims
        if rng.random() < 0.3:
            changed = mutate_tree(rng, header)
            header = changed if isinstance(changed, dict) else header
        token, is_signed = self._sign(rng, algorithm, header, claims)
        shown = token if rng.random() < 0.7 else mutate_text(rng, token)
        is_signed = is_signed and [_bytes_of(part) for part in shown.strip().split(".")] == [
            _bytes_of(part) for part in token.split(".")
        ]
        identity = self._identify(f"Bearer {shown}")
        if identity is None:
            return "refused"
        audiences = claims.get("aud")
        is_meant = audiences == AUDIENCE or (isinstance(audiences, list) and AUDIENCE in audiences)
        if not is_signed or not is_meant or claims.get("iss") != ISSUER:
            raise FindingError(f"{shown!r} with {header} and {claims} is {identity}")
        return "ok"

    def _sign(
        self, rng: Random, algorithm: str, header: dict[str, Any], claims: dict[str, Any]
    ) -> tuple[str, bool]:
        """Return a token, and whether the issuer has signed it: not where anybody else has, or nobody."""
        parts = f"{_encoded(header)}.{_encoded(claims)}"
        choice = rng.randrange(6)
        if choice == 0:  # no signature
            none = rng.choice(("none", "None", "NONE", ""))
            return f"{_encoded(header | {'alg': none})}.{_encoded(claims)}.", False
        if choice == 1:  # the public key as a shared secret
            parts = f"{_encoded(header | {'alg': 'HS256'})}.{_encoded(claims)}"
            mac = hmac.digest(_pem(self._signing[algorithm]), parts.encode(), "sha256")
            return f"{parts}.{_base64(mac)}", False
        if choice == 2:  # somebody else's key, which the header may bring along
            extra = {"jwk": json.loads(_to_jwk(self._strange)), "kid": any_text(rng), "alg": "ES256"}
            parts = f"{_encoded(header | extra)}.{_encoded(claims)}"
            signature = jwt.get_algorithm_by_name("ES256").sign(parts.encode(), self._strange)
            return f"{parts}.{_base64(signature)}", False
        signer = jwt.get_algorithm_by_name(algorithm)
        signature = signer.sign(parts.encode(), self._signing[algorithm])
        return f"{parts}.{_base64(signature)}", True

    def session(self, rng: Random) -> str:
        """Only the cookie that was made, while its key is valid."""
        cookie = self._sessions.begin(self._keys[1]).cookie
        shown = cookie if rng.random() < 0.3 else mutate_text(rng, cookie)
        try:
            identity = self._sessions.identify(shown)
        except (UnauthenticatedError, ForbiddenError) as error:
            return type(error).__name__
        if _bytes_of(shown) != _bytes_of(cookie):
            raise FindingError(f"{shown!r} in place of {cookie!r} is {identity}")
        return "ok"

    def resume_token(self, rng: Random) -> str:
        """Only the token of this caller, request, seed and prompt."""
        identity = self._authenticator.identify(Credentials(authorization=f"Bearer {self._keys[0]}"))
        asked = ("a", "request-1", 7, b"prompt")
        other = ("b", any_text(rng), rng.randrange(1 << 64), rng.randbytes(3))
        pairs = zip(asked, other, strict=True)
        given = tuple(rng.choice(pair) if rng.random() < 0.2 else pair[0] for pair in pairs)
        token = self._resume.issue(identity, *asked)
        shown = token if rng.random() < 0.4 else mutate_text(rng, token)

        def check() -> None:
            self._resume.check(shown, identity, *given)  # type: ignore[arg-type]
            if given != asked or _bytes_of(shown) != _bytes_of(token):
                raise FindingError(f"{shown!r} resumes {given}; {token!r} was issued for {asked}")

        return outcome(check, ForbiddenError, InvalidRequestError)

    def relay_token(self, rng: Random) -> str:
        """Only the names and the request that a gateway has vouched for."""
        caller = RelayedCaller(tuple(any_text(rng) for _ in range(rng.randrange(3))), any_text(rng))
        token = self._relay.issue(caller)
        shown = token if rng.random() < 0.3 else mutate_text(rng, token)
        found = self._relay.caller(shown)
        if found is not None and (found != caller or _bytes_of(shown) != _bytes_of(token)):
            raise FindingError(f"{shown!r} in place of {token!r} gives {found}")
        return "names" if found is not None else "none"

    def certificate(self, rng: Random) -> str:
        """A name of any bytes is that of somebody only where it is spelled like it."""
        known = b"spiffe://b/admin"
        values = [known if rng.random() < 0.2 else mutate_bytes(rng, known) for _ in range(rng.randrange(4))]
        fields = ("x509_common_name", "x509_subject_alternative_name", "x509_pem_cert", any_text(rng))
        shown = names_of_auth_context({rng.choice(fields): values})
        try:
            self._authenticator.identify(Credentials(certificate_names=shown))
        except UnauthenticatedError:
            return "refused"
        if known not in values:
            raise FindingError(f"{values} is somebody")
        return "ok"

    def key_file(self, rng: Random) -> str:
        """The file of API keys: what can be read can be used."""
        text = mutate_bytes(rng, self._keys_text)

        def read() -> None:
            for entry in parse_keys(text).values():
                entry.identity(self._config)
                entry.opens_with("secret")
                assert entry.mark

        return outcome(read, ValueError)

    def issuer_file(self, rng: Random) -> str:
        """The file of an issuer's public keys, in both forms."""
        if rng.random() < 0.5:
            text = mutate_bytes(rng, self._pem)
        else:
            text = json.dumps(mutate_tree(rng, self._jwks)).encode()
            text = mutate_bytes(rng, text) if rng.random() < 0.2 else text
        return outcome(lambda: parse_issuer_keys(text), ValueError)


class _CertificateFiles:
    """The chain and the key of a gateway's port, damaged as text or in the DER within."""

    def __init__(self, folder: Path) -> None:
        self._files = write_certificate(folder, "fuzzed")
        self._honest = [path.read_bytes() for path in self._files]
        cert_file, key_file = map(str, self._files)
        config = config_of(
            gateway={"tls_cert_file": cert_file, "tls_key_file": key_file},
            inner_tls={"cert_file": cert_file, "key_file": key_file, "ca_file": cert_file},
        )
        self._checked = context_of(Machine(), config, clock=SystemClock())

    def run(self, rng: Random) -> str:
        """What is taken over serves a handshake's context; the doctor has an opinion on anything."""
        damaged = rng.randrange(3)
        for number, (path, text) in enumerate(zip(self._files, self._honest, strict=True)):
            path.write_bytes(self._damage(rng, text) if damaged in (number, 2) else text)
        for check in (tls.gateway_tls, tls.inner_tls):
            assert list(check(self._checked))
        return outcome(lambda: Certificate(*self._files).ssl_context(), StartError)

    def _damage(self, rng: Random, text: bytes) -> bytes:
        if rng.random() < 0.5:
            return mutate_bytes(rng, text)
        first, *body, last = text.strip().split(b"\n")
        der = mutate_bytes(rng, base64.b64decode(b"".join(body)))
        return b"\n".join([first, base64.encodebytes(der).strip(), last]) + b"\n"


def _key_roots(rng: Random) -> str:
    line = b"root-1 " + base64.b64encode(rng.randbytes(rng.choice((32, 32, 32, 16)))) + b"\n"
    text = mutate_bytes(rng, line * rng.randint(1, 3)) if rng.random() < 0.8 else line
    return outcome(lambda: parse_key_roots(text), ValueError)


class _Audit:
    """An audit log with a file."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._folder = folder
        self._log = AuditLog(AuditConfig(folder=folder, max_mb=0.05, keep=2), "fuzz", ManualClock(NOW))
        stack.callback(self._log.close)

    def run(self, rng: Random) -> str:
        """One act is one line of JSON, which shows no key that stands in a field by mistake."""
        secret = base64.urlsafe_b64encode(rng.randbytes(32)).decode().rstrip("=")
        key = f"tandem_{rng.choice(('k3vq7yab', 'aaaaaaaa'))}_{secret}"
        shown = rng.choice((key, f"Bearer {key}", f"{any_text(rng)} {key}", f"bearer {secret}"))
        what = {any_text(rng): any_tree(rng), "field": [shown, {shown: shown}]}
        self._log.record(
            AuditEntry(shown, "fuzz", rng.choice(EDGE_TEXTS), peer=any_text(rng), what=what, detail=shown)
        )
        newest = max(self._folder.glob("*.jsonl*"), key=lambda path: path.stat().st_mtime_ns)
        last = newest.read_bytes().splitlines()[-1]
        if secret.encode() in last:
            raise FindingError(f"a secret is shown: {last!r}")
        json.loads(last)
        return "ok"


# ----------------------------------------------------------------------------------------------- encodings


def _pem(key: Any) -> bytes:
    public: bytes = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return public


def _to_jwk(key: Any) -> str:
    name = {rsa.RSAPrivateKey: "RS256", ec.EllipticCurvePrivateKey: "ES256"}
    algorithm = next((value for kind, value in name.items() if isinstance(key, kind)), "EdDSA")
    return str(jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key()))


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _encoded(tree: dict[str, Any]) -> str:
    return _base64(json.dumps(tree).encode())


def _bytes_of(text: str) -> bytes:
    """Return what a text of base64 holds; several texts hold the same."""
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return hashlib.sha256(text.encode()).digest()

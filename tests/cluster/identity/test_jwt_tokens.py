"""JSON web tokens: which are accepted, who they name, and which attacks on their format fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jwt
import pytest
from callers import AUDIENCE, ISSUER, Issuer, jwt_config, unsigned, write_jwks
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from cluster.errors import ConfigError, UnauthenticatedError
from cluster.identity import jwt_tokens
from cluster.identity.authenticator import Authenticator, Credentials
from cluster.identity.config import AuthConfig
from cluster.identity.identity import Identity
from cluster.identity.jwt_tokens import parse_issuer_keys
from kvtransfer.common.clock import ManualClock

NOW = 1_000_000.0
FAR = NOW + 60


class Verifier:
    """An authenticator that trusts the keys in a file."""

    def __init__(self, keys_file: Path, clock: ManualClock | None = None, **fields: Any) -> None:
        self.clock = clock or ManualClock(NOW)
        tenants = {"acme": {"max_priority": 2, "models": ["m"], "sharing_group": "firm"}}
        section = {"mode": "required", "jwt": jwt_config(keys_file, **fields), "tenants": tenants}
        self.authenticator = Authenticator(AuthConfig.model_validate(section), self.clock)

    def identify(self, token: str) -> Identity:
        return self.authenticator.identify(Credentials(f"Bearer {token}"))

    def refused(self, token: str) -> str:
        with pytest.raises(UnauthenticatedError) as caught:
            self.identify(token)
        return str(caught.value)


@pytest.fixture(scope="module")
def issuers() -> dict[str, Issuer]:
    return {name: Issuer(name, f"key-{name}") for name in ("RS256", "ES256", "EdDSA")}


@pytest.fixture
def verifier(issuers: dict[str, Issuer], tmp_path: Path) -> Verifier:
    return Verifier(write_jwks(tmp_path / "keys.json", list(issuers.values())))


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
@pytest.mark.parametrize("form", ["PEM", "JWKS"])
def test_a_signed_token_names_who_calls(
    issuers: dict[str, Issuer], tmp_path: Path, algorithm: str, form: str
) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"".join(issuer.pem() for issuer in issuers.values()))
    if form == "JWKS":
        write_jwks(path, list(issuers.values()))
    token = issuers[algorithm].token(exp=FAR, roles=["viewer", "admin-of-something-else"], sub="ann@example")
    identity = Verifier(path).identify(token)
    assert (identity.name, identity.method, identity.tenant) == ("jwt:ann@example", "jwt", "acme")
    assert identity.roles == {"viewer"}
    assert (identity.sharing_group, identity.max_priority) == ("firm", 2)
    assert identity.models == frozenset({"m"})
    assert identity.expires_at == FAR


def test_a_token_without_roles_is_a_user_s(verifier: Verifier, issuers: dict[str, Issuer]) -> None:
    assert verifier.identify(issuers["ES256"].token(exp=FAR)).roles == {"user"}
    assert verifier.identify(issuers["ES256"].token(exp=FAR, roles="user operator")).roles == {
        "user",
        "operator",
    }
    assert verifier.identify(issuers["ES256"].token(exp=FAR, roles=[])).roles == frozenset()
    assert "is no list" in verifier.refused(issuers["ES256"].token(exp=FAR, roles={"a": 1}))


def test_claims_may_have_other_names(issuers: dict[str, Issuer], tmp_path: Path) -> None:
    path = write_jwks(tmp_path / "keys.json", list(issuers.values()))
    verifier = Verifier(path, tenant_claim="org", roles_claim="groups")
    token = issuers["EdDSA"].token(exp=FAR, tenant=None, org="other", groups=["operator"])
    identity = verifier.identify(token)
    assert (identity.tenant, identity.models) == ("other", None)
    assert identity.roles == {"operator"}


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"aud": "somebody-else"}, "another issuer or audience"),
        ({"aud": None}, "not valid"),
        ({"iss": "https://evil.example"}, "another issuer or audience"),
        ({"iss": None}, "not valid"),
        ({"exp": None}, "not valid"),
        ({"exp": "soon"}, "not valid"),
        ({"exp": 1e300}, "not valid"),
        ({"exp": True}, "not valid"),
        ({"exp": NOW - 31}, "has expired"),
        ({"nbf": NOW + 31}, "not valid yet"),
        ({"iat": NOW + 31}, "not valid yet"),
        ({"sub": None}, "not valid"),
        ({"sub": ""}, "not valid"),
        ({"sub": 5}, "not valid"),
        ({"tenant": None}, "names no tenant"),
        ({"tenant": ""}, "names no tenant"),
        ({"tenant": "a b"}, "names no tenant"),
        ({"tenant": ["acme"]}, "names no tenant"),
    ],
)
def test_a_token_with_a_wrong_claim_is_refused(
    verifier: Verifier, issuers: dict[str, Issuer], claims: dict[str, Any], reason: str
) -> None:
    assert reason in verifier.refused(issuers["ES256"].token(**{"exp": FAR, **claims}))


def test_clocks_may_differ_a_little(verifier: Verifier, issuers: dict[str, Issuer]) -> None:
    token = issuers["ES256"].token(exp=NOW - 29, nbf=NOW + 29, iat=NOW + 29)
    assert verifier.identify(token).tenant == "acme"
    verifier.clock.advance(1)
    assert "has expired" in verifier.refused(token)


def test_a_subject_cannot_forge_a_line_of_a_log(verifier: Verifier, issuers: dict[str, Issuer]) -> None:
    name = verifier.identify(issuers["ES256"].token(exp=FAR, sub="a\nb" + "c" * 500)).name
    assert name.startswith("jwt:a?bccc")
    assert len(name) == len("jwt:") + 128


def test_no_other_key_signs(verifier: Verifier, issuers: dict[str, Issuer]) -> None:
    for algorithm, issuer in issuers.items():
        assert "not valid" in verifier.refused(Issuer(algorithm, issuer.key_id).token(exp=FAR))
        assert "not valid" in verifier.refused(Issuer(algorithm).token(exp=FAR))
        good = issuer.token(exp=FAR)
        head, body, signature = good.split(".")
        assert "not valid" in verifier.refused(f"{head}.{body}.{signature[:-4]}AAAA")
        assert "not valid" in verifier.refused(f"{head}.{body}.")
        assert "not valid" in verifier.refused(unsigned(good))


def test_a_public_key_is_no_shared_secret(issuers: dict[str, Issuer], tmp_path: Path) -> None:
    """The attack on a verifier that takes the algorithm from the token: HS256 under the public key's text."""
    path = tmp_path / "keys.pem"
    path.write_bytes(issuers["RS256"].pem())
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "x", "tenant": "acme", "exp": FAR}
    parts = jwt.encode(claims, "s" * 64, algorithm="HS256").split(".")
    signed = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
    mac = signed.sign(".".join(parts[:2]).encode(), issuers["RS256"].pem())
    forged = ".".join([*parts[:2], jwt.utils.base64url_encode(mac).decode()])
    assert "not valid" in Verifier(path).refused(forged)


def test_an_algorithm_may_be_left_out(issuers: dict[str, Issuer], tmp_path: Path) -> None:
    path = write_jwks(tmp_path / "keys.json", list(issuers.values()))
    verifier = Verifier(path, algorithms=["EdDSA"])
    assert verifier.identify(issuers["EdDSA"].token(exp=FAR)).tenant == "acme"
    assert "not valid" in verifier.refused(issuers["ES256"].token(exp=FAR))


@pytest.mark.parametrize(
    "text", ["", "a", "a.b", "a.b.c", "....", "eyJhbGciOiJFUzI1NiJ9..", "eyJhbGciOm51bGx9.e30.AA", "é.é.é"]
)
def test_what_is_no_token_is_refused(verifier: Verifier, text: str) -> None:
    with pytest.raises(UnauthenticatedError):
        verifier.identify(text)


def test_an_extension_that_is_not_understood_is_refused(
    verifier: Verifier, issuers: dict[str, Issuer]
) -> None:
    token = issuers["EdDSA"].token(exp=FAR, headers={"crit": ["made-up"], "made-up": 1})
    assert "not valid" in verifier.refused(token)


def test_a_signature_is_verified_once(
    verifier: Verifier, issuers: dict[str, Issuer], monkeypatch: pytest.MonkeyPatch
) -> None:
    token, other = (issuers["ES256"].token(exp=FAR, sub=name) for name in "ab")
    first = verifier.identify(token)
    with monkeypatch.context() as patched:
        patched.delattr(jwt, "decode")
        assert verifier.identify(token) is first
        with pytest.raises(AttributeError):
            verifier.identify(other)
    verifier.clock.advance(60 + 30)
    assert "has expired" in verifier.refused(token)


def test_what_is_remembered_is_bounded(
    issuers: dict[str, Issuer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwt_tokens, "MAX_REMEMBERED", 3)
    verifier = Verifier(write_jwks(tmp_path / "keys.json", list(issuers.values())))
    for number in range(10):
        verifier.identify(issuers["EdDSA"].token(exp=FAR, sub=f"s{number}"))
    assert verifier.authenticator._jwt is not None
    assert len(verifier.authenticator._jwt._verified) == 3


def test_keys_rotate_without_a_refused_token(tmp_path: Path) -> None:
    old, new = Issuer("ES256", "old"), Issuer("ES256", "new")
    path = write_jwks(tmp_path / "keys.json", [old])
    verifier = Verifier(path)
    before, after = old.token(exp=FAR), new.token(exp=FAR)
    assert verifier.identify(before)
    assert verifier.refused(after)
    write_jwks(path, [old, new])
    verifier.authenticator.reload()
    assert verifier.identify(before)
    assert verifier.identify(after)
    path.write_text("{")
    verifier.authenticator.reload()
    assert verifier.identify(before)
    write_jwks(path, [new])
    verifier.authenticator.reload()
    assert verifier.refused(before), "also a token that was verified before"
    assert verifier.identify(after)


def _private_pem(key: Any) -> bytes:
    encoded: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return encoded


def _public_pem(key: Any) -> bytes:
    encoded: bytes = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return encoded


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: b"", "neither PEM nor a JWKS"),
        (lambda: b"{}", "neither PEM nor a JWKS"),
        (lambda: b"[1]", "neither PEM nor a JWKS"),
        (lambda: b'{"keys": 5}', "is no list"),
        (lambda: b'{"keys": []}', "no public key"),
        (lambda: b'{"keys": ["a"]}', "no JSON object"),
        (lambda: b'{"keys": [{"kty": "oct", "k": "AAAA"}]}', "private key"),
        (lambda: json.dumps({"keys": [Issuer().jwk() | {"d": "AAAA"}]}).encode(), "private key"),
        (lambda: json.dumps({"keys": [Issuer().jwk() | {"x": "AAAA"}]}).encode(), "cannot be read"),
        (lambda: json.dumps({"keys": [Issuer().jwk() | {"use": "enc"}]}).encode(), "no public key"),
        (lambda: _private_pem(Issuer().key), "private key"),
        (lambda: b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----", "cannot be read"),
        (lambda: b"-----BEGIN PUBLIC KEY-----", "no public key"),
        (lambda: _public_pem(ec.generate_private_key(ec.SECP384R1())), "no public key"),
        (lambda: _public_pem(rsa.generate_private_key(65537, 1024)), "1024 bits; at least 2048"),
    ],
)
def test_a_file_without_a_usable_key_says_why(make: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_issuer_keys(make())
    path = tmp_path / "keys"
    path.write_bytes(make())
    with pytest.raises(ConfigError, match=rf"auth\.jwt\.keys_file: .*{problem}"):
        Verifier(path)

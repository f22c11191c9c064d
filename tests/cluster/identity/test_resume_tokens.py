"""What a resume token binds."""

from __future__ import annotations

import base64
import dataclasses
import hmac
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import ForbiddenError, InvalidRequestError
from cluster.identity.identity import LOCAL
from cluster.identity.relay_tokens import RelayedCaller, RelayTokens
from cluster.identity.resume_tokens import ResumeTokens, gateway_tag, resume_digest
from cluster.proto.tandem.v1 import inference_pb2 as pb
from kvtransfer.common.clock import ManualClock
from kvtransfer.rpc.trust import Trust

TRUST = Trust(b"s" * 32)
OTHER = Trust(b"t" * 32)
ALICE = dataclasses.replace(LOCAL, name="key:alice", tenant="acme", method="key")
CAROL = dataclasses.replace(LOCAL, name="jwt:carol", tenant="acme", method="jwt")
RIGHT: dict[str, Any] = {
    "identity": ALICE,
    "tenant": "acme",
    "request_id": "r",
    "seed": 5,
    "prompt": b"p" * 32,
}


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def tokens(clock: ManualClock) -> ResumeTokens:
    return ResumeTokens(TRUST, clock, 60.0)


def test_a_token_is_good_at_every_gateway_of_the_secret_until_it_expires(
    tokens: ResumeTokens, clock: ManualClock
) -> None:
    token = tokens.issue(**RIGHT)
    other = ResumeTokens(TRUST, clock, 1.0)
    other.check(token, **RIGHT)
    clock.advance(59)
    other.check(token, **RIGHT)
    clock.advance(1)
    with pytest.raises(ForbiddenError, match="has expired"):
        other.check(token, **RIGHT)


@pytest.mark.parametrize(
    "wrong",
    [
        {"identity": CAROL},
        {"identity": LOCAL},
        {"tenant": "mallory"},
        {"tenant": ""},
        {"request_id": "s"},
        {"seed": 6},
        {"prompt": b"q" * 32},
        {"tenant": "acm", "request_id": "er"},
    ],
)
def test_a_token_is_of_one_caller_request_and_prompt(tokens: ResumeTokens, wrong: dict[str, Any]) -> None:
    with pytest.raises(ForbiddenError, match="not the one of this caller"):
        tokens.check(tokens.issue(**RIGHT), **{**RIGHT, **wrong})


def test_a_client_may_change_its_key_and_nobody_else_may_be_another(tokens: ResumeTokens) -> None:
    """Keys of a tenant are interchangeable; users of an issuer and certificates are themselves."""
    tokens.check(tokens.issue(**RIGHT), **{**RIGHT, "identity": dataclasses.replace(ALICE, name="key:new")})
    for identity in (CAROL, dataclasses.replace(CAROL, name="cert:batch", method="certificate")):
        mine = {**RIGHT, "identity": identity}
        tokens.check(tokens.issue(**mine), **mine)
        for other in (ALICE, dataclasses.replace(identity, name="other")):
            with pytest.raises(ForbiddenError, match="not the one of this caller"):
                tokens.check(tokens.issue(**mine), **{**mine, "identity": other})


def test_a_token_names_its_gateway_and_what_load_cut(clock: ManualClock) -> None:
    tokens = ResumeTokens(TRUST, clock, 60.0, "g1")
    first = tokens.check(tokens.issue(**RIGHT, capped_max_tokens=7), **RIGHT)
    assert first[1:] == (gateway_tag("g1"), 160, 7)
    clock.advance(1)
    assert tokens.check(tokens.issue(**RIGHT), **RIGHT).key != first.key
    assert gateway_tag("") == 0 < gateway_tag("g1") < 1 << 32


def test_gateways_of_the_version_before_take_these_tokens_and_theirs_are_taken(clock: ManualClock) -> None:
    """They know one time of 8 bytes, and no gateway."""
    tokens = ResumeTokens(TRUST, clock, 60.0, "g1")
    data = base64.urlsafe_b64decode(tokens.issue(**RIGHT, capped_max_tokens=7))
    head, mac = data[:12], data[12:]
    proven = (head, ALICE.owner, "acme", "r", 5, b"p" * 32)
    key = TRUST.key_for("tandem-resume-2")
    assert mac == hmac.digest(key, msgspec.msgpack.encode(proven), "sha256")
    assert int.from_bytes(head[:8], "big") > clock.wall()
    assert int.from_bytes(head[8:], "big") == 7
    head = (160).to_bytes(8, "big") + (7).to_bytes(4, "big")
    mac = hmac.digest(key, msgspec.msgpack.encode((head, *proven[1:])), "sha256")
    theirs = tokens.check(base64.urlsafe_b64encode(head + mac).decode(), **RIGHT)
    assert theirs[1:] == (0, 160, 7)


def test_a_token_of_another_secret_is_none(tokens: ResumeTokens, clock: ManualClock) -> None:
    with pytest.raises(ForbiddenError):
        tokens.check(ResumeTokens(OTHER, clock, 60.0).issue(**RIGHT), **RIGHT)


def test_without_a_token_the_field_is_named(tokens: ResumeTokens) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        tokens.check("", **RIGHT)
    assert [violation.field for violation in caught.value.violations] == ["resume_token"]


@given(text=st.text() | st.binary(max_size=80).map(lambda data: base64.urlsafe_b64encode(data).decode()))
def test_whatever_else_is_sent_is_refused(text: str) -> None:
    tokens = ResumeTokens(TRUST, ManualClock(100.0), 60.0)
    with pytest.raises((ForbiddenError, InvalidRequestError)):
        tokens.check(text, **RIGHT)
    assert RelayTokens(TRUST, ManualClock(100.0)).caller(text) is None


@given(position=st.integers(0, 39), bit=st.integers(0, 7))
def test_every_bit_of_a_token_counts(position: int, bit: int) -> None:
    tokens = ResumeTokens(TRUST, ManualClock(100.0), 60.0)
    data = bytearray(base64.urlsafe_b64decode(tokens.issue(**RIGHT)))
    data[position] ^= 1 << bit
    with pytest.raises(ForbiddenError):
        tokens.check(base64.urlsafe_b64encode(data).decode(), **RIGHT)


def test_what_decides_tokens_is_digested() -> None:
    def request(**fields: Any) -> pb.GenerateRequest:
        return pb.GenerateRequest(**{"text": "prompt", "logit_bias": {1: 0.5, 2: 1.5}, **fields})

    same = resume_digest(request())
    assert resume_digest(request(logit_bias={2: 1.5, 1: 0.5})) == same
    unchanged: dict[str, Any] = {
        "request_id": "r",
        "seed": 1,
        "tenant": "t",
        "priority": 3,
        "model": "m",
        "resume_token": "x",
        "resume": [pb.ResumedSample(sample=0, token_ids=[1])],
    }
    for field, value in unchanged.items():
        assert resume_digest(request(**{field: value})) == same, field
    changed: dict[str, Any] = {
        "text": "another",
        "temperature": 0.5,
        "top_k": 0,
        "max_tokens": 5,
        "stop": ["x"],
        "logit_bias": {1: 0.5},
        "n": 2,
        "ignore_eos": False,
    }
    for field, value in changed.items():
        assert resume_digest(request(**{field: value})) != same, field


def test_a_request_is_digested_as_it_came() -> None:
    request = pb.GenerateRequest(text="x", seed=1, request_id="r")
    before = request.SerializeToString()
    resume_digest(request)
    assert request.SerializeToString() == before


def test_a_token_of_one_kind_is_none_of_the_other(tokens: ResumeTokens, clock: ManualClock) -> None:
    assert RelayTokens(TRUST, clock).caller(tokens.issue(**RIGHT)) is None
    with pytest.raises(ForbiddenError):
        tokens.check(RelayTokens(TRUST, clock).issue(RelayedCaller(("ops",), "r")), **RIGHT)

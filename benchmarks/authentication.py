"""What authentication costs, as JSON lines: a figure, its limit and their ratio.

Alone: identifying the caller by an API key among 10,000, by a JWT (new, and known already) and by a
certificate, and issuing and checking a resume token. Over gRPC on loopback: a call that is authenticated
beside one that is not, in pairs, in both orders; the median of the differences counts, in time of the
processors, server and client together, which other processes disturb least. Per token: how much
longer an authenticated stream takes with each token more, from streams of 1 and of 1,025 tokens.

    python -m benchmarks.authentication [--pairs 2000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import jwt
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from benchmarks.drawn_trust import draw_trust
from cluster.api.authentication import Authentication
from cluster.api.call_reading import CallReading
from cluster.config import default_config
from cluster.identity.access_control import AccessControl
from cluster.identity.api_key_file import add_key
from cluster.identity.authenticator import Authenticator, Credentials
from cluster.identity.config import AuthConfig
from cluster.identity.identity import LOCAL
from cluster.identity.resume_tokens import ResumeTokens, resume_digest
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.proto.tandem.v1 import inference_pb2_grpc
from kvtransfer.common.clock import SystemClock
from kvtransfer.rpc.trust import Trust

LIMIT_US = 100.0
# A token on the wire takes tens of microseconds; a part of one would show that authentication is in its way.
TOKEN_LIMIT_US = 1.0
NUM_KEYS = 10_000
NUM_TOKENS = 1024
PROMPT_TOKENS = 8192
CLOCK = SystemClock()
CREATED = datetime(2026, 1, 1, tzinfo=UTC)


def report(what: str, value_us: float, limit_us: float) -> None:
    """Print one line."""
    line = {"what": what, "figure_us": round(value_us, 3), "limit_us": limit_us}
    print(json.dumps(line | {"ratio": round(value_us / limit_us, 4)}), flush=True)


def median_us(call: Callable[[], object], num_calls: int = 2000) -> float:
    """Return the median of one call."""
    times = []
    for _ in range(num_calls):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times) * 1e6


# ------------------------------------------------------------------------------------------------ alone


def write_keys(path: Path, num_keys: int) -> str:
    """Write a file of `num_keys` keys, and return one that is valid."""
    key = add_key(path, draw_bytes, tenant="acme", roles=("user",), created=CREATED)
    raw = yaml.safe_load(path.read_text())
    (entry,) = raw["keys"]
    others = [entry | {"id": _key_id(number)} for number in range(num_keys - 1)]
    path.write_text(
        yaml.dump({"keys": [*others, entry]}, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))
    )
    return key


def draw_bytes(num_bytes: int) -> bytes:
    """Return the same bytes in every run."""
    return bytes(range(200, 200 + num_bytes))


def _key_id(number: int) -> str:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return "".join(letters[number // 26**place % 26] for place in range(8))


class Issuer:
    """Signs tokens with one algorithm."""

    def __init__(self, algorithm: str) -> None:
        self.algorithm = algorithm
        self._key: Any
        if algorithm == "RS256":
            self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        elif algorithm == "ES256":
            self._key = ec.generate_private_key(ec.SECP256R1())
        else:
            self._key = ed25519.Ed25519PrivateKey.generate()

    def pem(self) -> bytes:
        """Return the public key."""
        encoded: bytes = self._key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return encoded

    def token(self, subject: str) -> str:
        """Return a token that is valid for an hour."""
        claims = {"iss": "i", "aud": "a", "sub": subject, "tenant": "acme", "exp": CLOCK.wall() + 3600}
        return jwt.encode(claims, self._key, algorithm=self.algorithm)


def measure_alone(folder: Path) -> None:
    """Report the time to identify the caller, without a call."""
    keys_file = folder / "keys.yaml"
    key = write_keys(keys_file, NUM_KEYS)
    by_key = Authenticator(_config(keys_file), CLOCK)
    shown = Credentials(f"Bearer {key}")
    report(f"identify by one of {NUM_KEYS} API keys", median_us(lambda: by_key.identify(shown)), LIMIT_US)
    for algorithm in ("RS256", "ES256", "EdDSA"):
        measure_tokens(folder, Issuer(algorithm))
    measure_certificates()
    measure_resume()


def measure_tokens(folder: Path, issuer: Issuer) -> None:
    """Report tokens that are verified for the first time, and again."""
    path = folder / "issuer.pem"
    path.write_bytes(issuer.pem())
    section = {"keys_file": path, "issuer": "i", "audience": "a"}
    known = Authenticator(AuthConfig.model_validate({"mode": "required", "jwt": section}), CLOCK)
    fresh = iter([Credentials(f"Bearer {issuer.token(str(number))}") for number in range(500)])
    first_us = median_us(lambda: known.identify(next(fresh)), 500)
    report(f"identify by a new {issuer.algorithm} token (once for each token)", first_us, 10 * LIMIT_US)
    again = Credentials(f"Bearer {issuer.token('again')}")
    report(
        f"identify by a known {issuer.algorithm} token", median_us(lambda: known.identify(again)), LIMIT_US
    )


def measure_certificates() -> None:
    """Report the search of a certificate's names among 1,000 identities, of which the last has them."""
    identities = [{"name": f"client-{number}", "tenant": "acme"} for number in range(1000)]
    section = {"ca_file": "unused", "identities": identities}
    known = Authenticator(AuthConfig.model_validate({"mode": "required", "certificates": section}), CLOCK)
    shown = Credentials("", ("localhost", "client-999"))
    report("identify by one of 1000 certificates", median_us(lambda: known.identify(shown)), LIMIT_US)


def measure_resume() -> None:
    """Report the times of `accepted` and of a resumed call."""
    tokens = ResumeTokens(Trust.read(draw_trust()), CLOCK, 3600.0)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(PROMPT_TOKENS)), max_tokens=10)

    def issue() -> str:
        return tokens.issue(LOCAL, "acme", "id", 1, resume_digest(request))

    token = issue()
    report(f"issue a resume token for {PROMPT_TOKENS} tokens", median_us(issue), LIMIT_US)
    digest = resume_digest(request)
    check_us = median_us(lambda: tokens.check(token, LOCAL, "acme", "id", 1, digest))
    report("check a resume token", check_us, LIMIT_US)


def _config(keys_file: Path) -> AuthConfig:
    return AuthConfig.model_validate({"mode": "required", "keys_file": keys_file})


def _reading() -> CallReading:
    return CallReading(default_config(Path("models/tiny")), 2048)


# ------------------------------------------------------------------------------------------- over gRPC


class Streams(inference_pb2_grpc.InferenceServicer):
    """Answers `Generate` with as many tokens as it is asked for, and does nothing else."""

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        for index in range(request.max_tokens):
            delta = pb.Delta(first_index=index, token_ids=[7])
            await context.write(pb.GenerateResponse(delta=delta))


class Served:
    """A server with the interceptor or without, and a client."""

    def __init__(self, metadata: tuple[tuple[str, str], ...], access: AccessControl | None) -> None:
        interceptors = [] if access is None else [Authentication(access, _reading())]
        self._server = grpc.aio.server(interceptors=interceptors)
        inference_pb2_grpc.add_InferenceServicer_to_server(Streams(), self._server)
        self._metadata = metadata
        self._channel: Any = None
        self._call: Any = None

    async def start(self) -> None:
        """Start the server, and connect."""
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self._call = inference_pb2_grpc.InferenceStub(self._channel).Generate

    async def stop(self) -> None:
        """End the server and the client."""
        await self._channel.close()
        await self._server.stop(0)

    async def seconds(self, num_tokens: int) -> float:
        """Return the time of the processors that one call takes."""
        request = pb.GenerateRequest(max_tokens=num_tokens)
        start = time.process_time()
        async for _ in self._call(request, metadata=self._metadata):
            pass
        return time.process_time() - start


async def measure_calls(folder: Path, num_pairs: int) -> None:
    """Report the extra time of an authenticated call, and of each of its tokens."""
    keys_file = folder / "grpc.yaml"
    key = add_key(keys_file, draw_bytes, tenant="acme", roles=("user",), created=CREATED)
    access = AccessControl(_config(keys_file), "benchmark", Trust.read(draw_trust()), CLOCK)
    plain = Served((), None)
    guarded = Served((("authorization", f"Bearer {key}"),), access)
    await plain.start()
    await guarded.start()
    short = await differences(plain, guarded, 1, num_pairs)
    long = await differences(plain, guarded, 1 + NUM_TOKENS, max(num_pairs // 20, 20))
    await plain.stop()
    await guarded.stop()
    access.close()
    report("authentication of a call, over gRPC", 1e6 * short, LIMIT_US)
    report("authentication for each token of a stream", 1e6 * (long - short) / NUM_TOKENS, TOKEN_LIMIT_US)


async def differences(plain: Served, guarded: Served, num_tokens: int, num_pairs: int) -> float:
    """Return the median difference of a pair of calls, in seconds; the two take turns in going first."""
    for served in (plain, guarded):
        for _ in range(20):
            await served.seconds(num_tokens)
    found = []
    for number in range(num_pairs):
        order = (plain, guarded) if number % 2 else (guarded, plain)
        taken = {served: await served.seconds(num_tokens) for served in order}
        found.append(taken[guarded] - taken[plain])
    return statistics.median(found)


def main() -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=2000, help="of calls, for each length of streams")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure_alone(Path(folder))
        asyncio.run(measure_calls(Path(folder), arguments.pairs))


if __name__ == "__main__":
    main()

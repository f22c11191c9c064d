"""Everything that listens, against everybody who might try: the matrix is generated from the descriptors of
the gRPC services, the routes of HTTP and of the console, and the list of internal ports.

What is new there has no expectation, and fails its test.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from aiohttp import web
from callers import Issuer, bearing, jwt_config, key_of
from console_harness import ConsoleHarness
from gateway_harness import PROMPT, GatewayHarness
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from listeners import KINDS, ListenerProcess
from patience import WAIT_S

from benchmarks.drawn_trust import draw_trust
from cluster.api.generate_options import GenerateOptions
from cluster.console.http_server import API, PATH
from cluster.identity.api_key_file import revoke_key
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.roster.messages import GatewayRecord
from kvtransfer.errors import ProofError
from kvtransfer.rpc.handshake import connect_tcp, prove_as_async_client, prove_as_client
from kvtransfer.rpc.trust import Trust

CALLERS = (
    "no credential",
    "other tenant",
    "viewer",
    "operator",
    "expired",
    "revoked",
    "wrong audience",
    "replayed resume token",
)
VICTIM = "acme-invoice-4711"
SEED = 1
Row = tuple[Any, ...]


def row(known: str, *, other: Any, viewer: Any, operator: Any, replayed: Any = None) -> Row:
    """What each of `CALLERS` gets; `known` is what they get whose credentials are not valid."""
    return (known, other, viewer, operator, known, known, known, known if replayed is None else replayed)


# ----------------------------------------------------------------------------------------------------- gRPC

SERVICES = (
    *pb.DESCRIPTOR.services_by_name.values(),
    *admin_pb.DESCRIPTOR.services_by_name.values(),
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
METHODS = {
    f"/{service.full_name}/{method.name}": method for service in SERVICES for method in service.methods
}
INFERENCE, ADMIN = "/tandem.v1.Inference/", "/tandem.v1.Admin/"
HEALTH, REFLECTION = "/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/"

UNKNOWN, FORBIDDEN = "UNAUTHENTICATED", "PERMISSION_DENIED"
OPEN = ("OK",) * len(CALLERS)
USERS = row(UNKNOWN, other="OK", viewer=FORBIDDEN, operator=FORBIDDEN)
VIEWERS = row(UNKNOWN, other=FORBIDDEN, viewer="OK", operator="OK")
OPERATORS = row(UNKNOWN, other=FORBIDDEN, viewer=FORBIDDEN, operator="OK")
RPCS: dict[str, Row] = {
    # With the victim's token, in a call of another tenant: the only one that takes it.
    f"{INFERENCE}Generate": row(
        UNKNOWN, other="OK", viewer=FORBIDDEN, operator=FORBIDDEN, replayed=FORBIDDEN
    ),
    f"{INFERENCE}Embed": row(UNKNOWN, other="INVALID_ARGUMENT", viewer=FORBIDDEN, operator=FORBIDDEN),
    f"{INFERENCE}Score": row(UNKNOWN, other="INVALID_ARGUMENT", viewer=FORBIDDEN, operator=FORBIDDEN),
    f"{INFERENCE}Tokenize": USERS,
    f"{INFERENCE}Detokenize": USERS,
    f"{INFERENCE}ListModels": USERS,
    f"{INFERENCE}Explain": row(UNKNOWN, other="NOT_FOUND", viewer=FORBIDDEN, operator=FORBIDDEN),
    f"{INFERENCE}ListRequests": USERS,
    f"{ADMIN}Status": VIEWERS,
    f"{ADMIN}Paths": VIEWERS,
    f"{ADMIN}Explain": VIEWERS,
    f"{ADMIN}ListRequests": VIEWERS,
    f"{ADMIN}Recording": VIEWERS,
    f"{ADMIN}StoreStat": VIEWERS,
    f"{ADMIN}StoreList": VIEWERS,
    f"{ADMIN}StoreVerify": OPERATORS,
    f"{ADMIN}StorePurge": OPERATORS,
    f"{ADMIN}Scale": OPERATORS,
    f"{ADMIN}Release": OPERATORS,
    f"{ADMIN}Traffic": OPERATORS,
    f"{HEALTH}Check": OPEN,
    f"{HEALTH}List": ("UNIMPLEMENTED",) * len(CALLERS),
    f"{HEALTH}Watch": OPEN,
    f"{REFLECTION}ServerReflectionInfo": row(UNKNOWN, other="OK", viewer="OK", operator="OK"),
}
REQUESTS: dict[str, Any] = {
    f"{INFERENCE}Generate": pb.GenerateRequest(text=PROMPT, max_tokens=1),
    f"{INFERENCE}Tokenize": pb.TokenizeRequest(text=PROMPT),
    f"{INFERENCE}Detokenize": pb.DetokenizeRequest(token_ids=[5]),
    f"{INFERENCE}Explain": pb.ExplainRequest(request_id=VICTIM, tenant="acme"),
    f"{ADMIN}Explain": pb.ExplainRequest(request_id=VICTIM),
    f"{ADMIN}StorePurge": admin_pb.StorePurgeRequest(all=True),
    f"{ADMIN}Scale": admin_pb.ScaleRequest(replicas={"decode": 2}),
    f"{ADMIN}Release": admin_pb.ReleaseRequest(pools=["decode"]),
    f"{ADMIN}Traffic": admin_pb.TrafficRequest(weights={"tandem": 1.0}),
    f"{REFLECTION}ServerReflectionInfo": reflection_pb2.ServerReflectionRequest(list_services=""),
}

# -------------------------------------------------------------------------------------------------- console

PAGE = (200,) * len(CALLERS)
ROUTES: dict[tuple[str, str], Row] = {
    ("GET", "/"): PAGE,
    ("GET", PATH): PAGE,
    ("GET", f"{PATH}/"): PAGE,
    ("GET", f"{API}/session"): PAGE,  # says who is signed in: nobody
    # With the credential as the key to sign in with.
    ("POST", f"{API}/sign-in"): (400, 403, 200, 200, 401, 401, 401, 401),
    ("POST", f"{API}/sign-out"): PAGE,
    **{
        ("GET", f"{API}/{name}"): row("401", other=403, viewer=200, operator=200)
        for name in ("about", "status", "paths", "requests", "explain", "curves", "trends")
    },
    ("GET", "/metrics"): row("401", other=403, viewer=200, operator=200),
    **{
        ("POST", f"{API}/{name}"): row("401", other=403, viewer=403, operator=200)
        for name in ("scale", "release")
    },
}
BODIES: Mapping[str, dict[str, Any]] = {
    f"{API}/sign-out": {},
    f"{API}/scale": {"pool": "decode", "replicas": 2},
    f"{API}/release": {"pool": "decode"},
}
QUERIES = {f"{API}/explain": f"?id={VICTIM}", f"{API}/trends": "?span_s=300"}

# ----------------------------------------------------------------------------------------------------- HTTP

HTTP_USERS = row("401", other=200, viewer=403, operator=403)
HTTP_ROUTES: dict[tuple[str, str], Row] = {
    ("GET", "/health"): PAGE,
    ("GET", "/ping"): PAGE,
    ("GET", "/version"): PAGE,
    ("GET", "/v1/models"): HTTP_USERS,
    ("GET", "/v1/models/{model}"): HTTP_USERS,
    ("POST", "/v1/chat/completions"): HTTP_USERS,
    ("POST", "/v1/completions"): HTTP_USERS,
    ("POST", "/v1/responses"): HTTP_USERS,
    ("POST", "/v1/messages"): HTTP_USERS,
    ("POST", "/v1/messages/count_tokens"): HTTP_USERS,
    ("POST", "/v1/embeddings"): row("401", other=400, viewer=403, operator=403),  # it is a bad one
    ("POST", "/tokenize"): HTTP_USERS,
    ("POST", "/detokenize"): HTTP_USERS,
}
_CHAT = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
HTTP_BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 1},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 1},
    "/v1/messages": _CHAT,
    "/v1/messages/count_tokens": {"messages": _CHAT["messages"]},
    "/v1/embeddings": {"input": PROMPT, "dimensions": 0},
    "/tokenize": {"prompt": PROMPT},
    "/detokenize": {"tokens": [5]},
}

# ------------------------------------------------------------------------------------------- internal ports

# Fields of a gateway's record that are no internal port.
PUBLIC_ADDRESSES = {"address", "console", "admin", "http"}
# Nobody who calls has the cluster secret.
PORTS = dict.fromkeys(("fleet", *KINDS), ("closed",) * len(CALLERS))


class Siege:
    """A gateway with everything on, the victim's running stream, and what each caller has to show."""

    def __init__(self, harness: GatewayHarness, folder: Path) -> None:
        self.console = ConsoleHarness(harness)
        self._harness = harness
        self._keys_file = folder / "keys.yaml"
        issuer = Issuer()
        issuer_file = folder / "issuer.pem"
        issuer_file.write_bytes(issuer.pem())
        past = datetime(2026, 1, 2, tzinfo=UTC)
        self._acme = key_of(self._keys_file, "acme")
        self.credentials = {
            "no credential": "",
            "other tenant": key_of(self._keys_file, "mallory"),
            "viewer": key_of(self._keys_file, "ops", "viewer"),
            "operator": key_of(self._keys_file, "ops", "operator"),
            "expired": key_of(self._keys_file, "acme", "user", "operator", expires=past),
            "revoked": key_of(self._keys_file, "acme", "user", "operator"),
            "wrong audience": issuer.token(aud="elsewhere", sub="s" * 100, roles=["user", "operator"]),
        }
        self._auth = {
            "mode": "required",
            "keys_file": str(self._keys_file),
            "jwt": jwt_config(issuer_file),
        }

    async def start(self) -> None:
        await self.console.start(auth=self._auth)
        self._harness.replicas["d0"].script.stop_after = 4
        revoke_key(self._keys_file, self.credentials["revoked"][7:15])
        self.console.gateway._access.authenticator.reload()
        options = GenerateOptions(request_id=VICTIM, seed=SEED, max_tokens=8)
        victim = self._harness.client(self.console.address, credentials=bearing(self._acme))
        self._stream = victim.generate(PROMPT, options, resume=False).events()
        accepted = await anext(self._stream)
        assert isinstance(accepted, pb.Accepted)
        self.credentials["replayed resume token"] = accepted.resume_token

    async def stop(self) -> None:
        await self._stream.aclose()
        await self.console.stop()

    async def call(self, path: str, caller: str) -> str:
        """The status of the first answer to one call; nobody's answer shows the victim's request, except
        those for operators and viewers."""
        request, token = REQUESTS.get(path), self.credentials[caller]
        if request is None:
            request = GetMessageClass(METHODS[path].input_type)()
        if path == f"{INFERENCE}Generate":
            request = pb.GenerateRequest.FromString(request.SerializeToString())
            request.request_id = f"try-{caller.replace(' ', '-')}"
            if caller == "replayed resume token":
                token = self.credentials["other tenant"]
                resumed = pb.GenerateRequest(request_id=VICTIM, seed=SEED, max_tokens=8, tenant="acme")
                request.MergeFrom(resumed)
                request.resume_token = self.credentials[caller]
                request.resume.add(sample=0)
        is_admin = path.startswith(ADMIN)
        address = self.console.admin_address if is_admin else self.console.address
        method = METHODS[path]
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        if method.client_streaming:
            return await asyncio.to_thread(call_and_stream, address, path, request, metadata)
        async with grpc.aio.insecure_channel(address) as channel:
            kind = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = kind(path)(request.SerializeToString(), metadata=metadata, timeout=WAIT_S)
            try:
                answer = await (call.read() if method.server_streaming else call)
                if path == f"{INFERENCE}Generate":
                    while await call.read() is not grpc.aio.EOF:
                        pass
            except grpc.aio.AioRpcError as error:
                return str(error.code().name)
            assert is_admin or answer is grpc.aio.EOF or VICTIM.encode() not in answer
            if answer is grpc.aio.EOF:
                return str((await call.code()).name)
            call.cancel()
            return "OK"

    async def ask(self, method: str, path: str, caller: str) -> int:
        """The HTTP status of one request to the console."""
        token = self.credentials[caller]
        headers = {"Content-Type": "application/json"} if method == "POST" else {}
        if token and path != f"{API}/sign-in":
            headers["Authorization"] = f"Bearer {token}"
        body = {"key": token} if path == f"{API}/sign-in" else BODIES.get(path)
        data = None if body is None else json.dumps(body).encode()
        url = f"{self.console.page.url}{path}{QUERIES.get(path, '')}"
        async with self.console.page.session.request(method, url, headers=headers, data=data) as reply:
            text = await reply.text()
            assert caller in ("viewer", "operator") or "acme" not in text
            self.console.page.session.cookie_jar.clear()
            return reply.status

    async def ask_http(self, method: str, path: str, caller: str) -> int:
        """The HTTP status of one request to the API."""
        token = self.credentials[caller]
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = f"http://127.0.0.1:{self.console.gateway.http_port}{path.replace('{model}', 'm')}"
        options: dict[str, Any] = {"json": HTTP_BODIES[path]} if method == "POST" else {}
        async with self.console.page.session.request(method, url, headers=headers, **options) as reply:
            assert VICTIM not in await reply.text()
            return reply.status

    def routes(self) -> set[tuple[str, str]]:
        """Every route of the console, without those of the page's own files."""
        console = self.console.gateway._console
        assert console is not None
        found = routes_of(console.app)
        return {(method, path) for method, path in found if not path.endswith((".js", ".css", ".svg"))}

    def http_routes(self) -> set[tuple[str, str]]:
        """Every route of the API."""
        front = self.console.gateway._http
        assert front is not None
        return routes_of(front.app)


def call_and_stream(address: str, path: str, request: Message, metadata: Sequence[tuple[str, str]]) -> str:
    """The status of the first answer to one call that streams its messages; by threads, as an asyncio client
    may report INTERNAL in place of a refusal that comes while it sends (grpc/grpc#36066)."""
    with grpc.insecure_channel(address) as channel:
        call = channel.stream_stream(path)(
            iter([request.SerializeToString()]), metadata=metadata, timeout=WAIT_S
        )
        try:
            answer = next(call)
        except grpc.RpcError as error:
            return str(error.code().name)
        assert VICTIM.encode() not in answer
        return "OK"


def routes_of(app: web.Application) -> set[tuple[str, str]]:
    """Without those of HEAD, which stand beside GET's and have their handlers."""
    found = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None
    }
    heads = {route for route in found if route[0] == "HEAD"}
    assert {path for _, path in heads} == {path for method, path in found if method == "GET"}
    return found - heads


@pytest.fixture
async def siege(harness: GatewayHarness, tmp_path: Path) -> AsyncIterator[Siege]:
    built = Siege(harness, tmp_path)
    await built.start()
    yield built
    await built.stop()


async def test_every_rpc_answers_each_caller_as_expected(siege: Siege) -> None:
    assert RPCS.keys() == METHODS.keys(), "a method without an expectation, or one that is gone"
    found = {path: tuple([await siege.call(path, caller) for caller in CALLERS]) for path in METHODS}
    assert {path: each for path, each in found.items() if each != RPCS[path]} == {}


async def test_every_route_of_the_console_answers_each_caller_as_expected(siege: Siege) -> None:
    assert ROUTES.keys() == siege.routes(), "a route without an expectation, or one that is gone"
    found = {
        route: tuple([str(await siege.ask(*route, caller)) for caller in CALLERS]) for route in sorted(ROUTES)
    }
    expected = {route: tuple(map(str, statuses)) for route, statuses in ROUTES.items()}
    assert {route: each for route, each in found.items() if each != expected[route]} == {}


async def test_every_route_of_http_answers_each_caller_as_expected(siege: Siege) -> None:
    assert HTTP_ROUTES.keys() == siege.http_routes(), "a route without an expectation, or one that is gone"
    found = {
        route: tuple([str(await siege.ask_http(*route, caller)) for caller in CALLERS])
        for route in sorted(HTTP_ROUTES)
    }
    expected = {route: tuple(map(str, statuses)) for route, statuses in HTTP_ROUTES.items()}
    assert {route: each for route, each in found.items() if each != expected[route]} == {}


async def test_the_port_between_gateways_is_closed_to_every_caller(siege: Siege) -> None:
    addresses = {name for name in GatewayRecord.__struct_fields__ if name in ("fleet", *PUBLIC_ADDRESSES)}
    assert addresses == {"fleet", *PUBLIC_ADDRESSES}
    for expected, caller in zip(PORTS["fleet"], CALLERS, strict=True):
        assert expected == "closed"
        secret = Trust.of(siege.credentials[caller].encode() or b"guess")
        sock = await connect_tcp(f"127.0.0.1:{siege.console.gateway.fleet_port}")
        with sock, pytest.raises(ProofError, match="does not know the cluster secret"):
            await prove_as_async_client(sock, secret, caller)


def test_every_other_internal_port_is_closed_to_every_caller() -> None:
    assert PORTS.keys() == {"fleet", *KINDS}
    with ListenerProcess(draw_trust()) as listening:
        for kind in KINDS:
            for expected, caller in zip(PORTS[kind], CALLERS, strict=True):
                assert expected == "closed"
                secret = Trust.of(f"{caller}, as a secret".encode())
                with listening.connect(kind) as sock, pytest.raises(ProofError, match="does not know"):
                    prove_as_client(sock, secret, caller)

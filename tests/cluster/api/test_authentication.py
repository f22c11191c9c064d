"""Every method of the gateway, called with and without credentials: real gRPC, real keys and certificates."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from authority import Authority
from callers import Issuer, bearing, jwt_config, key_of, write_jwks
from cryptography import x509
from gateway_harness import PROMPT, GatewayHarness, Pair, encode, expected, until
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from patience import WAIT_S

from cluster.api.authentication import METHOD_ACCESS
from cluster.api.channel import ClientCredentials
from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError
from cluster.identity.api_key_file import revoke_key
from cluster.identity.identity import ROLES
from cluster.identity.relay_tokens import RelayedCaller, RelayTokens
from cluster.proto import RELAYED_CERTIFICATE_KEY
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.serve.gateway_server import Gateway
from kvtransfer.common.clock import SystemClock

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
PERMISSION_DENIED = grpc.StatusCode.PERMISSION_DENIED
SERVICES = {**pb.DESCRIPTOR.services_by_name, **admin_pb.DESCRIPTOR.services_by_name}
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for service in SERVICES.values()
    for method in service.methods
}
# A request that each method accepts, where an empty one would be refused for itself.
REQUESTS: dict[str, Any] = {
    "Generate": pb.GenerateRequest(token_ids=pb.TokenIds(ids=encode(PROMPT)), max_tokens=1),
    "Tokenize": pb.TokenizeRequest(text="x"),
    "Explain": pb.ExplainRequest(request_id="unheard-of"),
    "StorePurge": admin_pb.StorePurgeRequest(all=True),
    "Traffic": admin_pb.TrafficRequest(weights={"tandem": 1.0}),
}


class Guarded:
    """A gateway that asks who calls, and a key for each set of roles."""

    def __init__(self, harness: GatewayHarness, folder: Path) -> None:
        self.harness = harness
        self.keys_file = folder / "keys.yaml"
        self.keys = {
            role: key_of(self.keys_file, "acme" if role == "user" else "ops", role) for role in ROLES
        }
        self.gateway: Gateway
        self.address = ""

    async def start(self, auth: dict[str, Any] | None = None, **gateway: Any) -> None:
        await self.harness.add_replica("p0", "prefill")
        await self.harness.add_replica("d0", "decode")
        section = {"mode": "required", "keys_file": str(self.keys_file), **(auth or {})}
        config = self.harness.config(auth=section, **gateway)
        self.gateway, self.address = await self.harness.add_gateway(config)

    def place(self, path: str) -> str:
        """Where the method is answered."""
        is_admin = path.startswith(f"/{SERVICES['Admin'].full_name}/")
        return f"127.0.0.1:{self.gateway.admin_port}" if is_admin else self.address

    async def call(self, path: str, metadata: tuple[tuple[str, str], ...] = ()) -> grpc.StatusCode:
        """The status of one call of the method."""
        method = METHODS[path]
        request = REQUESTS.get(method.name) or GetMessageClass(method.input_type)()
        async with grpc.aio.insecure_channel(self.place(path)) as channel:
            kind = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = kind(path, request_serializer=lambda it: it.SerializeToString())(
                request, metadata=metadata, timeout=WAIT_S
            )
            try:
                if method.server_streaming:
                    async for _ in call:
                        pass
                else:
                    await call
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK


@pytest.fixture
async def guarded(harness: GatewayHarness, tmp_path: Path) -> Guarded:
    built = Guarded(harness, tmp_path)
    await built.start()
    return built


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def test_every_method_has_an_entry_and_no_entry_is_of_a_method_that_is_gone() -> None:
    others = {path for path in METHOD_ACCESS if path.startswith(("/grpc.health.", "/grpc.reflection."))}
    assert METHOD_ACCESS.keys() - others == METHODS.keys()
    assert {METHOD_ACCESS[path] for path in METHODS} == set(ROLES)
    inference = f"/{SERVICES['Inference'].full_name}/"
    for path in METHODS:
        assert (METHOD_ACCESS[path] == "user") == path.startswith(inference)


@pytest.mark.parametrize("path", METHODS)
async def test_each_method_serves_its_role_alone(guarded: Guarded, path: str) -> None:
    assert await guarded.call(path) is UNAUTHENTICATED
    assert await guarded.call(path, bearer("tandem_abcdefgh_" + 43 * "A")) is UNAUTHENTICATED
    assert await guarded.call(path, (("authorization", guarded.keys["user"]),)) is UNAUTHENTICATED
    for role in ROLES:
        needed = METHOD_ACCESS[path]
        may = role == needed or (needed == "viewer" and role == "operator")
        code = await guarded.call(path, bearer(guarded.keys[role]))
        if may:  # the method itself may find fault with an empty request
            assert code not in (UNAUTHENTICATED, PERMISSION_DENIED, grpc.StatusCode.UNKNOWN)
        else:
            assert code is PERMISSION_DENIED
    refused = {it.tenant for replica in guarded.harness.replicas.values() for it in replica.submissions}
    assert refused <= {"acme"}, "nothing of a refused call reached a replica"


async def test_neither_port_answers_what_belongs_to_the_other(guarded: Guarded) -> None:
    async with grpc.aio.insecure_channel(guarded.address) as channel:
        call = channel.unary_unary(f"/{SERVICES['Admin'].full_name}/Status")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"", metadata=bearer(guarded.keys["operator"]), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_method_that_does_not_exist_is_unknown_to_everybody(guarded: Guarded) -> None:
    async with grpc.aio.insecure_channel(guarded.address) as channel:
        for path in ("/tandem.v1.Inference/None", "/other.Service/Method"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(path)(b"", timeout=WAIT_S)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_is_open_and_reflection_is_not(guarded: Guarded) -> None:
    for place in (guarded.address, f"127.0.0.1:{guarded.gateway.admin_port}"):
        async with grpc.aio.insecure_channel(place) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
            request = reflection_pb2.ServerReflectionRequest(list_services="*")
            # It sends no message: one that fails because the call has ended would hide the call's status.
            assert await ask(timeout=WAIT_S).code() is UNAUTHENTICATED
            shown = [
                it
                async for it in ask(iter([request]), timeout=WAIT_S, metadata=bearer(guarded.keys["viewer"]))
            ]
            names = {service.name for service in shown[0].list_services_response.service}
            assert len(names & {"tandem.v1.Inference", "tandem.v1.Admin"}) == 1


async def test_a_stream_of_messages_is_refused_with_the_same_status(guarded: Guarded) -> None:
    """Those that arrive when the call has ended change nothing about it. With gRPC's synchronous client: that
    of asyncio confuses its own failed write with the status of the call."""
    requests = [reflection_pb2.ServerReflectionRequest(file_by_filename="x" * 100_000)] * 20

    def refused() -> set[grpc.StatusCode]:
        with grpc.insecure_channel(guarded.address) as channel:
            ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
            codes = set()
            for _ in range(20):
                with pytest.raises(grpc.RpcError) as caught:
                    list(ask(iter(requests), timeout=WAIT_S))
                codes.add(caught.value.code())
            return codes

    assert await asyncio.to_thread(refused) == {UNAUTHENTICATED}


async def test_who_calls_is_decided_before_the_message_is_read(guarded: Guarded) -> None:
    """The refusal comes while the client has not sent anything of its message."""
    never = asyncio.Event()

    async def nothing() -> AsyncIterator[bytes]:
        await never.wait()
        yield b""

    async with grpc.aio.insecure_channel(guarded.address) as channel:
        call = channel.stream_unary("/tandem.v1.Inference/Generate")(nothing(), timeout=WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    assert caught.value.code() is UNAUTHENTICATED
    assert not never.is_set()


async def test_two_credentials_at_once_are_refused(guarded: Guarded) -> None:
    both = (*bearer(guarded.keys["user"]), *bearer(guarded.keys["operator"]))
    assert await guarded.call("/tandem.v1.Inference/ListModels", both) is UNAUTHENTICATED


async def test_a_revoked_key_is_refused_and_its_connection_too(guarded: Guarded) -> None:
    key = guarded.keys["user"]
    client = guarded.harness.client(guarded.address, credentials=bearing(key))
    await client.models()
    revoke_key(guarded.keys_file, key[7:15])

    async def is_refused() -> bool:
        try:
            await client.models()
        except CallError as error:
            return error.code is UNAUTHENTICATED
        return False

    while not await is_refused():
        await asyncio.sleep(0.05)


async def test_the_client_library_shows_its_credentials(guarded: Guarded) -> None:
    used: list[str] = []

    def fresh() -> str:
        used.append(guarded.keys["user"])
        return used[-1]

    client = guarded.harness.client(guarded.address, credentials=ClientCredentials(bearer=fresh))
    done = await client.complete(PROMPT, GenerateOptions(seed=3, max_tokens=4))
    assert list(done.token_ids[0]) == expected(3, 4)
    assert (await client.tokenize(PROMPT)) == encode(PROMPT)
    assert (await client.explain(done.request_id)).tenant == "acme"
    assert [it.request_id for it in await client.requests()] == [done.request_id]
    assert len(used) == 4, "asked before each call"
    admin = guarded.harness.admin(credentials=bearing(guarded.keys["viewer"]))
    assert (await admin.status()).authentication == "required"
    assert [it.request_id for it in (await admin.requests()).requests] == [done.request_id]
    assert (await admin.explain(done.request_id, "acme")).state == pb.REQUEST_STATE_FINISHED
    with pytest.raises(CallError, match="NOT_FOUND"):
        await admin.explain(done.request_id, "ops")
    assert [path.replica_id for path in await admin.paths()] == ["d0", "p0"]
    with pytest.raises(CallError, match=r"PERMISSION_DENIED.*lacks the role 'operator'"):
        await admin.store_purge(admin_pb.StorePurgeRequest(all=True))


async def test_tokens_of_an_issuer_are_as_good(harness: GatewayHarness, tmp_path: Path) -> None:
    issuer = Issuer("EdDSA", "one")
    jwks = write_jwks(tmp_path / "jwks.json", [issuer])
    guarded = Guarded(harness, tmp_path)
    await guarded.start(auth={"jwt": jwt_config(jwks)})
    path = "/tandem.v1.Inference/ListModels"
    assert await guarded.call(path, bearer(issuer.token())) is grpc.StatusCode.OK
    assert await guarded.call(path, bearer(issuer.token(aud="other"))) is UNAUTHENTICATED
    assert await guarded.call(path, bearer(issuer.token(exp=1))) is UNAUTHENTICATED
    assert await guarded.call(path, bearer(issuer.token(roles=["viewer"]))) is PERMISSION_DENIED
    assert await guarded.call(path, bearer(guarded.keys["user"])) is grpc.StatusCode.OK


async def test_what_only_a_gateway_may_say_is_worth_nothing_from_a_client(guarded: Guarded) -> None:
    forged = ((RELAYED_CERTIFICATE_KEY, "AAAA"),)
    assert await guarded.call("/tandem.v1.Inference/ListModels", forged) is UNAUTHENTICATED


async def test_without_authentication_a_call_needs_nothing(pair: Pair) -> None:
    assert (await pair.admin.status()).authentication == "none"
    done = await pair.client.complete(PROMPT, GenerateOptions(seed=1, max_tokens=2, tenant="any", priority=9))
    (submission,) = pair.prefill.submissions
    assert (submission.tenant, submission.priority) == ("any", 9)
    assert (await pair.client.explain(done.request_id)).tenant == "any"


# ----------------------------------------------------------------------------- client certificates


class Certified:
    """A gateway with TLS that asks for client certificates, and an authority that both sides trust."""

    def __init__(self, harness: GatewayHarness, folder: Path) -> None:
        self.harness = harness
        self.folder = folder
        self.authority = Authority("our authority")
        (folder / "ca").mkdir()
        (folder / "server").mkdir()
        self.ca_file = self.authority.write(folder / "ca")
        self.server = self.authority.issue(folder / "server", "gateway")
        self.guarded = Guarded(harness, folder)

    async def start(self, **certificates: Any) -> None:
        identities = [
            {"name": "batch", "tenant": "batch"},
            {"name": "spiffe://example/ops", "tenant": "ops", "roles": ["operator"]},
        ]
        section = {"ca_file": str(self.ca_file), "identities": identities, **certificates}
        cert_file, key_file = self.server
        await self.guarded.start(
            auth={"certificates": section}, tls_cert_file=str(cert_file), tls_key_file=str(key_file)
        )

    def credentials(self, name: str, *uris: str, authority: Authority | None = None) -> ClientCredentials:
        folder = self.folder / f"client-{name}-{authority is None}"
        folder.mkdir(exist_ok=True)
        names = [x509.UniformResourceIdentifier(uri) for uri in uris]
        cert_file, key_file = (authority or self.authority).issue(folder, name, names=names)
        return ClientCredentials(
            root_certificate=self.ca_file.read_bytes(),
            certificate=cert_file.read_bytes(),
            private_key=key_file.read_bytes(),
        )

    def client(self, credentials: ClientCredentials) -> Any:
        return self.harness.client(f"tls://{self.guarded.address}", credentials=credentials)


@pytest.fixture
async def certified(harness: GatewayHarness, tmp_path: Path) -> Certified:
    built = Certified(harness, tmp_path)
    await built.start()
    return built


async def test_a_client_certificate_says_who_calls(certified: Certified) -> None:
    client = certified.client(certified.credentials("batch"))
    done = await client.complete(PROMPT, GenerateOptions(seed=3, max_tokens=4, tenant="other"))
    assert list(done.token_ids[0]) == expected(3, 4)
    assert (await client.explain(done.request_id)).tenant == "batch"
    assert (await client.tokenize(PROMPT)) == encode(PROMPT)
    ops = certified.credentials("anything", "spiffe://example/ops")
    admin = certified.harness.admin(credentials=ops, scheme="tls://")
    assert [it.tenant for it in (await admin.requests()).requests] == ["batch"]
    assert [path.replica_id for path in await admin.paths()] == ["d0", "p0"]
    with pytest.raises(
        CallError, match=r"PERMISSION_DENIED.*cert:spiffe://example/ops lacks the role 'user'"
    ):
        await certified.client(ops).models()


async def test_a_certificate_of_a_stranger_or_of_nobody_opens_nothing(certified: Certified) -> None:
    unknown = certified.client(certified.credentials("somebody"))
    with pytest.raises(CallError, match=r"UNAUTHENTICATED.*no name that is known"):
        await unknown.models()
    for credentials in (
        certified.credentials("batch", authority=Authority("theirs")),
        ClientCredentials(root_certificate=certified.ca_file.read_bytes()),
    ):
        with pytest.raises(CallError, match="UNAVAILABLE"):
            await certified.client(credentials).models()


async def test_a_key_goes_before_the_certificate(certified: Certified) -> None:
    key = certified.guarded.keys["user"]
    shown = certified.credentials("somebody")
    client = certified.client(
        ClientCredentials(
            bearer=key,
            root_certificate=shown.root_certificate,
            certificate=shown.certificate,
            private_key=shown.private_key,
        )
    )
    done = await client.complete(PROMPT, GenerateOptions(max_tokens=1))
    assert (await client.explain(done.request_id)).tenant == "acme"


async def test_a_call_without_a_message_is_refused(certified: Certified) -> None:
    credentials = certified.credentials("batch").channel_credentials()
    async with grpc.aio.secure_channel(certified.guarded.address, credentials) as channel:
        call = channel.stream_unary("/tandem.v1.Inference/ListModels")(timeout=WAIT_S)
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_one_port_alone_may_ask_for_certificates(harness: GatewayHarness, tmp_path: Path) -> None:
    certified = Certified(harness, tmp_path)
    await certified.start(ports=["admin"])
    trusting = certified.ca_file.read_bytes()
    key = ClientCredentials(bearer=certified.guarded.keys["user"], root_certificate=trusting)
    assert [model.name for model in await certified.client(key).models()] == ["m"]
    viewer = ClientCredentials(bearer=certified.guarded.keys["viewer"], root_certificate=trusting)
    with pytest.raises(CallError, match="UNAVAILABLE"):
        await harness.admin(credentials=viewer, scheme="tls://").status()


async def test_another_authority_is_trusted_without_a_restart(certified: Certified) -> None:
    theirs = Authority("our next authority")
    credentials = certified.credentials("batch", authority=theirs)
    with pytest.raises(CallError, match="UNAVAILABLE"):
        await certified.client(credentials).models()
    old = certified.ca_file.read_bytes()
    (certified.folder / "next").mkdir()
    both = old + theirs.write(certified.folder / "next").read_bytes()
    certified.ca_file.write_bytes(both)
    assert [model.name for model in await certified.client(credentials).models()] == ["m"]
    assert await certified.client(certified.credentials("batch")).models()


async def test_keys_rotate_under_load_without_a_failed_request(guarded: Guarded) -> None:
    """Streams run one after the other while the key changes under the client's hands."""
    current = [guarded.keys["user"]]
    credentials = ClientCredentials(bearer=lambda: current[0])
    client = guarded.harness.client(guarded.address, credentials=credentials)
    is_over = asyncio.Event()
    num_done = [0] * 4

    async def work(index: int) -> None:
        while not is_over.is_set():
            done = await client.complete(PROMPT, GenerateOptions(seed=index, max_tokens=4))
            assert list(done.token_ids[0]) == expected(index, 4)
            num_done[index] += 1

    working = [asyncio.create_task(work(index)) for index in range(4)]
    for _ in range(3):
        old, new = current[0], key_of(guarded.keys_file, "acme")
        guarded.gateway._access.authenticator.reload()
        current[0] = new
        before = list(num_done)
        await until(
            lambda: all(now >= was + 2 for now, was in zip(num_done, before, strict=True)),  # noqa: B023
            "every worker has used the new key",
        )
        revoke_key(guarded.keys_file, old[7:15])
        guarded.gateway._access.authenticator.reload()
    is_over.set()
    await asyncio.gather(*working)


async def test_a_stream_is_resumed_with_the_key_that_replaced_the_one_it_began_with(
    guarded: Guarded,
) -> None:
    """Another tenant's key does not, not even with the token of `accepted`."""
    _, second = await guarded.harness.add_gateway(guarded.gateway._config)
    current = [guarded.keys["user"]]
    credentials = ClientCredentials(bearer=lambda: current[0])
    client = guarded.harness.client(guarded.address, second, credentials=credentials)
    scripts = [replica.script for replica in guarded.harness.replicas.values()]
    for script in scripts:
        script.stop_after = 2
    stream = client.generate(PROMPT, GenerateOptions(seed=3, max_tokens=6))
    events = stream.events()
    tokens: list[int] = []
    while len(tokens) < 2:
        event = await anext(events)
        tokens += event.token_ids if isinstance(event, pb.Delta) else []
    current[0] = key_of(guarded.keys_file, "acme")
    revoke_key(guarded.keys_file, guarded.keys["user"][7:15])
    for gateway in guarded.harness.gateways:
        gateway._access.authenticator.reload()
    for script in scripts:
        script.stop_after = None
    guarded.harness.gateways.remove(guarded.gateway)
    await guarded.gateway.stop()
    async for event in events:
        tokens += event.token_ids if isinstance(event, pb.Delta) else []
    assert stream.num_resumes == 1
    assert tokens == expected(3, 6)


async def test_what_a_relaying_gateway_vouches_for_is_one_request(certified: Certified) -> None:
    token = RelayTokens(certified.harness.trust, SystemClock()).issue(RelayedCaller(("batch",), "mine"))
    shown = certified.credentials("anybody", "urn:nobody")
    tls = grpc.ssl_channel_credentials(shown.root_certificate, shown.private_key, shown.certificate)

    async def status(channel: grpc.aio.Channel, method: str, request: Any) -> grpc.StatusCode:
        call = channel.unary_stream(f"/tandem.v1.Inference/{method}")(
            request.SerializeToString(), metadata=((RELAYED_CERTIFICATE_KEY, token),), timeout=WAIT_S
        )
        try:
            [_ async for _ in call]
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    async with grpc.aio.secure_channel(certified.guarded.address, tls) as channel:
        for request_id, code in (
            ("mine", grpc.StatusCode.OK),
            ("other", UNAUTHENTICATED),
            ("", UNAUTHENTICATED),
        ):
            request = pb.GenerateRequest(text=PROMPT, max_tokens=1, request_id=request_id)
            assert await status(channel, "Generate", request) is code
        assert await status(channel, "Explain", pb.ExplainRequest(request_id="mine")) is grpc.StatusCode.OK
        assert await status(channel, "Explain", pb.ExplainRequest(request_id="other")) is UNAUTHENTICATED
        assert await status(channel, "ListModels", pb.ListModelsRequest()) is UNAUTHENTICATED

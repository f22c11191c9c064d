"""What a stranger once got from a gateway, and what one gets now: each step of a review's attack is a test.

`acme` has a stream under way; `mallory` is another tenant with a key of its own, or has none. What the
console and the cache give away is tested with them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from callers import bearing, key_of
from gateway_harness import PROMPT, GatewayHarness, encode, expected

from cluster.api.admin_client import AdminClient
from cluster.api.client import Client
from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.serve.gateway_server import Gateway
from workers.messages.link import Submission

VICTIM = "acme-invoice-4711"
SEED = 1
NUM_TOKENS = 12


class Scene:
    """A gateway, the victim's running stream, and the attacker's clients."""

    def __init__(self, harness: GatewayHarness, folder: Path) -> None:
        self.harness = harness
        path = folder / "keys.yaml"
        self.acme_key = key_of(path, "acme")
        self.acme_other_key = key_of(path, "acme")
        self.mallory_key = key_of(path, "mallory")
        tenants = {"acme": {"max_priority": 5}}
        self.auth = {"mode": "required", "keys_file": str(path), "tenants": tenants}
        self.gateway: Gateway
        self.address = ""
        self.acme: Client
        self.mallory: Client
        self.nobody: Client
        self.admin: AdminClient
        self.stream: AsyncGenerator[Any, None]
        self.accepted: pb.Accepted

    async def start(self) -> None:
        await self.harness.add_replica("p0", "prefill")
        decode = await self.harness.add_replica("d0", "decode")
        decode.script.stop_after = 4
        self.gateway, self.address = await self.harness.add_gateway(self.harness.config(auth=self.auth))
        self.acme = self.client(self.acme_key)
        self.mallory = self.client(self.mallory_key)
        self.nobody = self.harness.client(self.address)
        self.admin = self.harness.admin(credentials=bearing(self.mallory_key))
        options = GenerateOptions(request_id=VICTIM, seed=SEED, max_tokens=NUM_TOKENS)
        self.stream = self.acme.generate(PROMPT, options, resume=False).events()
        first = await anext(self.stream)
        assert isinstance(first, pb.Accepted)
        self.accepted = first

    def client(self, key: str) -> Client:
        return self.harness.client(self.address, credentials=bearing(key))

    def resuming(self, **fields: Any) -> pb.GenerateRequest:
        """A call that resumes the victim's stream, as the victim would make it."""
        request = pb.GenerateRequest(
            **{
                "request_id": VICTIM,
                "text": PROMPT,
                "seed": SEED,
                "max_tokens": NUM_TOKENS,
                "resume_token": self.accepted.resume_token,
                **fields,
            }
        )
        request.resume.add(sample=0)
        return request

    async def sent(self, key: str, request: pb.GenerateRequest) -> list[int]:
        """The tokens that the call gets; raises `AioRpcError` when it is refused."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            call = channel.unary_stream(
                "/tandem.v1.Inference/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
                response_deserializer=pb.GenerateResponse.FromString,
            )
            metadata = (("authorization", f"Bearer {key}"),) if key else ()
            events = call(request, metadata=metadata, timeout=30)
            return [token async for event in events for token in event.delta.token_ids]

    def submissions(self, request_id: str) -> list[Submission]:
        """What the replica got of the request."""
        found = self.harness.replicas["p0"].submissions
        return [it for it in found if it.request_id.startswith(f"{request_id}~")]

    async def victim_finishes(self) -> None:
        """With all of its tokens, and nobody else's."""
        self.harness.replicas["d0"].script.resume.set()
        ids = [token async for event in self.stream for token in getattr(event, "token_ids", ())]
        assert ids == expected(SEED, NUM_TOKENS)


@pytest.fixture
async def scene(harness: GatewayHarness, tmp_path: Path) -> AsyncIterator[Scene]:
    built = Scene(harness, tmp_path)
    await built.start()
    yield built
    await built.stream.aclose()


async def test_requests_of_others_are_not_listed(scene: Scene) -> None:
    assert await scene.mallory.requests() == []
    assert [it.request_id for it in await scene.acme.requests()] == [VICTIM]
    with pytest.raises(CallError, match="UNAUTHENTICATED"):
        await scene.nobody.requests()
    with pytest.raises(CallError, match="PERMISSION_DENIED"):
        await scene.admin.requests()


async def test_requests_of_others_are_not_explained(scene: Scene) -> None:
    with pytest.raises(CallError) as unknown:
        await scene.mallory.explain("unheard-of")
    with pytest.raises(CallError) as refused:
        await scene.mallory.explain(VICTIM)
    assert refused.value.code is unknown.value.code is grpc.StatusCode.NOT_FOUND
    assert str(refused.value).replace(VICTIM, "unheard-of") == str(unknown.value)
    with pytest.raises(CallError, match="UNAUTHENTICATED"):
        await scene.nobody.explain(VICTIM)
    with pytest.raises(CallError, match="PERMISSION_DENIED"):
        await scene.admin.explain(VICTIM)
    assert (await scene.acme.explain(VICTIM)).state == pb.REQUEST_STATE_RUNNING


async def test_naming_a_tenant_does_not_explain_its_requests(scene: Scene) -> None:
    request = pb.ExplainRequest(request_id=VICTIM, tenant="acme")
    with pytest.raises(CallError, match="NOT_FOUND"):
        await scene.mallory._unary("Explain", request)


@pytest.mark.parametrize(
    ("caller", "fields", "code"),
    [
        ("mallory", {"text": "x", "tenant": "mallory"}, grpc.StatusCode.PERMISSION_DENIED),
        ("mallory", {"tenant": "acme"}, grpc.StatusCode.PERMISSION_DENIED),
        ("mallory", {"resume_token": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ("acme_other", {"seed": 2}, grpc.StatusCode.PERMISSION_DENIED),
        ("acme", {"resume_token": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ("acme", {"text": "x"}, grpc.StatusCode.PERMISSION_DENIED),
        ("acme", {"seed": 2}, grpc.StatusCode.PERMISSION_DENIED),
        ("acme", {"temperature": 1.0}, grpc.StatusCode.PERMISSION_DENIED),
        ("", {}, grpc.StatusCode.UNAUTHENTICATED),
    ],
)
async def test_nobody_ends_a_stream_by_resuming_it(
    scene: Scene, caller: str, fields: dict[str, Any], code: grpc.StatusCode
) -> None:
    """Even with the victim's own token, which only the victim was given."""
    key = getattr(scene, f"{caller}_key") if caller else ""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await scene.sent(key, scene.resuming(**fields))
    assert refused.value.code() is code
    await scene.victim_finishes()


@pytest.mark.parametrize("key", ["acme_key", "acme_other_key"])
async def test_the_owner_resumes_with_the_token(scene: Scene, key: str) -> None:
    """With the key that it has now: keys of a tenant are one owner, so that they can be changed."""
    scene.harness.replicas["d0"].script.resume.set()
    assert await scene.sent(getattr(scene, key), scene.resuming()) == expected(SEED, NUM_TOKENS)


async def test_the_same_id_of_another_tenant_is_another_request(scene: Scene) -> None:
    options = GenerateOptions(request_id=VICTIM, seed=2, max_tokens=3, tenant="acme")
    done = await scene.mallory.complete(PROMPT, options)
    assert list(done.token_ids[0]) == expected(2, 3)
    explained = await scene.mallory.explain(VICTIM)
    assert (explained.tenant, explained.state) == ("mallory", pb.REQUEST_STATE_FINISHED)
    assert (await scene.acme.explain(VICTIM)).tenant == "acme"
    with pytest.raises(CallError, match="ALREADY_EXISTS"):
        await scene.acme.complete(PROMPT, options)
    await scene.victim_finishes()


async def test_a_tenant_cannot_be_chosen(scene: Scene) -> None:
    """Prefixes are shared within a tenant: a request under its name would show which of them are cached."""
    done = await scene.mallory.complete(PROMPT, GenerateOptions(max_tokens=1, tenant="acme"))
    (mine,) = scene.submissions(done.request_id)
    assert mine.tenant == "mallory"
    assert (await scene.mallory.explain(done.request_id)).tenant == "mallory"


@pytest.mark.parametrize(
    ("tenant", "asked", "given"), [("mallory", 100, 0), ("mallory", -3, -3), ("acme", 100, 5)]
)
async def test_nobody_goes_first_at_will(scene: Scene, tenant: str, asked: int, given: int) -> None:
    client = scene.mallory if tenant == "mallory" else scene.acme
    await client.complete(PROMPT, GenerateOptions(max_tokens=1, request_id="mine", priority=asked))
    (mine,) = scene.submissions("mine")
    assert mine.priority == given


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Status", admin_pb.StatusRequest()),
        ("StoreStat", admin_pb.StoreStatRequest()),
        ("StoreList", admin_pb.StoreListRequest()),
        ("StoreVerify", admin_pb.StoreVerifyRequest()),
        ("StorePurge", admin_pb.StorePurgeRequest(all=True)),
        ("Traffic", admin_pb.TrafficRequest(weights={"tandem-v2": 1.0})),
    ],
)
async def test_what_concerns_the_cluster_is_for_operators(scene: Scene, method: str, request_: Any) -> None:
    with pytest.raises(CallError, match="PERMISSION_DENIED"):
        await scene.admin._unary(method, request_)
    with pytest.raises(CallError, match="UNAUTHENTICATED"):
        await scene.harness.admin()._unary(method, request_)
    assert scene.gateway.connections.roster_view.traffic == {}
    await scene.victim_finishes()


async def test_recordings_are_for_viewers(scene: Scene) -> None:
    with pytest.raises(CallError, match="PERMISSION_DENIED"):
        await anext(scene.admin.recording())
    with pytest.raises(CallError, match="UNAUTHENTICATED"):
        await anext(scene.harness.admin().recording())


async def test_paths_are_for_operators(scene: Scene) -> None:
    with pytest.raises(CallError, match="PERMISSION_DENIED"):
        await scene.admin.paths()


@pytest.mark.parametrize("models", [["other"], ["m"], []])
async def test_a_model_may_be_kept_from_a_tenant(
    harness: GatewayHarness, tmp_path: Path, models: list[str]
) -> None:
    path = tmp_path / "keys.yaml"
    key = key_of(path, "acme")
    await harness.add_replica("d0", "decode")
    auth = {"mode": "required", "keys_file": str(path), "tenants": {"*": {"models": models}}}
    _, address = await harness.add_gateway(harness.config(auth=auth))
    client = harness.client(address, credentials=bearing(key))
    calls = (
        lambda: client.complete(PROMPT, GenerateOptions(max_tokens=1)),
        lambda: client.tokenize(PROMPT),
        lambda: client.detokenize(encode(PROMPT)),
    )
    for call in calls:
        if models == ["other"]:
            with pytest.raises(CallError, match=r"PERMISSION_DENIED: key:\w+ may not use the model 'm'"):
                await call()
        else:
            await call()
    assert [model.name for model in await client.models()] == ([] if models == ["other"] else ["m"])

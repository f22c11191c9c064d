"""Requests that another application answers: over TLS, for the same caller."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from authority import Authority
from callers import bearing, key_of
from certificates import write_certificate
from gateway_harness import PROMPT, GatewayHarness, until

from cluster.api.channel import ClientCredentials
from cluster.api.client import Client
from cluster.api.generate_options import GenerateOptions
from cluster.errors import CallError
from cluster.gateway.relay_channels import shown_name
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.roster.messages import GatewayRecord, SetTraffic
from cluster.roster.state import RosterClient
from cluster.serve.gateway_server import ControlPlane, Gateway

OWN, OTHER = "tandem", "tandem-v2"


class TwoApps:
    """`tandem`, whose gateway clients call, and `tandem-v2`, which answers all requests where it can."""

    def __init__(self, model: Path) -> None:
        self.front, self.behind = GatewayHarness(model), GatewayHarness(model)
        self.behind.trust = self.front.trust
        self.address = ""

    async def start(self, front: dict[str, Any], behind: dict[str, Any]) -> None:
        """Each with its arguments of `GatewayHarness.config`."""
        for harness, name, token in ((self.front, "d0", 65), (self.behind, "e0", 66)):
            replica = await harness.add_replica(name, "decode")
            replica.script.tokens = [token] * 400
        self.address = await self._add(self.front, OWN, front)
        await self._add(self.behind, OTHER, behind)
        await self.front.roster.change(SetTraffic({OWN: 0.0, OTHER: 1.0}))
        links = self.front.gateways[0].connections
        await until(lambda: bool(links.roster_view.traffic), "the gateway knows")

    async def _add(self, harness: GatewayHarness, app: str, settings: dict[str, Any]) -> str:
        gateway = Gateway(
            gateway_id=f"{app}-g0",
            epoch=1,
            config=harness.config(**settings).model_copy(update={"app": app}),
            control=ControlPlane(harness.roster, open_roster=self._roster),
            trust=harness.trust,
            clock=harness.clock,
        )
        harness.gateways.append(gateway)
        address = f"127.0.0.1:{await gateway.start()}"
        await self.register(harness, address)
        await until(lambda: harness.is_connected(gateway), "its replicas are connected")
        return address

    async def register(self, harness: GatewayHarness, address: str) -> None:
        """As `cluster.serve.gateway_actor.GatewayActor` does every few seconds."""
        (gateway,) = harness.gateways
        name = f"{OWN if harness is self.front else OTHER}-g0"
        chain = gateway.certificate_chain()
        await harness.roster.register(GatewayRecord(name, 1, address, 1, certificate=chain))

    def _roster(self, app: str) -> RosterClient:
        return {OWN: self.front, OTHER: self.behind}[app].roster

    def client(self, credentials: ClientCredentials, scheme: str = "") -> Client:
        return self.front.client(f"{scheme}{self.address}", credentials=credentials)

    async def answer(self, client: Client, **options: Any) -> str:
        """A or B: which application answers."""
        done = await client.complete(PROMPT, GenerateOptions(max_tokens=2, **options))
        return chr(done.token_ids[0][0])


@pytest.fixture
async def apps(gateway_model: Path) -> AsyncIterator[TwoApps]:
    both = TwoApps(gateway_model)
    yield both
    await both.front.close()
    await both.behind.close()


def required(keys_file: Path, **more: Any) -> dict[str, Any]:
    return {"auth": {"mode": "required", "keys_file": str(keys_file), **more}}


async def test_the_caller_s_key_goes_with_the_request(apps: TwoApps, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    key, mallory = key_of(keys, "acme"), key_of(keys, "mallory")
    await apps.start(required(keys), required(keys))
    client = apps.client(bearing(key))
    assert await apps.answer(client, request_id="one", tenant="other", priority=50) == "B"
    (submission,) = apps.behind.replicas["e0"].submissions
    assert (submission.tenant, submission.priority) == ("acme", 0)
    explained = await client.explain("one")
    assert (explained.tenant, explained.gateway_id) == ("acme", "tandem-v2-g0")
    with pytest.raises(CallError, match="NOT_FOUND"):
        await apps.client(bearing(mallory)).explain("one")
    with pytest.raises(CallError, match="UNAUTHENTICATED"):
        await apps.answer(apps.client(bearing("x")))


async def test_a_caller_that_the_other_application_does_not_know_is_answered_here(
    apps: TwoApps, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = key_of(tmp_path / "keys.yaml", "acme")
    key_of(tmp_path / "others.yaml", "acme")
    await apps.start(required(tmp_path / "keys.yaml"), required(tmp_path / "others.yaml"))
    assert await apps.answer(apps.client(bearing(key))) == "A"
    assert "application tandem-v2: 127.0.0.1:" in caplog.text
    assert "not valid here" in caplog.text
    assert key not in caplog.text


async def test_a_stream_that_began_there_is_refused_there(apps: TwoApps, tmp_path: Path) -> None:
    """What the other application says of a resume token is not turned into a reason to try again."""
    keys = tmp_path / "keys.yaml"
    key = key_of(keys, "acme")
    await apps.start(required(keys), required(keys))
    request = pb.GenerateRequest(text=PROMPT, seed=1, request_id="r", resume_token="x")
    request.resume.add(sample=0)
    client = apps.client(bearing(key))
    call = client.stub().Generate(
        request, metadata=(*client.metadata(), ("tandem-application", OTHER)), timeout=30
    )
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        [_ async for _ in call]
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "resume_token" in (refused.value.details() or "")


@pytest.mark.parametrize("signed_by", ["itself", "an authority"])
async def test_gateways_speak_tls_with_each_other(apps: TwoApps, tmp_path: Path, signed_by: str) -> None:
    """The roster says which certificate the other one shows, so no authority need be named."""
    keys = tmp_path / "keys.yaml"
    key = key_of(keys, "acme")
    (tmp_path / "behind").mkdir()
    authority = Authority("somebody")
    write = write_certificate if signed_by == "itself" else authority.issue
    cert_file, key_file = write(tmp_path / "behind", "other")
    await apps.start(
        required(keys), required(keys) | {"tls_cert_file": str(cert_file), "tls_key_file": str(key_file)}
    )
    client = apps.client(bearing(key))
    assert await apps.answer(client, request_id="one") == "B"
    assert (await client.explain("one")).gateway_id == "tandem-v2-g0"
    write(tmp_path / "behind", "renewed")
    (record,) = (await apps.behind.roster.view(-1, 0.0)).gateways
    seen = apps.front.gateways[0]._traffic._others[OTHER]
    # A connection that is open stays; a new one shows the new certificate, which the roster learns.
    await apps.front.gateways[0]._traffic._channels.close()
    apps.front.gateways[0]._traffic._channels._opened.clear()
    assert await apps.answer(client) == "A", "the gateway is not trusted with a certificate that is not its"
    await apps.register(apps.behind, record.address)
    await until(lambda: seen.gateways[0].certificate != record.certificate, "the new certificate is known")
    assert await apps.answer(client) == "B"


async def test_a_client_s_certificate_is_vouched_for(apps: TwoApps, tmp_path: Path) -> None:
    authority = Authority("ours")
    ca_file = authority.write(tmp_path)
    settings = []
    for name in ("front", "behind"):
        (tmp_path / name).mkdir()
        cert_file, key_file = authority.issue(tmp_path / name, name)
        identities = [{"name": "batch", "tenant": f"batch-at-{name}"}]
        certificates = {"ca_file": str(ca_file), "identities": identities}
        settings.append(
            {
                "auth": {"mode": "required", "certificates": certificates},
                "tls_cert_file": str(cert_file),
                "tls_key_file": str(key_file),
            }
        )
    await apps.start(*settings)
    (tmp_path / "client").mkdir()
    cert_file, key_file = authority.issue(tmp_path / "client", "batch")
    credentials = ClientCredentials(
        root_certificate=ca_file.read_bytes(),
        certificate=cert_file.read_bytes(),
        private_key=key_file.read_bytes(),
    )
    assert await apps.answer(apps.client(credentials, "tls://")) == "B"
    (submission,) = apps.behind.replicas["e0"].submissions
    assert submission.tenant == "batch-at-behind"


def test_the_name_of_a_certificate_is_one_that_it_is_valid_for(tmp_path: Path) -> None:
    cert_file, _ = write_certificate(tmp_path, "name")
    assert shown_name(cert_file.read_bytes()) == "localhost"


async def test_an_operator_splits_the_traffic(apps: TwoApps) -> None:
    await apps.start({}, {})
    admin = apps.front.admin()
    links = apps.front.gateways[0].connections
    assert await admin.traffic({OWN: 3, OTHER: 1}) == {OWN: 0.75, OTHER: 0.25}
    await until(lambda: links.roster_view.traffic == {OWN: 0.75, OTHER: 0.25}, "the gateway knows")
    assert await admin.traffic({OWN: 1}) == {OWN: 1.0, OTHER: 0.0}
    for weights in ({}, {OWN: 0.0}, {OWN: -1.0}, {OWN: float("inf")}, {OWN: float("nan")}, {"": 1.0}):
        with pytest.raises(CallError) as refused:
            await admin.traffic(weights)
        assert [field for field, _ in refused.value.fields] == ["weights"]
    await apps.behind.roster.remove("tandem-v2-g0", 1)
    with pytest.raises(CallError, match="no gateway of an application 'tandem-v2' serves"):
        await admin.traffic({OTHER: 1})

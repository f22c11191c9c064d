"""`tandem store` and the API below it: every node is asked; one that does not answer is never passed over."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from gateway_harness import FINGERPRINT as SERVED
from gateway_harness import GatewayHarness, until
from rich.console import Console
from scripted_store import FINGERPRINT, ScriptedStore, record
from serving import tandem
from store_harness import COMPATIBILITY, Chain, Replica, StoreHarness
from trust_files import TRUST
from typer.testing import CliRunner

from cluster.api.admin_client import AdminClient
from cluster.cli.calls import status
from cluster.cli.store import cli
from cluster.cli.store_calls import Selection, purge_records, show_records, show_stat, verify_records
from cluster.errors import CallError, StoreAwayError
from cluster.proto.tandem.v1 import admin_pb2 as admin_pb
from cluster.roster.messages import StoreRecord
from cluster.serve.gateway_server import Gateway
from kvtransfer.store.messages.admin_requests import (
    AdminFailed,
    ListRequest,
    PurgeRequest,
    VerifyRequest,
    VerifyResult,
)
from kvtransfer.store.messages.owner_codec import FromOwner, StoreRefusal

EVERYTHING = Selection(None, None)


def nowhere() -> Console:
    return Console(file=io.StringIO())


class Nodes:
    """A gateway in front of nodes `a` (groups t, u) and `b` (group t)."""

    def __init__(self, harness: GatewayHarness) -> None:
        self.harness = harness
        self.a = ScriptedStore("a", harness.trust, [record(1, "t"), record(2, "u"), record(3, "")])
        self.b = ScriptedStore("b", harness.trust, [record(4, "t")])
        self.address = ""
        self.client: AdminClient

    async def start(self) -> None:
        for number, store in enumerate((self.a, self.b)):
            await store.start()
            await self.harness.roster.register(
                StoreRecord(store.node_id, 1, store.address, 100 + number, "host")
            )
        gateway, _ = await self.harness.add_gateway()
        self.address = f"127.0.0.1:{gateway.admin_port}"
        self.client = self.harness.admin(gateway)
        await until(lambda: len(gateway.connections.stores) == 2, "the gateway knows the stores")

    async def stop(self) -> None:
        await asyncio.gather(self.a.stop(), self.b.stop())


@pytest.fixture
async def stores(harness: GatewayHarness) -> AsyncIterator[Nodes]:
    built = Nodes(harness)
    await built.start()
    yield built
    await built.stop()


async def shown(command: Callable[[Console], Awaitable[None]]) -> str:
    """What it prints, in 80 columns."""
    console = Console(file=io.StringIO(), width=80)
    await command(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    assert max(len(line) for line in text.splitlines()) <= 80
    return text


async def test_every_node_reports_its_tiers(stores: Nodes) -> None:
    reply = await stores.client.store_stat()
    assert [(node.member.node_id, node.member.address, node.error) for node in reply.nodes] == [
        ("a", stores.a.address, ""),
        ("b", stores.b.address, ""),
    ]
    dram, nvme = reply.nodes[0].tiers
    assert (dram.tier, dram.num_records, dram.num_bytes, dram.capacity_bytes) == ("dram", 3, 9000, 10**9)
    assert nvme.latency_ms == pytest.approx(2.0)
    assert (reply.nodes[0].index.state, reply.nodes[0].index.num_lookups) == ("up", 5)
    assert dict(reply.nodes[0].bytes_by_sharing_group) == {"t": 3000, "u": 3000, "": 3000}
    text = await shown(lambda console: show_stat(stores.address, console, as_json=False))
    for cell in ("9.0 kB", "1.0 GB", "75%", "1.50", "(none)", "up", "nvme of node a: gone"):
        assert cell in text


async def test_status_shows_the_tiers_of_every_node(stores: Nodes) -> None:
    members = (await stores.client.status()).stores
    assert [(member.node_id, member.process_id) for member in members] == [("a", 100), ("b", 101)]
    await stores.b.stop()
    text = await shown(lambda console: status(stores.address, console, as_json=False))
    assert "75%" in text
    assert "store of node b" in text.replace("\n", " ")


async def test_records_are_listed_filtered_and_limited(stores: Nodes) -> None:
    reply = await stores.client.store_list(
        admin_pb.StoreListRequest(filter=admin_pb.StoreFilter(sharing_group="t"), limit=5)
    )
    assert [[item.key for item in node.records] for node in reply.nodes] == [["01" * 16], ["04" * 16]]
    (first,) = reply.nodes[0].records
    assert (first.layer_start, first.layer_end, first.head_start, first.head_end) == (0, 4, 0, 2)
    assert (first.model, first.num_bytes, list(first.tiers)) == (FINGERPRINT.hex(), 3000, ["dram"])
    unnamed = await stores.client.store_list(
        admin_pb.StoreListRequest(filter=admin_pb.StoreFilter(sharing_group=""), limit=5)
    )
    assert [node.num_matching for node in unnamed.nodes] == [1, 0]
    text = await shown(
        lambda console: show_records(stores.address, Selection(None, "000102"), 2, console, as_json=False)
    )
    assert stores.a.requests[-1] == ListRequest(None, "000102", 2)
    assert "node a: 2 of 3 records" in text


async def test_purge_deletes_of_the_sharing_group_and_of_nobody_else(
    stores: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    stores.b.num_pending = 1
    chosen = Selection("t", None)
    text = await shown(lambda console: purge_records(stores.address, chosen, None, console, as_json=False))
    assert "1 of them are in use" in text
    assert [info.sharing_group for info in stores.a.records + stores.b.records] == ["u", ""]
    await purge_records(stores.address, EVERYTHING, 30.0, Console(), as_json=True)
    nodes = json.loads(capsys.readouterr().out)["nodes"]
    assert [node["num_records"] for node in nodes] == [{"dram": 2}, {"dram": 0}]
    assert stores.a.requests[-1] == PurgeRequest(None, None)
    assert stores.a.records == []


async def test_replicas_forget_what_they_cache_and_the_silent_are_named(
    stores: Nodes,
) -> None:
    harness = stores.harness
    decode = await harness.add_replica("d0", "decode")
    silent = await harness.add_replica("d1", "decode")
    await until(lambda: harness.is_connected(harness.gateways[0]), "all are connected")
    decode.purged = (40, 12, 2)
    chosen = Selection("t", None)
    text = await shown(lambda console: purge_records(stores.address, chosen, None, console, as_json=False))
    assert re.search(r"d0 +device +40", text)
    assert "d0: 2 requests are under way and hold 12 of these blocks" in " ".join(text.split())
    silent.purged = None
    with pytest.raises(StoreAwayError, match=r"^replica d1 no answer within [01]\.[0-9] s; it may still"):
        await purge_records(stores.address, chosen, 2.0, nowhere(), as_json=False)
    assert not any(view.purges for view in harness.gateways[0].connections.views()), "nobody waits any more"
    silent.purged = (0, 0, 0)
    purging = asyncio.create_task(stores.client.store_purge(admin_pb.StorePurgeRequest(all=True)))
    silent.purged = None
    await until(lambda: any(view.purges for view in harness.gateways[0].connections.views()), "it was asked")
    await silent.die()
    (error,) = [it.error for it in (await purging).replicas if it.error]
    assert error.startswith("not purged for certain: ")


async def test_without_a_store_replicas_are_purged_all_the_same(harness: GatewayHarness) -> None:
    await harness.add_replica("d0", "decode")
    gateway, _ = await harness.add_gateway()
    address = f"127.0.0.1:{gateway.admin_port}"
    text = await shown(lambda console: purge_records(address, EVERYTHING, None, console, as_json=False))
    assert re.search(r"d0 +device +0", text)


async def test_purge_must_say_of_what(stores: Nodes) -> None:
    for request, field in (
        (admin_pb.StorePurgeRequest(), "filter"),
        (admin_pb.StorePurgeRequest(filter=admin_pb.StoreFilter(sharing_group="t"), all=True), "all"),
        (admin_pb.StorePurgeRequest(filter=admin_pb.StoreFilter(model="tiny!")), "filter.model"),
        (admin_pb.StorePurgeRequest(filter=admin_pb.StoreFilter(model="")), "filter.model"),
    ):
        with pytest.raises(CallError) as refused:
            await stores.client.store_purge(request)
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert [violation.field for violation in refused.value.fields] == [field]
    for limit in (0, 10_001):
        with pytest.raises(CallError, match="limit: must be from 1 to 10000"):
            await stores.client.store_list(admin_pb.StoreListRequest(limit=limit))
    assert stores.a.requests == stores.b.requests == []


async def test_bad_records_fail_verify(stores: Nodes) -> None:
    reply = await stores.client.store_verify(admin_pb.StoreVerifyRequest(), 30.0)
    assert [dict(node.num_read) for node in reply.nodes] == [{"dram": 3}, {"dram": 1}]
    stores.b.num_bad = 1
    with pytest.raises(StoreAwayError, match="1 records had a wrong checksum"):
        await verify_records(stores.address, EVERYTHING, 30.0, nowhere(), as_json=False)
    assert stores.b.requests[-1] == VerifyRequest(None, None)


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("gone", "not purged: not reached, nothing was done"),
        ("stranger", "not purged: not reached, nothing was done: .*secret"),
        ("silent", "not purged: no answer within .* it may still complete"),
        ("hangs up", "not purged: lost before it answered, which part was done is not known"),
        ("failed", "not purged: failed: disk on fire"),
        ("refusal", "not purged: refused, nothing was done: another protocol"),
        ("nonsense", "not purged: answered VerifyResult"),
    ],
)
async def test_a_store_that_does_not_answer_is_named_and_the_others_do_their_part(
    stores: Nodes, trouble: str, message: str
) -> None:
    if trouble == "gone":
        await stores.a.stop()
    elif trouble == "stranger":
        await stores.a.become_stranger()
    elif trouble in ("failed", "refusal", "nonsense"):
        answers: dict[str, FromOwner] = {
            "failed": AdminFailed("disk on fire"),
            "refusal": StoreRefusal("another protocol"),
            "nonsense": VerifyResult({}, {}, 0, 0.0),
        }
        stores.a.answer = answers[trouble]
    stores.a.is_silent, stores.a.hangs_up = trouble == "silent", trouble == "hangs up"
    timeout_s = 1.0 if trouble == "silent" else 30.0
    with pytest.raises(StoreAwayError, match=rf"node a \(host, .*\) {message}"):
        await purge_records(stores.address, EVERYTHING, timeout_s, nowhere(), as_json=False)
    assert len(stores.a.records) == 3
    assert stores.b.records == []


async def test_a_node_that_could_not_be_asked_fails_the_command(stores: Nodes) -> None:
    await stores.b.stop()
    done = await asyncio.to_thread(
        tandem, "store", "purge", "--sharing-group", "t", "--yes", "--admin-address", stores.address
    )
    assert done.returncode == 1
    assert f"node b (host, {stores.b.address}) not purged: not reached" in done.stderr
    assert "dram" in done.stdout
    assert [info.sharing_group for info in stores.a.records] == ["u", ""]


async def test_a_cluster_without_a_store_says_so(harness: GatewayHarness) -> None:
    gateway, _ = await harness.add_gateway()
    address = f"127.0.0.1:{gateway.admin_port}"
    with pytest.raises(StoreAwayError, match="no store is registered"):
        await purge_records(address, EVERYTHING, None, nowhere(), as_json=False)


@pytest.fixture
async def real_store(tmp_path: Path) -> AsyncIterator[StoreHarness]:
    folder = str(tmp_path / "nvme")
    store = StoreHarness(tmp_path, nvme_path=folder, nvme_bytes=16 << 20, segment_bytes=1 << 20)
    yield store
    await store.close()


async def test_what_a_real_store_purged_does_not_come_back_with_it(
    harness: GatewayHarness, real_store: StoreHarness
) -> None:
    harness.trust = TRUST
    store = real_store
    await store.start()
    replica = await Replica(store).start()
    for tenant, num_blocks in (("alice", 3), ("bob", 2)):
        await replica.put(Chain.of("prompt", num_blocks, tenant))
    await store.until("nvme", lambda stat: stat.num_records == 5, "all is written")

    async def register() -> Gateway:
        record = StoreRecord("node-1", store.settings.epoch, store.address, store.pid, "host")
        assert await harness.roster.register(record)
        return harness.gateways[0]

    await harness.add_gateway()
    gateway = await register()
    await until(lambda: bool(gateway.connections.stores), "the gateway knows the store")
    client = harness.admin(gateway)
    listed = (await client.store_list(admin_pb.StoreListRequest())).nodes[0]
    assert sorted(item.sharing_group for item in listed.records) == ["alice"] * 3 + ["bob"] * 2
    assert {tuple(item.tiers) for item in listed.records} == {("dram", "nvme")}
    assert {item.model for item in listed.records} == {COMPATIBILITY.model_fingerprint.hex()}
    verified = (await client.store_verify(admin_pb.StoreVerifyRequest(), 30.0)).nodes[0]
    assert (verified.error, dict(verified.num_read)) == ("", {"dram": 5, "nvme": 5})
    assert not any(verified.num_bad.values())
    request = admin_pb.StorePurgeRequest(filter=admin_pb.StoreFilter(sharing_group="alice"))
    purged = (await client.store_purge(request, 30.0)).nodes[0]
    assert (purged.error, dict(purged.num_records)) == ("", {"dram": 3, "nvme": 3})
    await replica.close()
    await store.stop()
    await store.start()
    await register()
    await until(lambda: gateway.connections.stores[0].address == store.address, "the new life is known")
    await store.until("nvme", lambda stat: stat.num_records == 2, "the rest is found again")
    listed = (await client.store_list(admin_pb.StoreListRequest())).nodes[0]
    assert [(item.sharing_group, list(item.tiers)) for item in listed.records] == [("bob", ["nvme"])] * 2
    await store.stop()


@pytest.mark.parametrize(
    ("arguments", "answer", "status_and_text"),
    [
        (["purge"], "", (2, "name a sharing group, a model, or --all")),
        (["purge", "--all", "--sharing-group", "t"], "", (2, "goes without --sharing-group and --model")),
        (
            ["purge", "--sharing-group", "t"],
            "n\n",
            (1, "Delete all records of sharing group 't' from every tier"),
        ),
        (["purge", "--all"], "", (1, "Delete all records of all sharing groups and models")),
    ],
)
def test_purge_asks_before_it_deletes(
    arguments: list[str], answer: str, status_and_text: tuple[int, str]
) -> None:
    done = CliRunner().invoke(cli, arguments, input=answer, env={"COLUMNS": "200"})
    status_code, text = status_and_text
    assert done.exit_code == status_code
    assert text in done.output


async def test_a_served_models_name_stands_for_its_fingerprint(stores: Nodes) -> None:
    await stores.harness.add_replica("d0", "decode")
    await until(lambda: stores.harness.is_connected(stores.harness.gateways[0]), "the replica is connected")
    await show_records(stores.address, Selection(None, "m"), 5, nowhere(), as_json=False)
    assert stores.a.requests[-1] == ListRequest(None, SERVED.hex(), 5)

"""An owner in a process of its own, real clients, real worker: what is put is found and read, byte by
byte."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from patience import WAIT_S
from store_harness import (
    BOTTOM,
    LEFT,
    MODEL,
    RIGHT,
    TOP,
    Chain,
    Replica,
    StoreHarness,
    block_bytes,
    eventually,
)
from trust_files import TRUST

from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import Faults
from kvtransfer.errors import PeerGoneError, TransferError
from kvtransfer.messages import Shard
from kvtransfer.rpc.handshake import draw_id
from kvtransfer.rpc.stream import open_tcp, open_unix
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.messages.admin_requests import StatRequest, StoreStat
from kvtransfer.store.messages.engine_session import (
    HELD,
    REFUSED,
    FindRequest,
    NewRecord,
    PutCommit,
    PutRequest,
)
from kvtransfer.store.messages.owner_codec import (
    FROM_OWNER_CODEC,
    STORE_PROTOCOL,
    TO_OWNER_CODEC,
    StoreRefusal,
)
from kvtransfer.store.server.store_server import StoreServer


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[StoreHarness]:
    harness = StoreHarness(tmp_path)
    yield harness
    await harness.close()


@pytest.fixture
async def running(harness: StoreHarness) -> StoreHarness:
    await harness.start()
    return harness


async def test_what_is_put_is_found_and_read(running: StoreHarness) -> None:
    replica = await Replica(running).start()
    chain = Chain.of("prompt", 5)
    assert await replica.find(chain) == ()
    assert await replica.get(chain) == ()
    assert await replica.put(chain) == [0, 1, 2, 3, 4]
    assert await replica.find(chain) == ("dram",) * 5
    assert await replica.get(chain) == ("dram",) * 5
    await eventually(lambda: set(replica.tiers) == set(chain.keys), "all blocks are told")
    stat = await running.stat("dram")
    assert (stat.num_records, stat.num_hits) == (5, 5)
    await running.check_nothing_leaked()
    await replica.close()
    await running.stop()


async def test_an_engine_core_of_an_older_version_is_sent_all_blocks_and_then_changes(
    running: StoreHarness,
) -> None:
    first = await Replica(running).start()
    chains = [Chain.of(f"prompt {number}", 3) for number in range(2)]
    await first.put(chains[0])
    older = await Replica(running, takes_parts=False).start()
    await eventually(lambda: set(older.tiers) == set(chains[0].keys), "all blocks are told")
    await first.put(chains[1])
    both = {*chains[0].keys, *chains[1].keys}
    await eventually(lambda: set(older.tiers) == both == set(first.tiers), "the changes are told")
    await first.close()
    await older.close()


async def test_a_block_missing_in_the_middle_ends_what_can_be_had(running: StoreHarness) -> None:
    replica = await Replica(running).start()
    chain = Chain.of("prompt", 5)
    await replica.put(chain, only=[0, 1, 3, 4])
    assert await replica.find(chain) == ("dram",) * 2
    assert await replica.get(chain) == ("dram",) * 2
    assert replica.reason == "not in any tier"
    await running.check_nothing_leaked()
    await replica.close()


async def test_two_replicas_share_records(running: StoreHarness) -> None:
    first, second = await Replica(running).start(), await Replica(running).start()
    chain = Chain.of("prompt", 3)
    grant = await first.grant(chain, [0, 1, 2])
    assert grant is not None
    assert min(grant.offsets) > 0
    during = await second.grant(chain, [0, 1, 2])
    assert during is not None
    assert during.offsets == (HELD,) * 3, "what another one is writing needs not be written"
    sums = await first.write(chain, grant, [(index, 0) for index in range(3)])
    written = tuple((offset, sums[index, 0]) for index, offset in enumerate(grant.offsets))
    assert first.client.send(PutCommit(written))
    await eventually(lambda: len(second.tiers) == 3, "the other replica is told")
    assert await second.get(chain) == ("dram",) * 3
    after = await second.grant(chain, [0, 1, 2])
    assert after is not None
    assert after.offsets == (HELD,) * 3
    late = await Replica(running).start()
    await eventually(lambda: late.tiers == dict.fromkeys(chain.keys, "dram"), "a new replica is told all")
    for replica in (first, second, late):
        await replica.close()


async def test_what_one_tenant_put_under_other_keys_is_not_another_tenants(running: StoreHarness) -> None:
    replica = await Replica(running).start()
    await replica.put(Chain.of("prompt", 2, group="alice"))
    assert await replica.find(Chain.of("prompt", 2, group="bob")) == ()
    await replica.close()


@pytest.mark.parametrize(
    ("writers", "readers"),
    [
        ((LEFT, RIGHT), (MODEL,)),
        ((MODEL,), (LEFT, RIGHT)),
        ((TOP, BOTTOM), (LEFT, RIGHT)),
        ((LEFT, LEFT, RIGHT, RIGHT), (TOP, BOTTOM)),
    ],
)
async def test_replicas_of_another_shape_assemble_blocks(
    running: StoreHarness, writers: tuple[Shard, ...], readers: tuple[Shard, ...]
) -> None:
    writer, reader = await Replica(running, *writers).start(), await Replica(running, *readers).start()
    chain = Chain.of("prompt", 4)
    await writer.put(chain)
    await eventually(lambda: set(reader.tiers) == set(chain.keys), "told")
    assert await reader.get(chain) == ("dram",) * 4
    await running.check_nothing_leaked()
    await writer.close()
    await reader.close()


async def test_a_part_of_a_block_is_a_miss(running: StoreHarness) -> None:
    writer, reader = await Replica(running, LEFT).start(), await Replica(running).start()
    chain = Chain.of("prompt", 2)
    await writer.put(chain)
    assert await writer.get(chain) == ("dram",) * 2
    assert await reader.find(chain) == ()
    assert await reader.get(chain) == ()
    assert not reader.tiers
    await writer.close()
    await reader.close()


async def test_a_full_arena_gives_up_what_was_used_longest_ago(running: StoreHarness) -> None:
    replica = await Replica(running).start()
    num_fitting = (8 << 20) // (block_bytes(MODEL) + 4096)
    chains = [Chain.of(f"prompt {number}", 16) for number in range(num_fitting // 16 + 4)]
    for chain in chains:
        assert await replica.put(chain) == list(range(16))
        await replica.get(chains[0])  # always in use
    assert await replica.get(chains[0]) == ("dram",) * 16
    assert await replica.get(chains[-1]) == ("dram",) * 16
    assert len(await replica.find(chains[1])) < 16
    await eventually(lambda: set(chains[-1].keys) <= set(replica.tiers), "told")
    gone = len(await replica.find(chains[1]))
    assert chains[1].keys[gone] not in replica.tiers, "its removal is told"
    assert replica.reasons[chains[1].keys[gone]] == "space"
    assert (await running.stat("dram")).num_evictions > 0
    await running.check_nothing_leaked()
    await replica.close()


async def test_what_is_being_read_is_not_given_up(running: StoreHarness) -> None:
    replica = await Replica(running).start()
    num_fitting = (8 << 20) // (block_bytes(MODEL) + 4096)
    held = Chain.of("held", num_fitting)
    stored = await replica.put(held)
    assert await replica.get(held, hold=True) == ("dram",) * len(stored)
    number = replica.held
    other = Chain.of("other", 2)
    assert await replica.put(other) == []
    assert (await running.stat("dram")).num_refused >= 2
    assert await replica.get(held) == ("dram",) * len(stored)
    replica.release(number)
    assert await replica.put(other) == [0, 1]
    await running.check_nothing_leaked()
    await replica.close()


async def test_only_what_is_its_own_is_granted_and_committed(
    running: StoreHarness,
) -> None:
    replica, other = await Replica(running, LEFT).start(), await Replica(running).start()
    chain = Chain.of("prompt", 1)
    request = PutRequest(99, "alice", chain.keys[0], (NewRecord(chain.keys[0], b"", RIGHT, 1024),))
    assert replica.client.send(request)
    answer = await replica._answer(type(await other.grant(chain, [0])), 99)
    assert answer is not None
    assert answer.offsets == (REFUSED,)
    granted = await other.grant(Chain.of("more", 1), [0])
    assert granted is not None
    assert replica.client.send(PutCommit(((granted.offsets[0], 1),), ()))
    assert await other.find(Chain.of("more", 1)) == ()
    await replica.close()
    await other.close()


# ------------------------------------------------------------------------------------- ends of sessions


async def test_a_lost_engine_cores_grants_stay_taken_until_its_ranks_have_ended(
    running: StoreHarness,
) -> None:
    replica = await Replica(running, LEFT, RIGHT).start()
    grant = await replica.grant(Chain.of("prompt", 3), [0, 1, 2])
    assert grant is not None
    await replica.client.close()
    await running.until("dram", lambda stat: stat.num_quarantined == 6, "ranks may still write there")
    replica.ranks[0].worker.close()
    assert (await running.stat("dram")).num_quarantined == 6
    await asyncio.to_thread(replica.close_ranks)
    await running.until("dram", lambda stat: stat.num_quarantined == 0, "nobody can write there any more")
    other = await Replica(running, LEFT, RIGHT).start()
    assert await other.put(Chain.of("prompt", 3)) == [0, 1, 2]
    await other.close()


async def test_an_engine_core_that_comes_back_frees_what_it_was_granted(running: StoreHarness) -> None:
    replica = await Replica(running).start()
    chain = Chain.of("prompt", 3)
    await replica.grant(chain, [0, 1, 2])
    await replica.put(Chain.of("other", 2))
    await replica.get(Chain.of("other", 2), hold=True)
    stream = replica.client._stream
    assert stream is not None
    stream.abort()
    await eventually(lambda: bool(replica.losses), "the end is heard")
    await replica.up()
    await running.check_nothing_leaked()
    assert await replica.put(chain) == [0, 1, 2]
    assert await replica.get(chain) == ("dram",) * 3
    await replica.close()


async def test_an_engine_core_leaves_an_owner_that_does_not_read(running: StoreHarness) -> None:
    replica = await Replica(running).start()
    running.signal(signal.SIGSTOP)
    offsets = tuple(range(100_000))
    for _ in range(20):
        replica.client.send(PutCommit((), offsets))
    async with asyncio.timeout(WAIT_S):
        await replica.client.close()
    running.signal(signal.SIGCONT)
    await asyncio.to_thread(replica.close_ranks)


# --------------------------------------------------------------------------------------------- strangers


async def _is_closed(reader: asyncio.StreamReader) -> bool:
    """Whatever it says, in the end it closes."""
    async with asyncio.timeout(WAIT_S):
        try:
            while await reader.read(4096):
                pass
        except ConnectionError:
            return True
    return True


@pytest.mark.parametrize(
    "garbage", [b"\xff" * 64, b"\x05\0\0\0hello", b"GET / HTTP/1.1\r\n\r\n", b"\0\x10\0\0" + b"x" * 4096]
)
async def test_garbage_closes_that_connection_only(running: StoreHarness, garbage: bytes) -> None:
    replica = await Replica(running).start()
    host, _, port = running.address.rpartition(":")
    for opening in (
        asyncio.open_unix_connection(f"\0{running.settings.name}"),
        asyncio.open_connection(host, int(port)),
    ):
        reader, writer = await opening
        writer.write(garbage)
        assert await _is_closed(reader)
        writer.transport.abort()
    chain = Chain.of("prompt", 1)
    assert await replica.put(chain) == [0]
    assert await replica.get(chain) == ("dram",)
    assert not replica.losses
    await replica.close()


async def test_nobody_gets_in_without_the_secret(running: StoreHarness) -> None:
    with pytest.raises(TransferError):
        await open_unix(running.settings.name, Trust.draw(), "stranger")
    with pytest.raises(TransferError):
        await open_tcp(running.address, Trust.draw(), "stranger")
    stranger = Replica(running, trust=Trust.of(bytes(32)))
    await stranger.client.start()
    assert not stranger.client.is_up
    assert (await running.ask(StatRequest(), StoreStat)).num_sessions == 0
    await stranger.close()


async def test_engine_cores_and_ranks_come_over_the_nodes_own_socket_only(running: StoreHarness) -> None:
    replica = await Replica(running).start()
    stream = await open_tcp(running.address, TRUST, "engine_core")
    stream.send(TO_OWNER_CODEC.encode(replica.client._hello))
    assert isinstance(FROM_OWNER_CODEC.decode(await stream.next_frame()), StoreRefusal)
    stream.close()
    await stream.wait_closed()
    assert (await running.ask(StatRequest(), StoreStat, is_remote=True)).num_sessions == 1
    await replica.close()


async def test_a_first_message_that_is_none_is_refused(running: StoreHarness) -> None:
    stream = await open_unix(running.settings.name, TRUST, "?")
    stream.send(TO_OWNER_CODEC.encode(FindRequest(1, b"", ())))
    assert isinstance(FROM_OWNER_CODEC.decode(await stream.next_frame()), StoreRefusal)
    stream.close()
    await stream.wait_closed()


async def test_an_engine_core_of_another_protocol_is_refused(running: StoreHarness) -> None:
    replica = await Replica(running).start()
    stream = await open_unix(running.settings.name, TRUST, "engine_core")
    hello = replace(replica.client._hello, protocol=STORE_PROTOCOL + 1, session=draw_id())
    stream.send(TO_OWNER_CODEC.encode(hello))
    refusal = FROM_OWNER_CODEC.decode(await stream.next_frame())
    assert isinstance(refusal, StoreRefusal)
    with pytest.raises(PeerGoneError):
        await stream.next_frame()
    stream.close()
    await stream.wait_closed()
    await replica.close()


@pytest.mark.slow
async def test_silent_strangers_do_not_keep_others_out(running: StoreHarness) -> None:
    silent = []
    for _ in range(100):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        sock.connect(f"\0{running.settings.name}")
        silent.append(sock)
    replica = await Replica(running).start()  # when the silent ones have had their time, at the latest
    assert await replica.put(Chain.of("prompt", 1)) == [0]
    for sock in silent:
        sock.close()
    await replica.close()


async def test_a_stopped_owner_is_noticed(running: StoreHarness) -> None:
    replica = await Replica(running).start()
    running.signal(signal.SIGSTOP)
    assert await replica.find(Chain.of("prompt", 1)) == ()
    assert replica.losses
    running.signal(signal.SIGCONT)
    await replica.up()
    assert await replica.put(Chain.of("prompt", 1)) == [0]
    await replica.close()


# ------------------------------------------------------------------------------------------ errors of ours


async def test_an_error_of_ours_ends_the_store(harness: StoreHarness) -> None:
    owner = StoreServer(harness.settings, TRUST, SystemClock(), Faults())
    await owner.start()
    owner.check_health()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    owner._node.compact_if_needed = fail  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        await owner.wait_ended()
    with pytest.raises(ZeroDivisionError):
        owner.check_health()
    await owner.stop()

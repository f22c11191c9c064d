"""A store process as its admins see it: real proof and frames over TCP, answers that the test scripts."""

from __future__ import annotations

import socket

from kvtransfer.common.clock import SystemClock
from kvtransfer.common.tasks import SupervisedTasks
from kvtransfer.errors import TransferError
from kvtransfer.messages import ReplicaIdentity, Shard
from kvtransfer.rpc.listener import ProvenListener
from kvtransfer.rpc.stream import frame_stream
from kvtransfer.rpc.trust import Trust
from kvtransfer.store.messages.admin_requests import (
    AdminHello,
    IndexStat,
    ListedRecord,
    ListRequest,
    PurgeRequest,
    PurgeResult,
    StatRequest,
    StoreListing,
    StoreStat,
    TierStat,
    VerifyRequest,
    VerifyResult,
)
from kvtransfer.store.messages.owner_codec import (
    FROM_OWNER_CODEC,
    STORE_PROTOCOL,
    TO_OWNER_CODEC,
    FromOwner,
    ToOwner,
)
from kvtransfer.store.messages.records import RecordId, RecordInfo

FINGERPRINT = bytes(range(16))


def record(number: int, group: str) -> RecordInfo:
    return RecordInfo(
        id=RecordId(b"space---", bytes([number]) * 16, Shard(0, 4, 0, 2)),
        parent=b"",
        chain=bytes([number]) * 16,
        sharing_group=group,
        model=FINGERPRINT,
        num_bytes=3000,
        checksum=number,
    )


class ScriptedStore:
    """Holds `records` in "dram". `answer`, when set, is sent to every request instead; with `is_silent`
    nothing is, and with `hangs_up` the connection ends."""

    def __init__(self, node_id: str, trust: Trust, records: list[RecordInfo]) -> None:
        self.node_id = node_id
        self.records = records
        self.requests: list[ToOwner] = []
        self.answer: FromOwner | None = None
        self.is_silent = False
        self.hangs_up = False
        self.num_bad = 0
        self.num_pending = 0
        self.address = ""
        self._trust = trust
        self._listener: ProvenListener | None = None
        self._tasks = SupervisedTasks()

    async def start(self, port: int = 0) -> None:
        sock = socket.create_server(("127.0.0.1", port))
        self.address = f"127.0.0.1:{sock.getsockname()[1]}"
        self._listener = ProvenListener(
            sock, self._trust, self._serve, self._tasks.spawn, SystemClock(), "scripted"
        )

    async def stop(self) -> None:
        assert self._listener is not None
        self._listener.close()
        await self._tasks.close()

    async def become_stranger(self) -> None:
        """Listen at the same address with another secret from now on."""
        await self.stop()
        self._trust = Trust.draw()
        await self.start(int(self.address.rpartition(":")[2]))

    async def _serve(self, sock: socket.socket, name: str) -> None:
        stream = await frame_stream(sock, name)
        try:
            hello = TO_OWNER_CODEC.decode(await stream.next_frame())
            assert hello == AdminHello(STORE_PROTOCOL)
            while True:
                request = TO_OWNER_CODEC.decode(await stream.next_frame())
                self.requests.append(request)
                if self.hangs_up:
                    return
                if not self.is_silent:
                    stream.send(FROM_OWNER_CODEC.encode(self.answer or self._answer(request)))
        except TransferError:
            return  # the admin has left
        finally:
            stream.close()

    def _answer(self, request: ToOwner) -> FromOwner:
        if isinstance(request, StatRequest):
            return self._stat()
        assert isinstance(request, ListRequest | VerifyRequest | PurgeRequest)
        found = [
            info
            for info in self.records
            if request.sharing_group in (None, info.sharing_group)
            and info.model.hex().startswith(request.model or "")
        ]
        num_bytes = sum(info.num_bytes for info in found)
        if isinstance(request, ListRequest):
            listed = tuple(ListedRecord(info, ("dram",), 2) for info in found[: request.limit])
            return StoreListing(listed, len(found))
        if isinstance(request, VerifyRequest):
            return VerifyResult({"dram": len(found)}, {"dram": self.num_bad}, num_bytes, 0.5)
        self.records = [info for info in self.records if info not in found]
        return PurgeResult({"dram": len(found)}, {"dram": num_bytes}, self.num_pending)

    def _stat(self) -> StoreStat:
        by_group: dict[str, int] = {}
        for info in self.records:
            by_group[info.sharing_group] = by_group.get(info.sharing_group, 0) + info.num_bytes
        dram = TierStat(
            "dram",
            num_bytes=sum(by_group.values()),
            capacity_bytes=10**9,
            num_records=len(self.records),
            num_hits=30,
            num_misses=10,
        )
        nvme = TierStat(
            "nvme", 0, 2 * 10**9, 0, num_put_bytes=1000, num_written_bytes=1500, latency_s=0.002, note="gone"
        )
        return StoreStat(ReplicaIdentity(self.node_id, 1), (dram, nvme), IndexStat("up", 5), by_group, 2)

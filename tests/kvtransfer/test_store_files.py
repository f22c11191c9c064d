"""One stored and reloaded record enters exactly the files that `docs/architecture.md` lists."""

from __future__ import annotations

from pathlib import Path

from entered_files import EnteredFiles, documented_files
from store_harness import Chain, Replica, StoreHarness, eventually
from trust_files import TRUST

from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import Faults
from kvtransfer.store.server.store_server import StoreServer

NVME = {"nvme_bytes": 64 << 20, "segment_bytes": 1 << 20}


async def test_one_record_enters_the_documented_files(tmp_path: Path) -> None:
    """The store server, the client of the engine core and the worker of the rank are in this process. The
    record goes to DRAM and from there to NVMe, is found, and is read back."""
    entered = EnteredFiles()
    with entered.watching():
        harness = StoreHarness(tmp_path, nvme_path=str(tmp_path / "nvme"), **NVME)
        server = StoreServer(harness.settings, TRUST, SystemClock(), Faults(()), 0.0)
        await server.start()
        replica = await Replica(harness).start()
        try:
            for number in range(2):
                await put_and_get(server, replica, Chain.of(f"warm-up {number}", 1))
            for number in range(3):
                with entered.recording():
                    await put_and_get(server, replica, Chain.of(f"record {number}", 1))
        finally:
            await replica.close()
            await server.stop()
    assert entered.paths == documented_files("Files of one stored record")


async def put_and_get(server: StoreServer, replica: Replica, chain: Chain) -> None:
    """Returns when the record has been read back and lies on NVMe too."""
    num_before = num_on_nvme(server)
    assert await replica.put(chain) == [0]
    await eventually(lambda: num_on_nvme(server) > num_before, "the record lies on NVMe")
    assert await replica.find(chain) == ("dram",)
    assert await replica.get(chain) == ("dram",)


def num_on_nvme(server: StoreServer) -> int:
    return next((tier.num_records for tier in server.stat().tiers if tier.tier == "nvme"), 0)

"""A process that is nothing but a store server, for tests and benchmarks; a cluster runs it in a Ray actor.

`python -m kvtransfer.store.server.store_process` reads a `StoreServerSpec` frame from standard input.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import BinaryIO

from kvtransfer.codec import Codec, Message, read_frame
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import FaultRule, Faults
from kvtransfer.config import StoreSettings
from kvtransfer.rpc.trust import Trust, TrustFiles
from kvtransfer.store.server.arena_manager import OFFER_WAIT_S
from kvtransfer.store.server.store_server import StoreServer


class StoreServerSpec(Message, frozen=True):
    """The arguments of an owner process, read from its standard input."""

    settings: StoreSettings
    trust: TrustFiles
    faults: tuple[FaultRule, ...] = ()
    offer_wait_s: float = OFFER_WAIT_S


SPEC_CODEC: Codec[StoreServerSpec] = Codec(StoreServerSpec)


async def run_store_server(spec: StoreServerSpec, stdin: BinaryIO) -> None:
    """Serve until standard input ends, or SIGTERM; the first line printed is the owner's address."""
    trust = Trust.read(spec.trust)
    owner = StoreServer(spec.settings, trust, SystemClock(), Faults(spec.faults), spec.offer_wait_s)
    await owner.start()
    print(owner.address, flush=True)
    loop = asyncio.get_running_loop()
    stop_requested = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop_requested.set)
    loop.add_reader(stdin, stop_requested.set)  # nothing is sent on it but its end
    ends = [asyncio.create_task(stop_requested.wait()), asyncio.create_task(owner.wait_ended())]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    loop.remove_reader(stdin)
    owner.check_health()
    for end in ends:
        end.cancel()
    await owner.stop()


def main() -> None:
    """Run the owner process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    stdin = sys.stdin.buffer
    frame = read_frame(stdin)
    assert frame is not None, "standard input has no specification"
    asyncio.run(run_store_server(SPEC_CODEC.decode(frame), stdin))


if __name__ == "__main__":
    main()

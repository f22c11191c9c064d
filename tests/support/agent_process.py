"""Transfer agents of ranks in a process of their own: frames come in on standard input and go out on standard
output, length-prefixed. One process may hold several ranks, which come and go."""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import IO

from kvtransfer.agent.agent import TransferAgent
from kvtransfer.blocks.host_memory import KvMemory
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.pool import HostPool, KvPool
from kvtransfer.codec import Codec, Message, framed, read_frame
from kvtransfer.common.clock import SystemClock
from kvtransfer.common.faults import FaultRule, Faults
from kvtransfer.messages import RankEndpoints, ReplicaIdentity, Shard
from kvtransfer.rpc.trust import Trust, TrustFiles
from kvtransfer.transfer_orders import TransferOrder, TransferSettings
from kvtransfer.transfer_reports import TransferReport

# A fault's action, here only: wait at the point until the file "<marker>.go" exists.
HOLD = "hold"


class StartRank(Message, frozen=True):
    """To the process: a rank with pools of zeros, one for each group of layers (none: one of all layers).
    `is_device`: as a torch tensor's pool."""

    key: int
    identity: ReplicaIdentity
    rank: int
    shard: Shard
    head_dim: int
    block_tokens: int
    item_bytes: int
    num_blocks: int
    trust: TrustFiles
    faults: tuple[FaultRule, ...]
    settings: TransferSettings
    is_device: bool = False
    groups: tuple[tuple[int, ...], ...] = ()

    @property
    def layouts(self) -> list[BlockLayout]:
        """The layouts of the pools."""
        layout = BlockLayout(self.shard, self.head_dim, self.block_tokens, self.item_bytes)
        return [replace(layout, group=layers) for layers in self.groups] or [layout]


class EndRank(Message, frozen=True):
    """To the process: close that rank's agent; answered by `RankEnded`."""

    key: int


class Order(Message, frozen=True):
    """To the process: an order for that rank's agent."""

    key: int
    order: bytes


class RankStarted(Message, frozen=True):
    """From the process: how the rank is reached, and the descriptors of its pools' memory in that process."""

    key: int
    endpoints: RankEndpoints
    fds: tuple[int, ...]


class Report(Message, frozen=True):
    """From the process: what the rank's agent reports."""

    key: int
    report: bytes


class RankEnded(Message, frozen=True):
    """From the process: the rank's agent is closed."""

    key: int


TO_PROCESS: Codec[StartRank | EndRank | Order] = Codec(StartRank | EndRank | Order)
FROM_PROCESS: Codec[RankStarted | Report | RankEnded] = Codec(RankStarted | Report | RankEnded)
ORDERS: Codec[TransferOrder] = Codec(TransferOrder)
REPORTS: Codec[TransferReport] = Codec(TransferReport)


class HoldingFaults(Faults):
    """Knows the action "hold" too."""

    def __init__(self, rules: tuple[FaultRule, ...]) -> None:
        super().__init__(rules)
        self._held = [rule for rule in rules if rule.action == HOLD]

    def at(self, point: str) -> bool:
        is_corrupt = super().at(point)
        for rule in self._held:
            if rule.point == point and Path(rule.marker).exists():
                go, pause = Path(f"{rule.marker}.go"), threading.Event()
                while not go.exists():
                    pause.wait(0.005)
        return is_corrupt


def write(stream: IO[bytes], frame: bytes) -> None:
    stream.write(framed(frame))
    stream.flush()


class Ranks:
    """The ranks of this process."""

    def __init__(self, out: IO[bytes]) -> None:
        self._out = out
        self._writing = threading.Lock()
        self._agents: dict[int, TransferAgent] = {}
        self._pools: dict[int, list[KvPool | KvMemory]] = {}

    def handle(self, message: StartRank | EndRank | Order) -> None:
        match message:
            case StartRank():
                self._start(message)
            case EndRank(key):
                self._agents.pop(key).close()
                for each in self._pools.pop(key):
                    each.close()
                self._send(RankEnded(key))
            case Order():
                self._agents[message.key].handle(ORDERS.decode(message.order))

    def _start(self, start: StartRank) -> None:
        layouts = start.layouts
        memories = [KvMemory.allocate(start.num_blocks * layout.block_bytes) for layout in layouts]
        pools: list[KvPool] = [
            _device_pool(layout, memory) if start.is_device else HostPool(layout, memory)
            for layout, memory in zip(layouts, memories, strict=True)
        ]
        self._pools[start.key] = [*pools, *memories]

        def report(report: TransferReport) -> None:
            self._send(Report(start.key, REPORTS.encode(report)))

        agent = TransferAgent(
            identity=start.identity,
            rank=start.rank,
            pools=pools,
            trust=Trust.read(start.trust),
            clock=SystemClock(),
            faults=HoldingFaults(start.faults),
            report=report,
            settings=start.settings,
        )
        self._agents[start.key] = agent
        self._send(RankStarted(start.key, agent.endpoints(), tuple(it.fd for it in memories)))

    def _send(self, message: RankStarted | Report | RankEnded) -> None:
        with self._writing:
            write(self._out, FROM_PROCESS.encode(message))


def _device_pool(layout: BlockLayout, memory: KvMemory) -> KvPool:
    import torch

    from kvtransfer.blocks.device_pool import DevicePool

    return DevicePool(layout, torch.frombuffer(memory.buffer, dtype=torch.uint8).view(-1, layout.block_bytes))


def main() -> None:
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries write to standard output as they like
    ranks = Ranks(out)
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        ranks.handle(TO_PROCESS.decode(frame))
    os._exit(0)  # a process that had a NIXL agent crashes in a normal exit


if __name__ == "__main__":
    main()

"""Copies between blocks and records of the store, of the device's own bytes and in 8 bits, as JSON lines.

Blocks have the shape of Llama 3 8B in bf16. One thread copies them in turns, in each form of records. A
figure is the median of the rounds, in 1e9 bytes of blocks a second of that thread's processor time, and
`ratio` the median of its ratios to plain copies in the same round.

    python -m benchmarks.record_bits [--blocks 24] [--block-tokens 64] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from kvtransfer.blocks.host_memory import KvMemory
from kvtransfer.blocks.layout import BlockLayout
from kvtransfer.blocks.pool import HostPool, RecordPool
from kvtransfer.blocks.runs import ByteRegion
from kvtransfer.common.host import cpu_name
from kvtransfer.messages import Shard
from kvtransfer.store.messages.records import HEADER_BYTES
from workers.model import native
from workers.model.kv_form import ScaledParts
from workers.rank.quantized_records import QuantizedRecords

FORMS = ("auto", "int8", "fp8")
SHARD, HEAD_DIM = Shard(0, 32, 0, 8), 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    layout = BlockLayout(SHARD, HEAD_DIM, args.block_tokens, torch.bfloat16.itemsize)
    memory = KvMemory.allocate(args.blocks * layout.block_bytes)
    shape = args.blocks, SHARD.num_layers, 2, SHARD.num_heads, args.block_tokens, HEAD_DIM
    kv = torch.frombuffer(memory.buffer, dtype=torch.bfloat16).view(shape)
    kv.normal_()
    pools: dict[str, RecordPool] = {"auto": HostPool(layout, memory)}
    for form in FORMS[1:]:
        pools[form] = QuantizedRecords(layout, kv, ScaledParts(form, (HEAD_DIM,)))
    measure(args, pools, layout)


def measure(args: argparse.Namespace, pools: dict[str, RecordPool], layout: BlockLayout) -> None:
    """Print a line for each form of records and each direction."""
    ids, step = list(range(args.blocks)), layout.block_bytes + HEADER_BYTES
    region = ByteRegion(np.zeros(args.blocks * step, dtype=np.uint8).data)
    offsets = [number * step for number in ids]
    num_bytes = args.blocks * layout.block_bytes
    rates: dict[tuple[str, str], list[float]] = {}
    for number in range(args.rounds + 1):  # the first touches the memory
        for form, pool in pools.items():
            # Loads follow stores of the same form, whose records they read.
            works = {
                "store": lambda pool=pool: pool.store(ids, region, offsets),
                "load": lambda pool=pool: pool.load(ids, SHARD, region, offsets, SHARD),
            }
            for name, work in works.items():
                rate = num_bytes / _processor_s(work) / 1e9
                if number:
                    rates.setdefault((form, name), []).append(rate)
    kernels = native.load()
    for (form, name), found in rates.items():
        ratios = [rate / plain for rate, plain in zip(found, rates["auto", name], strict=True)]
        line = {
            "benchmark": "record_bits",
            "cpu": cpu_name(),
            "isa": None if kernels is None else kernels.isa.value,
            "kv_dtype": form,
            "direction": name,
            "gb_s": round(statistics.median(found), 2),
            "ratio": round(statistics.median(ratios), 3),
        }
        print(json.dumps(line), flush=True)


def _processor_s(work: Callable[[], object]) -> float:
    started_at = time.thread_time()
    work()
    return time.thread_time() - started_at


if __name__ == "__main__":
    main()

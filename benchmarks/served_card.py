"""Whole clusters on one card, as `tandem serve` starts them: the part `served` of `benchmarks.gpu`.

Clusters run one after the other: one replica that plays both roles, and a prefill and a decode replica with
half of the card each, which therefore take time slices. Each is asked over gRPC by processes of their own, so
that no client is the limit. Prompts are drawn tokens, and answers have the length that is asked for. The
halves also land long prompts, one replica is asked again behind two gateways, and a last cluster, whose
replica has half of the card, gets a second one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import yaml

from benchmarks.gpu_served import ServedLoad, ServedSizes
from benchmarks.part_process import part_process
from benchmarks.random_checkpoint import write_random_checkpoint
from benchmarks.served import ROOT, Service, serving
from benchmarks.served_reports import added_replica_s, landing_ms
from cluster.bench.dataset_load import DatasetSettings, RunSettings
from cluster.bench.grpc_target import grpc_target
from cluster.bench.lengths_dataset import lengths_load
from cluster.bench.serving_load import run_sessions
from kvtransfer.common.clock import SystemClock
from workers.config import DEVICE_TO_STEP_SIZES

if TYPE_CHECKING:
    from benchmarks.gpu import Bench

CLOCK = SystemClock()
# What everything around the engine may add to the first token of a short prompt on an idle replica.
MOST_ADDED_MS = 5.0
# From the command to the first request, with 16 GB of weights in the page cache.
_COLD_START_S, _WARM_START_S = 40.0, 25.0
# From the order to two replicas of one node that run.
_SECOND_START_S = 15.0
_MOST_CLIENTS = 4
_TIMEOUT_S = 120.0
# Sigma of lengths that are drawn (lognormal), the default of `tandem bench serve`.
_SPREAD = 0.5


class Asked(NamedTuple):
    """What became of a load: when it began and ended, seconds by request, tokens, and failures by reason."""

    began_at: float
    ended_at: float
    ttft_s: list[float]
    tpot_s: list[float]
    num_output: int
    failures: list[str]


def cluster_lines(bench: Bench) -> Iterator[dict[str, object]]:
    """Start the clusters, ask them, and yield the lines of what came of it."""
    is_on_cuda = bench.device.type == "cuda"
    prompt_tokens = bench.sizes.served.loads[0].input_tokens
    bench.driver.prefill_s(prompt_tokens, prompt_tokens)  # warms up
    prefill_ms = 1e3 * min(bench.driver.prefill_s(prompt_tokens, prompt_tokens) for _ in range(5))
    landing_limit_ms = _landing_limit_ms(bench)
    bench.close()  # its memory is needed
    with tempfile.TemporaryDirectory(prefix="tandem-", dir="/dev/shm" if is_on_cuda else None) as name:
        folder = Path(name)
        order = {"folder": str(folder / "model"), "device": str(bench.device), "shape": bench.sizes.shape}
        asyncio.run(_ask_part("checkpoint", order))
        kernels = {"TRITON_CACHE_DIR": str(folder / "kernels")}
        one, halves = (_config(bench, folder, roles) for roles in (("both",), ("prefill", "decode")))
        what_to_rate: dict[str, float] = {}
        if is_on_cuda:
            began_at = CLOCK.now()
            with serving("--file", str(one), variables=kernels):
                yield _start_line("without compiled kernels", CLOCK.now() - began_at, _COLD_START_S)
        for what, file in (("one replica", one), ("two halves", halves)):
            began_at = CLOCK.now()
            with serving("--file", str(file), variables=kernels) as service:
                if what == "one replica":
                    yield _start_line("with compiled kernels", CLOCK.now() - began_at, _WARM_START_S)
                for line in _loads(bench.sizes.served, service, what, prefill_ms):
                    if "requests" in line:
                        what_to_rate[what] = cast("float", line["value"])  # the last is that of most at once
                    yield line
                if what == "two halves":
                    yield _landing_line(bench, service, landing_limit_ms)
        load = bench.sizes.served.loads[-1].described
        yield {
            "figure": f"output_tok_s of one replica beside two halves, {load}",
            "value": what_to_rate["one replica"],
            "limit": what_to_rate["two halves"],
            "ratio": what_to_rate["one replica"] / what_to_rate["two halves"],
            "target": 1.0,
        }
        two_gateways = _config(bench, folder, ("both",), num_gateways=2)
        last = bench.sizes.served._replace(loads=bench.sizes.served.loads[-1:])
        with serving("--file", str(two_gateways), variables=kernels) as service:
            yield from _loads(last, service, "one replica behind two gateways", prefill_ms)
        half = _config(bench, folder, ("both",), gpus_per_rank=0.5)
        with serving("--file", str(half), variables=kernels) as service:
            start_s = asyncio.run(added_replica_s(service, "both"))
        yield _start_line("that gets a second replica", start_s, _SECOND_START_S)


def _start_line(kind: str, start_s: float, target_s: float) -> dict[str, object]:
    return {
        "figure": f"start_s of a cluster {kind}",
        "value": start_s,
        "limit": target_s,
        "ratio": target_s / start_s,
        "target": 1.0,
    }


def _landing_limit_ms(bench: Bench) -> float:
    """Return the time in which the KV of a long prompt should land: 1.2 times that of its bytes at 0.8 of the
    rate of a copy, and that of one chunk."""
    num_tokens = bench.sizes.prefill_tokens
    chunk_tokens = min(DEVICE_TO_STEP_SIZES[bench.device.type].chunk_tokens, num_tokens)
    num_bytes = num_tokens * bench.token_bytes
    return 1e3 * (
        1.2 * num_bytes / (0.8 * bench.limits.byte_s / 2) + bench.driver.prefill_s(chunk_tokens, chunk_tokens)
    )


def _landing_line(bench: Bench, service: Service, limit_ms: float) -> dict[str, object]:
    num_tokens = bench.sizes.prefill_tokens
    value = asyncio.run(landing_ms(service, num_tokens))
    figure = f"landing_ms of {num_tokens} tokens in service"
    return {"figure": figure, "value": value, "limit": limit_ms, "ratio": limit_ms / value, "target": 1.0}


def _loads(sizes: ServedSizes, service: Service, what: str, prefill_ms: float) -> Iterator[dict[str, object]]:
    for number, load in enumerate(sizes.loads):
        # Kernels of the batch's size, and whatever else comes first, are not measured.
        asyncio.run(_ask(service, load._replace(num_requests=load.num_at_once), 100 + number))
        asked = asyncio.run(_ask(service, load, number))
        seconds = asked.ended_at - asked.began_at
        ttft_ms, tpot_ms = ([_ms(times, share) for share in (0.5, 0.9, 0.99)] for times in asked[2:4])
        line: dict[str, object] = {
            "figure": f"output_tok_s of {what}, {load.described}",
            "value": asked.num_output / seconds,
            "requests": load.num_requests,
            "failed": len(asked.failures),
            "ttft_ms": ttft_ms,
            "tpot_ms": tpot_ms,
        }
        if asked.failures:
            line["first_failure"] = asked.failures[0]
        if load.target_tok_s and what == "one replica":
            ratio = asked.num_output / seconds / load.target_tok_s
            line |= {"limit": load.target_tok_s, "ratio": ratio, "target": 1.0}
        yield line
        if load.num_at_once == 1 and what == "one replica":
            limit_ms = prefill_ms + MOST_ADDED_MS
            yield {
                "figure": f"ttft_ms of {load.input_tokens} tokens, alone",
                "value": ttft_ms[0],
                "prefill_ms": prefill_ms,
                "limit": limit_ms,
                "ratio": limit_ms / ttft_ms[0],
                "target": 1.0,
            }


def _ms(seconds: list[float], share: float) -> float:
    return float(f"{1e3 * float(np.quantile(seconds, share)):.4g}") if seconds else 0.0


def _config(
    bench: Bench, folder: Path, roles: tuple[str, ...], *, gpus_per_rank: float = 0.0, num_gateways: int = 1
) -> Path:
    """Write the cluster's file; its replicas share the card, in equal parts (0)."""
    is_on_cuda = bench.device.type == "cuda"
    pool: dict[str, object] = {"device": bench.device.type, "engine": bench.sizes.served.engine}
    share = gpus_per_rank or 1 / len(roles)
    pool |= {"dtype": "bf16", "gpus_per_rank": share} if is_on_cuda else {"dtype": "fp32"}
    config = {
        "model": str(folder / "model"),
        "gateway": {"console_port": None, "replicas": num_gateways},
        "pools": [{"name": role, "role": role, "cpus_per_rank": 0.5, **pool} for role in roles],
    }
    file = folder / f"{'-'.join(roles)}-{share:g}-{num_gateways}.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


# ----------------------------------------------------------------------------------- in other processes


async def _ask(service: Service, load: ServedLoad, seed: int) -> Asked:
    """Send the load from several processes at once, which take the gateways in turn."""
    addresses = service.address.split(", ")
    num_clients = min(_MOST_CLIENTS, load.num_at_once, max((os.cpu_count() or 1) // 4, 1))
    async with AsyncExitStack() as running:
        clients = [
            await running.enter_async_context(
                part_process(
                    "benchmarks.served_card", "client", {"address": addresses[number % len(addresses)]}
                )
            )
            for number in range(num_clients)
        ]
        orders = []
        for number in range(num_clients):
            share = load._replace(
                num_requests=len(range(number, load.num_requests, num_clients)),
                num_at_once=len(range(number, load.num_at_once, num_clients)),
            )
            orders.append({"load": share, "seed": num_clients * seed + number})
        answers = await asyncio.gather(
            *(client.ask(order) for client, order in zip(clients, orders, strict=True))
        )
    parts = [Asked(*answer) for answer in answers]
    return Asked(
        min(part.began_at for part in parts),
        max(part.ended_at for part in parts),
        [each for part in parts for each in part.ttft_s],
        [each for part in parts for each in part.tpot_s],
        sum(part.num_output for part in parts),
        [each for part in parts for each in part.failures],
    )


async def play_client(order: dict[str, Any]) -> None:
    """Send the load of each line that is given, and print what became of it."""
    async with grpc_target(order["address"], _TIMEOUT_S, None) as target:
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            given = json.loads(line)
            load, model = ServedLoad(*given["load"]), target.model
            settings = DatasetSettings(
                num_requests=load.num_requests,
                input_tokens=load.input_tokens,
                output_tokens=load.output_tokens,
                length_spread=_SPREAD,
            )
            run = RunSettings(0.0, given["seed"], model.vocab_size, model.context_tokens)
            drawn = lengths_load("lognormal" if load.are_drawn else "fixed", False, settings, run)
            records = await run_sessions(drawn.sessions, load.num_at_once, target.send, CLOCK, lambda _: None)
            done = [each for each in records if each.outcome == "ok"]
            asked = Asked(
                min(each.sent_at for each in records),
                max(each.finished_at for each in records),
                [each.ttft_s for each in done],
                [each.tpot_s for each in done if each.tpot_s is not None],
                sum(each.num_output for each in done),
                [f"{each.outcome}: {each.reason}" for each in records if each.outcome != "ok"],
            )
            print(json.dumps(asked), flush=True)


async def play_checkpoint(order: dict[str, Any]) -> None:
    """Write random weights, in a process whose memory of the card is free again afterwards."""
    device = order["device"]
    dtype = "bfloat16" if device.startswith("cuda") else "float32"
    write_random_checkpoint(
        Path(order["folder"]),
        "llama",
        seed=1,
        dtype=dtype,
        device=device,
        tokenizer_from=ROOT / "models" / "tiny",
        **order["shape"],
    )
    print("written", flush=True)


async def _ask_part(kind: str, order: object) -> None:
    async with part_process("benchmarks.served_card", kind, order):
        pass


_PARTS = {"client": play_client, "checkpoint": play_checkpoint}


def main() -> None:
    parser = argparse.ArgumentParser(description="parts of `benchmarks.gpu served`")
    parser.add_argument("--part", choices=list(_PARTS), required=True)
    asyncio.run(_PARTS[parser.parse_args().part](json.loads(sys.stdin.readline())))

"""What engine core, Link, gateway and hand-over add to the bare engine: `python -m benchmarks.overhead`.

Stages, each on top of the one before, with one process for every part as in the cluster:

    runner    the step plans of the run, replayed by a model runner in this process
    engine core       a rank process and its engine core, asked over a Link
    gateway     a gateway before that engine core, asked over gRPC
    HTTP        the same gateway, asked over HTTP (/v1/completions)
    hand-over   a gateway before a prefill and a decode replica

All stages take turns in every round, to and fro, with new prompts of the same lengths, so that other load on
the machine falls on all of them. Each runs twice in its turn and only the second counts: caches are as warm
for all. Times are medians over all requests and tokens; `added` is against the stage before, `ratio` against
the runner. `cpu_us` is the CPU time of the gateway's process for each token. A last line compares HTTP with
gRPC round by round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import psutil
import torch
import uvloop

from benchmarks.drawn_trust import draw_trust
from benchmarks.part_process import part_process
from cluster.api.client import Client
from cluster.api.generate_options import GenerateOptions
from cluster.config import parse_config
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.roster.actor import VIEW_CODEC
from cluster.roster.messages import ReplicaRecord, RosterView
from cluster.roster.state import LocalRoster
from cluster.serve.gateway_server import ControlPlane, Gateway
from kvtransfer.blocks.keys import extend_keys
from kvtransfer.common.clock import SystemClock
from kvtransfer.config import TransferConfig
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.stream import FrameStream, open_link
from kvtransfer.rpc.trust import Trust, TrustFiles
from workers.config import EngineConfig, Parallel
from workers.messages.link import (
    LINK_DOWN_CODEC,
    LINK_UP_CODEC,
    GatewayHello,
    SampleState,
    StepFrame,
    Submission,
)
from workers.messages.rank_channel import StepPlan
from workers.messages.sampling import SamplingParams
from workers.model.model_config import read_model_config
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, ComputeSettings, RankCapacity, read_dtype
from workers.replica.engine_core import EngineCore
from workers.replica.partition import ReplicaSpec
from workers.replica.rank_group import ProcessLauncher
from workers.replica.step_loop import PIPELINE_DEPTH
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.scheduler import Scheduler

BLOCK_TOKENS = 16
CLOCK = SystemClock()
# The most that HTTP may add to a first token, and the CPU time that it may add to a token.
HTTP_LIMIT_MS, HTTP_LIMIT_CPU_US = 1.0, 100.0
_ROOT_KEY = bytes(16)


@dataclass
class Times:
    """The times of one stage and batch: to the first token of each request, and between its tokens;
    seconds."""

    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    # The CPU time of the gateway's process in all.
    cpu_s: float = 0.0

    def add(self, started_at: float, arrivals: list[tuple[float, int]]) -> None:
        """Add one request: its start, when its tokens came, and how many at a time."""
        self.ttfts.append(arrivals[0][0] - started_at)
        for (before, _), (at, num_tokens) in pairwise(arrivals):
            self.gaps += [(at - before) / num_tokens] * num_tokens


# Runs the prompts at once and notes their times.
Stage = Callable[[list[bytes], Times], Awaitable[None]]


@dataclass(frozen=True)
class Setting:
    """The setting that is run in every stage."""

    model: Path
    dtype: str
    threads: int
    num_tokens: int

    @property
    def engine(self) -> EngineConfig:
        return EngineConfig(block_tokens=BLOCK_TOKENS, kv_tokens=16384, num_threads=self.threads)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.num_tokens, ignore_eos=True)

    def submissions(self, prompts: list[bytes], prefix: str) -> list[Submission]:
        return [
            Submission(
                request_id=f"{prefix}{index}",
                attempt=1,
                tenant="",
                sharing_group="",
                priority=0,
                prompt=prompt,
                root_key=_ROOT_KEY,
                block_keys=extend_keys(_ROOT_KEY, prompt, BLOCK_TOKENS),
                samples=(SampleState(0, index),),
                sampling=self.sampling,
                decode=None,
                deadline_s=None,
            )
            for index, prompt in enumerate(prompts)
        ]


# ------------------------------------------------------------------------------------------- the stages


class BareRunner:
    """Replays the plans that a scheduler made for these prompts; only the runner is on the clock."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._runner = ModelRunner(
            CheckpointFolder(setting.model),
            ComputeSettings(read_dtype(setting.dtype), torch.device("cpu"), setting.threads),
            RankCapacity(BLOCK_TOKENS, setting.engine.kv_tokens, setting.engine.max_sequences),
            CLOCK,
        )
        self._runner.warm_up()

    async def __call__(self, prompts: list[bytes], times: Times) -> None:
        plans = self._record(prompts)
        arrivals: dict[int, list[tuple[float, int]]] = {}
        started_at = CLOCK.now()
        for plan in plans:
            report = self._runner.steps.run(plan)
            now = CLOCK.now()
            assert len(report.tokens) == 4 * len(plan.sample_slots)
            for slot in plan.sample_slots:
                arrivals.setdefault(slot, []).append((now, 1))
        self._free(plans)
        for of_slot in arrivals.values():
            times.add(started_at, of_slot)

    def _record(self, prompts: list[bytes]) -> list[StepPlan]:
        """Return the plans of a run with as many plans ahead as an engine core has."""
        fields = self._runner.ready_fields
        pool = BlockPool(fields.num_blocks, BLOCK_TOKENS)
        scheduler = Scheduler(
            self._setting.engine,
            pool,
            eos_token_ids=fields.eos_token_ids,
            max_context_tokens=fields.max_context_tokens,
        )
        for submission in self._setting.submissions(prompts, "plan"):
            scheduler.submit(submission, CLOCK.now())
        plans: list[StepPlan] = []
        ahead: deque[StepPlan] = deque()
        while not scheduler.is_idle:
            while len(ahead) < PIPELINE_DEPTH and (plan := scheduler.plan(CLOCK.now())) is not None:
                plans.append(plan)
                ahead.append(plan)
            scheduler.settle(self._runner.steps.run(ahead.popleft()), CLOCK.now())
        self._free(plans)
        return plans

    def _free(self, plans: list[StepPlan]) -> None:
        """Free the slots that the last plans left taken."""
        taken: set[int] = set()
        for plan in plans:
            taken = taken - set(plan.free_slots) | set(plan.started_slots)
        self._runner.steps.run(StepPlan(0, free_slots=tuple(taken)))


class OverLink:
    """A gateway reduced to its Link."""

    def __init__(self, setting: Setting, stream: FrameStream) -> None:
        self._setting = setting
        self._stream = stream
        self._num_runs = 0

    async def __call__(self, prompts: list[bytes], times: Times) -> None:
        self._num_runs += 1
        submissions = self._setting.submissions(prompts, f"run{self._num_runs}-")
        arrivals: dict[str, list[tuple[float, int]]] = {it.request_id: [] for it in submissions}
        running = set(arrivals)
        started_at = CLOCK.now()
        for submission in submissions:
            self._stream.send(LINK_DOWN_CODEC.encode(submission))
        while running:
            frame = await self._stream.receive()
            assert frame is not None, "the engine core is gone"
            message = LINK_UP_CODEC.decode(frame)
            now = CLOCK.now()
            if isinstance(message, StepFrame):
                assert not message.failures, message.failures
                for delta in message.deltas:
                    arrivals[delta.request_id].append((now, len(delta.tokens) // 4))
                    running -= {delta.request_id} if delta.finish else set()
        for of_request in arrivals.values():
            times.add(started_at, of_request)


class OverGrpc:
    """A client of a gateway."""

    def __init__(self, setting: Setting, place: dict[str, Any]) -> None:
        self._setting = setting
        self.client = Client(place["grpc"])

    async def __call__(self, prompts: list[bytes], times: Times) -> None:
        await asyncio.gather(*(self._one(prompt, times) for prompt in prompts))

    async def _one(self, prompt: bytes, times: Times) -> None:
        ids = np.frombuffer(prompt, dtype="<u4").tolist()
        options = GenerateOptions(max_tokens=self._setting.num_tokens, ignore_eos=True)
        arrivals: list[tuple[float, int]] = []
        started_at = CLOCK.now()
        async for event in self.client.generate(ids, options):
            if isinstance(event, pb.Delta):
                arrivals.append((CLOCK.now(), len(event.token_ids)))
        times.add(started_at, arrivals)


class OverHttp:
    """A client of a gateway's HTTP port."""

    def __init__(self, setting: Setting, place: dict[str, Any]) -> None:
        self._setting = setting
        self._url = f"{place['http']}/v1/completions"
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def __call__(self, prompts: list[bytes], times: Times) -> None:
        await asyncio.gather(*(self._one(prompt, times) for prompt in prompts))

    async def _one(self, prompt: bytes, times: Times) -> None:
        num_tokens = self._setting.num_tokens
        body = {
            "prompt": np.frombuffer(prompt, dtype="<u4").tolist(),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        arrivals: list[float] = []
        started_at = CLOCK.now()
        async with self.session.post(self._url, json=body) as reply:
            reply.raise_for_status()
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    arrivals.append(CLOCK.now())
        times.ttfts.append(arrivals[0] - started_at)
        # Chunks do not say how many tokens they bring; where text is held back, there are fewer chunks.
        tokens_per_chunk = (num_tokens - 1) / max(1, len(arrivals) - 1)
        times.gaps += [(at - before) / tokens_per_chunk for before, at in pairwise(arrivals)]


# ---------------------------------------------------------------------------------- processes beside this


@asynccontextmanager
async def part(kind: str, **order: Any) -> AsyncIterator[str]:
    """Start a process of this program that plays one part; yield its output when it is ready."""
    async with part_process("benchmarks.overhead", kind, order) as process:
        yield process.said


async def play_engine_core(order: dict[str, Any]) -> None:
    spec = ReplicaSpec(
        identity=ReplicaIdentity(order["name"], 1),
        pool=order["role"],
        role=order["role"],
        model_dir=order["model"],
        dtype=order["dtype"],
        parallel=Parallel(),
        engine=EngineConfig(**order["engine"]),
        transfer=TransferConfig(),
        trust=TrustFiles(order["secret_file"]),
        host="127.0.0.1",
    )
    core = await EngineCore.launch(spec, ProcessLauncher(), CLOCK)
    record = ReplicaRecord(
        identity=core.identity,
        pool=order["role"],
        role=order["role"],
        address=core.address,
        model="bench",
        compatibility=core.compatibility,
        process_id=0,
        rank_process_ids=core.rank_process_ids,
    )
    print(VIEW_CODEC.encode(RosterView(1, (record,))).hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await core.stop()


async def play_gateway(order: dict[str, Any]) -> None:
    roster = LocalRoster(CLOCK)
    for view in order["views"]:
        for record in VIEW_CODEC.decode(bytes.fromhex(view)).replicas:
            await roster.register(record)
    engine = {"block_tokens": BLOCK_TOKENS}
    config = parse_config(
        {
            "model": order["model"],
            "pools": [{"name": role, "role": role, "engine": engine} for role in ("prefill", "decode")],
            "gateway": {"port": 0},
            "router": {"policy": "round_robin", "skip_prefill_tokens": 0},
        },
        "overhead",
    )
    trust = Trust.read(TrustFiles(order["secret_file"]))
    gateway = Gateway(
        gateway_id="g", epoch=1, config=config, control=ControlPlane(roster), trust=trust, clock=CLOCK
    )
    port = await gateway.start()
    while (
        not all(view.takes_requests for view in gateway.connections.views())
        or not gateway.connections.has_route()
    ):
        await CLOCK.sleep(0.01)
    place = {"grpc": f"127.0.0.1:{port}", "http": f"http://127.0.0.1:{gateway.http_port}"}
    print(json.dumps(place | {"process_id": os.getpid()}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await gateway.stop()


# ---------------------------------------------------------------------------------------------- the run


async def measure(setting: Setting, batches: list[int], num_prompt_tokens: int, num_rounds: int) -> None:
    trust = draw_trust()
    common = {"model": str(setting.model), "secret_file": trust.secret_file}
    engine = setting.engine.model_dump()
    async with AsyncExitStack() as parts:
        views = {
            role: await parts.enter_async_context(
                part("engine core", name=role, role=role, dtype=setting.dtype, engine=engine, **common)
            )
            for role in ("both", "prefill", "decode")
        }
        (both,) = VIEW_CODEC.decode(bytes.fromhex(views["both"])).replicas
        link = await open_link(both.address, "link", Trust.read(trust), "bench")
        link.send(LINK_DOWN_CODEC.encode(GatewayHello("bench", 1)))
        await link.receive()
        one = json.loads(await parts.enter_async_context(part("gateway", views=[views["both"]], **common)))
        split = [views["prefill"], views["decode"]]
        two = json.loads(await parts.enter_async_context(part("gateway", views=split, **common)))
        fronts = [OverGrpc(setting, one), OverGrpc(setting, two)]
        http = OverHttp(setting, one)
        stages: dict[str, Stage] = {
            "runner": BareRunner(setting),
            "engine core": OverLink(setting, link),
            "gateway": fronts[0],
            "HTTP": http,
            "hand-over": fronts[1],
        }
        gateways = {"gateway": one["process_id"], "HTTP": one["process_id"], "hand-over": two["process_id"]}
        vocab_size = read_model_config(setting.model).vocab_size
        draw = np.random.default_rng(0)

        def prompts(batch: int) -> list[bytes]:
            ids = draw.integers(4, vocab_size, (batch, num_prompt_tokens), dtype="<u4")
            return [bytes(row.tobytes()) for row in ids]

        for batch in batches:
            times = {name: Times() for name in stages}
            pairs: list[tuple[float, float]] = []
            for number in range(num_rounds):
                first_tokens: dict[str, float] = {}
                for name, stage in list(stages.items())[:: 1 if number % 2 else -1]:
                    await stage(prompts(batch), Times())
                    before = _cpu_s(gateways.get(name))
                    so_far = len(times[name].ttfts)
                    await stage(prompts(batch), times[name])
                    times[name].cpu_s += _cpu_s(gateways.get(name)) - before
                    first_tokens[name] = median(times[name].ttfts[so_far:])
                pairs.append((first_tokens["HTTP"], first_tokens["gateway"]))
            report(times, batch, num_prompt_tokens, setting)
            report_http(times, pairs, batch, setting)
        await http.session.close()
        for front in fronts:
            await front.client.close()


def _cpu_s(process_id: int | None) -> float:
    """Return the processor time that the process has used; 0: there is none."""
    if process_id is None:
        return 0.0
    used = psutil.Process(process_id).cpu_times()
    return float(used.user + used.system)


def report(stage_to_times: dict[str, Times], batch: int, num_prompt_tokens: int, setting: Setting) -> None:
    base: dict[str, float] = {}
    before: dict[str, float] = {}
    for name, times in stage_to_times.items():
        now = {"ttft_ms": 1e3 * median(times.ttfts), "itl_ms": 1e3 * median(times.gaps)}
        base, before = base or now, before or now
        line: dict[str, Any] = {"what": name, "batch": batch}
        line |= {key: round(value, 3) for key, value in now.items()}
        for key, value in now.items():
            line[f"added_{key}"] = round(value - before[key], 3)
            line[f"ratio_{key[:-3]}"] = round(value / base[key], 3)
        if times.cpu_s:
            line["cpu_us"] = round(1e6 * times.cpu_s / (len(times.ttfts) * setting.num_tokens), 1)
        line |= {"prompt": num_prompt_tokens, "tokens": setting.num_tokens, "dtype": setting.dtype}
        print(json.dumps(line), flush=True)
        if name != "HTTP":  # nothing is on top of it
            before = now


def report_http(
    stage_to_times: dict[str, Times], pairs: list[tuple[float, float]], batch: int, setting: Setting
) -> None:
    """Report the time that HTTP adds to gRPC: to the first token the median over the rounds' pairs, with the
    interval that 90 % of resampled medians are in."""
    added_ms = 1e3 * np.array([over_http - over_grpc for over_http, over_grpc in pairs])
    drawn = np.random.default_rng(0).choice(added_ms, (10_000, len(added_ms)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.05, 0.95])
    http, grpc = stage_to_times["HTTP"], stage_to_times["gateway"]
    added_s = http.cpu_s - grpc.cpu_s
    line = {
        "what": "HTTP over gRPC",
        "batch": batch,
        "rounds": len(pairs),
        "added_ttft_ms": round(float(np.median(added_ms)), 3),
        "interval_ms": [round(float(low), 3), round(float(high), 3)],
        "limit_ms": HTTP_LIMIT_MS,
        "added_cpu_us": round(1e6 * added_s / (len(http.ttfts) * setting.num_tokens), 1),
        "limit_cpu_us": HTTP_LIMIT_CPU_US,
    }
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"), help="checkpoint folder")
    parser.add_argument("--dtype", default="fp32", help="bf16, fp16 or fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=lambda text: [int(it) for it in text.split(",")], default="1,16")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--part", choices=["engine core", "gateway"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        play = {"engine core": play_engine_core, "gateway": play_gateway}[args.part]
        uvloop.run(play(json.loads(sys.stdin.readline())))  # as Ray runs its processes
        return
    setting = Setting(args.model, args.dtype, args.threads, args.tokens)
    asyncio.run(measure(setting, args.batch, args.prompt, args.rounds))


if __name__ == "__main__":
    main()

"""Where the time to a first token goes besides computing the prompt: `python -m benchmarks.first_token`.

Two clusters run, with one process for every part and the event loop of Ray's processes (uvloop): `both`, a
replica of both roles, and `hand-over`, a prefill and a decode replica. One request runs at a time, on idle
replicas. Each round sends one over a gateway's gRPC, and one over Links that this program opens in a
gateway's place, which shows every stage of the engine. A line of JSON for each cluster:

    ttft_ms    from the client's call to its first token, over gRPC
    prefill_ms the rank's own time for the prompt
    added_ms   the difference, with its limit; over_link_ms is the same over a Link, without a gateway
    parts_ms   client and gateway: before the submission is sent; after the first token has come
               link down, landing (asked to granted), schedule, to the rank, from the rank, link up
    cpu_ms     processor time of each process for one request of two tokens, with both ways together

Figures are medians over the rounds, and `parts_ms` has the lowest tenth as well: on a busy machine, those
are nearer to what an idle one takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import psutil
import uvloop
from msgspec.structs import replace

from benchmarks.drawn_trust import draw_trust
from benchmarks.overhead import CLOCK, Setting, part
from cluster.api.client import Client
from cluster.api.generate_options import GenerateOptions
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.roster.actor import VIEW_CODEC
from cluster.roster.messages import ReplicaRecord
from kvtransfer.rpc.stream import FrameStream, open_link
from kvtransfer.rpc.trust import Trust
from workers.messages.link import (
    LINK_DOWN_CODEC,
    LINK_UP_CODEC,
    GatewayHello,
    HandOverTarget,
    PrefillReport,
    StepFrame,
)
from workers.model.model_config import read_model_config

# The most that everything around the engine may add to a first token.
LIMIT_MS = 5.0
_WARM_ROUNDS = 4
_NUM_TOKENS = 2
# Over a Link, in their order.
_STAGES = ("link down", "landing", "schedule", "to the rank", "from the rank", "link up")
_CLUSTER_TO_ROLES = {"both": ("both",), "hand-over": ("prefill", "decode")}


class Links:
    """The Links of a gateway to the replicas of one cluster, the one that computes prompts first."""

    def __init__(self, records: Sequence[ReplicaRecord], setting: Setting) -> None:
        self._records = records
        self._setting = setting
        self._streams: list[FrameStream] = []
        self._reading: list[asyncio.Task[None]] = []
        # When each frame came, in order of arrival on any Link.
        self._frames: asyncio.Queue[tuple[float, StepFrame]] = asyncio.Queue()
        self._num_runs = 0

    async def open(self, trust: Trust) -> None:
        for record in self._records:
            stream = await open_link(record.address, "link", trust, "bench")
            stream.send(LINK_DOWN_CODEC.encode(GatewayHello("bench", 1)))
            await stream.receive()
            self._streams.append(stream)
            self._reading.append(asyncio.create_task(self._read(stream)))

    async def close(self) -> None:
        for stream in self._streams:
            stream.close()
        await asyncio.gather(*self._reading)

    async def run(self, prompt: bytes) -> dict[str, float]:
        """Run one request to its end, and return the stages of its first token in seconds."""
        self._num_runs += 1
        (submission,) = self._setting.submissions([prompt], f"run{self._num_runs}-")
        if self._records[1:]:
            decode = self._records[1]
            submission = replace(submission, decode=HandOverTarget(decode.identity, decode.address))
        sent_at = CLOCK.now()
        self._streams[0].send(LINK_DOWN_CODEC.encode(submission))
        report: PrefillReport | None = None
        first_at, has_ended = 0.0, False
        while not has_ended:
            at, frame = await self._frames.get()
            assert not frame.failures, frame.failures
            report = next(iter(frame.prefills), report)
            if frame.deltas:
                first_at = first_at or at
                has_ended = bool(frame.deltas[-1].finish)
        assert report is not None
        return _stages(sent_at, report, first_at)

    async def _read(self, stream: FrameStream) -> None:
        while (frame := await stream.receive()) is not None:
            at, message = CLOCK.now(), LINK_UP_CODEC.decode(frame)
            if isinstance(message, StepFrame):
                self._frames.put_nowait((at, message))


def _stages(sent_at: float, report: PrefillReport, first_at: float) -> dict[str, float]:
    """Return the seconds of each stage of a first token over a Link. All times are of one host's clock."""
    times, trace = report.times, dict(report.trace)
    asked_at = trace.get("landing.asked", times.arrived)
    granted_at = trace.get("landing.granted", asked_at)
    return {
        "link down": times.arrived - sent_at,
        "landing": granted_at - asked_at,
        "schedule": times.scheduled - times.arrived - (granted_at - asked_at),
        "to the rank": times.step_start - times.scheduled,
        "prefill": times.step_end - times.step_start,
        "from the rank": times.prefilled - times.step_end,
        "link up": first_at - times.prefilled,
    }


async def _over_grpc(client: Client, prompt: bytes, setting: Setting) -> dict[str, float]:
    """Run one request over a gateway, and return the seconds until its first token and of its stages."""
    options = GenerateOptions(max_tokens=setting.num_tokens, ignore_eos=True)
    first_at, timing, request_id = 0.0, pb.Timing(), ""
    started_at = CLOCK.now()
    async for event in client.generate(np.frombuffer(prompt, dtype="<u4").tolist(), options):
        if isinstance(event, pb.Accepted):
            request_id = event.request_id
        elif isinstance(event, pb.Delta):
            first_at = first_at or CLOCK.now()
        elif isinstance(event, pb.Finished):
            timing = event.timing
    explained = await client.explain(request_id)
    routed_s = 1e-3 * next(entry.at_ms for entry in explained.timeline if entry.name == "routed")
    ttft_s = first_at - started_at
    return {
        "ttft": ttft_s,
        "client": ttft_s - 1e-3 * timing.ttft_ms,
        "gateway": routed_s,
        # Of the engine, without the Links: from the submission's arrival until the token is settled.
        "engine": 1e-3 * (timing.queue_ms + timing.prefill_ms),
        "links": 1e-3 * (timing.ttft_ms - timing.queue_ms - timing.prefill_ms) - routed_s,
    }


async def measure(setting: Setting, num_prompt_tokens: int, num_rounds: int, pause_s: float) -> None:
    trust = draw_trust()
    common = {"model": str(setting.model), "secret_file": trust.secret_file}
    engine = setting.engine.model_dump()
    draw = np.random.default_rng(0)
    vocab_size = read_model_config(setting.model).vocab_size
    for name, roles in _CLUSTER_TO_ROLES.items():
        async with AsyncExitStack() as parts:
            views = [
                await parts.enter_async_context(
                    part("engine core", name=role, role=role, dtype=setting.dtype, engine=engine, **common)
                )
                for role in roles
            ]
            records = [VIEW_CODEC.decode(bytes.fromhex(view)).replicas[0] for view in views]
            place = json.loads(await parts.enter_async_context(part("gateway", views=views, **common)))
            links = Links(records, setting)
            await links.open(Trust.read(trust))
            client = Client(place["grpc"])
            processes = {"gateway": place["process_id"]}
            for record in records:
                rank = record.rank_process_ids[0]
                processes |= {f"{record.role} rank": rank, f"{record.role} core": _parent(rank)}
            seen: dict[str, list[float]] = defaultdict(list)
            before: dict[str, float] = {}
            for number in range(_WARM_ROUNDS + num_rounds):
                if number == _WARM_ROUNDS:
                    seen.clear()
                    before = {key: _cpu_s(it) for key, it in processes.items()}
                prompts = draw.integers(4, vocab_size, (2, num_prompt_tokens), dtype="<u4")
                over_grpc = await _over_grpc(client, prompts[0].tobytes(), setting)
                await CLOCK.sleep(pause_s)
                over_link = await links.run(prompts[1].tobytes())
                await CLOCK.sleep(pause_s)
                for key, seconds in (over_grpc | over_link).items():
                    seen[key].append(seconds)
                beside_s = over_link["to the rank"] + over_link["from the rank"] + over_link["landing"]
                prefill_s = over_grpc["engine"] - beside_s - over_link["schedule"]
                seen["added"].append(over_grpc["ttft"] - prefill_s)
                seen["over link"].append(sum(over_link.values()) - over_link["prefill"])
            cpu_ms = {
                key: round(1e3 * (_cpu_s(it) - before[key]) / num_rounds, 2) for key, it in processes.items()
            }
            _report(name, seen, cpu_ms, num_prompt_tokens)
            await client.close()
            await links.close()


def _report(
    name: str, seen: Mapping[str, Sequence[float]], cpu_ms: Mapping[str, float], num_prompt_tokens: int
) -> None:
    stages = ("client", "gateway", "links", *_STAGES)
    line = {
        "what": name,
        "ttft_ms": _quantile_ms(seen["ttft"], 0.5),
        "prefill_ms": _quantile_ms(seen["prefill"], 0.5),
        "added_ms": _quantile_ms(seen["added"], 0.5),
        "added_ms_p10": _quantile_ms(seen["added"], 0.1),
        "limit_ms": LIMIT_MS,
        "over_link_ms": _quantile_ms(seen["over link"], 0.5),
        "over_link_ms_p10": _quantile_ms(seen["over link"], 0.1),
        "parts_ms": {key: _quantile_ms(seen[key], 0.5) for key in stages},
        "parts_ms_p10": {key: _quantile_ms(seen[key], 0.1) for key in stages},
        "cpu_ms": cpu_ms,
        "prompt": num_prompt_tokens,
        "rounds": len(seen["ttft"]),
    }
    print(json.dumps(line), flush=True)


def _quantile_ms(seconds: Sequence[float], share: float) -> float:
    return round(1e3 * float(np.quantile(seconds, share)), 3)


def _parent(process_id: int) -> int:
    return int(psutil.Process(process_id).ppid())


def _cpu_s(process_id: int) -> float:
    """Return the processor time that the process has used."""
    used = psutil.Process(process_id).cpu_times()
    return float(used.user + used.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"), help="checkpoint folder")
    parser.add_argument("--dtype", default="fp32", help="bf16, fp16 or fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between requests")
    args = parser.parse_args()
    setting = Setting(args.model, args.dtype, args.threads, _NUM_TOKENS)
    uvloop.run(measure(setting, args.prompt, args.rounds, args.pause))


if __name__ == "__main__":
    main()

"""How many tokens a second a gateway passes on: `python -m benchmarks.stream_rate`.

A replica that computes nothing gives every running stream a token each `--step-ms`, in one frame, as an
engine core does. Clients are two processes, which read messages and do not decode them before the end. One
gateway stands between them, in a process of its own. A line of JSON for each number of streams:

    tok_s            tokens that the clients have received, over the time from the first to the last
    offered_tok_s    the limit: streams over the time of a step
    cpu_us           processor time of the gateway for a token; replica_cpu_us and client_cpu_us likewise
    message_tokens   tokens in a message: more than one where the gateway merges what waits
    ttft_ms          p50 and p99 of the time from the call to the first token, when all call at once
    behind_ms        p50 and p99 of how much later a stream ended than its first token and its steps say

Processes share the cores of a small machine: there `tok_s` is of all of them together, and `core_tok_s`, one
second over `cpu_us`, is what a core of the gateway's own would carry.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import grpc.aio
import numpy as np
import psutil
import uvloop

from benchmarks.drawn_trust import draw_trust
from benchmarks.overhead import BLOCK_TOKENS, CLOCK, play_gateway
from benchmarks.part_process import PartProcess, part_process
from cluster.proto.tandem.v1 import inference_pb2 as pb
from cluster.roster.actor import VIEW_CODEC
from cluster.roster.messages import ReplicaRecord, RosterView
from cluster.serve.collector import leave_out_started
from kvtransfer.kv_events import KvSnapshot, KvSnapshotRequest
from kvtransfer.messages import PROTOCOL_VERSION, CompatibilityRecord, ReplicaIdentity
from kvtransfer.rpc.stream import FrameStream, LinkServer
from kvtransfer.rpc.trust import Trust, TrustFiles
from workers.messages.link import (
    LINK_DOWN_CODEC,
    LINK_UP_CODEC,
    Cancel,
    LoadReport,
    PrefillReport,
    ReplicaHello,
    StageTimes,
    StepFrame,
    Submission,
    TokenDelta,
)

_NUM_BLOCKS = 1 << 20
_CONTEXT_TOKENS = 1 << 16
_LOAD_PERIOD_S = 0.25
_NUM_CLIENTS = 2
_METHOD = "/tandem.v1.Inference/Generate"


class _Stream:
    """A stream of the replica, and the index of its next token."""

    __slots__ = ("next_index", "submission")

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.next_index = 0


class Replica:
    """Gives every stream a token each `step_s`, and computes nothing."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.identity = ReplicaIdentity("replica", 1)
        self._step_s: float = order["step_s"]
        self._load_sequence = 1
        self._links: list[FrameStream] = []
        self._streams: dict[str, _Stream] = {}
        self._server = LinkServer(Trust.read(TrustFiles(order["secret_file"])), self._on_link, self._on_peer)

    async def start(self) -> ReplicaRecord:
        """Listen; return the record for the roster."""
        port = await self._server.start("127.0.0.1")
        return ReplicaRecord(
            identity=self.identity,
            pool="both",
            role="both",
            address=f"127.0.0.1:{port}",
            model="bench",
            compatibility=self._compatibility(),
            process_id=0,
            rank_process_ids=(0,),
        )

    async def run(self) -> None:
        """Give tokens, step by step, until the task is cancelled."""
        next_at = loaded_at = CLOCK.now()
        while True:
            next_at = max(next_at + self._step_s, CLOCK.now())
            await CLOCK.sleep(next_at - CLOCK.now())
            load = None
            if CLOCK.now() - loaded_at >= _LOAD_PERIOD_S:
                loaded_at = CLOCK.now()
                self._load_sequence += 1
                load = self._load()
            if self._streams or load is not None:
                frame = LINK_UP_CODEC.encode(StepFrame(load=load, **self._step()))
                for link in self._links:
                    link.send(frame)

    def _step(self) -> dict[str, Any]:
        deltas, prefills = [], []
        for request_id, stream in list(self._streams.items()):
            submission, index = stream.submission, stream.next_index
            if index == 0:
                times = StageTimes(arrived=1.0, scheduled=1.0, prefilled=1.0)
                num_tokens = len(submission.prompt) // 4
                prefills.append(PrefillReport(request_id, submission.attempt, num_tokens, 0, times))
            is_last = index + 1 == submission.sampling.max_tokens
            deltas.append(
                TokenDelta(
                    request_id=request_id,
                    attempt=submission.attempt,
                    sample=submission.samples[0].index,
                    first_index=index,
                    tokens=(100 + index).to_bytes(4, "little"),
                    logprobs=(),
                    finish="length" if is_last else "",
                )
            )
            stream.next_index += 1
            if is_last:
                del self._streams[request_id]
        return {"deltas": tuple(deltas), "prefills": tuple(prefills)}

    async def _on_peer(self, stream: FrameStream) -> None:
        stream.close()

    async def _on_link(self, stream: FrameStream) -> None:
        if await stream.receive() is None:
            return
        hello = ReplicaHello(
            self.identity, "both", "both", self._compatibility(), _CONTEXT_TOKENS, self._load()
        )
        stream.send(LINK_UP_CODEC.encode(hello))
        self._links.append(stream)
        while (frame := await stream.receive()) is not None:
            message = LINK_DOWN_CODEC.decode_known(frame)
            if isinstance(message, Submission):
                self._streams[message.request_id] = _Stream(message)
            elif isinstance(message, Cancel):
                self._streams.pop(message.request_id, None)
            elif isinstance(message, KvSnapshotRequest):
                stream.send(LINK_UP_CODEC.encode(KvSnapshot(self.identity, 0, ())))
        self._links.remove(stream)

    def _compatibility(self) -> CompatibilityRecord:
        return CompatibilityRecord(PROTOCOL_VERSION, bytes(32), "float32", "float32", BLOCK_TOKENS, 2, 2, 8)

    def _load(self) -> LoadReport:
        return LoadReport(
            identity=self.identity,
            sequence=self._load_sequence,
            num_free_blocks=_NUM_BLOCKS,
            num_total_blocks=_NUM_BLOCKS,
            prefill_tok_s=1e6,
            decode_step_s=self._step_s,
            num_steps=1,
            transfer_gb_s=1.0,
        )


async def play_replica(order: dict[str, Any]) -> None:
    replica = Replica(order)
    print(VIEW_CODEC.encode(RosterView(1, (await replica.start(),))).hex(), flush=True)
    running = asyncio.create_task(replica.run())
    await asyncio.to_thread(sys.stdin.read)
    running.cancel()


async def play_serving_gateway(order: dict[str, Any]) -> None:
    leave_out_started()  # as the actor does
    await play_gateway(order)


class _Answer(NamedTuple):
    """When a client called, and each message of output with its arrival; seconds."""

    called_at: float
    messages: list[tuple[float, bytes]]


async def play_client(order: dict[str, Any]) -> None:
    """For each line `[streams, tokens]`, call so many times at once; print what came of it."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(order["grpc"], options=options) as channel:
        call: Any = channel.unary_stream(_METHOD, None, None)
        print("ready", flush=True)
        number = 0
        while line := await asyncio.to_thread(sys.stdin.readline):
            num_streams, num_tokens = json.loads(line)
            requests = []
            for _ in range(num_streams):
                number += 1
                requests.append(_request(order["seed"] + number, num_tokens))
            answers = await asyncio.gather(*(_ask(call, request) for request in requests))
            print(json.dumps(_found(answers, num_tokens)), flush=True)


def _request(seed: int, num_tokens: int) -> bytes:
    ids = np.random.default_rng(seed).integers(100, 200, 16).tolist()
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), max_tokens=num_tokens, ignore_eos=True)
    return bytes(request.SerializeToString())


async def _ask(call: Any, request: bytes) -> _Answer:
    called_at = CLOCK.now()
    return _Answer(called_at, [(CLOCK.now(), message) async for message in call(request)])


def _found(answers: list[_Answer], num_tokens: int) -> dict[str, Any]:
    """Decode the messages; check that every token came, once and in its order."""
    begins, ends, spans_s, ttfts_s, num_messages = [], [], [], [], 0
    for answer in answers:
        received: list[int] = []
        times = []
        for at, raw in answer.messages:
            message = pb.GenerateResponse.FromString(raw)
            if message.HasField("delta"):
                assert message.delta.first_index == len(received)
                received += message.delta.token_ids
                times.append(at)
        assert received == list(range(100, 100 + num_tokens)), "a token is missing, or came twice"
        num_messages += len(times)
        begins.append(times[0])
        ends.append(times[-1])
        spans_s.append(times[-1] - times[0])
        ttfts_s.append(times[0] - answer.called_at)
    return {
        "begin": min(begins),
        "end": max(ends),
        "spans_s": spans_s,
        "ttfts_s": ttfts_s,
        "num_messages": num_messages,
    }


async def measure(arguments: argparse.Namespace) -> None:
    trust = draw_trust()
    common = {"model": str(arguments.model), "secret_file": trust.secret_file}
    step_s = arguments.step_ms / 1e3
    async with AsyncExitStack() as parts:

        async def start(kind: str, **order: Any) -> PartProcess:
            return await parts.enter_async_context(part_process("benchmarks.stream_rate", kind, order))

        replica = await start("replica", step_s=step_s, **common)
        gateway = await start("gateway", views=[replica.said], **common)
        place = json.loads(gateway.said)
        clients = [
            await start("client", grpc=place["grpc"], seed=1_000_000 * at) for at in range(_NUM_CLIENTS)
        ]
        for num_streams in arguments.streams:
            order = [num_streams // _NUM_CLIENTS, arguments.tokens]
            await asyncio.gather(*(client.ask(order) for client in clients))  # warms up
            before = [_cpu_s(each) for each in (gateway, replica, *clients)]
            found = await asyncio.gather(*(client.ask(order) for client in clients))
            used = [
                _cpu_s(each) - was for each, was in zip((gateway, replica, *clients), before, strict=True)
            ]
            print(json.dumps(_line(found, used, step_s, arguments.tokens)), flush=True)


def _cpu_s(part: PartProcess) -> float:
    times = psutil.Process(part.process_id).cpu_times()
    return float(times.user + times.system)


def _line(
    found: list[dict[str, Any]], used_s: list[float], step_s: float, num_tokens: int
) -> dict[str, object]:
    spans_s = np.array([span for each in found for span in each["spans_s"]])
    ttfts_s = np.array([ttft for each in found for ttft in each["ttfts_s"]])
    num_all = len(spans_s) * num_tokens
    elapsed_s = max(each["end"] for each in found) - min(each["begin"] for each in found)
    behind_s = spans_s - (num_tokens - 1) * step_s
    offered, rate = len(spans_s) / step_s, num_all / elapsed_s
    cpu_us = 1e6 * used_s[0] / num_all
    return {
        "benchmark": "stream_rate",
        "streams": len(spans_s),
        "step_ms": 1e3 * step_s,
        "tok_s": round(rate),
        "offered_tok_s": round(offered),
        "ratio": round(rate / offered, 3),
        "cpu_us": round(cpu_us, 1),
        "core_tok_s": round(1e6 / cpu_us),
        "replica_cpu_us": round(1e6 * used_s[1] / num_all, 1),
        "client_cpu_us": round(1e6 * sum(used_s[2:]) / num_all, 1),
        "message_tokens": round(num_all / sum(each["num_messages"] for each in found), 2),
        "ttft_ms": [round(1e3 * float(it), 1) for it in np.quantile(ttfts_s, [0.5, 0.99])],
        "behind_ms": [round(1e3 * float(it), 1) for it in np.quantile(behind_s, [0.5, 0.99])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"), help="of its tokenizer")
    parser.add_argument(
        "--streams", type=lambda text: [int(it) for it in text.split(",")], default="32,256,1000"
    )
    parser.add_argument("--step-ms", type=float, default=25.0)
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--part", choices=list(_PARTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        uvloop.run(_PARTS[arguments.part](json.loads(sys.stdin.readline())))  # as Ray runs its processes
        return
    asyncio.run(measure(arguments))


_PARTS = {"replica": play_replica, "gateway": play_serving_gateway, "client": play_client}

if __name__ == "__main__":
    main()

"""How much of a hand-over hides behind the prefill when the link is slow: `python -m benchmarks.overlap`.

Two replicas, one rank each. The prefill replica's hand-over rate is limited so that moving the prompt takes a
given share of computing it. What counts is how long after the last chunk the landing is complete, against the
time that the last chunk's own transfer takes at that rate: 1.0 is all that could be hidden; moved after the
prefill, it would be the number of chunks. One JSON line a shape of the writer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from kvtransfer.clock import SystemClock
from kvtransfer.config import TransferConfig
from kvtransfer.keys import block_keys
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.secret import draw_secret
from workers.brain import Brain
from workers.config import EngineConfig, Parallel
from workers.links import FrameStream, open_stream
from workers.messages import (
    LINK_DOWN_CODEC,
    LINK_UP_CODEC,
    GatewayHello,
    HandOverReport,
    HandOverTarget,
    PrefillReport,
    RequestFailed,
    SampleState,
    SamplingParams,
    StepFrame,
    Submission,
)
from workers.model.random_checkpoint import write_random_checkpoint
from workers.ranks import ProcessLauncher

BLOCK_TOKENS = 32
CLOCK = SystemClock()
MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}


class Outcome(NamedTuple):
    """One hand-over; times are seconds on this host's clock."""

    prefill: PrefillReport
    hand_over: HandOverReport


class Pair:
    """A prefill and a decode replica, with a Link to each."""

    def __init__(self, model_dir: Path, num_tokens: int, chunk_tokens: int) -> None:
        self._model_dir = model_dir
        self._engine = EngineConfig(
            block_tokens=BLOCK_TOKENS,
            kv_tokens=2 * num_tokens + 512,
            chunk_tokens=chunk_tokens,
            max_batch_tokens=chunk_tokens,
        )
        self._secret = draw_secret()
        self._prefills: dict[str, PrefillReport] = {}
        self._hand_overs: dict[str, HandOverReport] = {}
        self._heard = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: list[FrameStream] = []
        self._brains: list[Brain] = []

    async def start(self, writer: Parallel, limit_gb_s: float) -> None:
        self._writer = await self._add("prefill", writer, TransferConfig(hand_over_gb_s=limit_gb_s))
        self._target = await self._add("decode", Parallel(), TransferConfig())

    async def _add(self, role: str, parallel: Parallel, transfer: TransferConfig) -> Brain:
        brain = Brain(
            identity=ReplicaIdentity(role, 1),
            pool=role,
            role=role,
            model_dir=str(self._model_dir),
            dtype="float32",
            parallel=parallel,
            engine=self._engine,
            transfer=transfer,
            secret=self._secret,
            launcher=ProcessLauncher(),
            clock=CLOCK,
            host="127.0.0.1",
        )
        await brain.start()
        self._brains.append(brain)
        stream = await open_stream(brain.address, "link", self._secret, "overlap")
        stream.send(LINK_DOWN_CODEC.encode(GatewayHello("overlap", 1)))
        self._streams.append(stream)
        self._tasks.append(asyncio.create_task(self._listen(stream)))
        return brain

    async def run(self, name: str, num_tokens: int) -> Outcome:
        """One prompt of random tokens, handed over."""
        tokens = np.random.default_rng(len(self._prefills)).integers(3, 250, num_tokens, dtype=np.uint32)
        prompt = tokens.astype("<u4").tobytes()
        fingerprint = self._writer.compatibility.model_fingerprint
        submission = Submission(
            request_id=name,
            attempt=0,
            tenant="",
            priority=0,
            prompt=prompt,
            block_keys=block_keys(prompt, BLOCK_TOKENS, fingerprint, ""),
            samples=(SampleState(0, 1),),
            sampling=SamplingParams(max_tokens=4, ignore_eos=True),
            decode=HandOverTarget(self._target.identity, self._target.address),
            deadline_s=None,
        )
        self._streams[0].send(LINK_DOWN_CODEC.encode(submission))
        while name not in self._prefills or name not in self._hand_overs:
            self._heard.clear()
            await self._heard.wait()
        return Outcome(self._prefills[name], self._hand_overs[name])

    async def stop(self) -> None:
        for stream in self._streams:
            stream.close()
        await asyncio.gather(*self._tasks)
        for brain in self._brains:
            await brain.stop()

    async def _listen(self, stream: FrameStream) -> None:
        while (frame := await stream.receive()) is not None:
            message = LINK_UP_CODEC.decode(frame)
            if not isinstance(message, StepFrame):
                continue
            failures: tuple[RequestFailed, ...] = message.failures
            assert not failures, failures
            self._prefills |= {report.request_id: report for report in message.prefills}
            self._hand_overs |= {report.request_id: report for report in message.hand_overs}
            self._heard.set()


async def measure(model_dir: Path, writer: Parallel, arguments: argparse.Namespace) -> dict[str, object]:
    num_tokens, chunk_tokens = arguments.tokens, arguments.chunk
    free = Pair(model_dir, num_tokens, chunk_tokens)
    await free.start(writer, 0.0)
    await free.run("warm-up", num_tokens)
    unlimited = [await free.run(f"free-{number}", num_tokens) for number in range(arguments.repeat)]
    await free.stop()
    prefill_s = median(_prefill_s(outcome) for outcome in unlimited)
    num_bytes = unlimited[0].hand_over.num_moved_bytes
    # The limit is a rank's; together the ranks of the writer move the prompt in the share of its prefill.
    total_gb_s = num_bytes / (arguments.share * prefill_s) / 1e9
    slow = Pair(model_dir, num_tokens, chunk_tokens)
    await slow.start(writer, total_gb_s / (writer.tp * writer.pp))
    await slow.run("warm-up", num_tokens)
    limited = [await slow.run(f"slow-{number}", num_tokens) for number in range(arguments.repeat)]
    await slow.stop()
    last_chunk_s = num_bytes / num_tokens * chunk_tokens / total_gb_s / 1e9
    rests = [outcome.hand_over.times.transfer_end - outcome.prefill.times.prefilled for outcome in limited]
    return {
        "what": "overlap",
        "writer": f"{writer.tp}x{writer.pp}",
        "prompt_tokens": num_tokens,
        "chunk_tokens": chunk_tokens,
        "moved_mib": round(num_bytes / 2**20, 1),
        "limit_gb_s": round(total_gb_s, 4),
        "prefill_s": round(prefill_s, 3),
        "limited_prefill_s": round(median(_prefill_s(outcome) for outcome in limited), 3),
        "last_chunk_s": round(last_chunk_s, 4),
        "rest_s": round(median(rests), 4),
        "ratio": round(median(rests) / last_chunk_s, 3),
        "ratio_without_overlap": round(num_tokens / chunk_tokens, 1),
    }


def _prefill_s(outcome: Outcome) -> float:
    return outcome.prefill.times.prefilled - outcome.prefill.times.scheduled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument(
        "--share", type=float, default=0.8, help="of the prefill time that the transfer takes"
    )
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(Path(folder) / "m", "llama", seed=1, **MODEL)
        for writer in (Parallel(), Parallel(tp=2)):
            figures = asyncio.run(measure(Path(folder) / "m", writer, arguments))
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()

"""What the host does for a step in which a whole batch decodes, as JSON lines: at the rank (a plan decoded,
taken in and planned for attention, a report encoded; without layers, head and sampler), at the rank of a GPU
(the same up to a graph that is launched, without the calls of CUDA; needs Triton), and at the engine core
(a plan made and encoded, a report decoded and settled, the frame for the gateway encoded). With the bytes of
the plan's frame.

    python -m benchmarks.host_time [--contexts 2048,8192,32768] [--batches 64,256]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from benchmarks.random_checkpoint import write_random_checkpoint
from kvtransfer.common.clock import ManualClock, SystemClock
from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.stream import FrameStream
from workers.config import EngineConfig
from workers.disagg.kv_hand_overs import KvHandOvers
from workers.disagg.request_table import RequestTable
from workers.messages.link import LoadReport, QueueReport, SampleState, Submission
from workers.messages.rank_channel import (
    RANK_DOWN_CODEC,
    RANK_UP_CODEC,
    BatchEntry,
    SlotSample,
    SlotStart,
    StepPlan,
    StepReport,
    TableChange,
)
from workers.messages.sampling import SamplingParams
from workers.model.attention.interface import AttentionPlan, StepInput
from workers.model.model_config import read_model_config
from workers.model.sizes import ModelWork
from workers.rank.decode_graphs import Decoded
from workers.rank.device_queue import CpuQueue, DeviceQueue, Graph, Recorder, Work
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, ComputeSettings, RankCapacity
from workers.replica.gateway_links import GatewayLinks
from workers.replica.requests import Requests
from workers.replica.step_loop import StepLoop
from workers.replica.step_stats import Capability, StepStats
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.scheduler import Scheduler
from workers.scheduler.step import pack_ids

BLOCK_TOKENS = 64
RANK_LIMIT_MS = 1.0
ENGINE_CORE_LIMIT_MS = 3.0
GATEWAY = ("gateway", 1)
SAMPLING = SamplingParams(temperature=1.0, max_tokens=100_000, ignore_eos=True)
CLOCK = SystemClock()


# -------------------------------------------------------------------------------------- the engine core


class CountedStream:
    """Takes the frames for a gateway."""

    def __init__(self) -> None:
        self.num_frames = 0

    def send(self, frame: bytes) -> None:
        self.num_frames += 1

    def close(self) -> None:
        pass


class NoControl:
    """What requests want of the engine core; nothing here waits for it."""

    def wake(self) -> None:
        pass

    def kill_ranks(self, reason: str) -> None:
        raise RuntimeError(reason)

    def fail(self, error: BaseException) -> None:
        raise error


class EngineCoreHost:
    """The parts of an engine core that a decoding step goes through, with the ranks' reports made here."""

    def __init__(self, batch: int, context_tokens: int, work: ModelWork) -> None:
        self._batch = batch
        engine = EngineConfig(
            block_tokens=BLOCK_TOKENS,
            max_batch_tokens=1 << 21,
            chunk_tokens=1 << 21,
            max_sequences=batch,
        )
        num_blocks = batch * (context_tokens // BLOCK_TOKENS + 8)
        pool = BlockPool(num_blocks, BLOCK_TOKENS)
        clock = ManualClock(0.0)
        self.scheduler = Scheduler(engine, pool, eos_token_ids=(1,), max_context_tokens=1 << 20)
        self._frames: list[bytes] = []
        self.steps = StepLoop(
            self.scheduler, self._send, clock, stats=StepStats(Capability(work, 1e12, 1e11))
        )
        self._gateways = GatewayLinks(clock)
        self.stream = CountedStream()
        self._gateways.connected(GATEWAY, cast(FrameStream, self.stream))
        table = RequestTable(self._gateways, NoControl())
        unused: Any = None
        self._requests = Requests(
            identity=ReplicaIdentity("replica", 1),
            table=table,
            gateways=self._gateways,
            scheduler=self.scheduler,
            hand_overs=KvHandOvers(unused, unused, unused),
            work=self.steps.work,
            clock=clock,
            vocab_size=1 << 17,
        )
        for number in range(batch):
            prompt = np.full(context_tokens, number, dtype="<u4").tobytes()
            sample = SampleState(0, number)
            submission = Submission(
                f"r{number}", 1, "", "", 0, prompt, b"", (), (sample,), SAMPLING, None, None
            )
            self.scheduler.submit(submission, 0.0)
            table.add(submission, GATEWAY)
        while self.scheduler.counts.num_waiting or len(self._decoding()) < batch:
            self.steps.feed()
            self.steps.settle(0, self._report())

    def step_ms(self) -> tuple[float, int]:
        """Return the milliseconds of a step from one report to the next, with the bytes of its plan."""
        self.steps.feed()
        reported = RANK_UP_CODEC.encode(self._report())
        num_sent = len(self._frames)
        began_at = CLOCK.now()
        message = RANK_UP_CODEC.decode(reported)
        assert isinstance(message, StepReport)
        outcome = self.steps.settle(0, message)
        assert outcome is not None
        assert len(outcome.tokens) == self._batch
        self._requests.settle(outcome)
        self.steps.feed()
        self.scheduler.landings_wanted(0.0)
        self._gateways.flush(_no_load, _no_queue)
        elapsed_ms = 1e3 * (CLOCK.now() - began_at)
        assert len(self._frames) == num_sent + 1
        return elapsed_ms, len(self._frames[-1])

    def _decoding(self) -> list[int]:
        return [slot for frame in self._frames[-1:] for slot in memoryview(_plan(frame).decodes).cast("I")]

    def _send(self, plan: StepPlan) -> None:
        self._frames.append(RANK_DOWN_CODEC.encode(plan))

    def _report(self) -> StepReport:
        """Return the report of the oldest plan that is out."""
        (step,) = self.steps.steps_under_way()
        plan = _plan(self._frames[step - 1])
        self._frames[step - 1] = b""
        tokens = np.full(len(plan.sample_slots), 7, dtype="<u4").tobytes()
        return StepReport(step, tokens, 0.0, 0.001)


def _plan(frame: bytes) -> StepPlan:
    message = RANK_DOWN_CODEC.decode(frame)
    assert isinstance(message, StepPlan)
    return message


def _no_load() -> LoadReport:
    raise AssertionError("no report is due while the clock stands")


def _no_queue() -> QueueReport:
    raise AssertionError("no report is due while the clock stands")


# --------------------------------------------------------------------------------------------- the rank

# Blocks that a sequence may gain while it is measured.
MOST_GROWTH = 1024


class NoDevice(CpuQueue):
    """Takes work as a device does that runs behind: a graph's replay is queued and costs the host nothing
    here. On CUDA a launch of a graph takes some microseconds more."""

    def __init__(self) -> None:
        super().__init__(has_triton=True)

    def recorder(self) -> Recorder:
        return OnceDone()


class OnceDone(Recorder):
    def record(self, work: Work) -> Graph:
        return Replayed(work())


class Replayed(Graph):
    def __init__(self, results: tuple[Tensor, ...]) -> None:
        self._results = results

    def replay(self) -> tuple[Tensor, ...]:
        return self._results


class RankHost:
    """A model runner whose layers compute nothing, with the time in head and sampler taken off. All sequences
    read the same blocks: what they hold does not matter. With a `queue` its steps are graphs."""

    def __init__(
        self, model_dir: Path, batch: int, context_tokens: int, queue: DeviceQueue | None = None
    ) -> None:
        self._batch = batch
        num_blocks = context_tokens // BLOCK_TOKENS + 8
        self._runner = ModelRunner(
            CheckpointFolder(model_dir),
            ComputeSettings(torch.float32, torch.device("cpu"), num_threads=1, queue=queue),
            RankCapacity(BLOCK_TOKENS, (num_blocks + MOST_GROWTH) * BLOCK_TOKENS, batch),
            CLOCK,
        )
        steps: Any = self._runner.steps
        self._excluded_s = self._planned_s = 0.0
        steps._attention.plan = self._timed_plan(steps._attention.plan)
        self.attention = steps._attention.name
        steps._decoder.run_layers = lambda hidden, plan: hidden
        steps._decoder.embed = self._excluded(steps._decoder.embed)
        steps._decoder.logits = self._excluded(steps._decoder.logits)
        if queue is None:
            steps.steps.sampler.sample = self._excluded(steps.steps.sampler.sample)
        else:
            steps.steps.sampler._sample = lambda logits, *_: torch.zeros(len(logits), dtype=torch.int32)
            steps.steps.graphs._work = lambda num_rows: (
                lambda: Decoded(torch.zeros(num_rows, dtype=torch.int32), torch.zeros(num_rows, 1))
            )
            steps.record_graphs(steps.steps.graphs.sizes)
        slots = range(batch)
        table = pack_ids(range(num_blocks))
        self._runner.steps.run(
            StepPlan(
                1,
                starts=tuple(SlotStart(SAMPLING, (SlotSample(slot, slot, 5),)) for slot in slots),
                tables=tuple(TableChange(slot, 0, table) for slot in slots),
                entries=tuple(BatchEntry(slot, context_tokens - 1, 1, bytes(4), (slot,)) for slot in slots),
            )
        )
        # In every step some sequences begin a block, or all of them do.
        self._frame, self._aligned_frame = (
            RANK_DOWN_CODEC.encode(
                StepPlan(
                    2, grown=pack_ids([it for slot in grown for it in (slot, 0)]), decodes=pack_ids(slots)
                )
            )
            for grown in (slots[::BLOCK_TOKENS], slots)
        )

    def step_ms(self, *, is_aligned: bool = False) -> tuple[float, float]:
        """Return the milliseconds of a decoding step, and those in which attention was planned. `is_aligned`:
        every sequence begins a block."""
        self._excluded_s = self._planned_s = 0.0
        began_at = CLOCK.now()
        report = self._runner.steps.run(_plan(self._aligned_frame if is_aligned else self._frame))
        frame = RANK_UP_CODEC.encode(report)
        elapsed_s = CLOCK.now() - began_at - self._excluded_s
        assert len(frame) > 4 * self._batch
        return 1e3 * elapsed_s, 1e3 * self._planned_s

    def close(self) -> None:
        self._runner.close()

    def _timed_plan(self, plan: Callable[..., AttentionPlan]) -> Callable[..., AttentionPlan]:
        def timed(step: StepInput) -> AttentionPlan:
            began_at = CLOCK.now()
            planned = plan(step)
            self._planned_s = CLOCK.now() - began_at
            return planned

        return timed

    def _excluded(self, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Wrap the call so that its time is noted as not the host's."""

        def timed(*args: Any) -> Tensor:
            began_at = CLOCK.now()
            result = call(*args)
            self._excluded_s += CLOCK.now() - began_at
            return result

        return timed


def line(what: str, batch: int, context_tokens: int, measured_ms: float, limit_ms: float) -> dict[str, Any]:
    return {
        "what": what,
        "batch": batch,
        "context": context_tokens,
        "ms": round(measured_ms, 3),
        "limit_ms": limit_ms,
        "ratio": round(measured_ms / limit_ms, 3),
    }


def measure(model_dir: Path, batch: int, context_tokens: int, num_steps: int) -> list[dict[str, Any]]:
    """Return the lines of one batch and context; medians of `num_steps` steps."""
    core = EngineCoreHost(batch, context_tokens, ModelWork(read_model_config(model_dir), 2))
    of_core = [core.step_ms() for _ in range(num_steps)]
    rank = RankHost(model_dir, batch, context_tokens)
    of_rank = [rank.step_ms() for _ in range(num_steps)]
    of_aligned = [rank.step_ms(is_aligned=True) for _ in range(num_steps)]
    rank.close()
    of_graphs: list[tuple[float, float]] = []
    if importlib.util.find_spec("triton") is not None:
        graphs = RankHost(model_dir, batch, context_tokens, NoDevice())
        of_graphs = [graphs.step_ms() for _ in range(num_steps)]
        graphs.close()
    core_ms = median(elapsed_ms for elapsed_ms, _ in of_core)
    sizes = [num_bytes for _, num_bytes in of_core]
    return [
        {
            **line("engine core", batch, context_tokens, core_ms, ENGINE_CORE_LIMIT_MS),
            "plan_bytes": int(median(sizes)),
            "most_plan_bytes": max(sizes),
        },
        {
            **line("rank", batch, context_tokens, median(each for each, _ in of_rank), RANK_LIMIT_MS),
            "attention": rank.attention,
            "attention_plan_ms": round(median(planned_ms for _, planned_ms in of_rank), 3),
        },
        line("rank, aligned", batch, context_tokens, median(each for each, _ in of_aligned), RANK_LIMIT_MS),
        line("rank, graphs", batch, context_tokens, median(each for each, _ in of_graphs), RANK_LIMIT_MS)
        if of_graphs
        else {"what": "rank, graphs", "skipped": "triton is not installed: pip install -e '.[gpu-tests]'"},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=_numbers, default="2048,8192,32768", help="tokens of a sequence")
    parser.add_argument("--batches", type=_numbers, default="64,256", help="sequences that decode")
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder)
        write_random_checkpoint(model_dir, "qwen3", seed=0, max_position_embeddings=1 << 20)
        for batch in args.batches:
            for context_tokens in args.contexts:
                for each in measure(model_dir, batch, context_tokens, args.steps):
                    print(json.dumps(each), flush=True)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()

"""A whole engine in this process: the scheduler, and the runners of all ranks in a thread each."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from step_plans import BLOCK

from kvtransfer.common.clock import ManualClock
from kvtransfer.common.faults import Faults
from workers.config import EngineConfig
from workers.messages import RequestFailed, StepPlan, StepReport, Submission
from workers.model.host_kv import OffloadMode
from workers.model.weights import ShardSpec
from workers.rank.collectives import RankGroups, find_store, open_store
from workers.rank.model_runner import ModelRunner
from workers.replica.step_loop import StepLoop
from workers.scheduler.block_pool import BlockPool
from workers.scheduler.scheduler import Scheduler

CPU = torch.device("cpu")
SECRET = b"the ranks' own secret"


class LocalEngine:
    """`num_blocks` on the device and `num_offload_blocks` in host memory; the model is split over `tp` ranks
    for each of `stages` (first and end layer)."""

    def __init__(
        self,
        model_dir: Path,
        config: EngineConfig,
        num_blocks: int,
        num_offload_blocks: int = 0,
        mode: OffloadMode = "in_place",
        *,
        tp: int = 1,
        stages: Sequence[tuple[int, int]] = ((0, 2),),
        host_id: str = "",
        faults: Sequence[Faults] = (),
    ) -> None:
        """Ranks with a `host_id` share memory, others speak through gloo; `faults` are those of each rank."""
        self.tp, self.pp = tp, len(stages)
        self._store, self._address = open_store("127.0.0.1")
        self._threads = [ThreadPoolExecutor(1) for _ in range(tp * self.pp)]

        def make(rank: int) -> ModelRunner:
            first, end = stages[rank // tp]
            groups = RankGroups(
                find_store(self._address),
                tp=tp,
                pp=self.pp,
                rank=rank,
                device=CPU,
                host="127.0.0.1",
                secret=SECRET,
                host_id=host_id,
            )
            runner = ModelRunner(
                model_dir=model_dir,
                dtype=torch.float32,
                device=CPU,
                block_tokens=BLOCK,
                num_kv_tokens=num_blocks * BLOCK,
                num_threads=1,
                clock=ManualClock(5.0),
                shard=ShardSpec(first, end, rank % tp, tp),
                groups=groups,
                num_offload_tokens=num_offload_blocks * BLOCK,
                offload_mode=mode,
                faults=faults[rank] if faults else None,
            )
            runner.warm_up()
            return runner

        made = [thread.submit(make, rank) for rank, thread in enumerate(self._threads)]
        self.runners = [each.result() for each in made]
        fields = self.runners[0].ready_fields
        self.pool = BlockPool(num_blocks, BLOCK)
        self.scheduler = Scheduler(
            config,
            self.pool,
            eos_token_ids=(),
            max_context_tokens=fields.max_context_tokens,
            fingerprint=b"model",
            num_stages=self.pp,
            num_offload_blocks=fields.num_offload_blocks,
        )
        self.steps = StepLoop(self.scheduler, self._send, ManualClock(0.0), tp, self.pp)
        self._out: deque[list[Future[StepReport]]] = deque()
        self.failures: dict[str, RequestFailed] = {}
        self.most_offloaded = 0
        self.plans: list[StepPlan] = []

    def run(self, submissions: Sequence[Submission]) -> dict[tuple[str, int], bytes]:
        """The outputs of all samples; plans run ahead as they do under an engine core. Requests that fail are
        in `failures`."""
        for submission in submissions:
            self.scheduler.submit(submission, 0.0)
        outputs: dict[tuple[str, int], bytes] = {}
        while self._feed():
            reports = [future.result() for future in self._out.popleft()]
            outcome = [self.steps.settle(rank, report) for rank, report in enumerate(reports)][-1]
            assert outcome is not None
            for delta in outcome.tokens:
                name = delta.request_id, delta.sample
                outputs[name] = outputs.get(name, b"") + delta.tokens
            self.failures |= {failure.request_id: failure for failure in outcome.failures}
            self.scheduler.check()
            self.most_offloaded = max(self.most_offloaded, self.scheduler.num_offloaded_blocks)
        assert self.scheduler.is_idle
        assert self.scheduler.num_offloaded_blocks == 0
        return outputs

    def _feed(self) -> bool:
        self.steps.feed()
        return bool(self._out)

    def _send(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        ranks = zip(self._threads, self.runners, strict=True)
        self._out.append([thread.submit(runner.run, plan) for thread, runner in ranks])

    def close(self) -> None:
        for thread, runner in zip(self._threads, self.runners, strict=True):
            thread.submit(runner.close).result()
            thread.shutdown()
        del self._store

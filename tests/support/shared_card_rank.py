"""A rank of a replica whose ranks take cards in turn, so that they share one where there is no other, or
stand in for such on the CPU; see `test_shared_card`.

    python shared_card_rank.py JSON

runs the plans of a `SharedCardCase` and writes what the sampler reports to `results.json` in its folder.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from runner_parts import by_kernels
from shared_buffers import file_buffers
from torch.distributed.distributed_c10d import Store

from benchmarks.rank_cards import card_of
from kvtransfer.common.clock import SystemClock
from kvtransfer.rpc.trust import Trust
from workers.messages.rank_channel import (
    BatchEntry,
    SlotSample,
    SlotStart,
    StepPlan,
    StepReport,
    TableChange,
)
from workers.messages.sampling import SamplingParams
from workers.model.weights import ShardSpec
from workers.rank.collectives import RankGroups
from workers.rank.local_links import SharedSums, Switchboard
from workers.rank.model_runner import ModelRunner
from workers.rank.runner_settings import CheckpointFolder, RankCapacity, RankPlace

TRUST = Trust.of(b"the ranks' own secret")
BLOCK = 16
NUM_PROMPT = 20
NUM_DECODES = 2
NUM_LAYERS = 2


class SharedCardCase(msgspec.Struct, frozen=True):
    """A model in a dtype on a device, and this rank among those of its replica. `batches` are the numbers of
    sequences that run together, one after another; before the second, graphs are recorded."""

    model_dir: str
    folder: str
    device: str
    dtype: str
    batches: tuple[int, ...]
    tp: int = 1
    pp: int = 1
    rank: int = 0
    is_deterministic: bool = False


class ReportedStep(msgspec.Struct, frozen=True):
    """The tokens of a step's rows, and the log-probability of each."""

    tokens: list[int]
    logprobs: list[float]


def make_runner(case: SharedCardCase) -> ModelRunner:
    """Make the rank's runner. On the CPU, sums of a stage's ranks go through files, by the kernel."""
    device, num_ranks = torch.device(case.device), case.tp * case.pp
    if device.type == "cuda":
        device = card_of(case.rank)
        torch.cuda.set_device(device)
    settings = by_kernels(device, is_deterministic=case.is_deterministic)
    settings = settings._replace(dtype=getattr(torch, case.dtype))
    if case.pp > 1:
        settings = settings._replace(queue=None)
    groups = None
    if num_ranks > 1:
        groups = RankGroups(
            _file_store(case, "store"),
            tp=case.tp,
            pp=case.pp,
            rank=case.rank,
            device=device,
            host="127.0.0.1",
            host_id="here",
            trust=TRUST,
            is_deterministic=case.is_deterministic,
        )
        if case.tp > 1 and device.type == "cpu":
            _sum_through_files(case, groups)
    stage, tp_rank = divmod(case.rank, case.tp)
    layers = [part.tolist() for part in np.array_split(np.arange(NUM_LAYERS), case.pp)][stage]
    return ModelRunner(
        CheckpointFolder(Path(case.model_dir)),
        settings,
        RankCapacity(BLOCK, 32 * BLOCK, 8),
        SystemClock(),
        place=RankPlace(ShardSpec(layers[0], layers[-1] + 1, tp_rank, case.tp), groups),
    )


def _file_store(case: SharedCardCase, name: str) -> Store:
    path = str(Path(case.folder) / name)
    store: Store = dist.FileStore(path, case.tp * case.pp)  # type: ignore[attr-defined]  # not in the stubs
    return store


def _sum_through_files(case: SharedCardCase, groups: RankGroups) -> None:
    """Put the exchange by kernels in the place of the sums by shared memory, which carry on with the rest."""
    from workers.model.cuda.one_shot_sums import buffer_bytes
    from workers.rank.one_shot_group import OneShotGroup, OneShotSums

    host, tp, own_rank = groups._layer_group, groups.tp, groups.tp_rank
    assert isinstance(host, SharedSums)
    with closing(Switchboard(_file_store(case, "switchboard"), own_rank, tp, "here", TRUST)) as board:
        sockets = board.connect("sums", [rank for rank in range(tp) if rank != own_rank])
    buffers = file_buffers(Path(case.folder), sockets, buffer_bytes(tp), own_rank)
    sums = OneShotSums(buffers, own_rank)
    groups._layer_group = OneShotGroup(sums, None, host, sockets, is_ordered=True)


def run(case: SharedCardCase, runner: ModelRunner) -> list[list[ReportedStep]]:
    """Return what the rank reports of each batch; nothing at ranks that do not sample."""
    batches: list[list[ReportedStep]] = []
    for number, num_sequences in enumerate(case.batches):
        if number == 1:
            runner.steps.record_graphs([size for size in runner.steps.graph_sizes if size <= 4])
        reports = [runner.steps.run(plan) for plan in _plans(num_sequences)]
        assert not any(report.failed for report in reports)
        batches.append([_reported(report) for report in reports if report.tokens])
    return batches


def _plans(num_sequences: int) -> Iterator[StepPlan]:
    """Yield the plans of a batch, in which each sequence is the same as in every other batch."""
    slots = range(num_sequences)
    prompts = np.random.default_rng(0).integers(0, 128, (8, NUM_PROMPT)).tolist()[:num_sequences]
    params = SamplingParams(num_logprobs=1)
    yield StepPlan(
        1,
        starts=tuple(SlotStart(params, (SlotSample(slot, 0, prompts[slot][-1]),)) for slot in slots),
        tables=tuple(TableChange(slot, 0, _packed(range(4 * slot, 4 * slot + 4))) for slot in slots),
        entries=tuple(BatchEntry(slot, 0, NUM_PROMPT, _packed(prompts[slot]), (slot,)) for slot in slots),
    )
    for step in range(NUM_DECODES):
        yield StepPlan(2 + step, decodes=_packed(slots))
    yield StepPlan(9, free_slots=tuple(slots))


def _packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


def _reported(report: StepReport) -> ReportedStep:
    rows = sorted(report.logprobs, key=lambda row: row.row)
    return ReportedStep(np.frombuffer(report.tokens, "<u4").tolist(), [row.logprob.logprob for row in rows])


def main() -> None:
    case = msgspec.convert(json.loads(sys.argv[1]), SharedCardCase)
    torch.set_num_threads(1)
    runner = make_runner(case)
    batches = run(case, runner)
    if any(batches):
        (Path(case.folder) / "results.json").write_bytes(msgspec.json.encode(batches))
    runner.close()


if __name__ == "__main__":
    main()

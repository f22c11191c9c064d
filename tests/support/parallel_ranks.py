"""The ranks of a replica in processes of their own, without engine core or runner: model, groups, greedy
choice.

The processes are forks of one that has imported this module: a start costs no import of torch.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import NamedTuple
from unittest import mock

import msgspec
import numpy as np
import torch
from hybrid_attention import attention_over, with_state_tables
from import_path import import_path
from patience import WAIT_S
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from kvtransfer.rpc.trust import Trust
from workers.messages.rank_channel import ExpertCopy
from workers.model.attention.choice import choose_attention
from workers.model.attention.interface import SequenceSpan, StepInput
from workers.model.attention.split_latents import SplitLatentAttention
from workers.model.decoder import Decoder, load_decoder
from workers.model.latent_split import LatentSplit
from workers.model.model_config import read_model_config
from workers.model.parallel import parallelize
from workers.model.sizes import held_experts, kv_heads, layer_heads
from workers.model.weights import ShardSpec
from workers.rank.collectives import RankGroups, find_store, open_store
from workers.rank.expert_copier import ExpertCopier

HOST = "127.0.0.1"
TRUST = Trust.of(b"the ranks' own secret")
BLOCK_TOKENS = 16
CPU = torch.device("cpu")
_IMPORTED_BY = os.getpid()


class ParallelCase(msgspec.Struct, frozen=True):
    """A greedy generation of `num_steps` tokens after each of `prompts`, whose chunk sizes are `chunks[i]`;
    every step takes the next chunk, or the next token, of every sequence. Layers are cut at `stages`, and
    experts into `ep` parts. Ranks have `num_slots` for copies of experts in each layer, which `orders[step]`
    change before a step, each (layer, part, slot, expert).
    With `splits_latents` ranks divide latents by the tokens of blocks.
    Rank r leaves its results in `output_dir`/r.safetensors."""

    name: str
    model_dir: str
    tp: int
    stages: list[tuple[int, int]]
    prompts: list[list[int]]
    chunks: list[list[int]]
    num_steps: int
    output_dir: str
    ep: int = 1
    num_slots: int = 0
    orders: list[list[tuple[int, int, int, int]]] = []
    block_tokens: int = BLOCK_TOKENS
    splits_latents: bool = False

    @property
    def num_ranks(self) -> int:
        return self.tp * len(self.stages)

    @property
    def tables(self) -> list[list[int]]:
        """Block tables, the blocks of the sequences interleaved."""
        most = max(len(prompt) for prompt in self.prompts) + self.num_steps
        count = len(self.prompts)
        return [
            [at * count + number for at in range(-(-most // self.block_tokens))] for number in range(count)
        ]


def run_case(case: ParallelCase, groups: RankGroups) -> dict[str, Tensor]:
    """Return `kv` of the rank, `tokens` [steps, sequences] where they are known, `logits` of all rows, how
    many bytes of rows the rank has `exchanged`, how many tokens its experts and `copied` ones have had, and
    the tokens of each layer and expert, `of_experts` [num_layers, num_experts], that it has computed."""
    model_dir = Path(case.model_dir)
    config, (first, end) = read_model_config(model_dir), case.stages[groups.stage]
    shard = ShardSpec(first, end, groups.tp_rank, case.tp, case.ep)
    decoder = load_decoder(model_dir, torch.float32, CPU, shard, expert_copies=case.num_slots)
    parallelize(decoder, groups)
    copier = ExpertCopier(decoder, groups)
    cells = config.kv_cells
    num_cells, num_layers = (
        len(kv_heads(cells.num_cells, groups.tp_rank, case.tp)),
        min(end, cells.num_layers),
    )
    num_blocks = sum(len(table) for table in case.tables)
    num_tokens = case.block_tokens // (case.tp if case.splits_latents else 1)
    kv = torch.zeros(num_blocks, num_layers - first, cells.num_kinds, num_cells, num_tokens, cells.width)
    attention = (
        _split_attention(decoder, kv, groups, case) if case.splits_latents else attention_over(decoder, kv)
    )
    positions = [0] * len(case.prompts)
    chosen: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    logits: list[Tensor] = []
    for step in range(case.num_steps):
        if step < len(case.orders):
            copier.change([ExpertCopy(*order) for order in case.orders[step]])
        waits = groups.is_first_stage and not groups.is_sampler
        if waits:
            groups.expect_tokens(step, len(case.prompts))
        counts = [chunks[step] if step < len(chunks) else 1 for chunks in case.chunks]
        spans = [SequenceSpan(*span) for span in zip(positions, counts, case.tables, strict=True)]
        plan = attention.plan(with_state_tables(decoder, StepInput.of(spans, case.block_tokens)))
        if groups.is_first_stage:
            hidden = decoder.embed(_inputs(case, positions, counts, chosen))
        else:
            hidden = torch.empty(sum(counts), decoder.num_inputs)
            groups.receive_hidden(hidden)
        hidden = decoder.run_layers(hidden, plan)
        if not groups.is_last_stage:
            groups.send_hidden(hidden)
        else:
            logits.append(decoder.logits(hidden))
        if groups.is_sampler:
            ends = torch.tensor(counts).cumsum(0) - 1
            chosen.append(logits[-1][ends].argmax(1).numpy())
            if case.num_ranks > 1:
                groups.send_tokens(step, chosen[-1])
        elif waits:
            sent_step, tokens = groups.receive_tokens()
            assert sent_step == step
            chosen.append(tokens)
        positions = [position + count for position, count in zip(positions, counts, strict=True)]
    results = {"kv": attention.kv, "tokens": torch.from_numpy(np.array(chosen, dtype=np.int64))}
    results["exchanged"] = torch.tensor(groups.num_exchanged_bytes)
    results |= _tokens_of_experts(decoder)
    return results | ({"logits": torch.cat(logits)} if groups.is_last_stage else {})


def _split_attention(
    decoder: Decoder, kv: Tensor, groups: RankGroups, case: ParallelCase
) -> SplitLatentAttention:
    num_heads = [len(layer_heads(decoder.config, 0, rank, case.tp).queries) for rank in range(case.tp)]
    split = LatentSplit(case.block_tokens, case.tp)
    return SplitLatentAttention(decoder.attention_shape, kv, choose_attention, split, num_heads, groups)


def form(case: ParallelCase, store: Store | None, rank: int) -> RankGroups:
    """Form the groups of rank `rank` of the case; they must be open until all its ranks are done."""
    return RankGroups(
        store,
        tp=case.tp,
        pp=len(case.stages),
        rank=rank,
        device=CPU,
        host=HOST,
        host_id="here",
        trust=TRUST,
    )


def _tokens_of_experts(decoder: Decoder) -> dict[str, Tensor]:
    if (shape := decoder.config.mixture) is None:
        return {}
    of_experts = torch.zeros(decoder.config.num_layers, shape.rule.num_experts, dtype=torch.int64)
    num_copied = 0
    shard, counts = decoder.shard, decoder.expert_counts()
    owned = held_experts(shape, shard.tp_rank, shard.tp_size, shard.ep_size).experts
    for (layer, mixture), of_layer in zip(decoder.mixtures.items(), counts, strict=True):
        of_experts[layer, owned.start : owned.stop] = of_layer[: len(owned)]
        if mixture.copies is not None:
            for expert, count in mixture.copies.slots.tokens(of_layer).items():
                of_experts[layer, expert] += count
                num_copied += count
    return {"of_experts": of_experts, "copied": torch.tensor(num_copied)}


def _inputs(
    case: ParallelCase,
    positions: list[int],
    counts: list[int],
    chosen: list[np.ndarray[tuple[int], np.dtype[np.int64]]],
) -> Tensor:
    tokens: list[int] = []
    for number, prompt in enumerate(case.prompts):
        given = prompt[positions[number] : positions[number] + counts[number]]
        tokens += given or [int(chosen[-1][number])]
    return torch.tensor(tokens)


class RankProcesses:
    """A number of processes, started once for many cases; rank r of every case runs in the r-th."""

    def __init__(self, count: int) -> None:
        self._store, address = open_store(HOST)
        self._ranks: list[_Rank] = []
        with _killed_on_error(self._ranks):
            for rank in range(count):
                ours, theirs = _forks().Pipe()
                process = _forks().Process(target=_serve, args=(rank, address, theirs), daemon=True)
                process.start()
                theirs.close()
                self._ranks.append(_Rank(process, ours))

    def run(self, case: ParallelCase) -> None:
        """Run the case; return when all of its ranks are done; their errors are on standard error."""
        ranks = self._ranks[: case.num_ranks]
        for rank in ranks:
            rank.connection.send_bytes(msgspec.json.encode(case))
        assert [rank.connection.recv() for rank in ranks] == [case.name] * case.num_ranks

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _killed_on_error(self._ranks):
            for rank in self._ranks:
                rank.connection.close()  # upon which it ends
            for rank in self._ranks:
                rank.process.join(WAIT_S)
                assert kind is not None or rank.process.exitcode == 0


class _Rank(NamedTuple):
    process: ForkServerProcess
    connection: Connection


@functools.cache
def _forks() -> ForkServerContext:
    """Return the context of the fork server, which has this module before it forks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    folder = Path(__file__).parent
    # It looks nowhere else.
    with mock.patch.dict(os.environ, {"PYTHONPATH": import_path(folder.parent.parent, folder)}):
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _killed_on_error(ranks: list[_Rank]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join(WAIT_S)
        raise


def _serve(rank: int, address: str, connection: Connection) -> None:
    """Run the cases that come, until the connection ends."""
    assert os.getpid() != _IMPORTED_BY, "the fork server has not imported this module"
    torch.set_num_threads(1)
    store = find_store(address)
    groups: RankGroups | None = None
    while True:
        try:
            order = connection.recv_bytes()
        except EOFError:
            return
        if groups is not None:
            groups.close()  # all ranks are done with the last case, else the next would not have come
        case = msgspec.json.decode(order, type=ParallelCase)
        groups = form(case, PrefixStore(case.name, store), rank)
        results = run_case(case, groups)
        save_file(results, str(Path(case.output_dir) / f"{rank}.safetensors"))
        connection.send(case.name)

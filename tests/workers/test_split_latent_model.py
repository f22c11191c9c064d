"""A model with latent attention whose ranks divide latents by tokens gives the logits, tokens and latents of
one rank; and a rank that fails in an exchange leaves no other waiting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from family_checkpoints import CASES, write_family_checkpoint
from met_collectives import MetCollectives, together
from paged_model import error_of, reference_logits, reference_of, tokens_of
from parallel_ranks import ParallelCase, RankProcesses, form, run_case
from safetensors.torch import load_file
from torch import Tensor

from workers.model.attention.choice import choose_attention
from workers.model.attention.interface import SequenceSpan, StepInput
from workers.model.attention.split_latents import SplitLatentAttention
from workers.model.decoder import load_decoder
from workers.model.latent_split import LatentSplit
from workers.model.parallel import Unfinished, parallelize
from workers.model.sizes import layer_heads
from workers.model.weights import ShardSpec

CPU = torch.device("cpu")
BLOCK = 64
NUM_STEPS = 8
# A width of 32, which the kernels serve; and heads that the ranks do not divide evenly.
V2 = CASES["deepseek_v2-1"] | {"num_attention_heads": 6, "num_hidden_layers": 3}
V3 = CASES["deepseek_v3-1"] | {"num_attention_heads": 5, "num_hidden_layers": 3}


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with RankProcesses(4) as started:
        yield started


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in ("v2", "v3")}
    write_family_checkpoint(made["v2"], seed=3, **V2)
    write_family_checkpoint(made["v3"], seed=4, **V3)
    return made


def _case(
    name: str, model_dir: Path, output_dir: Path, tp: int, stages: list[tuple[int, int]]
) -> ParallelCase:
    """A prompt of one chunk, one of a long chunk behind others, one of short chunks that are absorbed, and a
    short one."""
    prompts = [tokens_of(1, 270), tokens_of(2, 260), tokens_of(3, 150), tokens_of(4, 5)]
    chunks = [[270], [30, 1, 229], [100, 3, 40, 7], [5]]
    return ParallelCase(
        name,
        str(model_dir),
        tp,
        stages,
        prompts,
        chunks,
        NUM_STEPS,
        str(output_dir),
        block_tokens=BLOCK,
        splits_latents=tp > 1,
    )


@pytest.mark.slow  # four processes
@pytest.mark.parametrize(
    ("model", "tp", "stages"),
    [("v2", 2, [(0, 3)]), ("v2", 4, [(0, 3)]), ("v3", 4, [(0, 3)]), ("v3", 2, [(0, 1), (1, 3)])],
)
def test_divided_latents_equal_one_rank(
    model: str,
    tp: int,
    stages: list[tuple[int, int]],
    processes: RankProcesses,
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    alone = _case(model, folders[model], tmp_path, 1, [(0, 3)])
    expected = run_case(alone, form(alone, None, 0))
    case = _case(f"{model} {tp}x{len(stages)}", folders[model], tmp_path, tp, stages)
    processes.run(case)
    ranks = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(case.num_ranks)]
    for stage, (first, end) in enumerate(stages):
        parts = [ranks[stage * tp + tp_rank]["kv"] for tp_rank in range(tp)]
        assert {part.shape[4] for part in parts} == {BLOCK // tp}
        own = expected["kv"][:, first:end]
        torch.testing.assert_close(torch.cat(parts, 4), own, rtol=1e-5, atol=2e-5)
    sampler = ranks[case.num_ranks - tp]
    assert torch.equal(sampler["tokens"], expected["tokens"])
    torch.testing.assert_close(sampler["logits"], expected["logits"], rtol=1e-5, atol=5e-5)
    prompt = case.prompts[0]
    logits = reference_logits(reference_of(folders[model]), prompt)
    assert error_of(sampler["logits"][: len(prompt)], logits) <= 1e-4


class FailingRank:
    """A rank whose step fails before the `fails_at`-th exchange of its attention, if that is not -1."""

    def __init__(self, folder: Path, collectives: MetCollectives) -> None:
        tp, rank = collectives.tp, collectives.tp_rank
        self.decoder = load_decoder(folder, torch.float32, CPU, ShardSpec(0, 3, rank, tp))
        self.unfinished = Unfinished(collectives, self.decoder)
        parallelize(self.decoder, self.unfinished)
        self.tp, self.tp_rank, self.shares_memory = tp, rank, True
        config = self.decoder.config
        width = config.kv_cells.width
        kv = torch.zeros(9, config.num_layers, 1, 1, BLOCK // tp, width)
        num_heads = [len(layer_heads(config, 0, it, tp).queries) for it in range(tp)]
        self.attention = SplitLatentAttention(
            self.decoder.attention_shape, kv, choose_attention, LatentSplit(BLOCK, tp), num_heads, self
        )
        self.fails_at, self.num_done = -1, 0

    def exchange(self, parts: Sequence[Tensor], num_rows: Sequence[int] | None = None) -> list[Tensor]:
        if self.num_done == self.fails_at:
            raise MemoryError
        self.num_done += 1
        return self.unfinished.exchange(parts, num_rows)

    def step(self, spans: Sequence[SequenceSpan], tokens: Tensor) -> Tensor | None:
        """Return the logits of all rows, or None where the rank has failed."""
        self.num_done = 0
        step = StepInput.of(spans, BLOCK)
        exchanges = self.attention.exchanges(step.starts, step.lengths)
        self.unfinished.begin(len(tokens), len(tokens), attention=exchanges)
        try:
            return self.decoder.logits(self.decoder.forward(tokens, step, self.attention))
        except MemoryError:
            self.unfinished.finish(self.attention.kv)
            return None


def test_a_rank_that_fails_completes_the_exchanges(folders: dict[str, Path]) -> None:
    """Before each of the exchanges of a step with a chunk behind a context and rows that are queried; then
    the ranks compute it again as if nothing had happened."""
    prompt = tokens_of(1, 300)
    logits = reference_logits(reference_of(folders["v2"]), prompt)
    first, second = [SequenceSpan(0, 70, range(5))], [SequenceSpan(70, 230, range(5))]
    decoded = SequenceSpan(69, 1, range(5, 9))
    whole = [SequenceSpan(0, 69, range(5, 9))]

    def run(collectives: MetCollectives) -> Tensor | None:
        rank = FailingRank(folders["v2"], collectives)
        for spans, count in ((first, 70), (whole, 69)):
            assert rank.step(spans, torch.tensor(prompt[:count])) is not None
        tokens = torch.tensor([*prompt[70:], prompt[69]])
        num_exchanges = 3 * 3  # queries, results and latents in each layer
        for fails_at in range(num_exchanges):
            rank.fails_at = fails_at if collectives.tp_rank == 1 else -1
            failed = rank.step([*second, decoded], tokens)
            assert (failed is None) == (collectives.tp_rank == 1)
        rank.fails_at = -1
        found = rank.step([*second, decoded], tokens)
        assert rank.num_done == num_exchanges
        return found

    found, _ = together(2, run)
    assert error_of(found[:-1], logits[70:]) <= 1e-4
    assert error_of(found[-1:], logits[69:70]) <= 1e-4

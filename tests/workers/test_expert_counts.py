"""The tokens of each expert, counted where it computes: against the routers of `transformers`, and in a whole
engine against the tokens that it computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_checkpoints import CASES, write_family_checkpoint
from local_engine import BLOCK, LocalEngine, packed
from numpy.typing import NDArray
from optional_programs import uses_compiler
from paged_model import PagedModel, reference_of, tokens_of
from torch import Tensor

from kvtransfer.blocks.keys import extend_keys
from workers.config import EngineConfig
from workers.messages.link import SampleState, Submission
from workers.messages.rank_channel import ExpertCounts
from workers.messages.sampling import SamplingParams
from workers.model.decoder import load_decoder
from workers.model.experts.mixture import Mixture
from workers.model.model_config import read_model_config
from workers.model.weights import ShardSpec, WeightReader
from workers.rank.expert_reports import ExpertReports

pytestmark = uses_compiler

CPU = torch.device("cpu")
CONFIG = EngineConfig(block_tokens=16, max_batch_tokens=96, chunk_tokens=64, max_sequences=8)
NUM_LAYERS = 4


def checkpoint(path: Path, case: str = "qwen3_moe-1", **keys: Any) -> Path:
    write_family_checkpoint(path, **(CASES[case] | keys))
    return path


@torch.inference_mode()
def chosen_by_transformers(model_dir: Path, tokens: list[int]) -> Tensor:
    """Return how many of the tokens each expert of each layer with experts has."""
    reference = reference_of(model_dir)
    output = reference(torch.tensor([tokens]), output_router_logits=True)
    num_experts, num_chosen = reference.config.num_experts, reference.config.num_experts_per_tok
    chosen = (logits.view(len(tokens), -1).topk(num_chosen).indices for logits in output.router_logits)
    return torch.stack([it.flatten().bincount(minlength=num_experts) for it in chosen])


def counts_of(report: ExpertCounts) -> NDArray[np.uint32]:
    return np.frombuffer(report.counts, "<u4").reshape(len(report.layers), -1)


@pytest.mark.parametrize("case", ["qwen3_moe-1", "qwen3_moe-2", "olmoe-1"])
def test_a_decoder_counts_the_experts_that_transformers_chooses(
    case: str, backend: str, tmp_path: Path
) -> None:
    """In chunks, by the CPU kernels and by torch; of -2 one layer has no experts."""
    decoder = load_decoder(checkpoint(tmp_path, case), torch.float32, CPU)
    is_packed = [layer.packed() is not None for layer in decoder.layers]
    assert is_packed == [backend == "kernels"] * NUM_LAYERS
    assert not decoder.expert_counts().any()
    tokens = tokens_of(1, 70)
    PagedModel(decoder, torch.float32).chunked(0, tokens, 31)
    expected = chosen_by_transformers(tmp_path, tokens)
    assert decoder.expert_layers == ((0, 2, 3) if case == "qwen3_moe-2" else (0, 1, 2, 3))
    assert torch.equal(decoder.expert_counts(), expected)
    assert len(set(expected.flatten().tolist())) > 3, "experts differ"


def test_a_router_with_a_norm_of_its_own_counts_beside_the_kernels(tmp_path: Path) -> None:
    """The kernels compute the experts alone."""
    write_family_checkpoint(tmp_path, **CASES["gemma4_text-6"])
    decoder = load_decoder(tmp_path, torch.float32, CPU)
    assert decoder.config.mixture is not None
    assert all(layer.packed() is None for layer in decoder.layers)
    PagedModel(decoder, torch.float32).chunked(0, tokens_of(1, 40), 17)
    of_layers = decoder.expert_counts().sum(1).tolist()
    assert of_layers == [40 * decoder.config.mixture.rule.num_chosen] * len(decoder.expert_layers)


def first_mixture(model_dir: Path, tp_rank: int = 0, tp: int = 1, ep: int = 1) -> Mixture:
    """Load the experts of the first layer that a rank holds."""
    config = read_model_config(model_dir)
    shard = ShardSpec(0, config.num_layers, tp_rank, tp, ep)
    with WeightReader(model_dir, config, shard, torch.float32, CPU) as reader:
        weights = reader.layer(0).mixture
    assert weights is not None
    assert config.mixture is not None
    return Mixture(weights, config.mixture.rule, "silu")


@pytest.mark.parametrize("ep", [1, 2])
def test_a_rank_counts_the_tokens_of_the_experts_that_it_holds(ep: int, backend: str, tmp_path: Path) -> None:
    """Ranks that share experts count the same tokens, and ranks that do not have all of them together."""
    model_dir = checkpoint(tmp_path)
    whole, *ranks = first_mixture(model_dir), *(first_mixture(model_dir, rank, 2, ep) for rank in range(2))
    x = torch.randn(50, 66, generator=torch.Generator().manual_seed(5))
    for mixture in (whole, *ranks):
        mixture(x)
        mixture.add_to(x[:20].clone(), x[:20])
    assert whole.counts.sum() == 70 * 3
    assert (whole.counts > 0).all()
    if ep == 1:
        assert all(torch.equal(rank.counts, whole.counts) for rank in ranks)
    else:
        assert torch.equal(torch.cat([rank.counts for rank in ranks]), whole.counts)


def test_reports_have_what_was_counted_in_between(tmp_path: Path) -> None:
    decoder = load_decoder(checkpoint(tmp_path, "qwen3_moe-2"), torch.float32, CPU, ShardSpec(1, NUM_LAYERS))
    hidden = torch.randn(30, 48, generator=torch.Generator().manual_seed(5))

    def compute(num_tokens: int) -> Tensor:
        before = decoder.expert_counts()
        for layer in decoder.layers:
            if layer.mixture is not None:
                layer.mixture(hidden[:num_tokens])
        return decoder.expert_counts() - before

    compute(10)  # as a warm-up does
    reports = ExpertReports(decoder, CPU)
    assert reports.take() is None
    for num_tokens in (30, 1):
        expected = compute(num_tokens)
        report = reports.take()
        assert report is not None
        assert report.layers == (2, 3), "the numbers are those of the model"
        assert (report.first_expert, report.num_experts, report.num_chosen) == (0, 5, 1)
        assert counts_of(report).tolist() == expected.tolist()
        assert counts_of(report).sum() == 2 * num_tokens
        assert reports.take() is None


def test_a_model_without_experts_reports_none(tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, **CASES["qwen3-1"])
    decoder = load_decoder(tmp_path, torch.float32, CPU)
    assert (decoder.expert_layers, decoder.expert_counts().shape) == ((), (0, 0))
    PagedModel(decoder, torch.float32).chunked(0, tokens_of(1, 20), 20)
    assert ExpertReports(decoder, CPU).take() is None


def ask(name: str, num_prompt_tokens: int, max_tokens: int) -> Submission:
    prompt = packed(tokens_of(sum(name.encode()), num_prompt_tokens))
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    keys = extend_keys(b"root", prompt, BLOCK)
    return Submission(name, 1, "", "", 0, prompt, b"root", keys, (SampleState(0, 31),), sampling, None, None)


@pytest.mark.parametrize(("tp", "stages"), [(1, [(0, 4)]), (2, [(0, 1), (1, 4)])], ids=["1x1", "2x2"])
def test_an_engine_reports_the_tokens_that_it_computed(
    tp: int, stages: list[tuple[int, int]], tmp_path: Path
) -> None:
    """Each layer of each stage has them once, from the first of the ranks that hold the same experts."""
    num_threads = torch.get_num_threads()
    engine = LocalEngine(checkpoint(tmp_path), CONFIG, 40, tp=tp, stages=stages)
    sources = [runner.expert_reports() for runner in engine.runners]
    engine.run([ask("first", 150, 20), ask("second", 30, 40)])
    steps, num_chosen = engine.steps, CASES["qwen3_moe-1"]["num_experts_per_tok"]
    assert all(source.take() is None for rank, source in enumerate(sources) if rank % tp)
    for source, (first, end) in zip(sources[::tp], stages, strict=True):
        report = source.take()
        assert report is not None
        assert (report.layers, report.num_chosen) == (tuple(range(first, end)), num_chosen)
        of_layers = counts_of(report).sum(1).tolist()
        assert of_layers == [steps.stats.num_computed_tokens * num_chosen] * (end - first)
        steps.stats.experts.add(report, 1.0)
    assert steps.stats.num_computed_tokens == 150 + 30 + 19 + 39
    totals = steps.stats.totals()
    assert 1.0 < totals["expert_imbalance"] <= 7 / 3
    assert totals["expert_rank_imbalance"] == 1.0
    assert 3 / 7 < totals["hottest_expert_share"] <= 1.0
    engine.close()
    torch.set_num_threads(num_threads)

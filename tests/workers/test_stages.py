"""The layers of each stage, against trying all splits; and the measured costs they are decided from."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optional_programs import needs_compiler

from kvtransfer.common.clock import SystemClock
from workers.errors import WorkerError
from workers.messages.rank_channel import StageCost
from workers.replica.layer_split import given_layers, split_layers

# Few values, so that ties are common; some costs are 0, but not those of all layers.
COSTS = st.builds(
    StageCost,
    layer_s=st.sampled_from([0.0, 1.0, 1.5, 2.0, 7.0]),
    embedding_s=st.sampled_from([0.0, 0.5, 4.0]),
    head_s=st.sampled_from([0.0, 1.0, 9.0]),
)


def stage_times(stages: tuple[tuple[int, int], ...], costs: list[StageCost]) -> list[float]:
    times = [(end - start) * cost.layer_s for (start, end), cost in zip(stages, costs, strict=True)]
    times[0] += costs[0].embedding_s
    times[-1] += costs[-1].head_s
    return times


@settings(deadline=None)
@given(st.integers(1, 12), st.lists(COSTS, min_size=1, max_size=5), st.integers(0, 12))
def test_no_split_is_better(num_layers: int, costs: list[StageCost], bound: int) -> None:
    """First the slowest stage counts, then all together, then more layers in the first stages. The last
    `bound` layers, and the one before them, are on one stage."""
    limit = num_layers - 1 - bound
    if len(costs) - 1 > limit or not any(cost.layer_s for cost in costs):
        return

    def rank(stages: tuple[tuple[int, int], ...]) -> tuple[float, float, tuple[int, ...]]:
        times = stage_times(stages, costs)
        return max(times), sum(times), tuple(start - end for start, end in stages)

    cuts = combinations(range(1, limit + 1), len(costs) - 1)
    every = [tuple(pairwise((0, *inner, num_layers))) for inner in cuts]
    assert split_layers(num_layers, costs, limit) == min(every, key=rank)
    if not bound:
        assert split_layers(num_layers, costs) == min(every, key=rank)


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([StageCost()] * 3, ((0, 10), (10, 20), (20, 28))),
        ([StageCost(layer_s=2.0), StageCost(layer_s=1.0)], ((0, 9), (9, 28))),
        ([StageCost(layer_s=1.0), StageCost(layer_s=1.0, head_s=10.0)], ((0, 19), (19, 28))),
        ([StageCost(layer_s=1.0, embedding_s=100.0), StageCost(layer_s=1.0)], ((0, 1), (1, 28))),
        ([StageCost(layer_s=1.0, head_s=5.0)], ((0, 28),)),
    ],
)
def test_splits_of_28_layers(costs: list[StageCost], expected: tuple[tuple[int, int], ...]) -> None:
    assert split_layers(28, costs) == expected


def test_given_layers() -> None:
    assert given_layers(28, (10, 18)) == ((0, 10), (10, 28))
    with pytest.raises(WorkerError, match=r"layers \[10, 17\] are 27 together, but num_hidden_layers is 28"):
        given_layers(28, (10, 17))
    with pytest.raises(WorkerError, match=r"layers \[28, 0\]: every stage needs at least one"):
        given_layers(28, (28, 0))


def test_more_stages_than_layers() -> None:
    with pytest.raises(WorkerError, match="pp 3 is more than num_hidden_layers 2"):
        split_layers(2, [StageCost(layer_s=1.0)] * 3)


# --------------------------------------------------------------------------------------------- the probe


def test_attention_ratio() -> None:
    """Of a device where a token's products take 4 s and attending to one token takes 0.02 s."""
    from workers.rank.probe import attention_ratio

    def chunk_s(num_rows: int, num_earlier: int) -> float:
        return num_rows * (4 + 0.02 * (num_earlier + num_rows / 2))

    for num_rows, num_earlier in ((256, 2048), (16, 500)):
        ratio = attention_ratio(chunk_s(num_rows, 0), chunk_s(num_rows, num_earlier), num_rows, num_earlier)
        assert ratio == pytest.approx(0.02 / 4)
    assert attention_ratio(1.0, 0.9, 16, 500) == 0.0
    assert attention_ratio(1.0, 1.0, 16, 0) == 0.0


@pytest.mark.parametrize(("family", "tp"), [("llama", 1), ("qwen3", 2), ("qwen2", 4), ("olmo2", 2)])
def test_the_probe_measures_a_part_of_the_model(tmp_path: Path, family: str, tp: int) -> None:
    import torch

    from benchmarks.random_checkpoint import write_random_checkpoint
    from workers.model.model_config import read_model_config
    from workers.rank.probe import Probe

    write_random_checkpoint(tmp_path, family, seed=0)
    probe = Probe(
        read_model_config(tmp_path),
        tp=tp,
        tp_rank=tp - 1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        block_tokens=16,
        clock=SystemClock(),
    )
    measured = probe.measure(32, 4)
    assert min(measured.cost.layer_s, measured.cost.embedding_s, measured.cost.head_s) > 0
    assert measured.attention_ratio >= 0


@needs_compiler
def test_the_probe_measures_products_of_the_form_that_weights_have(tmp_path: Path) -> None:
    import torch

    from benchmarks.random_checkpoint import write_random_checkpoint
    from workers.model.experts.quantized_experts import QuantizedExpertWeights
    from workers.model.linear_weights import are_quantized
    from workers.model.model_config import read_model_config
    from workers.model.quantization.weight_form import WeightForm
    from workers.rank.probe import Probe

    write_random_checkpoint(tmp_path, "qwen3_moe", seed=0)
    probe = Probe(
        read_model_config(tmp_path), tp=1, tp_rank=0, dtype=torch.bfloat16, device=torch.device("cpu"),
        block_tokens=16, clock=SystemClock(), form=WeightForm("int4"),
    )  # fmt: skip
    weights = probe._layer_weights()
    assert weights.qkv is not None
    assert weights.mixture is not None
    assert are_quantized(weights.qkv.parts)
    assert isinstance(weights.mixture.experts, QuantizedExpertWeights)
    assert probe.measure(8, 1).cost.layer_s > 0


def test_layers_with_states_count_by_their_weights(tmp_path: Path) -> None:
    """Of four layers one attends, with queries, gates, keys and values; the products of a state are wider."""
    from benchmarks.random_checkpoint import write_config
    from workers.model.model_config import read_model_config
    from workers.model.sizes import attention_products, feed_forward_weights, mean_layer_share

    write_config(tmp_path, "qwen3_5_text", "float32", num_hidden_layers=4)
    config = read_model_config(tmp_path)
    attends = [config.has_attention(layer) for layer in range(config.num_layers)]
    assert 0 < sum(attends) < len(attends)
    sizes = [
        sum(outputs * inputs for outputs, inputs in attention_products(config, layer))
        + 3 * config.hidden_size * config.intermediate_size
        for layer in range(config.num_layers)
    ]
    assert feed_forward_weights(config, 0) == 3 * config.hidden_size * config.intermediate_size
    first = attends.index(True)
    share = mean_layer_share(config, first, 0)
    assert share == pytest.approx(sum(sizes) / len(sizes) / sizes[first])
    assert share != 1


def test_the_probe_attends_as_the_model_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from benchmarks.random_checkpoint import write_random_checkpoint
    from workers.model.attention.choice import choose_attention
    from workers.model.attention.interface import AttentionBackend, AttentionShape
    from workers.model.model_config import read_model_config
    from workers.rank import probe

    shapes: list[AttentionShape] = []

    def chosen(shape: AttentionShape, kv: torch.Tensor) -> AttentionBackend:
        shapes.append(shape)
        return choose_attention(shape, kv)

    monkeypatch.setattr(probe, "choose_attention", chosen)
    write_random_checkpoint(tmp_path, "gemma2", seed=0, query_pre_attn_scalar=100, attn_logit_softcapping=7.0)
    measuring = probe.Probe(
        read_model_config(tmp_path), tp=1, tp_rank=0, dtype=torch.float32, device=torch.device("cpu"),
        block_tokens=16, clock=SystemClock(),
    )  # fmt: skip
    assert measuring.measure(8, 1).cost.layer_s > 0
    (shape,) = shapes
    assert (shape.scale(16), shape.softcap) == (0.1, 7.0)

"""A model split over ranks in processes gives the logits, tokens and KV of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_model import error_of, reference_logits, reference_of
from parallel_ranks import ParallelCase, RankProcesses, form, run_case
from safetensors.torch import load_file
from slow_cases import slow_rows_but
from torch import Tensor

from workers.model.model_config import read_model_config
from workers.model.sizes import kv_heads

MakeCheckpoint = Callable[..., Path]
NUM_STEPS = 12
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "num_hidden_layers": 3},
    "llama-uneven-biases": {
        "family": "llama",
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "vocab_size": 257,
        "intermediate_size": 101,
        "num_hidden_layers": 3,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen3-uneven-tied": {
        "family": "qwen3",
        "num_attention_heads": 10,
        "num_key_value_heads": 2,
        "vocab_size": 257,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
        "sharded": True,
    },
    "granite-uneven": {
        "family": "granite",
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "hidden_size": 96,
        "intermediate_size": 101,
        "num_hidden_layers": 3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 1.5,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "phi3-fused-uneven": {
        "family": "phi3",
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "hidden_size": 96,
        "intermediate_size": 101,
        "num_hidden_layers": 3,
        "sliding_window": 20,
    },
    "qwen2-window-one-head": {
        "family": "qwen2",
        "num_key_value_heads": 1,
        "num_hidden_layers": 3,
        "sliding_window": 20,
        "use_sliding_window": True,
        "max_window_layers": 1,
    },
}
# A checkpoint of each kind of layer that came with later families. At 4x1 two ranks hold a copy of a head.
_UNEVEN: dict[str, Any] = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "hidden_size": 96,
    "intermediate_size": 101,
    "vocab_size": 257,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
}
LAYERS: dict[str, dict[str, Any]] = {
    "norms-after-products": {
        "family": "gemma2",
        "sliding_window": 20,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "two-rotary-bases": {
        "family": "gemma3_text",
        "tie_word_embeddings": True,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "row-norms-biases": {"family": "olmo2", "attention_bias": True},
    "row-norms-windows": {
        "family": "olmo3",
        "rope_theta": 500000.0,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "neighboring-pairs": {"family": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5},
    "no-gate": {"family": "apertus", "hidden_act": "xielu"},
    "rotary-in-windows-only": {
        "family": "exaone4",
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "layers-without-rotary": {"family": "smollm3", "no_rope_layers": [1, 0, 1], "mlp_bias": True},
    "fused-longrope": {
        "family": "phi3",
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 32,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.5, 2.0],
            "long_factor": [1.0, 1.5, 7.0, 20.0],
        },
    },
}
SHAPES |= {name: _UNEVEN | keys for name, keys in LAYERS.items()}
# Latent attention, whose heads of keys and values are as many as those of queries, with experts.
LATENT: dict[str, Any] = _UNEVEN | {
    "kv_lora_rank": 22,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 37,
    "first_k_dense_replace": 1,
}
SHAPES |= {
    "latent-of-keys": LATENT | {"family": "deepseek_v2", "q_lora_rank": None, "v_head_dim": 9},
    "latent-of-queries-too": LATENT
    | {
        "family": "deepseek_v3",
        "q_lora_rank": 29,
        "v_head_dim": 9,
        "attention_bias": True,
        "n_group": 2,
        "topk_group": 1,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "latent-unpadded": LATENT | {"family": "glm4_moe_lite", "q_lora_rank": 29, "v_head_dim": 16},
}
# Heads of two sizes, of which 3 ranks hold whole cells; and as many of both, of which 4 ranks hold copies.
SHAPES |= {
    "two-head-sizes": _UNEVEN
    | {
        "family": "gemma4_text",
        "num_key_value_heads": 6,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 3,
        "global_head_dim": 48,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "tie_word_embeddings": True,
    },
    "layer-inputs": _UNEVEN
    | {
        "family": "gemma4_text",
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 7,
        "vocab_size_per_layer_input": 301,
        "tie_word_embeddings": True,
    },
}
SHARED_KV: dict[str, Any] = _UNEVEN | {
    "family": "gemma4_text",
    "num_hidden_layers": 7,
    "global_head_dim": 32,
    "sliding_window": 20,
    "layer_types": [
        *["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "full_attention",
    ],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 7,
    "vocab_size_per_layer_input": 301,
    "tie_word_embeddings": True,
}
# The layouts of these: not more ranks than cells, and layers that share KV on one stage.
SPLITS_BY_SHAPE = {
    "latent-of-keys": ("2x1", "4x1", "1x3"),
    "latent-of-queries-too": ("2x1", "3x1", "2x2"),
    "latent-unpadded": ("3x1",),
    "two-head-sizes": ("2x1", "3x1", "1x3", "2x2"),
    "layer-inputs": ("3x1", "4x1", "1x3", "2x2"),
}
LAYOUTS: dict[str, tuple[int, list[tuple[int, int]]]] = {
    "2x1": (2, [(0, 3)]),
    "3x1": (3, [(0, 3)]),
    "4x1": (4, [(0, 3)]),
    "1x2": (1, [(0, 2), (2, 3)]),
    "1x3": (1, [(0, 1), (1, 2), (2, 3)]),
    "2x2": (2, [(0, 1), (1, 3)]),
}
SPLITS = [
    (shape, layout)
    for shape in SHAPES
    for layout in LAYOUTS
    if layout in SPLITS_BY_SHAPE.get(shape, ("1x2", "3x1", "4x1", "2x2") if shape in LAYERS else LAYOUTS)
]
# Every layout of one shape, two stages of two ranks of every other, and heads that two ranks hold a copy of.
FAST_SPLITS = [
    (shape, layout)
    for shape, layout in SPLITS
    if shape == "llama-uneven-biases"
    or layout == "2x2"
    or (shape, layout) in (("llama", "4x1"), ("latent-of-keys", "4x1"), ("layer-inputs", "4x1"))
    or shape == "latent-unpadded"
]


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with RankProcesses(4) as started:
        yield started


def _case(
    name: str, model_dir: Path, output_dir: Path, tp: int, stages: list[tuple[int, int]]
) -> ParallelCase:
    """A prompt of more rows than the layers take at a time, one in chunks, and a short one."""
    generator = torch.Generator().manual_seed(3)
    lengths = [270, 41, 5]
    prompts = [torch.randint(256, (length,), generator=generator).tolist() for length in lengths]
    chunks = [[270], [16, 1, 24], [5]]
    return ParallelCase(name, str(model_dir), tp, stages, prompts, chunks, NUM_STEPS, str(output_dir))


@pytest.fixture(scope="module")
def alone(make_checkpoint: MakeCheckpoint) -> Callable[[str], dict[str, Tensor]]:
    """What one rank gives for a shape, computed once."""
    made: dict[str, dict[str, Tensor]] = {}

    def run(shape: str) -> dict[str, Tensor]:
        if shape not in made:
            model_dir = make_checkpoint(**SHAPES[shape])
            case = _case(shape, model_dir, model_dir, 1, [(0, 3)])
            made[shape] = run_case(case, form(case, None, 0))
        return made[shape]

    return run


@pytest.mark.parametrize(("shape", "layout"), slow_rows_but(SPLITS, *FAST_SPLITS))
def test_any_split_equals_one_rank(
    shape: str,
    layout: str,
    processes: RankProcesses,
    alone: Callable[[str], dict[str, Tensor]],
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
) -> None:
    model_dir, (tp, stages) = make_checkpoint(**SHAPES[shape]), LAYOUTS[layout]
    expected, config = alone(shape), read_model_config(model_dir)
    case = _case(f"{shape} {layout}", model_dir, tmp_path, tp, stages)
    processes.run(case)
    ranks = [load_file(tmp_path / f"{rank}.safetensors") for rank in range(case.num_ranks)]
    for rank, found in enumerate(ranks):
        stage, tp_rank = divmod(rank, tp)
        heads = kv_heads(config.kv_cells.num_cells, tp_rank, tp)
        own = expected["kv"][:, slice(*stages[stage]), :, heads.start : heads.stop]
        torch.testing.assert_close(found["kv"], own, rtol=1e-5, atol=2e-5)
        if stage == 0:
            assert torch.equal(found["tokens"], expected["tokens"])
        if stage == len(stages) - 1 and tp_rank > 0:
            assert found["logits"].shape == (0, config.vocab_size)
    sampler = ranks[case.num_ranks - tp]
    assert torch.equal(sampler["tokens"], expected["tokens"])
    torch.testing.assert_close(sampler["logits"], expected["logits"], rtol=1e-5, atol=5e-5)


def test_stages_of_layers_that_share_kv_equal_one_rank(
    processes: RankProcesses, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The last stage has all such layers, and what they attend to."""
    model_dir = make_checkpoint(**SHARED_KV)
    whole = _case("shared 1x1", model_dir, tmp_path, 1, [(0, 7)])
    expected = run_case(whole, form(whole, None, 0))
    assert expected["kv"].shape[1:4] == (4, 2, 3)
    for tp, stages in ((1, [(0, 2), (2, 7)]), (2, [(0, 1), (1, 7)]), (4, [(0, 7)])):
        case = _case(f"shared {tp}x{len(stages)}", model_dir, tmp_path, tp, stages)
        processes.run(case)
        first, last = (load_file(tmp_path / f"{rank}.safetensors") for rank in (0, case.num_ranks - tp))
        own = expected["kv"][:, : stages[0][1], :, : first["kv"].shape[3]]
        torch.testing.assert_close(first["kv"], own, rtol=1e-5, atol=2e-5)
        assert torch.equal(last["tokens"], expected["tokens"])
        torch.testing.assert_close(last["logits"], expected["logits"], rtol=1e-5, atol=5e-5)
    prompt = whole.prompts[0]
    logits = reference_logits(reference_of(model_dir), prompt)
    assert error_of(expected["logits"][: len(prompt)], logits) <= 1e-4


@pytest.mark.parametrize("shape", ["llama-uneven-biases", "qwen3-uneven-tied", *LAYERS, *SPLITS_BY_SHAPE])
def test_one_rank_equals_transformers(
    shape: str, alone: Callable[[str], dict[str, Tensor]], make_checkpoint: MakeCheckpoint
) -> None:
    """The other side of the comparison above: the very same cases, greedily continued by transformers."""
    model_dir = make_checkpoint(**SHAPES[shape])
    prompt = _case(shape, model_dir, model_dir, 1, [(0, 3)]).prompts[0]
    expected = alone(shape)
    logits = reference_logits(reference_of(model_dir), prompt + expected["tokens"][:, 0].tolist())
    assert logits[len(prompt) - 1 : -1].argmax(1).tolist() == expected["tokens"][:, 0].tolist()
    assert error_of(expected["logits"][: len(prompt)], logits[: len(prompt)]) <= 1e-4

"""Models some of whose layers keep a recurrent state: however a step is made up and a prompt is cut, and
however ranks divide the model, logits are those of `transformers`, which computes the prompt at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from family_checkpoints import CASES, write_family_checkpoint
from hybrid_attention import attention_over
from optional_programs import needs_compiler
from paged_model import PagedModel, error_of, reference_logits, reference_of, tokens_of
from parallel_ranks import ParallelCase, RankProcesses, form, run_case
from safetensors.torch import load_file
from slow_cases import slow_but

from workers.errors import CheckpointError
from workers.model.decoder import Decoder, load_decoder
from workers.model.model_config import read_model_config
from workers.model.sizes import refuse_split
from workers.model.weights import ShardSpec

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 101,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA
    | {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 30,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_bias": True},
    # Ranks have parts of the one group that is normalized, with experts.
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 12,
        "mamba_d_state": 18,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 51,
        "attention_multiplier": 0.15,
        "residual_multiplier": 0.6,
        "mamba_proj_bias": True,
    },
    # Ranks have whole groups; layers of one block.
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "mamba_num_heads": 6,
        "mamba_head_dim": 11,
        "ssm_state_size": 18,
        "n_groups": 3,
        "time_step_min": 1e-30,
        "use_bias": True,
    },
}
LAYOUTS = {
    "2x1": (2, [(0, 4)]),
    "1x2": (1, [(0, 2), (2, 4)]),
    # The first stage has no attention, the second no state.
    "2x3": (2, [(0, 2), (2, 3), (3, 4)]),
}
NUM_STEPS = 8


def _write(folder: Path, family: str, **keys: Any) -> Path:
    write_family_checkpoint(folder, family, **(SHAPE | HYBRID[family] | keys))
    return folder


def _load(folder: Path) -> Decoder:
    return load_decoder(folder, torch.float32, CPU)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("family", HYBRID)
def test_sequences_of_one_step_do_not_mix(family: str, tmp_path: Path) -> None:
    """They begin, go on and decode in the same steps, cut within and at the borders of blocks."""
    _write(tmp_path, family)
    model, reference = PagedModel(_load(tmp_path), torch.float32), reference_of(tmp_path)
    prompts = [tokens_of(seed, count) for seed, count in enumerate((70, 33, 5, 49))]
    cuts = [[32, 1, 1, 15, 21], [33], [1, 1, 3], [16, 16, 17]]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in range(5):
        work, at = [], []
        for number, chunks in enumerate(cuts):
            if step < len(chunks):
                start = sum(chunks[:step])
                work.append((number, prompts[number][start : start + chunks[step]]))
                at.append(number)
        for number, logits in zip(at, model.step(work), strict=True):
            found[number].append(logits)
    for prompt, parts in zip(prompts, found, strict=True):
        assert error_of(torch.cat(parts), reference_logits(reference, prompt)) <= 1e-4


@pytest.mark.parametrize("family", HYBRID)
def test_the_state_of_a_border_continues_in_another_block(family: str, tmp_path: Path) -> None:
    """What a sequence left at the border of a block is what a sequence with the same beginning continues."""
    _write(tmp_path, family)
    model = PagedModel(_load(tmp_path), torch.float32)
    prompt = tokens_of(4, 60)
    expected = model.chunked(0, prompt, 32)
    model.tables[1], model.lengths[1] = model.tables[0][:2], 32
    assert torch.equal(model.step([(1, prompt[32:])])[0], expected[32:])
    assert model.tables[1][2:] != model.tables[0][2:4]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", HYBRID)
def test_deterministic_logits_depend_on_nothing_else(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Neither on how a prompt is cut nor on other sequences, bit for bit."""
    _write(tmp_path, family)
    model = PagedModel(load_decoder(tmp_path, dtype, CPU, is_deterministic=True), dtype)
    model.attention = attention_over(model.decoder, model.kv, is_deterministic=True)
    prompt, other = tokens_of(6, 75), tokens_of(7, 40)
    expected = model.chunked(0, prompt, 75)
    assert torch.equal(model.chunked(1, prompt, 1), expected)
    found, start = [], 0
    for length in (33, 1, 31, 10):
        work = [(2 + start, other[:9]), (1000, prompt[start : start + length]), (3 + start, other)]
        found.append(model.step(work)[1])
        start += length
    assert torch.equal(torch.cat(found), expected)


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with RankProcesses(6) as started:
        yield started


@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize("layout", slow_but(tuple(LAYOUTS), "2x3"))
def test_ranks_equal_one(family: str, layout: str, processes: RankProcesses, tmp_path: Path) -> None:
    model_dir, (tp, stages) = _write(tmp_path / "model", family), LAYOUTS[layout]
    prompts = [tokens_of(seed, count) for seed, count in ((1, 41), (2, 70), (3, 5))]
    chunks, output = [[16, 1, 24], [70], [5]], str(tmp_path)
    whole = ParallelCase("whole", str(model_dir), 1, [(0, 4)], prompts, chunks, NUM_STEPS, output)
    expected = run_case(whole, form(whole, None, 0))
    case = ParallelCase(f"{family} {layout}", str(model_dir), tp, stages, prompts, chunks, NUM_STEPS, output)
    processes.run(case)
    found = load_file(tmp_path / f"{case.num_ranks - tp}.safetensors")
    assert torch.equal(found["tokens"], expected["tokens"])
    # Norms of what the delta rule gives enlarge what rounding changes of small sums.
    atol = 5e-4 if HYBRID[family].get("linear_num_key_heads") else 5e-5
    torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-5, atol=atol)


def test_experts_without_gates_on_any_ranks_equal_those_on_one(
    processes: RankProcesses, tmp_path: Path
) -> None:
    """Divided by their columns or by their numbers; shared ones by their columns."""
    keys = {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 37,
        "moe_shared_expert_intermediate_size": 51,
        "routed_scaling_factor": 1.5,
    }
    model_dir = _write(tmp_path / "model", "nemotron_h", **keys)
    prompts, chunks = [tokens_of(seed, count) for seed, count in ((1, 41), (2, 70))], [[41], [16, 1, 53]]
    whole = ParallelCase("whole", str(model_dir), 1, [(0, 4)], prompts, chunks, NUM_STEPS, str(tmp_path))
    expected = run_case(whole, form(whole, None, 0))
    logits = reference_logits(reference_of(model_dir), prompts[0])
    assert error_of(expected["logits"][: len(prompts[0])], logits) <= 1e-4
    for ep in (1, 2):
        case = msgspec.structs.replace(whole, name=f"ep {ep}", tp=2, ep=ep)
        processes.run(case)
        found = load_file(tmp_path / "0.safetensors")
        assert torch.equal(found["tokens"], expected["tokens"])
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize(("key", "value"), [("moe_latent_size", 32), ("mlp_bias", True)])
def test_experts_without_gates_that_are_others_are_refused(key: str, value: object, tmp_path: Path) -> None:
    _write(tmp_path, "nemotron_h", layers_block_type=["linear_attention", "moe", "full_attention", "mlp"])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(CheckpointError, match=f"{key}.* is not supported"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("family", HYBRID)
def test_more_ranks_than_key_value_heads_are_refused(family: str, tmp_path: Path) -> None:
    config = read_model_config(_write(tmp_path, family))
    refuse_split(config, 3)
    with pytest.raises(CheckpointError, match=r"tp 4 is more than num_key_value_heads 3, .* states"):
        refuse_split(config, 4)


def test_a_rank_without_attention_holds_states_alone(tmp_path: Path) -> None:
    _write(tmp_path, "lfm2")
    decoder = load_decoder(tmp_path, torch.float32, CPU, ShardSpec(0, 2, 1, 2))
    kv = torch.zeros(4, 2, 2, 2, 16, 16)
    kvs = attention_over(decoder, kv).kvs
    assert [tuple(it.shape) for it in kvs] == [(4, 0, 2, 2, 16, 16), (4, 2, 1, 2, 1, 2 * 32)]


def test_states_that_key_value_heads_do_not_divide_are_refused(tmp_path: Path) -> None:
    shape = CASES["lfm2-1"] | {"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 16}
    write_family_checkpoint(tmp_path, **shape)
    read_model_config(tmp_path)
    file = tmp_path / "config.json"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace('"hidden_size": 80', '"hidden_size": 84, "head_dim": 16'), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"num_key_value_heads 5 divides .* 84 channels"):
        read_model_config(tmp_path)


@needs_compiler
def test_a_family_with_states_has_models_without_them(tmp_path: Path) -> None:
    """All layers of Granite 4.0 Micro attend."""
    keys = HYBRID["granitemoehybrid"] | {"layer_types": ["full_attention"] * 4, "num_local_experts": 0}
    write_family_checkpoint(
        tmp_path, "granitemoehybrid", **(SHAPE | keys | {"position_embedding_type": "rope"})
    )
    model = PagedModel(_load(tmp_path), torch.float32)
    assert model.decoder.config.state is None
    assert model.decoder.layers[0].packed() is not None, "it runs in one call of the kernels"
    prompt = tokens_of(5, 60)
    assert error_of(model.chunked(0, prompt, 32), reference_logits(reference_of(tmp_path), prompt)) <= 1e-4

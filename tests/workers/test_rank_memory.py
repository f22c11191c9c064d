"""The arithmetic of a rank's memory, against what is loaded, and of its division among replicas."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import CASES, write_family_checkpoint
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from wrapped_checkpoints import SPELLINGS, wrap_checkpoint

from benchmarks.random_checkpoint import write_config, write_random_checkpoint
from workers.model.decoder import load_decoder
from workers.model.families.known_families import NAME_TO_FAMILY
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.norm import Norm
from workers.model.quantization.rounded_weight import rounded
from workers.model.quantization.weight_form import WeightDtype, WeightForm
from workers.model.rank_memory import (
    Checkpoint,
    RankShape,
    activation_bytes,
    least_kv_tokens,
    most_useful_kv_tokens,
    whole_blocks,
)
from workers.model.sizes import ModelWork
from workers.model.weights import LayerWeights, ShardSpec, WeightReader

TINY = Path(__file__).resolve().parent.parent.parent / "models" / "tiny"


def loaded_bytes(model_dir: Path, config: ModelConfig, shape: RankShape) -> int:
    """What `WeightReader` reads for the rank, in float32."""
    shard = ShardSpec(shape.first_layer, shape.end_layer, shape.tp_rank, shape.tp, shape.ep)
    tensors: list[torch.Tensor] = []
    with WeightReader(model_dir, config, shard, torch.float32, torch.device("cpu")) as reader:
        table = None
        if shape.is_first_stage or (shape.is_last_stage and config.tie_word_embeddings):
            table = reader.embedding()
            assert isinstance(table, torch.Tensor)
            tensors.append(table)
        if shape.is_first_stage and (inputs := reader.input_embedding()) is not None:
            assert isinstance(inputs.table, torch.Tensor)
            tensors += [inputs.table, inputs.projection.weight, *tensors_of_norms(inputs.norm)]
        for layer in range(shape.first_layer, shape.end_layer):
            weights = reader.layer(layer)
            tensors += tensors_of(weights)
            if (latent := config.latent) is not None and weights.latent is not None:
                # The rows of keys are kept for both forms of attention.
                by_head = weights.latent.expansion.weight.view(-1, latent.expanded_dim, latent.kv_lora_rank)
                tensors.append(by_head[:, : latent.qk_nope_head_dim])
        if shape.is_last_stage:
            tensors += tensors_of_norms(reader.final_norm())
            if (bias := reader.head_bias()) is not None:
                tensors.append(bias)
            head = reader.head(table)
            if head is not table:
                assert isinstance(head, torch.Tensor)
                tensors.append(head)
    return sum(tensor.nbytes for tensor in tensors)


def tensors_of(layer: LayerWeights) -> list[torch.Tensor]:
    products = [it for it in (layer.qkv, layer.output, layer.gate_up, layer.down) if it is not None]
    norms = [getattr(layer.norms, field.name) for field in dataclasses.fields(layer.norms)]
    found = tensors_of_norms(*norms, layer.q_norm, layer.k_norm)
    if (gated := layer.inputs) is not None:
        products += [gated.gate, gated.projection]
        found += tensors_of_norms(gated.norm)
    if (latent := layer.latent) is not None:
        products += [latent.latents, latent.queries, latent.expansion]
        found += tensors_of_norms(latent.q_norm, latent.kv_norm)
    if (state := layer.state) is not None:
        products += state.inputs
        fields = [getattr(state, field.name) for field in dataclasses.fields(state)]
        found += [it for it in fields if isinstance(it, torch.Tensor)]
    if (mixture := layer.mixture) is not None:
        products.append(mixture.router)
        experts, shared = mixture.experts, mixture.shared
        found += [*experts.gates, *experts.ups, *experts.downs]
        found += [
            it for it in (experts.gate_up_bias, experts.down_bias, mixture.correction) if it is not None
        ]
        branches = mixture.branch_norms
        if branches is not None:
            found += tensors_of_norms(*(getattr(branches, it.name) for it in dataclasses.fields(branches)))
        found += tensors_of_norms(mixture.router_norm)
        found += [] if mixture.expert_scale is None else [mixture.expert_scale]
        if shared is not None:
            products += [shared.gate_up, shared.down]
            found += [] if shared.gate is None else [shared.gate]
    parts = [part for product in products for part in (product.weight, product.bias)]
    return found + [tensor for tensor in (*parts, layer.sinks) if tensor is not None]


def tensors_of_norms(*norms: Norm | None) -> list[torch.Tensor]:
    parts = [part for norm in norms if norm is not None for part in (norm.weight, norm.bias)]
    return [tensor for tensor in parts if tensor is not None]


def check_every_rank(model_dir: Path, tp: int, stages: list[tuple[int, int]], ep: int = 1) -> None:
    """Compare what is counted with what is read, for each rank of each stage."""
    config, checkpoint = read_model_config(model_dir), Checkpoint.read(model_dir)
    for first, end in stages:
        for tp_rank in range(tp):
            shape = RankShape(config, first, end, tp_rank, tp, ep)
            assert checkpoint.weight_bytes(shape, 4) == loaded_bytes(model_dir, config, shape)


@pytest.mark.parametrize(
    ("family", "is_tied", "tp"), [("llama", False, 1), ("qwen3", True, 3), ("qwen2", False, 4)]
)
def test_the_weights_of_every_rank_are_those_that_it_reads(
    tmp_path: Path, family: str, is_tied: bool, tp: int
) -> None:
    """Also with more ranks than KV heads, with biases, and with an embedding that is the head too."""
    write_random_checkpoint(
        tmp_path,
        family,
        seed=1,
        tie_word_embeddings=is_tied,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    check_every_rank(tmp_path, tp, [(0, 5), (0, 2), (2, 4), (4, 5)])


# The first checkpoint of each family, and those with biases of products that are split by inputs or with
# norms of heads by weights of their own.
COUNTED = [name for name in CASES if name.endswith("-1")] + [
    "llama-2",
    "granite-2",
    "smollm3-3",
    "seed_oss-3",
    "cohere-2",
    "stablelm-2",
    "qwen2_moe-3",
    "ernie4_5_moe-3",
    "deepseek_v2-2",
    "lfm2-3",
    "lfm2_moe-3",
    "granitemoehybrid-2",
    "granitemoehybrid-3",
    "nemotron_h-3",
    "gemma4_text-4",
]


_FAST = (
    "llama-2",
    "phi3-1",
    "gemma4_text-1",
    "stablelm-2",
    "qwen2_moe-3",
    "gpt_oss-1",
    "deepseek_v2-2",
    *("lfm2-3", "granitemoehybrid-3", "nemotron_h-3"),
)


@pytest.mark.parametrize("case", slow_but(COUNTED, *_FAST))
def test_the_weights_of_every_family_are_those_that_ranks_read(case: str, tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, **CASES[case])
    most = read_model_config(tmp_path).num_kv_heads if NAME_TO_FAMILY[CASES[case]["family"]].state else 4
    for tp in range(1, min(most, CASES[case]["num_attention_heads"]) + 1):
        check_every_rank(tmp_path, tp, [(0, 4), (0, 1), (1, 3), (3, 4)])


@pytest.mark.parametrize("case", slow_but(("qwen2_moe-1", "granitemoe-1", "glm4_moe-2"), "granitemoe-1"))
def test_ranks_that_hold_other_experts_are_counted_as_they_read(case: str, tmp_path: Path) -> None:
    write_family_checkpoint(tmp_path, **CASES[case])
    for tp, ep in ((2, 2), (4, 2), (4, 4), (3, 3)) if CASES[case]["num_attention_heads"] >= 4 else ((3, 3),):
        check_every_rank(tmp_path, tp, [(0, 4), (0, 1), (1, 3), (3, 4)], ep)


def test_layers_that_share_keys_and_values_are_counted_without_them(tmp_path: Path) -> None:
    """Also where a checkpoint carries weights of them, which are passed over."""
    write_family_checkpoint(tmp_path, **CASES["gemma4_text-2"])
    check_every_rank(tmp_path, 3, [(0, 7), (0, 1), (1, 7)])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.5.self_attn.{name}.weight"] = torch.zeros(3, 3)
    save_file(tensors, file)
    check_every_rank(tmp_path, 2, [(0, 7), (0, 1), (1, 7)])
    model = load_decoder(tmp_path, torch.float32, torch.device("cpu"))
    assert model.attention_shape.reads == (0, 1, 2, 3, 3, 2, 2)
    shape = RankShape(model.config, 1, 7)
    assert shape.kv_token_bytes(2) == 2 * 3 * 1 * 64 * 2


def test_layers_that_config_json_does_not_have_are_not_counted(tmp_path: Path) -> None:
    """Loading refuses them, by name; memory is counted before."""
    write_random_checkpoint(tmp_path, "llama", seed=3)
    shape = RankShape(read_model_config(tmp_path), 0, 2)
    counted = Checkpoint.read(tmp_path)
    more = {f"model.layers.{layer}.self_attn.k_proj.weight": 12 for layer in (2, 999_999_999)}
    assert Checkpoint(counted.name_to_size | more).weight_bytes(shape, 2) == counted.weight_bytes(shape, 2)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("family", ["llama", "gemma4_text"])
def test_many_layers_are_counted_in_linear_time(family: str, tmp_path: Path) -> None:
    """It happens at the start of a cluster, for whatever config.json says."""
    needs = []
    for num_layers in (2, 1 << 16):
        kinds = {"sliding_window": 9, "sliding_window_pattern": 2, "hidden_size_per_layer_input": 0}
        keys = kinds if family == "gemma4_text" else {}
        write_config(tmp_path, family, "float32", num_hidden_layers=num_layers, **keys)
        model = read_model_config(tmp_path)
        whole = RankShape(model, 0, num_layers)
        ModelWork(model, 2)
        needs.append((activation_bytes(whole, 2, 64, 4), whole.kv_token_bytes(2) // num_layers))
    assert needs[0] == needs[1]


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_step_reads_the_bytes_that_weights_of_a_form_have(name: WeightDtype, tmp_path: Path) -> None:
    """Those of the codes and scales of layers, experts and head, and of a router of floats."""
    sizes: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "hidden_size": 256,
    }
    write_random_checkpoint(tmp_path, "qwen3_moe", seed=2, dtype="bfloat16", **sizes)
    model, form = read_model_config(tmp_path), WeightForm(name)
    mean = Checkpoint.read(tmp_path).mean_bytes(RankShape(model, 0, model.num_layers), 2, form)
    tensors, num_bytes = load_file(tmp_path / "model.safetensors"), {True: 0, False: 0}
    for product, weight in tensors.items():
        rounded_to = form.rounded_table if product == "lm_head.weight" else form.rounded
        if product.endswith(("_proj.weight", "lm_head.weight")):
            assert rounded_to is not None
            quantized = rounded(weight.float(), rounded_to)
            assert quantized is not None
            num_bytes[".experts." in product] += quantized.packed.nbytes + 2 * quantized.scales.numel()
    router = 2 * sum(weight.numel() for product, weight in tensors.items() if product.endswith("gate.weight"))
    work = ModelWork(model, 2, weights=mean)
    everything = sum(num_bytes.values()) + router
    assert work.weight_bytes == pytest.approx(everything, rel=0.02)
    of_one_token = 2 / 4  # of the experts
    read = everything - num_bytes[True] * (1 - of_one_token)
    assert work.read_weight_bytes(1) == pytest.approx(read, rel=0.02)
    assert ModelWork(model, 2).weight_bytes > 1.5 * work.weight_bytes


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("is_tied", [True, False])
def test_of_a_wrapped_checkpoint_only_the_text_model_counts(
    spelling: str, is_tied: bool, tmp_path: Path
) -> None:
    plain = tmp_path / "plain"
    write_random_checkpoint(
        plain, "gemma3_text", seed=3, tie_word_embeddings=is_tied, hidden_activation="gelu_pytorch_tanh"
    )
    wrapped = wrap_checkpoint(tmp_path / "wrapped", plain, "Gemma3ForConditionalGeneration", spelling)
    check_every_rank(wrapped, 2, [(0, 2), (0, 1), (1, 2)])
    whole = RankShape(read_model_config(plain), 0, 2)
    expected = Checkpoint.read(plain).weight_bytes(whole, 4)
    assert Checkpoint.read(wrapped).weight_bytes(RankShape(read_model_config(wrapped), 0, 2), 4) == expected


def test_the_bundled_model_is_as_large_as_its_file() -> None:
    config = read_model_config(TINY)
    counted = Checkpoint.read(TINY).weight_bytes(RankShape(config, 0, config.num_layers), 2)
    assert counted == pytest.approx(sum(file.stat().st_size for file in TINY.glob("*.safetensors")), rel=0.02)


def test_experts_on_cuda_compute_for_all_pairs_at_once(tmp_path: Path) -> None:
    """Wherever the experts are: a rank with a part of them has rows for all."""
    keys = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
    write_config(tmp_path, "qwen3_moe", "bfloat16", **keys)
    config = read_model_config(tmp_path)
    one, two = (
        [
            activation_bytes(rank, 2, num_tokens, 4, is_on_cuda=True)
            for rank in (RankShape(config, 0, 2), RankShape(config, 0, 2, 0, 2, 2))
        ]
        for num_tokens in (1000, 2000)
    )
    pair_bytes = 2 * (config.hidden_size + 2 * 24)
    assert two[0] - one[0] > 1000 * 4 * pair_bytes
    assert two[1] - one[1] > 1000 * 4 * pair_bytes
    assert activation_bytes(RankShape(config, 0, 2), 2, 1000, 4) < one[0]


def test_activations_grow_with_rows_and_samples_and_shrink_with_ranks() -> None:
    config = read_model_config(TINY)
    whole = RankShape(config, 0, config.num_layers)
    base = activation_bytes(whole, 2, 512, 64)
    assert activation_bytes(whole, 2, 1024, 64) > base
    assert (
        activation_bytes(whole, 2, 512, 401) - activation_bytes(whole, 2, 512, 400) >= config.vocab_size * 4
    )
    assert activation_bytes(whole, 2, 512, 1) == base, "a piece of a prompt that is read has more logits"
    assert activation_bytes(whole, 2, 32, 64) == activation_bytes(whole, 2, 32, 32), "a row samples once"
    assert activation_bytes(RankShape(config, 0, config.num_layers, 0, 2), 2, 512, 64) < base
    assert activation_bytes(RankShape(config, 0, 3), 2, 512, 64) == activation_bytes(
        RankShape(config, 0, 3), 2, 512, 1
    ), "a stage without the head has no logits"


def test_without_a_gate_the_activation_takes_float32_copies(tmp_path: Path) -> None:
    """As many as `workers.model.xielu` holds at a time, beside its inputs and outputs."""
    write_family_checkpoint(tmp_path, **CASES["apertus-1"])
    config = read_model_config(tmp_path)
    gated = dataclasses.replace(config, activation="silu")
    shapes = [RankShape(it, 0, config.num_layers) for it in (config, gated)]
    own, other = (activation_bytes(shape, 2, 1000, 1) for shape in shapes)
    assert own - other == 1000 * 4 * 4 * config.intermediate_size


def test_the_bounds_of_an_automatic_capacity() -> None:
    config = read_model_config(TINY)
    assert config.max_context_tokens == 2048
    assert most_useful_kv_tokens(config, 64) == 64 * 2048
    assert least_kv_tokens(config, 256) == 2048
    assert least_kv_tokens(config, 16) == 2048
    assert whole_blocks(100, 64) == 64

"""Layers with the attention of gpt-oss: sinks, biases, windows in turn and its rotary embedding, against
`transformers`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_sinks import DENSE_SINKS, make_reference, register, write_reference
from optional_programs import uses_compiler
from paged_model import PagedModel, error_of, greedy_tokens, reference_logits, tokens_of
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvtransfer.common.clock import SystemClock
from workers.errors import CheckpointError
from workers.model.attention.choice import choose_attention
from workers.model.attention.interface import (
    AttentionShape,
    HeadKind,
    LayerAttention,
    Rotation,
    SequenceSpan,
    StepInput,
)
from workers.model.attention.kinds_backend import heads_of_kind
from workers.model.decoder import Decoder, load_decoder
from workers.model.families.family import Rotary
from workers.model.families.known_families import ARCHITECTURE_TO_FAMILY, NAME_TO_FAMILY
from workers.model.model_config import read_model_config
from workers.model.rank_memory import Checkpoint, RankShape
from workers.model.rope import rotation_of
from workers.model.rope_config import RopeReader
from workers.model.weights import ShardSpec, WeightReader
from workers.rank.probe import Probe

CPU = torch.device("cpu")
# As published, but for the lengths: prompts are longer than windows and than the context that was stretched.
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def write_model(path: Path, **keys: Any) -> Any:
    """Write a checkpoint and return its model of `transformers`."""
    rope = YARN | {"rope_theta": 150_000.0}
    given = {"head_dim": 32, "num_hidden_layers": 4, "sliding_window": 20, "rope_parameters": rope, **keys}
    model = make_reference(**given)
    write_reference(path, model)
    return model


@uses_compiler
@pytest.mark.parametrize("head_dim", [32, 64])
def test_logits_and_greedy_tokens_equal_transformers(tmp_path: Path, backend: str, head_dim: int) -> None:
    reference, prompt = write_model(tmp_path, head_dim=head_dim), tokens_of(1)
    expected = reference_logits(reference, prompt)
    assert expected.std() >= 1.0
    decoder = load_decoder(tmp_path, torch.float32, CPU)
    assert (decoder._native_layers is None) == (backend == "torch")
    model = PagedModel(decoder, torch.float32)
    for sequence, chunk_tokens in enumerate((1, 7, 100)):
        assert error_of(model.chunked(sequence, prompt, chunk_tokens), expected) <= 1e-4
    others = [(number, tokens_of(number, 30 + number)) for number in (10, 11)]
    (together, *_) = model.step([(12, prompt), *others])
    assert error_of(together, expected) <= 1e-4
    model.step([(13, prompt[:-1]), (14, prompt[:50])])
    (last, middle) = model.step([(13, prompt[-1:]), (14, prompt[50:51])])
    assert error_of(torch.cat((middle, last)), expected[[50, -1]]) <= 1e-4
    assert model.greedy(15, prompt, 20) == greedy_tokens(reference, prompt, 20)
    with torch.no_grad():
        for layer in reference.model.layers:
            layer.self_attn.sinks.fill_(-torch.inf)
    assert error_of(reference_logits(reference, prompt), expected) > 0.1, "sinks tell"


@uses_compiler
@pytest.mark.usefixtures("backend")
def test_bfloat16_is_as_close_to_float32_as_transformers(tmp_path: Path) -> None:
    reference, prompt = write_model(tmp_path), tokens_of(2)
    tensors = {name: it.bfloat16() for name, it in load_file(tmp_path / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    reference.load_state_dict({name: it.float() for name, it in tensors.items()})
    exact = reference_logits(reference, prompt)
    allowed = 1.5 * error_of(reference_logits(reference.bfloat16(), prompt), exact)
    assert 1e-4 < allowed < 0.1
    decoder = load_decoder(tmp_path, torch.bfloat16, CPU)
    model = PagedModel(decoder, torch.bfloat16)
    for sequence, chunk_tokens in enumerate((1, 40, 100)):
        assert error_of(model.chunked(sequence, prompt, chunk_tokens), exact) <= allowed
    stored = tensors["model.layers.3.self_attn.sinks"].float()
    sinks = decoder.layers[3]._attention.sinks
    assert sinks is not None
    assert sinks.dtype == torch.float32
    assert torch.equal(sinks, stored)


@uses_compiler
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_ranks_have_the_sinks_of_their_query_heads(tmp_path: Path, tp: int) -> None:
    """Attention of one layer is the sum of the ranks' parts, also where ranks hold copies of keys."""
    reference = write_model(tmp_path, num_hidden_layers=1)
    with torch.no_grad():
        reference.model.layers[0].mlp.down_proj.weight.zero_()
    write_reference(tmp_path, reference)
    config = read_model_config(tmp_path)
    hidden = torch.randn(60, 64, generator=torch.Generator().manual_seed(4))

    def added(shard: ShardSpec) -> Tensor:
        decoder = load_decoder(tmp_path, torch.float32, CPU, shard)
        return _after_layer(decoder, hidden, shard) - hidden

    parts = [added(ShardSpec(0, 1, rank, tp)) for rank in range(tp)]
    torch.testing.assert_close(sum(parts), added(ShardSpec.whole(config)), rtol=1e-4, atol=1e-4)
    sinks = []
    for rank in range(tp):
        with WeightReader(tmp_path, config, ShardSpec(0, 1, rank, tp), torch.bfloat16, CPU) as reader:
            sinks.append(reader.layer(0).sinks)
    assert torch.equal(
        torch.cat([it for it in sinks if it is not None]), reference.model.layers[0].self_attn.sinks
    )


def _after_layer(decoder: Decoder, hidden: Tensor, shard: ShardSpec) -> Tensor:
    num_kv_heads = RankShape(decoder.config, 0, 1, shard.tp_rank, shard.tp_size).num_kv_cells
    kv = torch.zeros(4, 1, 2, num_kv_heads, 16, decoder.config.head_dim)
    plan = choose_attention(decoder.attention_shape, kv).plan(
        StepInput.of([SequenceSpan(0, len(hidden), (2, 0, 3, 1))], 16)
    )
    return decoder.run_layers(hidden.clone(), plan)


def test_the_probe_of_a_rank_has_sinks(tmp_path: Path) -> None:
    write_model(tmp_path, num_hidden_layers=1)
    probe = Probe(
        read_model_config(tmp_path), tp=3, tp_rank=1, dtype=torch.bfloat16, device=CPU, block_tokens=16,
        clock=SystemClock(),
    )  # fmt: skip
    assert probe.measure(8, 1).cost.layer_s > 0
    sinks = probe._layer_weights().sinks
    assert sinks is not None
    assert (sinks.shape, sinks.dtype) == ((2,), torch.float32)


def test_memory_counts_the_sinks_of_a_rank(tmp_path: Path) -> None:
    write_model(tmp_path)
    config, checkpoint = read_model_config(tmp_path), Checkpoint.read(tmp_path)
    without = Checkpoint(
        {name: size for name, size in checkpoint.name_to_size.items() if not name.endswith("sinks")}
    )
    for rank, num_heads in ((0, 2), (1, 2), (2, 2)):
        shape = RankShape(config, 1, 3, rank, 3)
        assert checkpoint.weight_bytes(shape, 4) - without.weight_bytes(shape, 4) == 2 * num_heads * 4


def test_a_checkpoint_without_sinks_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    sinks = tensors.pop("model.layers.2.self_attn.sinks")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.2\.self_attn\.sinks is missing"):
        load_decoder(tmp_path, torch.float32, CPU)
    save_file(tensors | {"model.layers.2.self_attn.sinks": sinks[:3].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"sinks has shape \[3\], config.json says \[6\]"):
        load_decoder(tmp_path, torch.float32, CPU)


def test_sinks_of_a_family_without_them_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path)
    without = dataclasses.replace(DENSE_SINKS, has_sinks=False)
    monkeypatch.setitem(NAME_TO_FAMILY, without.name, without)
    monkeypatch.setitem(ARCHITECTURE_TO_FAMILY, without.architectures[0], without)
    with pytest.raises(CheckpointError, match=r"unexpected tensor model\.layers\.\d\.self_attn\.sinks"):
        load_decoder(tmp_path, torch.float32, CPU)


PUBLISHED_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    "spelled",
    [
        {"rope_scaling": PUBLISHED_YARN, "rope_theta": 150_000},
        {"rope_parameters": PUBLISHED_YARN | {"rope_theta": 150_000.0}},
    ],
)
@pytest.mark.parametrize("truncate", [False, True])
def test_the_published_rotary_embedding_is_that_of_transformers(
    spelled: dict[str, Any], truncate: bool
) -> None:
    """The bounds of the ramp are not whole numbers; if they were, 9 of 32 frequencies would differ."""
    key = next(iter(spelled))
    raw = spelled | {key: spelled[key] | {"truncate": truncate}, "max_position_embeddings": 131072}
    config = GptOssConfig(**raw)
    frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](config, CPU)
    rope = RopeReader(Path("config.json"), raw, Rotary()).read(64)
    rotation = rotation_of(rope, 64, CPU)
    torch.testing.assert_close(rotation.frequencies, frequencies, rtol=1e-6, atol=0)
    assert rotation.scale == pytest.approx(scale, rel=1e-12)
    assert scale == pytest.approx(1.3465736)
    assert rope.is_truncated == truncate


def test_the_defaults_of_transformers_are_the_published_rotary_embedding() -> None:
    defaults = GptOssConfig().rope_parameters
    assert defaults == PUBLISHED_YARN | {"rope_theta": 150_000.0}


@pytest.mark.parametrize("num_layers", [24, 36, 5])
def test_windows_alternate_from_the_first_layer(tmp_path: Path, num_layers: int) -> None:
    """By `layer_types`, and where there are none."""
    config = GptOssConfig(num_hidden_layers=num_layers)
    raw = config.to_dict() | {"model_type": DENSE_SINKS.name, "architectures": None}
    expected = tuple(128 if kind == "sliding_attention" else 0 for kind in config.layer_types)
    assert expected[:3] == (128, 0, 128)
    for keys in (raw, {name: value for name, value in raw.items() if name != "layer_types"}):
        (tmp_path / "config.json").write_text(json.dumps(keys), encoding="utf-8")
        read = read_model_config(tmp_path)
        assert read.sliding_windows == expected
        assert (read.max_context_tokens, read.head_dim) == (131072, 64)


@uses_compiler
@pytest.mark.usefixtures("backend")
def test_each_kind_of_heads_has_sinks() -> None:
    """A backend of several kinds computes what a backend of each computes."""
    generator = torch.Generator().manual_seed(5)
    still = {dim: (Rotation(torch.zeros(dim // 2)),) for dim in (16, 32)}
    kinds = (HeadKind(2, 16, (0,), (9,), still[16]), HeadKind(1, 32, (1,), (0,), still[32]))
    step = StepInput.of([SequenceSpan(0, 20, (1, 2)), SequenceSpan(30, 1, (4, 0))], 16)
    kv = torch.randn(5, 2, 2, 1, 16, 32, generator=generator)
    backend = choose_attention(AttentionShape(4, (9, 0), (), kinds=kinds, reads=(0, 1), has_sinks=True), kv)
    plan = backend.plan(step)
    for number, kind in enumerate(kinds):
        sinks = torch.randn(4, generator=generator) * 2
        qkv = torch.randn(21, (4 + 2 * kind.num_kv_heads) * kind.head_dim, generator=generator)
        layer = LayerAttention(number, kind.windows[0], sinks=sinks, kind=number)
        own = heads_of_kind(kv, kind)[:, number : number + 1].clone()
        alone = choose_attention(AttentionShape(4, kind.windows, kind.rotations), own).plan(step)
        expected = alone.run(LayerAttention(0, kind.windows[0], sinks=sinks), qkv.clone())
        without = alone.run(LayerAttention(0, kind.windows[0]), qkv.clone())
        assert not torch.allclose(without, expected, atol=1e-2)
        assert torch.equal(plan.run(layer, qkv.clone()), expected)

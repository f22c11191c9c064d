"""Reading weights: broken checkpoints are refused by name, and shards are the right slices."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from workers.errors import CheckpointError
from workers.model.attention.choice import choose_attention
from workers.model.attention.interface import SequenceSpan, StepInput
from workers.model.decoder import Decoder, load_decoder
from workers.model.model_config import read_model_config
from workers.model.weights import LayerWeights, ShardSpec, WeightReader

CPU = torch.device("cpu")
STEP = StepInput.of([SequenceSpan(0, 20, (1, 0))], 16)
MakeCheckpoint = Callable[..., Path]
QUERY = "model.layers.1.self_attn.q_proj.weight"


def _load(model_dir: Path, shard: ShardSpec | None = None) -> None:
    load_decoder(model_dir, torch.float32, CPU, shard)


def _rewrite(model_dir: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    file = model_dir / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def model_dir(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    return shutil.copytree(make_checkpoint("qwen2"), tmp_path / "model")


def test_a_missing_tensor_is_named(model_dir: Path) -> None:
    _rewrite(model_dir, lambda tensors: tensors.pop(QUERY))
    with pytest.raises(CheckpointError, match=f"{model_dir}: tensor {QUERY} is missing"):
        _load(model_dir)


def test_an_untied_head_may_not_be_missing(model_dir: Path) -> None:
    _rewrite(model_dir, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        _load(model_dir)


def test_a_mis_shaped_tensor_is_named_with_both_shapes(model_dir: Path) -> None:
    _rewrite(model_dir, lambda tensors: tensors.update({QUERY: tensors[QUERY][:32].clone()}))
    with pytest.raises(CheckpointError) as caught:
        _load(model_dir)
    assert str(model_dir / "model.safetensors") in str(caught.value)
    assert f"{QUERY} has shape [32, 64], config.json says [64, 64]" in str(caught.value)


def test_a_tensor_of_integers_is_named(model_dir: Path) -> None:
    _rewrite(model_dir, lambda tensors: tensors.update({QUERY: tensors[QUERY].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=f"{QUERY} has dtype I8"):
        _load(model_dir)


def test_a_tensor_that_the_model_would_leave_out_is_named(model_dir: Path) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    _rewrite(model_dir, lambda tensors: tensors.update({name: torch.ones(16)}))
    with pytest.raises(CheckpointError, match=f"unexpected tensor {name}"):
        _load(model_dir)


def test_old_rotary_buffers_are_left_out(model_dir: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _rewrite(model_dir, lambda tensors: tensors.update({name: torch.ones(8)}))
    _load(model_dir)


@pytest.mark.parametrize("length", [0, 7, 200])
def test_a_weight_file_cut_short_is_named(length: int, model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=f"{file}: unreadable"):
        _load(model_dir)


def test_a_folder_without_weights_is_named(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        _load(model_dir)


@pytest.mark.parametrize("weight_map", [None, {}, {QUERY: "gone.safetensors"}, {QUERY: "../x.safetensors"}])
def test_a_bad_index_is_named(weight_map: dict[str, str] | None, model_dir: Path) -> None:
    (model_dir / "model.safetensors").rename(model_dir.parent / "x.safetensors")
    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        _load(model_dir)


def _logits(model_dir: Path) -> Tensor:
    return _logits_of(load_decoder(model_dir, torch.float32, CPU), torch.float32)


def _logits_of(decoder: Decoder, dtype: torch.dtype) -> Tensor:
    config = decoder.config
    kv = torch.zeros(2, config.num_layers, 2, config.num_kv_heads, 16, config.head_dim, dtype=dtype)
    attention = choose_attention(decoder.attention_shape, kv)
    return decoder.logits(decoder.forward(torch.arange(20), STEP, attention))


def test_a_tied_checkpoint_may_name_its_weights_in_any_way(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """The head beside an equal embedding, the head alone, and a head that differs and is then used."""
    model_dir = shutil.copytree(make_checkpoint("qwen3", tie_word_embeddings=True), tmp_path / "model")
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    expected = _logits(model_dir)
    _rewrite(model_dir, lambda tensors: tensors.update({head: tensors[embedding].clone()}))
    assert torch.equal(_logits(model_dir), expected)
    _rewrite(model_dir, lambda tensors: tensors.pop(embedding))
    assert torch.equal(_logits(model_dir), expected)
    _rewrite(model_dir, lambda t: t.update({embedding: t[head].clone(), head: 2 * t[head]}))
    torch.testing.assert_close(_logits(model_dir), 2 * expected)


def _layer(model_dir: Path, shard: ShardSpec) -> LayerWeights:
    config = read_model_config(model_dir)
    with WeightReader(model_dir, config, shard, torch.float32, CPU) as reader:
        return reader.layer(1)


def _qkv(layer: LayerWeights) -> Tensor:
    assert layer.qkv is not None
    return layer.qkv.weight


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_the_shards_of_a_layer_add_up_to_the_layer(
    tp_size: int, num_kv_heads: int, make_checkpoint: MakeCheckpoint
) -> None:
    model_dir = make_checkpoint(
        "llama", num_key_value_heads=num_kv_heads, attention_bias=True, mlp_bias=True, sharded=True
    )
    whole = _layer(model_dir, ShardSpec(0, 2))
    parts = [_layer(model_dir, ShardSpec(0, 2, rank, tp_size)) for rank in range(tp_size)]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    q_rows, kv_rows = 64, 16 * num_kv_heads
    whole_q, whole_k, whole_v = torch.split(_qkv(whole), [q_rows, kv_rows, kv_rows])
    local_q, local_kv = q_rows // tp_size, max(16, kv_rows // tp_size)
    split = [torch.split(_qkv(part), [local_q, local_kv, local_kv]) for part in parts]
    assert torch.equal(torch.cat([queries for queries, _, _ in split]), whole_q)
    copies = max(1, tp_size // num_kv_heads)
    assert torch.equal(torch.cat([keys for _, keys, _ in split[::copies]]), whole_k)
    assert torch.equal(torch.cat([values for _, _, values in split[::copies]]), whole_v)
    for first in range(0, tp_size, copies):
        assert all(torch.equal(split[first][1], other[1]) for other in split[first : first + copies])

    def feed_forward(weights: LayerWeights) -> Tensor:
        assert weights.gate_up is not None
        assert weights.down is not None
        gate, up = torch.nn.functional.linear(x, weights.gate_up.weight, weights.gate_up.bias).chunk(2, -1)
        return torch.nn.functional.linear(gate.sigmoid() * up, weights.down.weight, weights.down.bias)

    summed = torch.stack([feed_forward(part) for part in parts]).sum(0)
    torch.testing.assert_close(summed, feed_forward(whole), rtol=1e-4, atol=1e-5)


def test_more_ranks_than_heads_are_refused(make_checkpoint: MakeCheckpoint) -> None:
    with pytest.raises(CheckpointError, match="tp 5 is more than num_attention_heads 4"):
        _load(make_checkpoint("llama"), ShardSpec(0, 2, 0, 5))


@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_layers_make_the_whole_model(tied: bool, make_checkpoint: MakeCheckpoint) -> None:
    model_dir = make_checkpoint("qwen3", num_hidden_layers=3, tie_word_embeddings=tied)
    first = load_decoder(model_dir, torch.float32, CPU, ShardSpec(0, 1))
    last = load_decoder(model_dir, torch.float32, CPU, ShardSpec(1, 3))
    attention, later_attention = (
        choose_attention(stage.attention_shape, torch.zeros(2, len(stage.layers), 2, 2, 16, 16))
        for stage in (first, last)
    )
    hidden = first.forward(torch.arange(20), STEP, attention)
    hidden = last.run_layers(hidden, later_attention.plan(STEP))
    assert torch.equal(last.logits(hidden), _logits(model_dir))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["packed", "by torch"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_loaded_model_no_longer_depends_on_its_files(
    tied: bool, dtype: torch.dtype, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Weights are packed from the mapped files. Afterwards the files are unmapped, and may change."""
    source = make_checkpoint("llama", tie_word_embeddings=tied, mlp_bias=True, dtype=str(dtype).split(".")[1])
    model_dir = shutil.copytree(source, tmp_path / "model")
    file = model_dir / "model.safetensors"
    decoder = load_decoder(model_dir, dtype, CPU)
    expected = _logits_of(decoder, dtype)
    assert str(file) not in Path("/proc/self/maps").read_text()
    file.write_bytes(bytes(file.stat().st_size))
    assert torch.equal(_logits_of(decoder, dtype), expected)

"""Write checkpoints and tokenizers in Hugging Face layout as GGUF files, as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFWriter,
    get_tensor_name_map,
)
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
Floats = npt.NDArray[np.float32]

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    checkpoint: Path,
    quantization: GGMLQuantizationType,
    *,
    parts: int = 1,
    metadata: dict[str, Any] | None = None,
) -> Path:
    """Write the checkpoint, of llama, qwen2 or qwen3, with its matrices quantized; in several parts where
    asked. `metadata` is added: strings, or lists of strings. Returns the (first) file."""
    config = json.loads((checkpoint / "config.json").read_text())
    family = str(config["model_type"])
    tensors: list[tuple[str, Floats]] = []
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            values = tensor.float().numpy()
            tensors.append((_gguf_name(name), _permuted(name, values, family, config)))
    numbers = np.array_split(np.arange(len(tensors)), parts)
    names = (
        [path]
        if parts == 1
        else [path.with_name(f"{path.stem}-{n + 1:05d}-of-{parts:05d}.gguf") for n in range(parts)]
    )
    for index, name in enumerate(names):
        writer = GGUFWriter(name, family)
        if parts > 1:
            writer.add_uint16("split.no", index)
            writer.add_uint16("split.count", parts)
        if index == 0:
            _add_shape(writer, config)
            _add_tokens(writer, config["vocab_size"])
            for key, value in (metadata or {}).items():
                writer.add_array(key, value) if isinstance(value, list) else writer.add_string(key, value)
        for number in numbers[index]:
            gguf_name, values = tensors[number]
            _add_tensor(writer, gguf_name, values, quantization)
        finish(writer)
    return names[0]


def with_joined_heads(tensors: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the tensors with those of the norms of single heads as one, in which each is a row."""
    found: dict[str, Floats] = {}
    name_to_rows: dict[str, list[Floats]] = {}
    for name, values in tensors.items():
        stem, separator, rest = name.partition(".norms.")
        if separator:
            assert int(rest.partition(".")[0]) == len(name_to_rows.setdefault(stem, []))
            name_to_rows[stem].append(values)
        else:
            found[name] = values
    return found | {f"{stem}.weight": np.stack(rows) for stem, rows in name_to_rows.items()}


def write_family(
    path: Path,
    architecture: str,
    tensors: Mapping[str, Floats],
    metadata: Mapping[str, Any],
    *,
    num_heads: int = 0,
    num_kv_heads: int = 0,
    norm_shift: float = 0.0,
    others: Mapping[str, Floats] | None = None,
    types: Sequence[GGMLQuantizationType] = (),
) -> Path:
    """Write a model of any architecture in 32-bit floats, with the tensor names of the package `gguf`; its
    matrices but routers in the `types` in turn, if there are any. Names that begin with blk. stay.

    `metadata` has keys without the architecture. With `num_heads` and `num_kv_heads`, the rows of queries and
    keys are brought into the order of llama.cpp; `norm_shift` is added to the weights of norms. `others` are
    tensors that have no name in Hugging Face layout.
    """
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        _ADDERS[type(value)](writer, f"{architecture}.{key}", value)
    _add_tokens(writer, len(tensors["model.embed_tokens.weight"]))
    (number,) = (number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    name_map = get_tensor_name_map(number, int(metadata["block_count"]))
    number_of_matrix = 0
    for name, values in tensors.items():
        suffix = ".weight" if name.endswith(("layer_scalar", "sinks")) else ""
        is_named = name.startswith("blk.")
        found = name if is_named else name_map.get_name(name + suffix, (".weight", ".bias"))
        assert found is not None, name
        heads = {"q_proj": num_heads, "k_proj": num_kv_heads}.get(name.split(".")[-2], 0)
        written = _rotary_order(values, heads) if heads else values
        is_matrix = values.ndim > 1 and found.endswith(".weight") and "norm" not in name
        if types and is_matrix and "ffn_gate_inp" not in found and values.shape[-1] % 32 == 0:
            _add_tensor(writer, found, written, types[number_of_matrix % len(types)])
            number_of_matrix += 1
            continue
        writer.add_tensor(found, written + np.float32(norm_shift) if "norm.weight" in name else written)
    for name, values in (others or {}).items():
        writer.add_tensor(name, values)
    finish(writer)
    return path


_ADDERS: dict[type, Callable[[GGUFWriter, str, Any], None]] = {
    int: GGUFWriter.add_uint32,
    float: GGUFWriter.add_float32,
    bool: GGUFWriter.add_bool,
    str: GGUFWriter.add_string,
    list: GGUFWriter.add_array,
}


def finish(writer: GGUFWriter) -> None:
    """Write what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer_gguf(
    path: Path,
    tokenizer: Tokenizer,
    model: str,
    pre: str = "",
    *,
    scores: Sequence[float] | None = None,
    kinds: dict[str, int] | None = None,
    flags: dict[str, bool] | None = None,
    ids: dict[str, int] | None = None,
    architecture: str = "llama",
) -> Path:
    """Write a file with a tokenizer alone, and what the smallest llama needs. `kinds` are those of tokens
    that are not normal; merges are those of the tokenizer where its tokens have no `scores`."""
    writer = GGUFWriter(path, architecture)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model(model)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([(kinds or {}).get(token, NORMAL) for token in tokens])
    if scores is None:
        merges = json.loads(tokenizer.to_str())["model"]["merges"]
        writer.add_token_merges([" ".join(pair) for pair in merges])
    else:
        writer.add_token_scores(scores)
    for name, flag in (flags or {}).items():
        writer.add_bool(f"tokenizer.ggml.{name}", flag)
    for name, number in (ids or {}).items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    shape = {"num_hidden_layers": 1, "hidden_size": 4, "intermediate_size": 4, "num_attention_heads": 1}
    _add_shape(writer, shape | {"rms_norm_eps": 1e-5, "max_position_embeddings": 64})
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 4), np.float32))
    finish(writer)
    return path


def dequantized(paths: Sequence[Path]) -> dict[str, Floats]:
    """Read all tensors by the package `gguf` alone."""
    found = {}
    for path in paths:
        for tensor in GGUFReader(path).tensors:
            shape = tuple(reversed(tensor.shape.tolist()))
            found[tensor.name] = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    return found


def _add_shape(writer: GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or 10000.0)


def _add_tokens(writer: GGUFWriter, vocab_size: int) -> None:
    """Add tokens that are nothing but numbers."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{index}" for index in range(vocab_size)])
    writer.add_token_types([NORMAL] * (vocab_size - 1) + [CONTROL])
    writer.add_token_merges([])
    writer.add_eos_token_id(vocab_size - 1)


def _add_tensor(writer: GGUFWriter, name: str, values: Floats, quantization: GGMLQuantizationType) -> None:
    if values.ndim == 1:
        writer.add_tensor(name, values)
    elif quantization in _HALVES:  # the package only reads it
        writer.add_tensor(name, drawn_blocks(values, quantization), raw_dtype=quantization)
    else:
        writer.add_tensor(name, quantize(values, quantization), raw_dtype=quantization)


# Where a block has its 16-bit floats, scales and minima.
_HALVES = {
    GGMLQuantizationType.Q2_K: (80, 82),
    GGMLQuantizationType.Q3_K: (108,),
    GGMLQuantizationType.Q4_K: (0, 2),
    GGMLQuantizationType.Q5_K: (0, 2),
    GGMLQuantizationType.Q6_K: (208,),
    GGMLQuantizationType.IQ4_NL: (0,),
    GGMLQuantizationType.IQ4_XS: (0,),
}


def drawn_blocks(values: Floats, quantization: GGMLQuantizationType) -> npt.NDArray[np.uint8]:
    """Draw blocks for a matrix of the shape of `values`, whose values are of a like size."""
    columns, (block_items, block_bytes) = values.shape[-1], GGML_QUANT_SIZES[quantization]
    rows = values.size // columns
    generator = np.random.default_rng(rows * columns)
    blocks = generator.integers(0, 256, (rows, columns // block_items, block_bytes), dtype=np.uint8)
    for at in _HALVES[quantization]:
        blocks[:, :, at : at + 2] = np.array([1.0], np.float16).view(np.uint8)
    scale = np.float16(values.std() / dequantize(blocks.reshape(rows, -1), quantization).std())
    for at in _HALVES[quantization]:
        blocks[:, :, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.{kind}"


def _permuted(name: str, values: Floats, family: str, config: dict[str, Any]) -> Floats:
    """Bring the rows of queries and keys into the order of llama.cpp's own attention."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
    num_heads = heads.get(name.split(".")[-2])
    if family != "llama" or num_heads is None:
        return values
    return _rotary_order(values, num_heads)


def _rotary_order(values: Floats, num_heads: int) -> Floats:
    half = values.shape[0] // num_heads // 2
    split = values.reshape(num_heads, 2, half, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))

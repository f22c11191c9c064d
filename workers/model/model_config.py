"""Read a checkpoint's configuration: shapes, rope, windows, end tokens, weight files.

Engine cores and gateways read it as well as ranks, so nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any, Literal, NoReturn

from workers.errors import CheckpointError

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
RopeType = Literal["default", "linear", "llama3"]

_MAX_HEADER_BYTES = 100_000_000
# Beyond what any model has; lists of as many layers are made.
_MAX_LAYERS = 1 << 16
_MAX_COUNT = 1 << 40
# Positions and token ids travel as 32-bit numbers.
_MAX_CONTEXT_TOKENS = (1 << 31) - 1
_MAX_TOKEN_ID = (1 << 31) - 1
_MAX_END_TOKENS = 1024
_MAX_NUMBER = 1e30
# What an error shows of a value.
_MAX_SHOWN_CHARS = 200
_ARCHITECTURES: dict[str, Family] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_FAMILIES: dict[str, Family] = {family: family for family in _ARCHITECTURES.values()}
_ROPE_TYPES: dict[str, RopeType] = {"default": "default", "linear": "linear", "llama3": "llama3"}
_ACTIVATIONS = ("silu", "swish")
# Defaults of transformers for keys that config.json lacks, where they differ between the families.
_DEFAULTS: dict[Family, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
    },
}


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. `factor` belongs to linear and llama3, the three fields after it to
    llama3."""

    rope_type: RopeType
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder. `sliding_windows` has one entry a layer: a token sees itself and the window - 1 tokens
    before it; 0 means no window. `checkpoint_dtype` is the dtype that config.json names ("" if none)."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_context_tokens: int
    rope: RopeConfig
    sliding_windows: tuple[int, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    checkpoint_dtype: str
    eos_token_ids: tuple[int, ...]


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read config.json and, for the end tokens, generation_config.json.

    Raises CheckpointError, naming the file and key, for what this decoder cannot compute.
    """
    refuse_no_folder(model_dir)
    return _ConfigReader(model_dir / "config.json").read()


# Of weights in formats that are never loaded.
_PICKLED_SUFFIXES = (".bin", ".pth", ".pt", ".ckpt", ".msgpack", ".h5")
_GGUF_MAGIC = b"GGUF"


def refuse_no_folder(model_dir: Path) -> None:
    """Raise `CheckpointError` where the path is no folder, with the way to one."""
    if model_dir.is_dir():
        return
    if model_dir.is_file():
        with model_dir.open("rb") as file:
            is_gguf = file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
        what = "is a GGUF file, which is not supported" if is_gguf else "is a file"
        raise CheckpointError(
            f"{model_dir}: {what}; name a folder in Hugging Face layout, with config.json, tokenizer.json "
            "and unquantized weights in safetensors"
        )
    raise CheckpointError(
        f"{model_dir}: no such folder; name a folder in Hugging Face layout, or a model of the Hugging Face "
        "hub as org/name"
    )


def weight_files(model_dir: Path) -> tuple[Path, ...]:
    """Return the safetensors files of the checkpoint in name order: the single file, or those of the index.
    `CheckpointError` where one lies, or is a link that leads, outside of the folder; into the blobs of the
    same model in the cache of the Hugging Face hub it may lead."""
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if single.is_file():
        if not _stays_in(model_dir, single):
            raise CheckpointError(f"{single}: {_LEAVES}")
        return (single,)
    if not index.is_file():
        raise CheckpointError(
            f"{model_dir}: neither {single.name} nor {index.name}{_pickled_words(model_dir)}"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    files = tuple(model_dir / name for name in sorted({str(name) for name in weight_map.values()}))
    for file in files:
        if not _is_in(model_dir, file):
            raise CheckpointError(f"{index}: names {file.name[:100]}, which is not in the folder")
        if not _stays_in(model_dir, file):
            raise CheckpointError(f"{index}: names {file.name[:100]}, which {_LEAVES}")
    return files


def _pickled_words(model_dir: Path) -> str:
    """Say what to do where the folder has pickled weights instead; "" where it has none."""
    pickled = sorted(file.name for file in model_dir.glob("*") if file.suffix in _PICKLED_SUFFIXES)
    if not pickled:
        return ""
    return (
        f", but {pickled[0]}, which is never loaded, as unpickling can run anything: download a revision "
        "with safetensors, or convert it"
    )


_LEAVES = "is a link that leaves the model's folder; put the file itself there"


def _stays_in(folder: Path, file: Path) -> bool:
    """Whether the file, through all links, lies in the folder or in the blobs of the hub's cache: there
    `models--org--name/snapshots/<revision>/<file>` is a link to `models--org--name/blobs/<hash>`."""
    real, target = folder.resolve(), file.resolve()
    if target.is_relative_to(real):
        return True
    return real.parent.name == "snapshots" and target.parent == real.parent.parent / "blobs"


def _is_in(folder: Path, file: Path) -> bool:
    try:
        return file.parent == folder and file.is_file()
    except OSError:  # no file can have this name
        return False


def read_header(file: Path) -> tuple[bytes, dict[str, Any]]:
    """Read a safetensors file's header. Returns its bytes and its parsed form."""
    with file.open("rb") as stream:
        prefix = stream.read(8)
        (length,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (0,)
        raw = stream.read(length) if 0 < length <= _MAX_HEADER_BYTES else b""
    if not raw or len(raw) != length:
        raise CheckpointError(f"{file}: not a safetensors file, or cut short")
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: unreadable safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: unreadable safetensors header: not an object")
    return raw, header


def file_problem(file: Path) -> str:
    """Return why a safetensors file is incomplete by its header, "" if it is complete. Raises
    `CheckpointError` if its header is unreadable."""
    raw, header = read_header(file)
    try:
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (KeyError, TypeError, IndexError) as error:
        raise CheckpointError(f"{file}: unreadable safetensors header: {error!r}") from error
    if odd := [end for end in ends if type(end) is not int]:
        raise CheckpointError(f"{file}: unreadable safetensors header: {odd[0]!r} is not an offset")
    needed, size = 8 + len(raw) + max(ends, default=0), file.stat().st_size
    return f"{file}: cut short: {size} bytes, its header needs {needed}" if size < needed else ""


def read_json(file: Path) -> dict[str, Any]:
    """Read the JSON object in the file. Raises `CheckpointError`, naming the file, if there is none."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{file}: cannot be read: {reason}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return value


class _ConfigReader:
    """Reads one config.json; every refusal names the file, the key and the value."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.raw = read_json(file)
        self.family = self._family()
        self.raw = _DEFAULTS[self.family] | self.raw

    def read(self) -> ModelConfig:
        self._refuse_unsupported()
        hidden_size, num_heads = self._count("hidden_size"), self._count("num_attention_heads")
        num_layers = self._count("num_hidden_layers", most=_MAX_LAYERS)
        num_kv_heads = self._count("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            self._refuse("num_key_value_heads", f"does not divide the {num_heads} attention heads")
        head_dim = self._count("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            given = "" if self.raw.get("head_dim") else f" (hidden_size {hidden_size} // {num_heads} heads)"
            reason = "is odd: rotary embedding needs pairs"
            raise CheckpointError(f"{self.file}: head_dim {head_dim}{given} {reason}")
        rope = self._rope()
        attention_bias = self.family in ("llama", "qwen3") and bool(self.raw.get("attention_bias"))
        return ModelConfig(
            family=self.family,
            vocab_size=self._count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self._count("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self._number("rms_norm_eps", self.raw, 1e-6),
            max_context_tokens=self._max_context_tokens(rope),
            rope=rope,
            sliding_windows=self._sliding_windows(num_layers),
            qkv_bias=attention_bias or self.family == "qwen2",
            output_bias=attention_bias,
            mlp_bias=self.family == "llama" and bool(self.raw.get("mlp_bias")),
            qk_norm=self.family == "qwen3",
            tie_word_embeddings=bool(self.raw.get("tie_word_embeddings", False)),
            checkpoint_dtype=str(self.raw.get("dtype") or self.raw.get("torch_dtype") or ""),
            eos_token_ids=self._eos_token_ids(),
        )

    def _refuse(self, key: str, why: str) -> NoReturn:
        raise CheckpointError(f"{self.file}: {key} {self.raw.get(key)!r} {why}")

    def _max_context_tokens(self, rope: RopeConfig) -> int:
        """Return the context length. With linear scaling `max_position_embeddings` is that of the base model,
        which is then stretched; with llama3 it is the stretched length already."""
        num_positions = self._count("max_position_embeddings", most=_MAX_CONTEXT_TOKENS)
        if rope.rope_type != "linear":
            return num_positions
        num_stretched = int(num_positions * rope.factor)
        if not 0 < num_stretched <= _MAX_CONTEXT_TOKENS:
            what = f"factor {rope.factor:g} makes {num_stretched:.4g} of {num_positions} positions"
            raise CheckpointError(f"{self.file}: {what}, not 1 to {_MAX_CONTEXT_TOKENS}")
        return num_stretched

    def _family(self) -> Family:
        architectures = self.raw.get("architectures")
        if isinstance(architectures, list) and architectures:
            family = _ARCHITECTURES.get(str(architectures[0]))
            if family is None:
                self._refuse("architectures", f"is not supported (supported: {', '.join(_ARCHITECTURES)})")
            return family
        family = _FAMILIES.get(str(self.raw.get("model_type")))
        if family is None:
            self._refuse("model_type", f"is not supported (supported: {', '.join(_FAMILIES)})")
        return family

    def _refuse_unsupported(self) -> None:
        if self.raw.get("hidden_act", "silu") not in _ACTIVATIONS:
            self._refuse("hidden_act", f"is not supported (supported: {', '.join(_ACTIVATIONS)})")
        if self.raw.get("quantization_config"):
            self._refuse_quantized(self.raw["quantization_config"])
        if self.raw.get("partial_rotary_factor") not in (None, 1, 1.0):
            self._refuse("partial_rotary_factor", "is not supported")

    def _refuse_quantized(self, config: Any) -> NoReturn:
        method = config.get("quant_method") if isinstance(config, dict) else None
        what = f"says that the weights are quantized ({method})" if method else "is there"
        raise CheckpointError(
            f"{self.file}: quantization_config {what}, and quantized weights are not supported; take the "
            "checkpoint in 16 or 32 bits of which this one was made"
        )

    def _count(self, key: str, default: int | None = None, most: int = _MAX_COUNT) -> int:
        value = self.raw.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            self._refuse(key, f"is not a positive integer up to {most}")
        return value

    def _number(self, key: str, where: dict[str, Any], default: float | None = None) -> float:
        value = where.get(key)
        if value is None:
            value = default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < _MAX_NUMBER:
            raise CheckpointError(f"{self.file}: {key} {value!r} is not a positive number")
        return float(value)

    def _rope(self) -> RopeConfig:
        """Read either spelling: `rope_theta` with `rope_scaling`, or `rope_parameters` of transformers 5."""
        key = "rope_scaling" if self.raw.get("rope_scaling") else "rope_parameters"
        scaling = self.raw.get(key) or {}
        if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
            self._refuse(key, "is not one flat set of rope parameters")
        if scaling.get("partial_rotary_factor") not in (None, 1, 1.0):
            self._refuse(key, "has a partial_rotary_factor, which is not supported")
        theta = self._number("rope_theta", scaling, self._number("rope_theta", self.raw, 10000.0))
        rope_type = _ROPE_TYPES.get(str(scaling.get("rope_type") or scaling.get("type") or "default"))
        if rope_type is None:
            self._refuse(key, f"has an unsupported rope type (supported: {', '.join(_ROPE_TYPES)})")
        if rope_type == "default":
            return RopeConfig("default", theta)
        factor = self._number("factor", scaling)
        if rope_type == "linear":
            return RopeConfig("linear", theta, factor)
        low, high = self._number("low_freq_factor", scaling), self._number("high_freq_factor", scaling)
        original = self._number(
            "original_max_position_embeddings", scaling, float(self._count("max_position_embeddings"))
        )
        if original > _MAX_CONTEXT_TOKENS:
            self._refuse(key, f"has more original_max_position_embeddings than {_MAX_CONTEXT_TOKENS}")
        if low >= high:
            self._refuse(key, "has a low_freq_factor that is not below its high_freq_factor")
        return RopeConfig("llama3", theta, factor, low, high, int(original))

    def _sliding_windows(self, num_layers: int) -> tuple[int, ...]:
        if self.family == "llama":
            kinds = ["full_attention"] * num_layers
        elif self.family == "mistral":
            window = self.raw["sliding_window"]
            kinds = ["full_attention" if window is None else "sliding_attention"] * num_layers
        else:
            sliding = self.raw.get("use_sliding_window", False) and self.raw["sliding_window"] is not None
            first = self.raw.get("max_window_layers", 28)
            if not isinstance(first, int):
                self._refuse("max_window_layers", "is not a number of layers")
            kinds = [
                "sliding_attention" if sliding and layer >= first else "full_attention"
                for layer in range(num_layers)
            ]
        given = self.raw.get("layer_types")
        if given is not None and given != kinds:
            kinds = self._layer_types(given, num_layers)
        if "sliding_attention" not in kinds:
            return (0,) * num_layers
        window = self._count("sliding_window")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)

    def _layer_types(self, given: Any, num_layers: int) -> list[str]:
        if self.family in ("llama", "mistral"):
            self._refuse("layer_types", f"is not supported in a {self.family} model")
        if not isinstance(given, list) or len(given) != num_layers:
            self._refuse("layer_types", f"does not name the {num_layers} layers")
        if not all(kind in ("full_attention", "sliding_attention") for kind in given):
            self._refuse("layer_types", "is not supported (supported: full_attention, sliding_attention)")
        if "sliding_attention" in given and not self.raw.get("use_sliding_window", False):
            self._refuse("layer_types", "has sliding layers, but use_sliding_window is not set")
        return [str(kind) for kind in given]

    def _eos_token_ids(self) -> tuple[int, ...]:
        """Read the ids of generation_config.json, as `generate` does, or else of config.json."""
        generation = self.file.with_name("generation_config.json")
        value = read_json(generation).get("eos_token_id") if generation.is_file() else None
        if value is None:
            value = self.raw.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        is_right = len(ids) <= _MAX_END_TOKENS and all(
            isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= _MAX_TOKEN_ID
            for token in ids
        )
        if not is_right:
            shown = repr(value[:_MAX_SHOWN_CHARS] if isinstance(value, list) else value)[:_MAX_SHOWN_CHARS]
            raise CheckpointError(
                f"{self.file}: eos_token_id {shown} is not a token id or a list of at most "
                f"{_MAX_END_TOKENS}, each up to {_MAX_TOKEN_ID}"
            )
        return tuple(ids)


# ------------------------------------------------------------------------------------------ ignored keys
# These keys of config.json change what other programs compute, and this decoder ignores them. Transformers
# ignores most of them as well, for these families. `read_model_config` refuses unsupported keys without which
# the result would be plainly wrong.

# Values with which a key changes nothing; 1 is that of factors.
_OFF = (None, False, 0, 1, (), "")
_WHY = {
    "dual_chunk_attention_config": "attention is plain: quality suffers beyond the length of a chunk",
    "attention_chunk_size": "attention is not cut into chunks",
    "attn_temperature_tuning": "attention is not scaled by position",
    "attn_logit_softcapping": "attention scores are not capped",
    "final_logit_softcapping": "logits are not capped",
    "logit_scale": "logits are not scaled",
    "logits_scaling": "logits are not scaled",
    "attention_multiplier": "attention scores are scaled by the square root of head_dim",
    "query_pre_attn_scalar": "attention scores are scaled by the square root of head_dim",
    "embedding_multiplier": "embeddings are not scaled",
    "residual_multiplier": "residuals are not scaled",
    "scale_emb": "embeddings are not scaled",
    "scale_depth": "residuals are not scaled",
    "clip_qkv": "queries, keys and values are not clipped",
    "use_qk_norm": "queries and keys are normalized in qwen3 models only",
    "qk_layernorm": "queries and keys are normalized in qwen3 models only",
    "no_rope_layers": "every layer has rotary embedding",
    "no_rope_layer_interval": "every layer has rotary embedding",
    "rope_local_base_freq": "every layer has the same rotary embedding",
    "alibi": "positions are those of rotary embedding",
    "use_logn_attn": "attention is not scaled by length",
    "use_dynamic_ntk": "rotary frequencies do not depend on length",
}
_ROPE_KEYS = {
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
}


def ignored_keys(model_dir: Path) -> dict[str, str]:
    """Return, by ignored key, what is computed instead, for a folder that `read_model_config` accepts."""
    raw = read_json(model_dir / "config.json")
    found = {key: why for key, why in _WHY.items() if not _is_off(raw.get(key))}
    if _family(raw) == "llama" and not _is_off(raw.get("sliding_window")):
        found["sliding_window"] = "llama models attend to the whole context"
    for outer in ("rope_scaling", "rope_parameters"):
        inner = raw.get(outer)
        if isinstance(inner, dict):
            unknown = sorted(key for key in inner.keys() - _ROPE_KEYS if not _is_off(inner[key]))
            found |= {f"{outer}.{key}": "rotary embedding is computed without it" for key in unknown}
    return found


def _family(raw: dict[str, Any]) -> str:
    architectures = raw.get("architectures")
    named = architectures if isinstance(architectures, list) and architectures else [raw.get("model_type")]
    return str(named[0]).lower().removesuffix("forcausallm")


def _is_off(value: Any) -> bool:
    if isinstance(value, list | dict):
        return not value
    return value is not True and value in _OFF

"""Read a checkpoint's configuration: shapes, rope, windows, end tokens, weight files.

Engine cores and gateways read it as well as ranks, so nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from workers.errors import CheckpointError
from workers.model.families.family import Family, LayerNorms
from workers.model.families.known_families import ARCHITECTURE_TO_FAMILY, NAME_TO_FAMILY, WRAPPERS

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]
Activation = Literal["silu", "gelu_tanh", "xielu"]

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
_ROPE_TYPES: dict[str, RopeType] = {name: name for name in get_args(RopeType)}
# Spellings of rope types: `dynamic` changes nothing within the context that the model was made for, which is
# all that is served.
_ROPE_ALIASES = {"su": "longrope", "dynamic": "default"}
# Activations by their names in config.json; in a gated feed-forward, and in one without a gate.
_GATED_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
# What a model of text and images says of its text model outside of `text_config`.
_OF_WRAPPERS = ("quantization_config", "tie_word_embeddings", "eos_token_id")
_PLAIN_ACTIVATIONS: dict[str, Activation] = {"xielu": "xielu"}


@dataclasses.dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. `factor` and `original_max_positions` belong to all types but the default
    one, the frequency factors to llama3, and the betas to yarn."""

    rope_type: RopeType
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    # Dimensions that turn at least so often, and at most, within the original context.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # Whether the bounds between these dimensions are whole numbers.
    is_truncated: bool = True
    # Queries and keys are multiplied by this as they are rotated.
    scale: float = 1.0
    # Of each head so many dimensions are rotated, the first; 0: all.
    num_rotated: int = 0
    # Pairs are neighbors, and not halves of what is rotated.
    is_interleaved: bool = False
    # Of longrope: the frequency of each pair is divided by its factor.
    pair_factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder. `sliding_windows` has one entry a layer: a token sees itself and the window - 1 tokens
    before it; 0 means no window. `checkpoint_dtype` is the dtype that config.json names ("" if none)."""

    family: str
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
    # Its config.json is that of a model of text and images, whose other tensors are passed over.
    is_wrapped: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    # 0: the inverse square root of `head_dim`.
    attention_scale: float = 0.0
    logits_divisor: float = 1.0
    activation: Activation = "silu"
    # Queries, and keys, are normalized over all heads of a token together.
    qk_row_norm: bool = False
    # Scores, and logits, s become softcap * tanh(s / softcap); 0: they stay.
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    # The rotary embedding of each layer, None where it has none; (): `rope` is that of all.
    layer_ropes: tuple[RopeConfig | None, ...] = ()
    # Attention and feed-forward of a layer both take the norm before attention.
    is_parallel: bool = False
    # Each head of queries, and of keys, has a LayerNorm with weights of its own.
    qk_own_norms: bool = False

    @property
    def declared(self) -> Family:
        """What is declared of the family."""
        return NAME_TO_FAMILY[self.family]

    @property
    def norm_names(self) -> LayerNorms:
        """The names of the norms that a layer has."""
        names = self.declared.norms
        return dataclasses.replace(names, feed_forward_input="") if self.is_parallel else names

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The rotary embedding of each layer, None where it has none."""
        return self.layer_ropes or (self.rope,) * self.num_layers


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read config.json and, for the end tokens, generation_config.json.

    Raises CheckpointError, naming the file and key, for what this decoder cannot compute.
    """
    refuse_no_folder(model_dir)
    return _ConfigReader(model_dir / "config.json").read()


# Of weights in formats that are never loaded.
_PICKLED_SUFFIXES = (".bin", ".pth", ".pt", ".ckpt", ".msgpack", ".h5")


def refuse_no_folder(model_dir: Path) -> None:
    """Raise `CheckpointError` where the path is no folder, with the way to one."""
    if model_dir.is_dir():
        return
    if model_dir.is_file():
        raise CheckpointError(
            f"{model_dir}: is a file, and no GGUF file; name a folder in Hugging Face layout, with "
            "config.json, tokenizer.json and unquantized weights in safetensors"
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


def family_of(file: Path) -> tuple[dict[str, Any], Family]:
    """Read the config.json. Returns its keys, of its text model where it has several, and the family."""
    reader = _ConfigReader(file)
    return reader.raw, reader.family


class _ConfigReader:
    """Reads one config.json; every refusal names the file, the key and the value."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.raw = read_json(file)
        self.is_wrapped = self._unwrap()
        self.family = self._family()
        self.raw = {**self.family.defaults, **self.raw}

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
        family, multipliers = self.family, self.family.multipliers
        windows = self._sliding_windows(num_layers)
        rope = self._rope(head_dim)
        layer_ropes = self._layer_ropes(rope, windows)
        qk_norm = family.qk_norm if self._is_set(family.has_qk_norm) else "none"
        return ModelConfig(
            family=family.name,
            vocab_size=self._count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=self._count("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self._number(family.norm_eps, self.raw, 1e-6),
            max_context_tokens=self._max_context_tokens(rope),
            rope=rope,
            sliding_windows=windows,
            qkv_bias=self._is_set(family.qkv_bias),
            output_bias=self._is_set(family.output_bias),
            mlp_bias=self._is_set(family.mlp_bias),
            qk_norm=qk_norm == "head",
            tie_word_embeddings=bool(self.raw.get("tie_word_embeddings", False)),
            checkpoint_dtype=str(self.raw.get("dtype") or self.raw.get("torch_dtype") or ""),
            eos_token_ids=self._eos_token_ids(),
            is_wrapped=self.is_wrapped,
            embedding_multiplier=(
                math.sqrt(hidden_size)
                if family.is_embedding_scaled
                else self._multiplier(multipliers.embeddings)
            ),
            residual_multiplier=self._multiplier(multipliers.residuals),
            attention_scale=self._attention_scale(),
            logits_divisor=(
                self._multiplier(multipliers.logits) / self._multiplier(multipliers.logits_scale)
            ),
            activation=self._activation(),
            qk_row_norm=qk_norm == "row",
            attention_softcap=self._softcap("attn_logit_softcapping"),
            logits_softcap=self._softcap("final_logit_softcapping"),
            layer_ropes=layer_ropes,
            is_parallel=self._is_set(family.is_parallel),
            qk_own_norms=qk_norm == "own",
        )

    def _attention_scale(self) -> float:
        if self.family.query_scalar:
            return float(self._number(self.family.query_scalar, self.raw) ** -0.5)
        return self._multiplier(self.family.multipliers.attention_scores, 0.0)

    def _softcap(self, key: str) -> float:
        has_one = self.family.has_softcaps and self.raw.get(key) is not None
        return self._number(key, self.raw) if has_one else 0.0

    def _activation(self) -> Activation:
        key, aliases = self.family.activation, self.family.activation_aliases
        named = str(self.raw.get(key) or "silu")
        known = _GATED_ACTIVATIONS if self.family.is_gated else _PLAIN_ACTIVATIONS
        activation = known.get(aliases.get(named, named))
        if activation is None:
            self._refuse(key, f"is not supported (supported: {', '.join(known)})")
        return activation

    def _is_set(self, rule: bool | str) -> bool:
        """Whether the family has something, by its rule: always, never, or where this key says so."""
        return bool(self.raw.get(rule)) if isinstance(rule, str) else rule

    def _multiplier(self, key: str, none: float = 1.0) -> float:
        """Return the value of the key; `none` where the family has no such multiplier."""
        return self._number(key, self.raw, 1.0) if key else none

    def _unwrap(self) -> bool:
        """Go on with the text model of a model of text and images. Returns whether it is one."""
        named = self.raw.get("architectures")
        if not (isinstance(named, list) and named and named[0] in WRAPPERS):
            return False
        outer, inner = self.raw, self.raw.get("text_config")
        if not isinstance(inner, dict):
            self._refuse("text_config", "is missing: it describes the model of text")
        own = {key: outer[key] for key in _OF_WRAPPERS if outer.get(key) is not None}
        self.raw = {"dtype": outer.get("dtype") or outer.get("torch_dtype"), **own, **inner}
        self.raw.pop("architectures", None)
        return True

    def _refuse(self, key: str, why: str) -> NoReturn:
        raise CheckpointError(f"{self.file}: {key} {self.raw.get(key)!r} {why}")

    def _max_context_tokens(self, rope: RopeConfig) -> int:
        """Return the context length. With linear scaling `max_position_embeddings` is that of the base model,
        which is then stretched; with llama3 it is the stretched length already, and with yarn it may be
        either."""
        num_positions = self._count("max_position_embeddings", most=_MAX_CONTEXT_TOKENS)
        if rope.rope_type == "yarn":
            return min(
                max(num_positions, int(rope.factor * rope.original_max_positions)), _MAX_CONTEXT_TOKENS
            )
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
            family = ARCHITECTURE_TO_FAMILY.get(str(architectures[0]))
            if family is None:
                names = ", ".join([*ARCHITECTURE_TO_FAMILY, *WRAPPERS])
                self._refuse("architectures", f"is not supported (supported: {names})")
            return family
        family = NAME_TO_FAMILY.get(str(self.raw.get("model_type")))
        if family is None:
            self._refuse("model_type", f"is not supported (supported: {', '.join(NAME_TO_FAMILY)})")
        return family

    def _refuse_unsupported(self) -> None:
        if self.raw.get("quantization_config"):
            self._refuse_quantized(self.raw["quantization_config"])
        for key in ("use_bidirectional_attention", "no_rope_scaling"):
            if self.raw.get(key):
                self._refuse(key, "is not supported")
        if self.raw.get("dual_chunk_attention_config"):
            raise CheckpointError(
                f"{self.file}: dual_chunk_attention_config is there, and attention in chunks is not "
                "supported; take the checkpoint of this model without 1M in its name"
            )

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
        if value is None or not _is_positive(value):
            raise CheckpointError(f"{self.file}: {key} {value!r} is not a positive number")
        return float(value)

    def _rope_keys(self, kind: str) -> tuple[str, dict[str, Any]]:
        """Return the parameters of layers of this kind, in either spelling, and their key: `rope_theta` with
        `rope_scaling`, or `rope_parameters` of transformers 5, which may have one set for each kind."""
        key = "rope_scaling" if self.raw.get("rope_scaling") else "rope_parameters"
        scaling = self.raw.get(key) or {}
        if isinstance(scaling, dict) and self.family.rotary.sliding_theta and kind in scaling:
            scaling = scaling[kind] or {}
        if not isinstance(scaling, dict) or any(isinstance(value, dict) for value in scaling.values()):
            self._refuse(key, "is not one flat set of rope parameters")
        return key, scaling

    def _layer_ropes(self, rope: RopeConfig, windows: tuple[int, ...]) -> tuple[RopeConfig | None, ...]:
        """Return the rotary embedding of each layer; () if it is `rope` for all."""
        family = self.family.rotary
        sliding: RopeConfig | None = rope
        if family.sliding_theta:
            sliding = RopeConfig("default", self._sliding_theta(), num_rotated=rope.num_rotated)
        ropes: list[RopeConfig | None] = [sliding if window else rope for window in windows]
        if family.without == "listed":
            ropes = [
                it if rotated else None
                for it, rotated in zip(ropes, self._rotated_layers(len(ropes)), strict=True)
            ]
        elif family.without == "unless_sliding" and self.raw.get("sliding_window") is not None:
            ropes = [it if window else None for it, window in zip(ropes, windows, strict=True)]
        return () if all(it == rope for it in ropes) else tuple(ropes)

    def _sliding_theta(self) -> float:
        key, scaling = self._rope_keys("sliding_attention")
        theta = self._number(self.family.rotary.sliding_theta, self.raw)
        if "sliding_attention" not in (self.raw.get(key) or {}):
            return theta
        if str(scaling.get("rope_type", "default")) != "default":
            self._refuse(key, "scales the rotary embedding of layers with a window, which is not supported")
        return self._number("rope_theta", scaling, theta)

    def _rotated_layers(self, num_layers: int) -> list[bool]:
        """Return which layers are rotated where config.json lists them."""
        listed = self.raw.get("no_rope_layers")
        if listed is None:
            every = self._count("no_rope_layer_interval")
            return [bool((layer + 1) % every) for layer in range(num_layers)]
        if (
            not isinstance(listed, list)
            or len(listed) != num_layers
            or any(value not in (0, 1) for value in listed)
        ):
            self._refuse("no_rope_layers", f"is not a 0 or 1 for each of the {num_layers} layers")
        return [bool(value) for value in listed]

    def _rope(self, head_dim: int) -> RopeConfig:
        """Read the rotary embedding of layers that attend to all."""
        key, scaling = self._rope_keys("full_attention")
        family = self.family.rotary
        part = self._number(
            "partial_rotary_factor",
            scaling,
            self._number("partial_rotary_factor", self.raw, family.partial_factor),
        )
        num_rotated = int(head_dim * part)
        if part > 1 or num_rotated < 2 or num_rotated % 2:
            self._refuse("partial_rotary_factor", f"does not make pairs of {head_dim} dimensions of a head")
        rope = dataclasses.replace(
            self._scaled_rope(key, scaling, num_rotated), is_interleaved=family.is_interleaved
        )
        return rope if num_rotated == head_dim else dataclasses.replace(rope, num_rotated=num_rotated)

    def _scaled_rope(self, key: str, scaling: dict[str, Any], num_rotated: int) -> RopeConfig:
        theta = self._number("rope_theta", scaling, self._number("rope_theta", self.raw, 10000.0))
        named = str(scaling.get("rope_type") or scaling.get("type") or "default")
        rope_type = _ROPE_TYPES.get(_ROPE_ALIASES.get(named, named))
        if rope_type is None:
            self._refuse(key, f"has an unsupported rope type (supported: {', '.join(_ROPE_TYPES)})")
        if rope_type == "default":
            return RopeConfig("default", theta)
        if rope_type == "longrope":
            return self._longrope(key, scaling, theta, num_rotated)
        factor = self._number("factor", scaling)
        if rope_type == "linear":
            return RopeConfig("linear", theta, factor)
        original = self._original_positions(key, scaling)
        if rope_type == "yarn":
            return self._yarn(
                key, scaling, RopeConfig("yarn", theta, factor, original_max_positions=original)
            )
        low, high = self._number("low_freq_factor", scaling), self._number("high_freq_factor", scaling)
        if low >= high:
            self._refuse(key, "has a low_freq_factor that is not below its high_freq_factor")
        return RopeConfig("llama3", theta, factor, low, high, original)

    def _original_positions(self, key: str, scaling: dict[str, Any]) -> int:
        """Return the context that the model was made for before it was stretched."""
        name = "original_max_position_embeddings"
        all_positions = float(self._count("max_position_embeddings"))
        original = self._number(name, scaling, self._number(name, self.raw, all_positions))
        if original > _MAX_CONTEXT_TOKENS:
            self._refuse(key, f"has more {name} than {_MAX_CONTEXT_TOKENS}")
        return int(original)

    def _longrope(self, key: str, scaling: dict[str, Any], theta: float, num_rotated: int) -> RopeConfig:
        """Read longrope. A stretched model divides its frequencies by the long factors at every position: the
        KV of a token must not depend on how long its sequence becomes."""
        original, most = self._original_positions(key, scaling), self._count("max_position_embeddings")
        name = "long_factor" if most > original else "short_factor"
        factors = scaling.get(name)
        if (
            not isinstance(factors, list)
            or len(factors) != num_rotated // 2
            or not all(_is_positive(factor) for factor in factors)
        ):
            self._refuse(key, f"has a {name} that is not {num_rotated // 2} positive numbers")
        factor = self._number("factor", scaling, most / original)
        is_stretched = factor > 1 and original > 1
        stretch = math.sqrt(1 + math.log(factor) / math.log(original)) if is_stretched else 1.0
        scale = self._number("attention_factor", scaling, stretch)
        pair_factors = tuple(map(float, factors))
        return RopeConfig(
            "longrope", theta, factor, original_max_positions=original, scale=scale, pair_factors=pair_factors
        )

    def _yarn(self, key: str, scaling: dict[str, Any], rope: RopeConfig) -> RopeConfig:
        """Read what yarn has beside its factor; its scale follows from the factor unless it is given."""
        fast, slow = self._number("beta_fast", scaling, 32.0), self._number("beta_slow", scaling, 1.0)
        if fast <= slow:
            self._refuse(key, "has a beta_fast that is not above its beta_slow")
        if scaling.get("attention_factor") is not None:
            scale = self._number("attention_factor", scaling)
        elif scaling.get("mscale") and scaling.get("mscale_all_dim"):
            scale = _mscale(rope.factor, self._number("mscale", scaling)) / _mscale(
                rope.factor, self._number("mscale_all_dim", scaling)
            )
        else:
            scale = _mscale(rope.factor, 1.0)
        is_truncated = scaling.get("truncate", True) is not False
        return dataclasses.replace(
            rope, beta_fast=fast, beta_slow=slow, is_truncated=is_truncated, scale=scale
        )

    def _sliding_windows(self, num_layers: int) -> tuple[int, ...]:
        kinds = self._default_kinds(num_layers)
        given = self.raw.get("layer_types")
        if given is not None and given != kinds:
            kinds = self._layer_types(given, num_layers)
        if "sliding_attention" not in kinds:
            return (0,) * num_layers
        window = self._count("sliding_window")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)

    def _default_kinds(self, num_layers: int) -> list[str]:
        """Return the kinds of layers that follow from other keys than `layer_types`."""
        if self.family.windows == "none":
            return ["full_attention"] * num_layers
        if self.family.windows == "all":
            window = self.raw.get("sliding_window")
            return ["full_attention" if window is None else "sliding_attention"] * num_layers
        if self.family.windows == "pattern":
            return self._pattern(num_layers)
        sliding = self.raw.get("use_sliding_window", False) and self.raw["sliding_window"] is not None
        first = self.raw.get("max_window_layers", 28)
        if not isinstance(first, int):
            self._refuse("max_window_layers", "is not a number of layers")
        return [
            "sliding_attention" if sliding and layer >= first else "full_attention"
            for layer in range(num_layers)
        ]

    def _pattern(self, num_layers: int) -> list[str]:
        """Return the kinds of layers by `sliding_window_pattern`: every so many-th sees all, or the layers
        repeat letters, of which L is one with a window."""
        if self.raw.get("sliding_window") is None:
            return ["full_attention"] * num_layers
        pattern = self.raw.get("sliding_window_pattern")
        if isinstance(pattern, str) and pattern and not set(pattern) - {"L", "G"}:
            letters = [pattern[layer % len(pattern)] for layer in range(num_layers)]
            return ["sliding_attention" if letter == "L" else "full_attention" for letter in letters]
        every = self._count("sliding_window_pattern")
        return [
            "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)
        ]

    def _layer_types(self, given: Any, num_layers: int) -> list[str]:
        if self.family.windows not in ("switched", "pattern"):
            self._refuse("layer_types", f"is not supported in a {self.family.name} model")
        if not isinstance(given, list) or len(given) != num_layers:
            self._refuse("layer_types", f"does not name the {num_layers} layers")
        if not all(kind in ("full_attention", "sliding_attention") for kind in given):
            self._refuse("layer_types", "is not supported (supported: full_attention, sliding_attention)")
        is_switched = self.family.windows == "switched"
        if is_switched and "sliding_attention" in given and not self.raw.get("use_sliding_window", False):
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


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MAX_NUMBER


def _mscale(factor: float, mscale: float) -> float:
    """Return by how much yarn scales queries and keys for a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

"""Read a checkpoint's configuration: shapes, windows, end tokens, weight files.

Engine cores and gateways read it as well as ranks, so nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NoReturn

from workers.errors import CheckpointError
from workers.model.config_values import MAX_SHOWN_CHARS, ConfigValues, shown
from workers.model.experts.mixture_shape import MixtureReader, MixtureShape
from workers.model.families.family import Family, NormNames
from workers.model.families.known_families import (
    ARCHITECTURE_TO_FAMILY,
    NAME_TO_FAMILY,
    UNSUPPORTED,
    WRAPPERS,
)
from workers.model.feed_forward_size import feed_forward_size
from workers.model.latent_shape import LatentReader, LatentShape
from workers.model.layer_shapes import (
    ALIKE,
    HeadShape,
    KvCells,
    LayerShapeReader,
    LayerShapes,
    head_dim_problem,
    kv_sources,
)
from workers.model.quantization.scheme_reader import SchemeReader
from workers.model.quantization.stored_format import QuantizationScheme
from workers.model.rope_config import MAX_CONTEXT_TOKENS, RopeConfig, RopeReader
from workers.model.state.state_shape import StateShape
from workers.model.window_reader import WindowReader

Activation = Literal["silu", "gelu_tanh", "xielu", "relu2"]

_MAX_HEADER_BYTES = 100_000_000
# Beyond what any model has; lists of as many layers are made.
_MAX_LAYERS = 1 << 16
# Positions and token ids travel as 32-bit numbers.
_MAX_TOKEN_ID = (1 << 31) - 1
_MAX_END_TOKENS = 1024
# Activations by their names in config.json; in a gated feed-forward, and in one without a gate.
_GATED_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_PLAIN_ACTIVATIONS: dict[str, Activation] = {"xielu": "xielu", "relu2": "relu2"}
# What a model of text and images says of its text model outside of `text_config`.
_OF_WRAPPERS = ("quantization_config", "tie_word_embeddings", "eos_token_id")


@dataclasses.dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder. `sliding_windows` has one entry a layer: a token sees itself and the window - 1 tokens
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
    layer_shapes: LayerShapes = ALIKE
    # The experts of some or all layers; None: there are none.
    mixture: MixtureShape | None = None
    # Logits have a bias.
    head_bias: bool = False
    # Attention by a latent of keys and values; None: they are products of the hidden states.
    latent: LatentShape | None = None
    # Layers behind the last that the checkpoint may have, and that are passed over.
    num_extra_layers: int = 0
    # What some layers keep in place of keys and values; None: all layers attend.
    state: StateShape | None = None
    # How weights are quantized in the checkpoint; None: they are not, or experts alone in a form of their
    # family.
    quantization: QuantizationScheme | None = None

    @property
    def traits(self) -> Family:
        """What makes its family."""
        return NAME_TO_FAMILY[self.family]

    def norm_names(self, layer: int) -> NormNames:
        """Return the names of the norms that a layer has."""
        names = self.traits.norms
        if self.traits.has_single_blocks:
            own = names.attention_input
            return NormNames(own, "", "", "") if self.has_mixer(layer) else NormNames("", "", own, "")
        return dataclasses.replace(names, feed_forward_input="") if self.is_parallel else names

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The rotary embedding of each layer, None where it has none."""
        return self.layer_ropes or (self.rope,) * self.num_layers

    @property
    def kv_cells(self) -> KvCells:
        """How the KV is laid out."""
        heads, full = HeadShape(self.num_kv_heads, self.head_dim), self.layer_shapes.full_heads
        if self.latent is not None:
            return KvCells(self.num_layers, 1, self.latent.parts, num_kinds=1)
        if full is None:
            return KvCells.of(self._num_own_kv, (heads,))
        windows = set(self.sliding_windows[: self._num_own_kv])
        return KvCells.of(self._num_own_kv, {heads if window else full for window in windows})

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """The layer whose keys and values each layer attends to."""
        return kv_sources(self.sliding_windows, self.layer_shapes.num_shared)

    @property
    def _num_own_kv(self) -> int:
        return self.num_layers - self.layer_shapes.num_shared

    def has_attention(self, layer: int) -> bool:
        """Whether a layer attends, and does not keep a state."""
        return self.state is None or self.state.attends(layer)

    def has_state(self, layer: int) -> bool:
        """Whether a layer keeps a state in place of keys and values."""
        return self.state is not None and self.state.keeps_state(layer)

    def has_mixer(self, layer: int) -> bool:
        """Whether a layer mixes tokens, by attention or by a state, and is no feed-forward alone."""
        return self.has_attention(layer) or self.has_state(layer)

    def has_own_kv(self, layer: int) -> bool:
        """Whether a layer has keys and values of its own, and does not attend to those of another."""
        return layer < self._num_own_kv

    def heads_of(self, layer: int) -> HeadShape:
        """Return the heads of a layer."""
        full = self.layer_shapes.full_heads
        if full is None or self.sliding_windows[layer]:
            return HeadShape(self.num_kv_heads, self.head_dim)
        return full

    def has_key_values(self, layer: int) -> bool:
        """Whether a layer takes its keys, before norm and rotation, for values."""
        return self.layer_shapes.are_keys_values and not self.sliding_windows[layer]

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.mixture is not None and layer in self.mixture.layers

    def intermediate_size_of(self, layer: int) -> int:
        """Return the size of a layer's feed-forward that is no expert's; 0 where it has none."""
        if self.traits.has_single_blocks and self.has_mixer(layer):
            return 0
        if self.mixture is not None and self.has_experts(layer) and not self.mixture.has_dense_branch:
            return 0
        is_double = self.layer_shapes.is_shared_double and not self.has_own_kv(layer)
        return self.intermediate_size * (1 + is_double)


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
    """Say what to do, and whether the folder has pickled weights instead."""
    pickled = sorted(file.name for file in model_dir.glob("*") if file.suffix in _PICKLED_SUFFIXES)
    if not pickled:
        return "; download the weights in safetensors into it"
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
        raise CheckpointError(f"{file}: no such file; download the whole folder of the model") from error
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


class _ConfigReader(ConfigValues):
    """Reads one config.json."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, read_json(file))
        self.is_wrapped = self._unwrap()
        self.family = self._family()
        aliases = self.family.key_aliases.items()
        renamed = {key: self.raw[alias] for alias, key in aliases if self.raw.get(alias) is not None}
        self.raw = {**self.family.defaults, **self.raw, **renamed}

    def read(self) -> ModelConfig:
        self._refuse_unsupported()
        hidden_size, num_heads = self.count("hidden_size"), self.count("num_attention_heads")
        num_layers = self._num_layers()
        family, multipliers = self.family, self.family.multipliers
        latent = LatentReader(self.file, self.raw).read() if family.has_latent_attention else None
        num_kv_heads, head_dim = self._heads(hidden_size, num_heads, latent)
        state = None if family.state is None else family.state.read(self, num_layers)
        self._refuse_state(state, num_kv_heads)
        windows = (0,) * num_layers
        if family.state is None:
            windows = WindowReader(self.file, self.raw, family).read(num_layers)
        shapes = ALIKE
        if family.has_layer_shapes:
            heads, vocab_size = HeadShape(num_kv_heads, head_dim), self.count("vocab_size")
            reader = LayerShapeReader(self.file, self.raw)
            shapes = reader.read(heads, num_heads, vocab_size, windows)
        ropes = RopeReader(self.file, self.raw, family.rotary)
        if latent is None:
            rope = ropes.read(head_dim if shapes.full_heads is None else shapes.full_heads.head_dim)
        else:
            rope = ropes.read(latent.qk_rope_head_dim)
            rope = dataclasses.replace(rope, num_rotated=latent.qk_rope_head_dim)
        qk_norm = family.qk_norm if self._is_set(family.has_qk_norm) else "none"
        return ModelConfig(
            family=family.name,
            vocab_size=self.count("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=feed_forward_size(self, family.feed_forward_key),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=self.number(family.norm_eps, self.raw, 1e-6),
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
            attention_scale=(
                self._attention_scale()
                if latent is None
                else ropes.score_factor(rope) * latent.head_dim**-0.5
            ),
            logits_divisor=(
                self._multiplier(multipliers.logits) / self._multiplier(multipliers.logits_scale)
            ),
            activation=self._activation(),
            qk_row_norm=qk_norm == "row",
            attention_softcap=self._softcap("attn_logit_softcapping") if family.has_softcaps else 0.0,
            logits_softcap=(
                self._softcap("final_logit_softcapping")
                if family.has_softcaps or family.has_logits_softcap
                else 0.0
            ),
            layer_ropes=ropes.of_layers(rope, windows),
            is_parallel=self._is_set(family.is_parallel),
            qk_own_norms=qk_norm == "own",
            layer_shapes=shapes,
            mixture=self._mixture(num_layers),
            head_bias=self._is_set(self.family.head_bias),
            latent=latent,
            num_extra_layers=self._num_extra_layers(),
            state=state,
            quantization=self._quantization(),
        )

    def _num_layers(self) -> int:
        traits = self.family.state
        listed = None if traits is None else traits.num_layers(self)
        return self.count("num_hidden_layers", listed, most=_MAX_LAYERS)

    def _refuse_state(self, state: StateShape | None, num_kv_heads: int) -> None:
        """Refuse a state that is not divided as KV is, and models without any KV."""
        if state is not None and not state.attending:
            raise CheckpointError(f"{self.file}: no layer attends, and such models are not supported")
        try:
            if state is not None:
                state.part_size(num_kv_heads)
        except ValueError as error:
            self.refuse("num_key_value_heads", f"divides the states of layers as well: {error}")

    def _heads(self, hidden_size: int, num_heads: int, latent: LatentShape | None) -> HeadShape:
        """Return the heads of keys and values, as they are in the KV: a latent is one that all share."""
        if latent is not None:
            return HeadShape(1, latent.width)
        num_kv_heads = self.count("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            self.refuse("num_key_value_heads", f"does not divide the {num_heads} attention heads")
        head_dim = self.count("head_dim", hidden_size // num_heads)
        if problem := head_dim_problem(head_dim):
            given = "" if self.raw.get("head_dim") else f" (hidden_size {hidden_size} // {num_heads} heads)"
            raise CheckpointError(f"{self.file}: head_dim {head_dim}{given} {problem}")
        return HeadShape(num_kv_heads, head_dim)

    def _num_extra_layers(self) -> int:
        key = self.family.extra_layers_key
        return self.count(key, most=_MAX_LAYERS) if key and self.raw.get(key) else 0

    def _mixture(self, num_layers: int) -> MixtureShape | None:
        traits, states = self.family.experts, self.family.state
        if traits is None:
            return None
        of_kind = () if states is None else states.expert_layers(self, num_layers)
        return MixtureReader(self.file, self.raw).read(traits, num_layers, of_kind)

    def _attention_scale(self) -> float:
        if self.family.query_scalar:
            return float(self.number(self.family.query_scalar, self.raw) ** -0.5)
        return self._multiplier(self.family.multipliers.attention_scores, self.family.score_scale)

    def _softcap(self, key: str) -> float:
        return self.number(key, self.raw) if self.raw.get(key) is not None else 0.0

    def _activation(self) -> Activation:
        key, aliases = self.family.activation, self.family.activation_aliases
        named = str(self.raw.get(key) or "silu")
        known = _GATED_ACTIVATIONS if self.family.is_gated else _PLAIN_ACTIVATIONS
        activation = known.get(aliases.get(named, named))
        if activation is None:
            self.refuse(key, f"is not supported (supported: {', '.join(known)})")
        return activation

    def _is_set(self, rule: bool | str) -> bool:
        """Whether the family has something, by its rule: always, never, or where this key says so."""
        return bool(self.raw.get(rule)) if isinstance(rule, str) else rule

    def _multiplier(self, key: str, none: float = 1.0) -> float:
        """Return the value of the key; `none` where the family has no such multiplier."""
        return self.number(key, self.raw, 1.0) if key else none

    def _unwrap(self) -> bool:
        """Go on with the text model of a model of text and images. Returns whether it is one."""
        named = self.raw.get("architectures")
        if not (isinstance(named, list) and named and named[0] in WRAPPERS):
            return False
        outer, inner = self.raw, self.raw.get("text_config")
        if not isinstance(inner, dict):
            self.refuse("text_config", "is missing: it describes the model of text")
        own = {key: outer[key] for key in _OF_WRAPPERS if outer.get(key) is not None}
        self.raw = {"dtype": outer.get("dtype") or outer.get("torch_dtype"), **own, **inner}
        self.raw.pop("architectures", None)
        return True

    def _max_context_tokens(self, rope: RopeConfig) -> int:
        """Return the context length. With linear scaling `max_position_embeddings` is that of the base model,
        which is then stretched, unless the family counts stretched positions; with llama3 it is the stretched
        length already, and with yarn it may be either."""
        num_positions = self.count("max_position_embeddings", most=MAX_CONTEXT_TOKENS)
        if self.family.context_key:
            longer = self.count(self.family.context_key, num_positions, most=MAX_CONTEXT_TOKENS)
            num_positions = max(num_positions, longer)
        if rope.rope_type == "yarn":
            return min(max(num_positions, int(rope.factor * rope.original_max_positions)), MAX_CONTEXT_TOKENS)
        if rope.rope_type != "linear" or self.family.rotary.is_context_stretched:
            return num_positions
        num_stretched = int(num_positions * rope.factor)
        if not 0 < num_stretched <= MAX_CONTEXT_TOKENS:
            what = f"factor {rope.factor:g} makes {num_stretched:.4g} of {num_positions} positions"
            raise CheckpointError(f"{self.file}: {what}, not 1 to {MAX_CONTEXT_TOKENS}")
        return num_stretched

    def _family(self) -> Family:
        architectures = self.raw.get("architectures")
        if isinstance(architectures, list) and architectures:
            family = ARCHITECTURE_TO_FAMILY.get(str(architectures[0]))
            if family is None:
                self._refuse_unknown("architectures", architectures[0], (*ARCHITECTURE_TO_FAMILY, *WRAPPERS))
            return family
        family = NAME_TO_FAMILY.get(str(self.raw.get("model_type")))
        if family is None:
            self._refuse_unknown("model_type", self.raw.get("model_type"), NAME_TO_FAMILY)
        return family

    def _refuse_unknown(self, key: str, found: object, known: Iterable[str]) -> NoReturn:
        """Refuse the name of a family, and give the nearest one that is known."""
        if found is None:
            raise CheckpointError(f"{self.file}: {key} is missing; docs/models.md lists the supported models")
        name = str(found)[:MAX_SHOWN_CHARS]
        if (why := UNSUPPORTED.get(name)) is not None:
            problem = f"{key} {name!r} is not supported: {why}"
            raise CheckpointError(f"{self.file}: {problem}; docs/models.md lists the supported models")
        # Most of these names end alike.
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.9)
        nearest = f", and the nearest supported name is {close[0]}" if close else ""
        problem = f"{key} {name!r} is not supported{nearest}"
        raise CheckpointError(f"{self.file}: {problem}; docs/models.md lists the supported models")

    def _refuse_unsupported(self) -> None:
        # Of text and images, only images attend to what follows them.
        if self.raw.get("use_bidirectional_attention") not in (None, False, "vision"):
            self.refuse("use_bidirectional_attention", "is not supported")
        if self.raw.get("dual_chunk_attention_config"):
            raise CheckpointError(
                f"{self.file}: dual_chunk_attention_config is there, and attention in chunks is not "
                "supported; take the checkpoint of this model without 1M in its name"
            )

    def _quantization(self) -> QuantizationScheme | None:
        config, experts = self.raw.get("quantization_config"), self.family.experts
        if not config:
            return None
        method = config.get("quant_method") if isinstance(config, dict) else None
        if method and experts is not None and method == experts.quantization:
            return None
        return SchemeReader(self.file, config).read()

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
            raise CheckpointError(
                f"{self.file}: eos_token_id {shown(value)} is not a token id or a list of at most "
                f"{_MAX_END_TOKENS}, each up to {_MAX_TOKEN_ID}"
            )
        return tuple(ids)

"""Turn the metadata of a GGUF file into what config.json and generation_config.json say.

The keys are those of the configurations of transformers. Where the metadata leaves out what a family's files
always have, such as the layers of Gemma with a window, the values are those that llama.cpp assumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from workers.errors import CheckpointError
from workers.model.gguf.gguf_experts import expert_traits_of, experts_config
from workers.model.gguf.gguf_file import F32_TYPE, GgufFile
from workers.model.gguf.gguf_gemma4 import END_TEXTS, gemma4_config
from workers.model.gguf.gguf_keys import GgufKeys

_F16_TYPE = 1
# Texts of tokens that end an answer, whether the metadata says so or not.
_END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|return|>",
        "<|call|>",
    }
)
_CONTROL, _USER_DEFINED = 3, 4
# Checkpoints of the Llama 3 family and what they were stretched from.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_POSITIONS = 1.0, 4.0, 8192
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_GEMMA2_PERIOD, _GEMMA3_PERIOD = 2, 6
_SMOLLM3_PERIOD = 4
_COHERE2_PERIOD = 4
_GPT_OSS_PERIOD = 2
# Heads are rotated in part, or may be.
_PARTIAL = ("phi3", "glm4", "cohere2", "stablelm", "glm4moe")
# Layers differ in their heads and in the size of their feed-forward.
_UNLIKE_LAYERS = ("gemma4",)


class Architecture(NamedTuple):
    """How `general.architecture` is called in config.json. `is_permuted`: the rows of queries and keys are in
    another order than in transformers. `norm_shift` is what the file has added to the weights of norms.
    `is_layer_norm`: norms are LayerNorms. `experts_key`: the key of the number of experts, "": there are
    none."""

    class_name: str
    model_type: str
    is_permuted: bool = False
    norm_shift: float = 0.0
    is_layer_norm: bool = False
    experts_key: str = ""


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", is_permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "gemma2": Architecture("Gemma2ForCausalLM", "gemma2", norm_shift=1.0),
    "gemma3": Architecture("Gemma3ForCausalLM", "gemma3_text", norm_shift=1.0),
    "gemma4": Architecture("Gemma4ForCausalLM", "gemma4_text"),
    "phi3": Architecture("Phi3ForCausalLM", "phi3"),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2"),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", is_permuted=True),
    "granite": Architecture("GraniteForCausalLM", "granite", is_permuted=True),
    "glm4": Architecture("Glm4ForCausalLM", "glm4"),
    "command-r": Architecture("CohereForCausalLM", "cohere", is_layer_norm=True),
    "cohere2": Architecture("Cohere2ForCausalLM", "cohere2", is_layer_norm=True),
    "stablelm": Architecture("StableLmForCausalLM", "stablelm", is_layer_norm=True),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", "qwen2_moe", experts_key="num_experts"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", experts_key="num_experts"),
    "olmoe": Architecture("OlmoeForCausalLM", "olmoe", experts_key="num_experts"),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM", "granitemoe", is_permuted=True, experts_key="num_local_experts"
    ),
    "gpt-oss": Architecture("GptOssForCausalLM", "gpt_oss", experts_key="num_local_experts"),
    "glm4moe": Architecture("Glm4MoeForCausalLM", "glm4_moe", experts_key="n_routed_experts"),
    "ernie4_5-moe": Architecture("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", experts_key="moe_num_experts"),
}
_MISTRAL = Architecture("MistralForCausalLM", "mistral", is_permuted=True)
_MIXTRAL = Architecture("MixtralForCausalLM", "mixtral", is_permuted=True, experts_key="num_local_experts")


def architecture_of(file: GgufFile) -> Architecture:
    """Return the architecture; `CheckpointError` for one that is not supported."""
    name = str(file.metadata.get("general.architecture", ""))
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: general.architecture {name[:100]!r} is not supported; take a model of one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return _MIXTRAL
    return ARCHITECTURES[name]


def config_of(file: GgufFile) -> dict[str, Any]:
    """Return what config.json says. Raises `CheckpointError`, naming the key, for what is missing or not
    supported."""
    return _ConfigMaker(file).make()


def generation_config_of(file: GgufFile) -> dict[str, Any]:
    """Return what generation_config.json says: the tokens that begin a text and end an answer."""
    metadata = file.metadata
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    types = metadata.get("tokenizer.ggml.token_type", [])
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = {token for token in named if isinstance(token, int)}
    is_gemma4 = metadata.get("general.architecture") == "gemma4"
    texts, kinds = (END_TEXTS, (_CONTROL, _USER_DEFINED)) if is_gemma4 else (_END_TEXTS, (_CONTROL,))
    ends |= {
        token
        for token, (text, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in kinds and text in texts
    }
    found: dict[str, Any] = {"eos_token_id": sorted(ends)} if ends else {}
    if isinstance(bos := metadata.get("tokenizer.ggml.bos_token_id"), int):
        found["bos_token_id"] = bos
    return found


def head_counts(file: GgufFile) -> tuple[int, int]:
    """Return the number of heads of queries, and of keys and values."""
    keys = GgufKeys(file)
    num_heads = keys.count("attention.head_count")
    return num_heads, keys.count("attention.head_count_kv", num_heads)


class _ConfigMaker(GgufKeys):
    """Makes one config.json."""

    def __init__(self, file: GgufFile) -> None:
        super().__init__(file)
        self._architecture = architecture_of(file)

    def make(self) -> dict[str, Any]:
        num_heads, num_layers = self.count("attention.head_count"), self.num_layers
        hidden_size = self.count("embedding_length")
        rotated = self.count("rope.dimension_count", hidden_size // num_heads)
        whole = hidden_size // num_heads if self.name in _PARTIAL else rotated
        head_dim = self.count("attention.key_length", whole)
        config: dict[str, Any] = {
            "architectures": [self._architecture.class_name],
            "model_type": self._architecture.model_type,
            "vocab_size": self._vocab_size(),
            "hidden_size": hidden_size,
            "intermediate_size": self._feed_forward_size(),
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._count_of_first("attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            **self._norm_eps(),
            "max_position_embeddings": self.count("context_length"),
            "rope_theta": self.number("rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in self.file.name_to_tensor,
            "torch_dtype": self._dtype(),
            # Without these, some families have default ones, of another vocabulary.
            "bos_token_id": None,
            "pad_token_id": self.file.metadata.get("tokenizer.ggml.padding_token_id"),
        }
        if (scaling := self._rope_scaling(config)) is not None:
            config["rope_scaling"] = scaling
        family: Callable[[dict[str, Any]], dict[str, Any]] = getattr(self, f"_{self.name.replace('-', '_')}")
        config |= family(config)
        if traits := self._architecture.experts_key and expert_traits_of(self._architecture.class_name):
            config |= experts_config(self, traits, self._architecture.experts_key)
        return config | generation_config_of(self.file)

    def _count_of_first(self, key: str, default: int | None = None) -> int:
        """Return the count of the first layer where that of others may differ, or else that of all."""
        if self.name in _UNLIKE_LAYERS:
            return self.counts(key, default)[0]
        return self.count(key, default)

    def _feed_forward_size(self) -> int:
        """Return the size of feed-forwards; that of experts, which replaces it, where no layer has one."""
        key = "feed_forward_length"
        if self._architecture.experts_key and not self.get(key):
            key = "expert_feed_forward_length"
        return self._count_of_first(key)

    def _norm_eps(self) -> dict[str, float]:
        if self._architecture.is_layer_norm:
            return {"layer_norm_eps": self.number("attention.layer_norm_epsilon")}
        return {"rms_norm_eps": self.number("attention.layer_norm_rms_epsilon")}

    def _vocab_size(self) -> int:
        embedding = self.file.name_to_tensor.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointError(
                f"{self.file.path}: tensor token_embd.weight is missing; download the file again"
            )
        return embedding.shape[0]

    def _dtype(self) -> str:
        """Return what dequantized weights are worth: 16 bits, but for a file of 32-bit floats alone."""
        found = {tensor.type_number for tensor in self.file.name_to_tensor.values() if len(tensor.shape) > 1}
        if found <= {F32_TYPE}:
            return "float32"
        return "float16" if found <= {F32_TYPE, _F16_TYPE} else "bfloat16"

    # ------------------------------------------------------------------------------------------ rope

    def _rope_scaling(self, config: dict[str, Any]) -> dict[str, Any] | None:
        kind = self.get("rope.scaling.type")
        if self.name in _UNLIKE_LAYERS:  # those with a window have another rotary embedding
            return None
        if "rope_freqs.weight" in self.file.name_to_tensor:
            return self._llama3_scaling(config)
        if kind in (None, "none", "longrope"):
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": self.number("rope.scaling.factor")}
        if kind == "yarn":
            positions = self.count("rope.scaling.original_context_length")
            factor = self.number("rope.scaling.factor")
            return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": positions}
        self.refuse("rope.scaling.type", kind, "none, linear, yarn or longrope")

    def _llama3_scaling(self, config: dict[str, Any]) -> dict[str, Any]:
        """Find the scaling of which the file has the factor of each frequency alone."""
        factors = self.file.floats("rope_freqs.weight")
        factor = round(max(factors), 4)
        expected = llama3_factors(config["rope_theta"], 2 * len(factors), factor)
        if any(abs(found - wanted) > 1e-3 * wanted for found, wanted in zip(factors, expected, strict=True)):
            raise CheckpointError(
                f"{self.file.path}: rope_freqs.weight is not the scaling of Llama 3; take the model in "
                "Hugging Face layout"
            )
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LOW_FREQ_FACTOR,
            "high_freq_factor": _HIGH_FREQ_FACTOR,
            "original_max_position_embeddings": _ORIGINAL_POSITIONS,
        }

    def _longrope(self) -> dict[str, Any]:
        if "rope_factors_long.weight" not in self.file.name_to_tensor:
            return {}
        longs, shorts = (self.file.floats(f"rope_factors_{which}.weight") for which in ("long", "short"))
        return {
            "rope_scaling": {"type": "longrope", "long_factor": longs, "short_factor": shorts},
            "original_max_position_embeddings": self.count("rope.scaling.original_context_length"),
        }

    # -------------------------------------------------------------------------------------- families

    def _llama(self, config: dict[str, Any]) -> dict[str, Any]:
        if self._architecture is _MIXTRAL:
            return {"sliding_window": self.get("attention.sliding_window") or None}
        if (window := self.get("attention.sliding_window")) is not None:
            names = {"architectures": [_MISTRAL.class_name], "model_type": _MISTRAL.model_type}
            return names | {"sliding_window": window}
        return self._biases()

    def _biases(self) -> dict[str, Any]:
        return {"attention_bias": self.has("attn_q.bias"), "mlp_bias": self.has("ffn_down.bias")}

    def _qwen2(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"use_sliding_window": False}

    def _qwen3(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"use_sliding_window": False, "attention_bias": self.has("attn_q.bias")}

    def _gemma(self, config: dict[str, Any]) -> dict[str, Any]:
        is_27b = config["num_hidden_layers"] == _GEMMA_27B_LAYERS[self.name]
        per_head = config["hidden_size"] // config["num_attention_heads"]
        del config["hidden_act"]
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": per_head if is_27b else config["head_dim"],
            "attention_bias": False,
        }

    def _layer_kinds(self, config: dict[str, Any], period: int) -> list[str]:
        """Return which layers have a window: all but each last one of a period, if the file has no list."""
        num_layers, key = config["num_hidden_layers"], "attention.sliding_window_pattern"
        found = self.get(key)
        if isinstance(found, list) and len(found) == num_layers and all(isinstance(it, bool) for it in found):
            return ["sliding_attention" if it else "full_attention" for it in found]
        period = self.count(key, period)
        return [
            "sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)
        ]

    def _gemma2(self, config: dict[str, Any]) -> dict[str, Any]:
        return self._gemma(config) | {
            "attn_logit_softcapping": self.number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": self.number("final_logit_softcapping", 30.0),
            "sliding_window": self.count("attention.sliding_window", 4096),
            "layer_types": self._layer_kinds(config, _GEMMA2_PERIOD),
        }

    def _gemma3(self, config: dict[str, Any]) -> dict[str, Any]:
        return self._gemma(config) | {
            "rope_theta": self.number("rope.freq_base", 1e6),
            "rope_local_base_freq": self.number("rope.freq_base_swa", 10000.0),
            "sliding_window": self.count("attention.sliding_window"),
            "layer_types": self._layer_kinds(config, _GEMMA3_PERIOD),
            "attn_logit_softcapping": None,
            "final_logit_softcapping": self._softcap(),
        }

    def _gemma4(self, config: dict[str, Any]) -> dict[str, Any]:
        del config["hidden_act"], config["rope_theta"]
        return gemma4_config(self) | {
            "attention_bias": self.has("attn_q.bias"),
            "final_logit_softcapping": self._softcap(),
        }

    def _softcap(self) -> float | None:
        return None if self.get("final_logit_softcapping") is None else self.number("final_logit_softcapping")

    def _phi3(self, config: dict[str, Any]) -> dict[str, Any]:
        return (
            self._partial_rope(config)
            | self._longrope()
            | {"sliding_window": self.get("attention.sliding_window") or None}
        )

    def _partial_rope(self, config: dict[str, Any]) -> dict[str, Any]:
        rotated = self.count("rope.dimension_count", config["head_dim"])
        return (
            {} if rotated == config["head_dim"] else {"partial_rotary_factor": rotated / config["head_dim"]}
        )

    def _olmo2(self, config: dict[str, Any]) -> dict[str, Any]:
        if self.get("attention.sliding_window") is not None:
            self.refuse(
                "attention.sliding_window", self.get("attention.sliding_window"), "absent, as in OLMo 2"
            )
        return {"attention_bias": self.has("attn_q.bias")}

    def _smollm3(self, config: dict[str, Any]) -> dict[str, Any]:
        layers = range(1, config["num_hidden_layers"] + 1)
        return self._biases() | {
            "no_rope_layer_interval": _SMOLLM3_PERIOD,
            "no_rope_layers": [int(layer % _SMOLLM3_PERIOD != 0) for layer in layers],
            "use_sliding_window": False,
        }

    def _granite(self, config: dict[str, Any]) -> dict[str, Any]:
        return self._biases() | {
            "attention_multiplier": self.number("attention.scale", config["head_dim"] ** -0.5),
            "embedding_multiplier": self.number("embedding_scale", 1.0),
            "residual_multiplier": self.number("residual_scale", 1.0),
            "logits_scaling": self.number("logit_scale", 1.0),
        }

    def _glm4(self, config: dict[str, Any]) -> dict[str, Any]:
        if self.get("rope.dimension_sections") is not None:
            sections = self.get("rope.dimension_sections")
            self.refuse("rope.dimension_sections", sections, "absent, as in GLM-4 without images")
        rotated = self.count("rope.dimension_count", config["head_dim"])
        return {
            "partial_rotary_factor": rotated / config["head_dim"],  # without it, that of the family is half
            "attention_bias": self.has("attn_q.bias"),
        }

    def _qwen2moe(self, config: dict[str, Any]) -> dict[str, Any]:
        return self._qwen2(config) | {"qkv_bias": self.has("attn_q.bias")}

    _qwen3moe = _qwen3

    def _olmoe(self, config: dict[str, Any]) -> dict[str, Any]:
        if self.get("attention.clamp_kqv"):
            self.refuse("attention.clamp_kqv", self.get("attention.clamp_kqv"), "absent, as in OLMoE")
        return {"attention_bias": self.has("attn_q.bias")}

    _granitemoe = _granite

    def _gpt_oss(self, config: dict[str, Any]) -> dict[str, Any]:
        scaling = config.get("rope_scaling") or {"rope_type": "default"}
        return {
            "rope_scaling": scaling | {"truncate": False},
            "attention_bias": self.has("attn_q.bias"),
            "sliding_window": self.count("attention.sliding_window"),
            "layer_types": self._layer_kinds(config, _GPT_OSS_PERIOD),
        }

    def _glm4moe(self, config: dict[str, Any]) -> dict[str, Any]:
        return self._glm4(config) | {
            "use_qk_norm": self.has("attn_q_norm.weight"),
            "num_nextn_predict_layers": 0,
        }

    def _ernie4_5_moe(self, config: dict[str, Any]) -> dict[str, Any]:
        return {"use_bias": self.has("attn_q.bias")}

    def _command_r(self, config: dict[str, Any]) -> dict[str, Any]:
        return self._cohere() | {"use_qk_norm": self.has("attn_q_norm.weight")}

    def _cohere(self) -> dict[str, Any]:
        return {"logit_scale": self.number("logit_scale"), "attention_bias": self.has("attn_q.bias")}

    def _cohere2(self, config: dict[str, Any]) -> dict[str, Any]:
        rotated = self.count("rope.dimension_count", config["head_dim"])
        if rotated != config["head_dim"]:
            self.refuse("rope.dimension_count", rotated, f"the {config['head_dim']} of a whole head")
        return self._cohere() | {
            "sliding_window": self.count("attention.sliding_window"),
            "layer_types": self._layer_kinds(config, _COHERE2_PERIOD),
        }

    def _stablelm(self, config: dict[str, Any]) -> dict[str, Any]:
        rotated = self.count("rope.dimension_count")
        return {
            "partial_rotary_factor": rotated / config["head_dim"],
            "use_qkv_bias": self.has("attn_q.bias"),
            "qk_layernorm": self.has("attn_q_norm.weight"),
            # As llama.cpp does, whatever `use_parallel_residual` of the metadata says.
            "use_parallel_residual": not self.has("ffn_norm.weight"),
        }


def llama3_factors(theta: float, head_dim: int, factor: float) -> list[float]:
    """Return by what the wavelength of each frequency is multiplied in models of the Llama 3 family."""
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (index / head_dim)
        smooth = (_ORIGINAL_POSITIONS / wavelength - _LOW_FREQ_FACTOR) / (
            _HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR
        )
        smooth = min(max(smooth, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors

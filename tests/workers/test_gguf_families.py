"""GGUF files of each architecture: from a random model of transformers, written as llama.cpp's converter
writes them, back to the same configuration, tensors and logits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf_files
import numpy as np
import pytest
import torch
import transformers
from decoder_logits import decoder_logits
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from workers.errors import CheckpointError
from workers.model.families.known_families import ARCHITECTURE_TO_FAMILY
from workers.model.gguf.gguf_config import ARCHITECTURES
from workers.model.model_config import read_model_config
from workers.model.model_folder import described_folder, weights_folder
from workers.model.quantization.quantized_files import QuantizedTensorFiles

SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 127,
    "pad_token_id": None,
}
TYPES = tuple(GGMLQuantizationType[name] for name in ("Q4_0", "Q8_0", "Q4_1", "Q5_1", "Q5_0", "IQ4_NL"))
TOKENS = torch.randint(128, (1, 70), generator=torch.Generator().manual_seed(5))


class _Case(NamedTuple):
    """A configuration of transformers, and the keys that the converter writes beside those of every model."""

    config: transformers.PreTrainedConfig
    metadata: dict[str, Any]
    norm_shift: float = 0.0
    is_permuted: bool = False
    # Whether transformers reads files of this architecture too.
    is_read_by_transformers: bool = False
    others: dict[str, Any] | None = None
    # `general.architecture` where that is not nearly the model type.
    name: str = ""

    @property
    def architecture(self) -> str:
        return self.name or str(self.config.model_type).removesuffix("_text")


def _rope(theta: float, **fields: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **fields}


def _window(window: int, **fields: Any) -> dict[str, Any]:
    return {"attention.key_length": 32, "attention.sliding_window": window, **fields}


def _gemma4_ropes(part: float) -> dict[str, Any]:
    full = _rope(2e6, rope_type="proportional", partial_rotary_factor=part)
    return {"full_attention": full, "sliding_attention": _rope(5000.0)}


def _factors(rotated: int, still: int) -> dict[str, Any]:
    """Return by what the frequencies of layers without a window are divided."""
    return {"rope_freqs.weight": np.array([1.0] * rotated + [1e30] * still, np.float32)}


_LAST_LAYERS = ["sliding_attention", "full_attention"]
_GEMMA4 = {
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.key_length_swa": 32,
    "attention.value_length_swa": 32,
    "rope.dimension_count": 64,
    "rope.dimension_count_swa": 32,
    "rope.freq_base": 2e6,
    "rope.freq_base_swa": 5000.0,
    "attention.sliding_window": 16,
}
_LAYER_NORM = SHAPE | {"head_dim": 16, "layer_norm_eps": 1e-5}
_EPSILON = {"attention.layer_norm_epsilon": 1e-5}
CASES = {
    "gemma2": _Case(
        transformers.Gemma2Config(
            **SHAPE,
            query_pre_attn_scalar=32,
            sliding_window=16,
            attn_logit_softcapping=20.0,
            final_logit_softcapping=5.0,
            rope_parameters=_rope(10000.0),
        ),
        _window(16, attn_logit_softcapping=20.0, final_logit_softcapping=5.0),
        norm_shift=1.0,
        is_read_by_transformers=True,
    ),
    "gemma3": _Case(
        transformers.Gemma3TextConfig(
            **SHAPE,
            query_pre_attn_scalar=32,
            sliding_window=16,
            rope_parameters={
                "sliding_attention": _rope(10000.0),
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        ),
        _window(16) | {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        norm_shift=1.0,
        is_read_by_transformers=True,
    ),
    "gemma3 with a list of windows": _Case(
        transformers.Gemma3TextConfig(
            **SHAPE,
            query_pre_attn_scalar=32,
            sliding_window=16,
            final_logit_softcapping=5.0,
            layer_types=["full_attention", "sliding_attention"] * 4,
            rope_parameters={"sliding_attention": _rope(5000.0), "full_attention": _rope(1e6)},
        ),
        _window(16)
        | {
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 5000.0,
            "attention.sliding_window_pattern": [False, True] * 4,
            "final_logit_softcapping": 5.0,
        },
        norm_shift=1.0,
    ),
    "gemma4 with shared layers and inputs of layers": _Case(
        transformers.Gemma4TextConfig(
            **SHAPE,
            global_head_dim=64,
            sliding_window=16,
            layer_types=[*["sliding_attention", "sliding_attention", "full_attention"] * 2, *_LAST_LAYERS],
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=128,
            final_logit_softcapping=5.0,
            rope_parameters=_gemma4_ropes(0.25),
        ),
        _GEMMA4
        | {
            "feed_forward_length": [96] * 5 + [192] * 3,
            "attention.shared_kv_layers": 3,
            "attention.sliding_window_pattern": [True, True, False, True, True, False, True, False],
            "embedding_length_per_layer_input": 8,
            "final_logit_softcapping": 5.0,
        },
        is_read_by_transformers=True,
        # As the published files, which have what these layers do not use.
        others={
            **_factors(rotated=8, still=24),
            "blk.6.attn_k.weight": np.ones((64, 64), np.float32),
            "blk.6.attn_v.weight": np.ones((64, 64), np.float32),
            "blk.6.attn_k_norm.weight": np.ones(32, np.float32),
        },
        name="gemma4",
    ),
    "gemma4 with keys for values": _Case(
        transformers.Gemma4TextConfig(
            **(SHAPE | {"num_key_value_heads": 4}),
            global_head_dim=64,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
            sliding_window=16,
            layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
            hidden_size_per_layer_input=0,
            rope_parameters=_gemma4_ropes(0.5),
        ),
        _GEMMA4
        | {
            "attention.head_count_kv": [4, 4, 4, 2] * 2,
            "attention.shared_kv_layers": 0,
            "attention.sliding_window_pattern": [True, True, True, False] * 2,
            "embedding_length_per_layer_input": 0,
        },
        is_read_by_transformers=True,
        others=_factors(rotated=16, still=16),
        name="gemma4",
    ),
    "phi3": _Case(
        transformers.Phi3Config(
            **(SHAPE | {"head_dim": 16}), sliding_window=24, rope_parameters=_rope(10000.0)
        ),
        {
            "rope.dimension_count": 16,
            "rope.freq_base": 10000.0,
            "rope.scaling.original_context_length": 512,
            "attention.sliding_window": 24,
        },
        is_read_by_transformers=True,
    ),
    "phi3 with a stretched context": _Case(
        transformers.Phi3Config(
            **(SHAPE | {"head_dim": 16}),
            original_max_position_embeddings=32,
            rope_parameters=_rope(
                10000.0,
                rope_type="longrope",
                long_factor=[1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 11.0, 16.0],
                short_factor=[1.0, 1.0, 1.25, 1.25, 1.5, 1.5, 1.75, 2.0],
                original_max_position_embeddings=32,
            ),
        ),
        {
            "rope.dimension_count": 16,
            "rope.freq_base": 10000.0,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": 1.0,
            "attention.sliding_window": 0,
        },
        others={
            "rope_factors_long.weight": np.array([1, 1.5, 2, 3, 5, 8, 11, 16], np.float32),
            "rope_factors_short.weight": np.array([1, 1, 1.25, 1.25, 1.5, 1.5, 1.75, 2], np.float32),
        },
    ),
    "olmo2": _Case(
        transformers.Olmo2Config(**SHAPE, rope_parameters=_rope(5e5)),
        {"attention.key_length": 32, "rope.dimension_count": 32, "rope.freq_base": 5e5},
    ),
    "smollm3": _Case(
        transformers.SmolLM3Config(**SHAPE, tie_word_embeddings=True, rope_parameters=_rope(5e6)),
        {"attention.key_length": 32, "rope.dimension_count": 32, "rope.freq_base": 5e6},
        is_permuted=True,
    ),
    "granite": _Case(
        transformers.GraniteConfig(
            **(SHAPE | {"head_dim": 16}),
            attention_multiplier=0.03,
            embedding_multiplier=6.0,
            residual_multiplier=0.3,
            logits_scaling=4.0,
            rope_parameters=_rope(1e4),
        ),
        {
            "rope.dimension_count": 16,
            "rope.freq_base": 1e4,
            "attention.scale": 0.03,
            "embedding_scale": 6.0,
            "residual_scale": 0.3,
            "logit_scale": 4.0,
        },
        is_permuted=True,
    ),
    "glm4": _Case(
        transformers.Glm4Config(
            **SHAPE, attention_bias=True, rope_parameters=_rope(1e4, partial_rotary_factor=0.5)
        ),
        {"attention.key_length": 32, "rope.dimension_count": 16, "rope.freq_base": 1e4},
    ),
    "glm4 with whole heads": _Case(
        transformers.Glm4Config(
            **SHAPE, attention_bias=False, rope_parameters=_rope(1e4, partial_rotary_factor=1.0)
        ),
        {"attention.key_length": 32, "rope.dimension_count": 32, "rope.freq_base": 1e4},
    ),
    "command-r": _Case(
        transformers.CohereConfig(**_LAYER_NORM, logit_scale=2.0, rope_parameters=_rope(8e6)),
        {**_EPSILON, "rope.freq_base": 8e6, "logit_scale": 2.0, "rope.scaling.type": "none"},
        name="command-r",
    ),
    "command-r with norms of heads": _Case(
        transformers.CohereConfig(
            **_LAYER_NORM, logit_scale=2.0, use_qk_norm=True, attention_bias=True, rope_parameters=_rope(1e4)
        ),
        {**_EPSILON, "rope.freq_base": 1e4, "logit_scale": 2.0, "rope.scaling.type": "none"},
        name="command-r",
    ),
    "cohere2": _Case(
        transformers.Cohere2Config(
            **_LAYER_NORM, logit_scale=2.0, sliding_window=16, rope_parameters=_rope(5e4)
        ),
        {
            **_EPSILON,
            "rope.freq_base": 5e4,
            "rope.dimension_count": 16,
            "logit_scale": 2.0,
            "attention.sliding_window": 16,
            "rope.scaling.type": "none",
        },
    ),
    "stablelm": _Case(
        transformers.StableLmConfig(
            **_LAYER_NORM, use_qkv_bias=True, rope_parameters=_rope(1e4, partial_rotary_factor=0.25)
        ),
        {**_EPSILON, "rope.freq_base": 1e4, "rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    "stablelm with parallel layers and norms of heads": _Case(
        transformers.StableLmConfig(
            **_LAYER_NORM,
            use_parallel_residual=True,
            qk_layernorm=True,
            rope_parameters=_rope(1e4, partial_rotary_factor=0.5),
        ),
        {**_EPSILON, "rope.freq_base": 1e4, "rope.dimension_count": 8, "use_parallel_residual": True},
    ),
}


class _Written(NamedTuple):
    case: _Case
    model: Any
    file: Path
    folder: Path


def _random_model(config: transformers.PreTrainedConfig) -> Any:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases, which begin as ones and zeros
                parameter.add_(0.2 * torch.randn(parameter.shape))
            elif "embed" not in name:
                parameter.mul_(4)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.2)
    return model


def _state(model: Any) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint: a head that is the embeddings is not among them."""
    state: dict[str, Tensor] = model.state_dict()
    is_tied = model.config.tie_word_embeddings
    return {name: tensor for name, tensor in state.items() if not (is_tied and name == "lm_head.weight")}


@pytest.fixture(scope="module", params=list(CASES))
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> _Written:
    case, folder = CASES[request.param], tmp_path_factory.mktemp("gguf")
    model = _random_model(case.config)
    file = _write_file(folder / "model.gguf", case, model)
    return _Written(case, model, file, weights_folder(file, "fp32", folder / "cache"))


def _write_file(file: Path, case: _Case, model: Any, types: Sequence[GGMLQuantizationType] = ()) -> Path:
    """Write the model, its matrices in the `types` in turn, if there are any."""
    config = case.config
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": SHAPE["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    heads = (config.num_attention_heads, SHAPE["num_key_value_heads"]) if case.is_permuted else (0, 0)
    return gguf_files.write_family(
        file,
        case.architecture,
        gguf_files.with_joined_heads({name: tensor.numpy() for name, tensor in _state(model).items()}),
        metadata | case.metadata,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        norm_shift=case.norm_shift,
        others=case.others,
        types=types,
    )


def test_tensors_are_those_of_the_model(written: _Written) -> None:
    expected, found = _state(written.model), load_file(written.folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        tolerance = 1e-6 if written.case.norm_shift and "norm" in name else 0.0
        assert torch.allclose(found[name], tensor, rtol=0, atol=tolerance), name
    if written.case.is_read_by_transformers:
        read = load_gguf_checkpoint(written.file, return_tensors=True, model_to_load=written.model)["tensors"]
        # transformers looks for the factor of a layer under a name without `.weight`, and finds none.
        assert found.keys() - read.keys() == {name for name in found if name.endswith("layer_scalar")}
        assert read.keys() <= found.keys()
        assert all(torch.equal(found[name], tensor.float()) for name, tensor in read.items())


def test_logits_of_transformers_are_those_of_the_model(written: _Written) -> None:
    """From the folder alone: every key of its config.json that matters is right."""
    model = transformers.AutoModelForCausalLM.from_pretrained(written.folder, attn_implementation="eager")
    assert type(model) is type(written.model)
    with torch.inference_mode():
        found, expected = (it.float().eval()(TOKENS).logits for it in (model, written.model))
    assert expected.std() > 0.1
    assert torch.allclose(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_logits_of_the_decoder_are_those_of_the_model(written: _Written) -> None:
    config = json.loads((written.folder / "config.json").read_text())
    if config["architectures"][0] not in ARCHITECTURE_TO_FAMILY:
        pytest.skip("the decoder does not compute this family")
    with torch.inference_mode():
        expected = written.model(TOKENS).logits[0]
    found = decoder_logits(written.folder, TOKENS[0].tolist())
    # Kernels of each instruction set add in an order of their own: 1.005e-4 was seen with AMX.
    assert float((found - expected).abs().max() / expected.abs().max()) <= 2e-4


def test_quantized_matrices_are_those_that_were_dequantized(written: _Written, tmp_path: Path) -> None:
    """Also rows in another order, tensors of several products, embeddings and tied heads."""
    file = _write_file(tmp_path / "model.gguf", written.case, written.model, TYPES)
    quantized, plain = (
        weights_folder(file, "bf16", tmp_path / "cache", keeps_quantized=keeps) for keeps in (True, False)
    )
    expected = load_file(plain / "model.safetensors")
    scheme = read_model_config(quantized).quantization
    assert scheme is not None
    with QuantizedTensorFiles(quantized, torch.bfloat16, torch.device("cpu"), scheme) as files:
        assert files.names == expected.keys()
        kept = {name for name in expected if files.is_quantized(name)}
        for name, tensor in expected.items():
            assert torch.equal(files.tensor(name, tuple(tensor.shape)), tensor), name
    is_matrix = {name for name, it in expected.items() if it.dim() == 2 and "norm" not in name}
    assert kept == is_matrix - {name for name in is_matrix if expected[name].shape[1] % 32}


def test_every_architecture_has_a_case() -> None:
    """`test_gguf_folder.py` has those of three, and `test_gguf_experts.py` those with experts."""
    dense = {name for name, architecture in ARCHITECTURES.items() if not architecture.experts_key}
    assert dense - {"llama", "qwen2", "qwen3"} == {case.architecture for case in CASES.values()}


# ------------------------------------------------------------------------------------------ single keys


def _config_of(tmp_path: Path, case: _Case, **changes: Any) -> dict[str, Any]:
    """Return the config.json of a file with one layer, and some keys changed (None: without the key)."""
    config = case.config
    metadata = {
        "block_count": 1,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }
    merged = metadata | case.metadata | changes.pop("metadata", {})
    tensors = {"model.embed_tokens.weight": np.zeros((128, 64), np.float32), **changes.pop("tensors", {})}
    file = gguf_files.write_family(
        tmp_path / "one.gguf",
        case.architecture,
        tensors,
        {key: value for key, value in merged.items() if value is not None},
        **changes,
    )
    folder = described_folder(file, tmp_path / "cache")
    return dict(json.loads((folder / "config.json").read_text()))


def test_longrope_has_the_factors_of_the_file(tmp_path: Path) -> None:
    factors = {"long": np.linspace(1, 8, 8, dtype=np.float32), "short": np.ones(8, np.float32)}
    others = {f"rope_factors_{name}.weight": values for name, values in factors.items()}
    metadata = {"context_length": 4096, "rope.scaling.type": "longrope", "attention.sliding_window": 0}
    config = _config_of(tmp_path, CASES["phi3"], metadata=metadata, others=others)
    assert config["rope_scaling"]["long_factor"] == factors["long"].tolist()
    assert config["rope_scaling"]["short_factor"] == [1.0] * 8
    assert (config["original_max_position_embeddings"], config["max_position_embeddings"]) == (512, 4096)
    assert config["sliding_window"] is None


@pytest.mark.parametrize(("num_layers", "scalar"), [(62, 16), (26, 32)])
def test_the_largest_gemma_scales_queries_by_another_size(
    num_layers: int, scalar: int, tmp_path: Path
) -> None:
    config = _config_of(tmp_path, CASES["gemma3"], metadata={"block_count": num_layers})
    assert config["query_pre_attn_scalar"] == scalar
    assert config["layer_types"].count("full_attention") == num_layers // 6


_SHARED = "gemma4 with shared layers and inputs of layers"


@pytest.mark.parametrize(
    ("case", "metadata", "message"),
    [
        ("glm4", {"rope.dimension_sections": [8, 12, 12, 0]}, "glm4.rope.dimension_sections is .*absent"),
        ("olmo2", {"attention.sliding_window": 16}, "olmo2.attention.sliding_window is 16, not absent"),
        ("gemma3", {"attention.sliding_window": None}, "gemma3.attention.sliding_window is missing"),
        ("gemma3", {"attention.sliding_window_pattern": [True]}, None),
        ("gemma3", {"attention.sliding_window_pattern": "x"}, "sliding_window_pattern is x, not"),
        ("cohere2", {"rope.dimension_count": 8}, "dimension_count is 8, not the 16 of a whole head"),
        ("command-r", {"logit_scale": None}, "command-r.logit_scale is missing"),
        ("stablelm", {"rope.dimension_count": None}, "stablelm.rope.dimension_count is missing"),
        ("stablelm", {"attention.layer_norm_epsilon": None}, "attention.layer_norm_epsilon is missing"),
        ("granite", {"rope.scaling.type": "ntk"}, "rope.scaling.type is ntk, not none, linear"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(
    case: str, metadata: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    if message is None:
        assert _config_of(tmp_path, CASES[case], metadata=metadata)["layer_types"] == ["sliding_attention"]
        return
    with pytest.raises(CheckpointError, match=message):
        _config_of(tmp_path, CASES[case], metadata=metadata)


def _gemma4_config(tmp_path: Path, without: tuple[int, ...] = (), **changes: Any) -> dict[str, Any]:
    """Return the config.json of a file of Gemma 4 in which the layers `without` have no values."""
    values = {
        f"model.layers.{layer}.self_attn.v_proj.weight": np.zeros((64, 64), np.float32)
        for layer in range(5)
        if layer not in without
    }
    table = {"model.embed_tokens_per_layer.weight": np.zeros((140, 64), np.float32)}
    options = {"others": CASES[_SHARED].others, **changes}
    tmp_path.mkdir(exist_ok=True)
    return _config_of(tmp_path, CASES[_SHARED], tensors=values | options.pop("tensors", table), **options)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"expert_count": 128}, "gemma4.expert_count is 128, but experts are not supported"),
        ({"attention.sliding_window_pattern": 6}, "is 6, not a boolean for each of the 8 layers"),
        ({"attention.sliding_window_pattern": [True] * 8}, "the last of them false"),
        ({"attention.key_length_swa": None}, "gemma4.attention.key_length_swa is missing"),
        ({"attention.value_length": 32}, "value_length is 32, not the 64 of a whole head"),
        ({"rope.dimension_count_swa": 8}, "dimension_count_swa is 8, not the 32 of a whole head"),
        ({"rope.scaling.type": "yarn"}, "gemma4.rope.scaling.type is yarn, not none"),
        ({"feed_forward_length": [96] * 7 + [192]}, "not one number, twice that in layers that share"),
        ({"attention.shared_kv_layers": 8}, "shared_kv_layers is 8, not less than the 8 layers"),
        ({"rope.freq_base_swa": None}, "gemma4.rope.freq_base_swa is missing"),
        ({"feed_forward_length": [96] * 7}, "not a positive integer for each of the 8 layers"),
        ({"attention.head_count_kv": [2, 2, 1] * 2 + [2, 1]}, "where these have no values"),
        ({"attention.head_count_kv": [1, 2, 2] * 2 + [2, 2]}, "not one number for all layers, or two"),
    ],
)
def test_layers_of_gemma4_that_its_configuration_cannot_describe_are_refused(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        _gemma4_config(tmp_path, metadata={"block_count": 8, **metadata})
    assert "\n" not in str(caught.value)


def test_tensors_of_gemma4_say_what_its_metadata_leaves_out(tmp_path: Path) -> None:
    config = _gemma4_config(tmp_path, metadata={"block_count": 8})
    assert config["vocab_size_per_layer_input"] == 140
    assert not config["attention_k_eq_v"]
    assert "num_global_key_value_heads" not in config
    assert config["rope_parameters"]["full_attention"]["partial_rotary_factor"] == 0.25
    assert _gemma4_config(tmp_path / "keys", (2,), metadata={"block_count": 8})["attention_k_eq_v"]


def test_as_many_pairs_are_rotated_as_the_file_says(tmp_path: Path) -> None:
    """In heads of any size: 15 / 22 of 44 dimensions would be 14 pairs."""
    assert int(15 / 22 * 44 // 2) == 14
    size = {"attention.key_length": 44, "attention.value_length": 44, "rope.dimension_count": 44}
    config = _gemma4_config(
        tmp_path, metadata={"block_count": 8, **size}, others=_factors(rotated=15, still=7)
    )
    assert int(config["rope_parameters"]["full_attention"]["partial_rotary_factor"] * 44 // 2) == 15


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without": (1,)}, "tensor blk.1.attn_v.weight is missing, but not those of all layers without"),
        ({"tensors": {}}, "tensor per_layer_token_embd.weight is missing; download the file again"),
        ({"others": {}}, "rope_freqs.weight is not that of Gemma 4"),
        ({"others": _factors(rotated=16, still=32)}, "rotates the first of the 32 pairs of a head"),
        ({"others": {"rope_freqs.weight": np.ones(32, np.float32) * 8}}, "is not that of Gemma 4"),
    ],
)
def test_tensors_of_gemma4_that_are_missing_or_others_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        _gemma4_config(tmp_path, metadata={"block_count": 8}, **changes)

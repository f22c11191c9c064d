"""A family with the attention of gpt-oss and a dense feed-forward, for tests of its attention alone; and its
model in `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from workers.model.families import known_families
from workers.model.families.family import Family

DENSE_SINKS = Family(
    "dense_sinks",
    "the attention of gpt-oss",
    ("DenseSinksForCausalLM",),
    defaults={"rope_theta": 150_000.0, "sliding_window": 128, "sliding_window_pattern": 2},
    qkv_bias=True,
    output_bias=True,
    has_sinks=True,
    windows="pattern",
    is_norm_rounded_first=False,
)


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the family known while a test runs."""
    monkeypatch.setitem(known_families.NAME_TO_FAMILY, DENSE_SINKS.name, DENSE_SINKS)
    monkeypatch.setitem(known_families.ARCHITECTURE_TO_FAMILY, DENSE_SINKS.architectures[0], DENSE_SINKS)


class _DenseMlp(LlamaMLP):
    """A feed-forward in the place of experts, which return their scores as well."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return super().forward(x), None


def make_reference(seed: int = 0, **keys: Any) -> Any:
    """Make a model with random weights, with the `keys` of `GptOssConfig`. Its sinks take from a hundredth to
    nearly all of a row."""
    torch.manual_seed(seed)
    config = GptOssConfig(
        vocab_size=211, hidden_size=64, intermediate_size=96, num_attention_heads=6, num_key_value_heads=3,
        max_position_embeddings=1024, num_local_experts=2, eos_token_id=None, attn_implementation="eager",
        **keys,
    )  # fmt: skip
    config.mlp_bias = False
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp = _DenseMlp(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(2.0, 2.5)
            elif "norm" in name:
                parameter.normal_(1.0, 0.2)
            elif parameter.dim() == 1:
                parameter.normal_(0.0, 0.3)
            else:
                gain = 2.0 if "embed" in name or "lm_head" in name else 1.2
                parameter.normal_(0.0, gain * parameter.shape[-1] ** -0.5)
    return model.eval()


def write_reference(path: Path, model: Any) -> None:
    """Write the model as a checkpoint of the family into the folder `path`."""
    config = model.config.to_dict()
    config |= {"model_type": DENSE_SINKS.name, "architectures": list(DENSE_SINKS.architectures)}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = {name: it.detach().clone() for name, it in model.state_dict().items()}
    save_file(tensors, path / "model.safetensors")

"""Write a checkpoint whose routers send most tokens to the experts of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from family_checkpoints import write_family_checkpoint
from safetensors.torch import load_file, save_file

NUM_EXPERTS = 8
NUM_LAYERS = 3
SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 33,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": NUM_LAYERS,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": 3,
    "rotary_dim": 8,
}


def write_skewed(path: Path, **keys: Any) -> None:
    """Write a checkpoint whose routers choose the first two experts for every token, and any third, with
    `keys` of its config.json."""
    write_family_checkpoint(path, "minimax_m2", seed=1, **(SHAPE | keys))
    file = path / "model.safetensors"
    tensors = load_file(file)
    biases = [tensor for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")]
    assert len(biases) == NUM_LAYERS
    for bias in biases:
        bias[:2] += 10.0
    save_file(tensors, file, {"format": "pt"})

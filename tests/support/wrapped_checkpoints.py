"""Write a text model's checkpoint again as a part of a model of text and images."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# How such checkpoints name the tensors of their text model: as they are published, and as transformers 5
# writes them. What stands for "model." and for "lm_head.", and the names of other tensors.
SPELLINGS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "published": (
        "language_model.model.",
        "language_model.lm_head.",
        (
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
            "multi_modal_projector.mm_input_projection_weight",
        ),
    ),
    "transformers 5": (
        "model.language_model.",
        "lm_head.",
        (
            "model.vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
            "model.multi_modal_projector.mm_input_projection_weight",
        ),
    ),
}


def wrap_checkpoint(
    folder: Path, model_dir: Path, architecture: str, spelling: str = "published", **outer: Any
) -> Path:
    """Write the checkpoint of a text model, with its tokenizer, as that of a model of this `architecture`;
    return its folder. `outer` are keys of its config.json beside those of `text_config`."""
    shutil.copytree(model_dir, folder)
    text = json.loads((model_dir / "config.json").read_text())
    text.pop("architectures", None)
    config = {
        "architectures": [architecture],
        "dtype": text.pop("dtype"),
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        **outer,
    }
    (folder / "config.json").write_text(json.dumps(config))
    model, head, others = SPELLINGS[spelling]
    tensors: dict[str, Tensor] = {name: torch.zeros(2, 2) for name in others}
    for name, tensor in load_file(model_dir / "model.safetensors").items():
        is_head = name.startswith("lm_head.")
        tensors[head + name.removeprefix("lm_head.") if is_head else model + name.removeprefix("model.")] = (
            tensor
        )
    save_file(tensors, str(folder / "model.safetensors"))
    return folder

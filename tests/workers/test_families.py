"""What families declare: wrapped checkpoints, and the fingerprints of models that were served before."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.random_checkpoint import write_random_checkpoint
from workers.errors import CheckpointError
from workers.model.decoder import load_decoder
from workers.model.families.known_families import FAMILIES
from workers.model.fingerprint import _fields_of_kv
from workers.model.model_config import read_model_config

CPU = torch.device("cpu")
FIRST_FIELDS = {
    "family",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "rms_norm_eps",
    "rope",
    "sliding_windows",
    "qkv_bias",
    "output_bias",
    "mlp_bias",
    "qk_norm",
    "tie_word_embeddings",
}
FIRST_ROPE_FIELDS = {
    "rope_type",
    "theta",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_positions",
}


def wrap(folder: Path, model_dir: Path, **outer: Any) -> Path:
    """Write the checkpoint again as the text model of one of text and images."""
    folder.mkdir()
    text = json.loads((model_dir / "config.json").read_text())
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "dtype": text.pop("dtype"),
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        **outer,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        f"language_model.{name}": it for name, it in load_file(model_dir / "model.safetensors").items()
    }
    images = {"vision_tower.patch_conv.weight": torch.zeros(2, 2)}
    save_file(tensors | images, str(folder / "model.safetensors"))
    return folder


def test_the_text_model_of_a_wrapped_checkpoint_is_served(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    write_random_checkpoint(plain, "mistral", seed=3)
    wrapped = wrap(tmp_path / "wrapped", plain)
    assert read_model_config(wrapped).is_wrapped
    for name in ("plain", "wrapped"):
        decoder = load_decoder(tmp_path / name, torch.float32, CPU)
        assert decoder.embedding is not None
        rows = decoder.embed(torch.arange(5))
        if name == "plain":
            expected = rows, decoder.logits(rows)
    assert torch.equal(rows, expected[0])
    assert torch.equal(decoder.logits(rows), expected[1])


def test_a_wrapped_checkpoint_without_text_or_quantized_is_refused(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    write_random_checkpoint(plain, "mistral", seed=3)
    with pytest.raises(CheckpointError, match="text_config None is missing"):
        read_model_config(wrap(tmp_path / "no-text", plain, text_config=None))
    with pytest.raises(CheckpointError, match="the weights are quantized \\(fp8\\)"):
        read_model_config(wrap(tmp_path / "fp8", plain, quantization_config={"quant_method": "fp8"}))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_fingerprints_of_the_first_families_stay(name: str, tmp_path: Path) -> None:
    """Replicas of neighboring versions hand over to each other while a cluster is rolled."""
    write_random_checkpoint(tmp_path, name, seed=0)
    fields = _fields_of_kv(read_model_config(tmp_path))
    assert fields.keys() == FIRST_FIELDS
    assert fields["rope"].keys() == FIRST_ROPE_FIELDS


def test_what_a_family_adds_is_part_of_its_fingerprint(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    write_random_checkpoint(tmp_path, "granite", seed=0, residual_multiplier=0.5, rope_scaling=yarn)
    fields = _fields_of_kv(read_model_config(tmp_path))
    assert fields["residual_multiplier"] == 0.5
    assert fields["rope"]["scale"] == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_the_page_of_models_has_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    families = page.partition("\n## ")[0]
    rows = [line for line in families.splitlines() if line.startswith("| ") and "`" in line][1:]
    assert rows == [
        f"| {it.models} | `{it.name}` | {', '.join(f'`{name}`' for name in it.architectures)} |"
        for it in FAMILIES
    ]


def test_names_and_architectures_are_of_one_family() -> None:
    names = [family.name for family in FAMILIES]
    architectures = [it for family in FAMILIES for it in family.architectures]
    assert len(names) == len(set(names))
    assert len(architectures) == len(set(architectures))

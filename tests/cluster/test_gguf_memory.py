"""What the weights of a GGUF file are counted with, before anything is converted."""

from __future__ import annotations

from pathlib import Path

import gguf_files
import pytest
from gguf import GGMLQuantizationType

from cluster.cli.terminal import BUNDLED_MODEL
from cluster.config import default_config
from cluster.served_model import described_model, model_weights, read_checkpoint
from workers.model.model_config import read_model_config
from workers.model.quantization.weight_form import AS_STORED, DEQUANTIZED
from workers.model.rank_memory import Checkpoint, RankShape


@pytest.mark.parametrize(("kind", "share"), [("Q8_0", 0.7), ("Q4_1", 0.5), ("F16", 1.0)])
def test_weights_that_stay_quantized_count_as_such(kind: str, share: float, tmp_path: Path) -> None:
    """As the folder that is made of the file, and less than in bf16 by what the layers of the bundled model
    are of the whole."""
    file = gguf_files.write_gguf(tmp_path / "model.gguf", BUNDLED_MODEL, GGMLQuantizationType[kind])
    config = default_config(file).model_copy(update={"model_cache": tmp_path / "cache"})
    rank = RankShape(read_model_config(described_model(config)), 0, 6)
    checkpoint = read_checkpoint(config)
    kept, dequantized = (checkpoint.weight_bytes(rank, 2, form) for form in (AS_STORED, DEQUANTIZED))
    assert share - 0.2 < kept / dequantized <= share
    written = Checkpoint.read(model_weights(config, "bf16", AS_STORED))
    assert written.weight_bytes(rank, 2, AS_STORED) == kept
    assert written.weight_bytes(rank, 2, DEQUANTIZED) == dequantized

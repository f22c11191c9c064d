"""The model that the configuration names, as a folder on this host: in `model_cache` one is made of a GGUF
file, and the description of a folder whose tokenizer has to be converted. No torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cluster.config import ClusterConfig
from workers.model.gguf.gguf_checkpoint import checkpoint_of
from workers.model.model_folder import described_folder, weights_folder
from workers.model.quantization.weight_form import WeightForm
from workers.model.rank_memory import Checkpoint


def described_model(config: ClusterConfig) -> Path:
    """Return the folder with the model's configuration and tokenizer. Of a GGUF file, or where tokenizer.json
    is missing beside tokenizer.model, it is made here, in a second or two, if it is not there yet. Raises
    `CheckpointError`."""
    return described_folder(config.model_path, config.model_cache)


def model_weights(
    config: ClusterConfig,
    dtype: str,
    form: WeightForm,
    progress: Callable[[str], None] = lambda phase: None,
) -> Path:
    """Return the folder with the model's weights as well. Those of a GGUF file are converted here, where that
    was not done yet: to `dtype`, as far as matrices do not stay quantized in this form. Raises
    `CheckpointError`."""
    keeps_quantized = form.keeps_stored
    return weights_folder(
        config.model_path, dtype, config.model_cache, progress, keeps_quantized=keeps_quantized
    )


def read_checkpoint(config: ClusterConfig) -> Checkpoint:
    """Read the sizes of the model's tensors; a GGUF file is not converted for that. Raises
    `CheckpointError`."""
    return checkpoint_of(config.model_path)

"""The check of a model's folder before anything starts. No Ray."""

from __future__ import annotations

from cluster.config import ClusterConfig
from cluster.served_model import described_model
from cluster.text.tokenizer import ModelText
from workers.model.model_config import read_model_config


def check_model(config: ClusterConfig) -> None:
    """Raise `CheckpointError` or `ConfigError` where the pools cannot serve the model's folder."""
    model = read_model_config(described_model(config))
    for pool in config.pools:
        pool.check_model(model)
    ModelText.load(described_model(config))

"""Specifications of ranks on CUDA, for tests that start none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvtransfer.messages import ReplicaIdentity
from kvtransfer.rpc.trust import TrustFiles
from kvtransfer.transfer_orders import TransferSettings
from workers.messages.rank_channel import RankSpec


def cuda_spec(model_dir: Path, **fields: Any) -> RankSpec:
    """Return the specification of a rank that has a whole small model on a card."""
    small: dict[str, Any] = {
        "replica": ReplicaIdentity("replica", 1),
        "rank": 0,
        "tp": 1,
        "pp": 1,
        "engine_core_address": "127.0.0.1:1",
        "trust": TrustFiles("secret"),
        "model_dir": str(model_dir),
        "dtype": "fp32",
        "device": "cuda:0",
        "num_threads": 1,
        "block_tokens": 16,
        "num_kv_tokens": 320,
        "max_batch_tokens": 9,
        "max_sequences": 3,
        "transfer": TransferSettings("127.0.0.1", ("tcp",)),
    }
    return RankSpec(**{**small, **fields})

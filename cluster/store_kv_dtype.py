"""Whether the store may keep a pool's KV in the dtype of `store.kv_dtype`."""

from __future__ import annotations

from workers.config import EngineSettings


def check_store_kv_dtype(kv_dtype: str, pool: str, engine: EngineSettings) -> None:
    """Raise `ValueError`, naming setting, pool and remedy, where the store must keep the pool's KV as it is:
    it is rounded once already, or tokens must not depend on where KV was."""
    if kv_dtype in ("auto", engine.kv_dtype):
        return
    setting = f"store.kv_dtype: {kv_dtype} does not fit pool {pool}, which has engine."
    if engine.kv_dtype != "auto":
        raise ValueError(
            f"{setting}kv_dtype {engine.kv_dtype}, and KV of 8 bits is not rounded again; set it "
            "to auto, or to the same"
        )
    if engine.deterministic:
        raise ValueError(
            f"{setting}deterministic, but tokens behind KV from the store would not be those behind computed "
            "KV; set it to auto, or engine.deterministic to false"
        )

"""Whether a model can be split over the ranks of a pool's replicas as configured."""

from __future__ import annotations

from cluster.errors import ConfigError
from workers.config import EngineSettings, Parallel
from workers.errors import CheckpointError
from workers.model.kv_form import refuse_kv_dtype
from workers.model.latent_split import refuse_latent_split
from workers.model.model_config import ModelConfig
from workers.model.sizes import refuse_expert_copies, refuse_expert_offload, refuse_split, refuse_stages


def check_split(model: ModelConfig, pool: str, parallel: Parallel, engine: EngineSettings) -> None:
    """Raise `ConfigError`, naming the pool, where the model cannot be split as configured."""
    tp, pp, devices, layers, ep = parallel
    shape = f"pool {pool}: tp {tp}, pp {pp}"
    if tp > model.num_heads:
        raise ConfigError(f"{shape}: tp is more than the model's {model.num_heads} attention heads")
    if pp > model.num_layers:
        raise ConfigError(f"{shape}: pp is more than the model's {model.num_layers} layers")
    if layers and sum(layers) != model.num_layers:
        raise ConfigError(f"pool {pool}: layers add up to {sum(layers)}, the model has {model.num_layers}")
    num_in_host, is_deterministic = engine.expert_offload, engine.deterministic
    try:
        refuse_split(model, tp, ep)
        refuse_stages(model, pp, layers)
        refuse_kv_dtype(model, engine.kv_dtype)
        refuse_latent_split(
            model,
            engine.latent_kv,
            devices,
            tp=tp,
            block_tokens=engine.block_tokens,
            kv_dtype=engine.kv_dtype,
            num_offload_tokens=engine.offload_tokens,
            is_deterministic=is_deterministic,
        )
        refuse_expert_offload(model, num_in_host, devices, tp=tp, is_deterministic=is_deterministic)
        refuse_expert_copies(
            model,
            engine.expert_copies,
            ep=ep,
            has_offload=num_in_host > 0,
            is_deterministic=is_deterministic,
        )
    except CheckpointError as error:
        raise ConfigError(f"pool {pool}: {error}") from error

"""The engine of a simulated replica on devices, as `tandem plan` predicts it."""

from __future__ import annotations

from cluster.errors import ConfigError
from cluster.planning.device_profile import DeviceProfile
from cluster.planning.device_split import DeviceSplit, held_memory
from cluster.planning.planned_model import PlannedModel
from cluster.planning.step_times import StepTimes
from cluster.simulation.simulated_replica import SimulatedEngine
from cluster.simulation.step_model import planned_steps
from workers.config import DEVICE_TO_STEP_SIZES

_BLOCK_TOKENS = 64


def planned_engine(
    model: PlannedModel,
    profile: DeviceProfile,
    split: DeviceSplit,
    max_sequences: int,
    *,
    tpot_objective_s: float | None = None,
) -> SimulatedEngine:
    """Return the engine of a replica of the model on these devices. Raises `ConfigError` where the model does
    not fit them."""
    memory = held_memory(model, profile, split, max_sequences)
    if memory is None:
        raise ConfigError(
            f"{model.source} does not fit {split.num_devices} {profile.name}; give a larger --tp or --pp"
        )
    sizes = DEVICE_TO_STEP_SIZES[profile.kind]
    return SimulatedEngine(
        planned_steps(model, profile, split),
        num_blocks=max(2, memory.kv_tokens // _BLOCK_TOKENS),
        block_tokens=_BLOCK_TOKENS,
        max_batch_tokens=sizes.max_batch_tokens,
        chunk_tokens=sizes.chunk_tokens,
        max_sequences=max_sequences,
        token_bytes=max(4, int(StepTimes(model, profile, split).token_bytes)),
        max_context_tokens=model.shape.max_context_tokens,
        tpot_objective_s=tpot_objective_s,
    )

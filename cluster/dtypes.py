"""The meaning of `dtype: auto`, decided once for all pools, because they exchange KV.

The kernels keep bf16 weights as bf16, half the bytes of fp32, on every x86 processor with AVX2; where it has
no bf16 arithmetic (AVX512-BF16, AMX), they widen weights in registers. Other processors, Arm's with BF16
excepted, emulate bf16 in torch, several times slower than fp32. So the weakest node decides. No Ray or torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cluster.config import ClusterConfig, DtypeName, PoolConfig
from cluster.served_model import described_model
from kvtransfer.common.host import cpu_flags
from workers.model.model_config import read_model_config

_SAVED: dict[str, DtypeName] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_NATIVE_BF16 = ("amx_bf16", "avx512_bf16", "bf16")
# What the kernels need at least: `Isa.AVX2` of `workers.model.native.isa`, which imports torch.
_KERNELS = frozenset({"avx2", "fma", "f16c", "bmi2"})
_VECTOR_UNITS = (*_NATIVE_BF16, "avx512f", "avx2", "asimd")


class Settled(NamedTuple):
    """Represents a configuration whose pools all name their dtype, and one line with the reason."""

    config: ClusterConfig
    reason: str


def settle_dtype(config: ClusterConfig, node_to_flags: Mapping[str, frozenset[str]]) -> Settled:
    """Replace `auto` in all pools. `node_to_flags` are the CPU flags of the nodes where CPU ranks may run, by
    display name; they matter only where `needs_flags` is true."""
    if config.pools[0].dtype != "auto":
        return Settled(config, f"{config.pools[0].dtype}, as configured")
    dtype = resolve_dtype(config.pools, described_model(config), node_to_flags.values())
    saved = read_model_config(described_model(config)).checkpoint_dtype or "nothing in config.json"
    if not needs_flags(config):
        return Settled(with_dtype(config, dtype), f"{dtype}: the checkpoint's ({saved})")
    emulating = [name for name, flags in node_to_flags.items() if not computes_bf16(flags)]
    if dtype == "bf16":
        units = ", ".join(sorted({vector_unit(flags) for flags in node_to_flags.values()}))
        reason = f"{dtype}: every node computes bf16 without emulation ({units}); the checkpoint is {saved}"
    else:
        units = ", ".join(sorted({vector_unit(node_to_flags[name]) or "unknown" for name in emulating}))
        reason = (
            f"{dtype}: {len(emulating)} of {len(node_to_flags)} nodes would emulate bf16 ({units}), such as "
            f"{emulating[0] if emulating else 'none'}; the checkpoint is {saved}"
        )
    return Settled(with_dtype(config, dtype), reason)


def may_compute(pools: Sequence[PoolConfig], node: dict[str, Any]) -> bool:
    """Whether a CPU rank of some pool may be placed on this entry of `ray.nodes()`."""
    resources = node["Resources"]
    return (
        node["Alive"]
        and resources.get("CPU", 0) > 0
        and any(
            all(resources.get(name, 0) > 0 for name in pool.resources)
            for pool in pools
            if "cpu" in pool.stage_devices
        )
    )


def needs_flags(config: ClusterConfig) -> bool:
    """Whether `auto` depends on processors: some rank computes on one, and the checkpoint has 16 bits."""
    return (
        config.pools[0].dtype == "auto"
        and _on_cpu(config.pools)
        and _saved(described_model(config)) != "fp32"
    )


def resolve_dtype(
    pools: Sequence[PoolConfig], model_dir: Path, cpus: Iterable[frozenset[str]] | None = None
) -> DtypeName:
    """Return the dtype of all pools; `cpus` are the flags of each node (None: of this machine).

    On GPUs `auto` is what the checkpoint was saved in. On CPUs, 16 bits become bf16 where every node
    computes it without emulation, and fp32 otherwise.
    """
    named = pools[0].dtype
    return named if named != "auto" else auto_dtype(model_dir, on_cpu=_on_cpu(pools), cpus=cpus)


def auto_dtype(model_dir: Path, *, on_cpu: bool, cpus: Iterable[frozenset[str]] | None = None) -> DtypeName:
    """Return the dtype for which `auto` stands, as `resolve_dtype` describes."""
    saved = _saved(model_dir)
    if saved == "fp32" or not on_cpu:
        return saved
    return "bf16" if all(map(computes_bf16, [cpu_flags()] if cpus is None else cpus)) else "fp32"


def with_dtype(config: ClusterConfig, dtype: DtypeName) -> ClusterConfig:
    """Return the configuration with this dtype in all pools."""
    pools = tuple(pool.model_copy(update={"dtype": dtype}) for pool in config.pools)
    return config.model_copy(update={"pools": pools})


def computes_bf16(flags: frozenset[str]) -> bool:
    """Whether a processor computes with bf16 weights without emulation: it has instructions for them, or the
    kernels widen them in registers."""
    return not flags.isdisjoint(_NATIVE_BF16) or flags >= _KERNELS


def vector_unit(flags: frozenset[str]) -> str:
    """Return the best vector unit that the kernels use; "" where none is known."""
    return next((name for name in _VECTOR_UNITS if name in flags), "")


def _saved(model_dir: Path) -> DtypeName:
    return _SAVED.get(read_model_config(model_dir).checkpoint_dtype, "fp32")


def _on_cpu(pools: Sequence[PoolConfig]) -> bool:
    return any("cpu" in pool.stage_devices for pool in pools)

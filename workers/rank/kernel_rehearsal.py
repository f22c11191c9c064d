"""Find the variants of Triton's kernels that a rank will launch, by its warm-up over tensors without memory.

The rank's own model runner is made on the device "meta", where torch computes shapes alone, and warms up.
Launches are noted in place of being made. So the variants are those that the warm-up of the rank meets, for
whatever model and settings, and there is no list of them to keep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import KernelInterface

from kvtransfer.common.clock import SystemClock
from workers.messages.rank_channel import RankSpec
from workers.model import cuda
from workers.model.cuda import card
from workers.model.decoder import Decoder
from workers.model.model_config import ModelConfig, read_model_config
from workers.model.quantization.exact_scales import assumptions
from workers.model.weights import ShardSpec, WeightReader
from workers.rank.device_queue import CopiedOut, CpuQueue
from workers.rank.model_runner import ModelRunner
from workers.rank.rehearsed_groups import rehearsed_place
from workers.rank.runner_settings import CheckpointFolder, ComputeSettings, RankCapacity, RankPlace

_META = torch.device("meta")
_WARP_SIZE = 32


class KernelVariant(NamedTuple):
    """A kernel as one kind of arguments needs it; `compile` puts it into Triton's cache."""

    name: str
    compile: Callable[[], Any]


def rehearse(spec: RankSpec, capability: int) -> list[KernelVariant]:
    """Return the variants that the rank of a specification launches on a card of this compute capability, 90
    for 9.0. Kernels are then those of such a card, also for tensors without memory, for the rest of the
    process. Raises `CheckpointError`."""
    cuda.DEVICE_TYPES.add(_META.type)
    card.stand_in = card.Card(capability)
    triton.runtime.driver.set_active(_TargetAlone(capability))
    with collected_variants() as variants:
        for _ in assumptions():
            run_rehearsal(spec)
    return variants


@torch.inference_mode()
def run_rehearsal(spec: RankSpec) -> None:
    """Do what the rank does before it serves, on the device "meta"."""
    capacity = RankCapacity.of(spec)._replace(num_offload_tokens=0, auto_kv=None, records=None)
    shard, groups = rehearsed_place(spec, _META)
    with contextlib.closing(groups):
        runner = _RehearsingRunner(
            CheckpointFolder(Path(spec.model_dir)),
            ComputeSettings.of(spec, _META)._replace(queue=_NoDevice()),
            capacity,
            SystemClock(),
            place=RankPlace(shard, groups),
        )
        if spec.kv_share:
            runner.run_largest(spec.max_batch_tokens)
        runner.warm_up(spec.max_batch_tokens)


@contextlib.contextmanager
def collected_variants() -> Iterator[list[KernelVariant]]:
    """Append each variant of a kernel that would be launched to the list, and launch nothing."""
    variants: list[KernelVariant] = []
    launch = KernelInterface.__getitem__

    def note(kernel: Any, grid: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            collector.name = kernel.fn.__name__
            return kernel.run(*args, grid=grid, warmup=True, **kwargs)

        return run

    with _Collector(variants) as collector:
        KernelInterface.__getitem__ = note
        try:
            yield variants
        finally:
            KernelInterface.__getitem__ = launch


class _Collector(AsyncCompileMode):
    """Takes what Triton would compile."""

    def __init__(self, variants: list[KernelVariant]) -> None:
        super().__init__(ThreadPoolExecutor(1))  # which gets nothing to do
        self._variants = variants
        self._known: set[str] = set()
        # The kernel that would be launched.
        self.name = ""

    def submit(
        self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]
    ) -> Future[Any]:
        if key not in self._known:
            self._known.add(key)
            self._variants.append(KernelVariant(self.name, compile_fn))
        return Future()


class _TargetAlone:
    """Stands for the driver of a device: it knows the target, and launches nothing."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, _WARP_SIZE)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _NoDevice(CpuQueue):
    """The queue of the device "meta". Steps are launched as on a device that is behind the host."""

    runs_behind = True

    def __init__(self) -> None:
        super().__init__(has_triton=True)
        self.device = _META

    def host_memory(self, source: Tensor) -> Tensor:
        return torch.zeros(source.shape, dtype=source.dtype)

    def copy_out(self, source: Tensor, host: Tensor) -> CopiedOut:
        return CopiedOut(host, source, self.event())


class _RehearsingRunner(ModelRunner):
    """A runner whose weights have shapes alone, and that runs a layer of each kind."""

    def _load(
        self, checkpoint: CheckpointFolder, compute: ComputeSettings, shard: ShardSpec | None
    ) -> Decoder:
        config = read_model_config(checkpoint.path)
        held = shard or ShardSpec.whole(config)
        with WeightReader(
            checkpoint.path, config, held, compute.dtype, compute.device, form=compute.weights
        ) as reader:
            reader.omit_values()
            decoder = Decoder(config, reader, held, is_deterministic=compute.is_deterministic)
            if not config.layer_shapes.input_size:  # else a layer's inputs are counted by the layers
                del decoder.layers[_num_first_layers(config, reader.stored_kinds()) : -1]
        return decoder

    def run_largest(self, num_rows: int) -> None:
        """Run the largest steps."""
        self._run_largest(self.steps, num_rows)


def _num_first_layers(config: ModelConfig, stored_kinds: Sequence[Hashable]) -> int:
    """Return how many of the first layers are of all kinds that there are, each behind all kinds that it
    follows, since a norm may add what the layer before it leaves. How the weights of a layer are stored is a
    part of its kind."""
    kinds = [
        (
            stored,
            config.heads_of(layer),
            config.sliding_windows[layer],
            config.ropes[layer],
            config.intermediate_size_of(layer),
            config.has_experts(layer),
            config.has_state(layer),
            config.has_attention(layer),
            config.has_own_kv(layer),
            config.has_key_values(layer),
        )
        for layer, stored in enumerate(stored_kinds)
    ]
    pairs = list(zip([None, *kinds], kinds, strict=False))
    return max(map(pairs.index, pairs)) + 1

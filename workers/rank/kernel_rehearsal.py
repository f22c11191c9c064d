"""Find the variants of Triton's kernels that a rank will launch, by its warm-up over tensors without memory.

The rank's own model runner is made on the device "meta", where torch computes shapes alone, and warms up.
Launches are noted in place of being made. So the variants are those that the warm-up of the rank meets, for
whatever model and settings, and there is no list of them to keep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import KernelInterface

from kvtransfer.common.clock import ManualClock
from workers.messages.rank_channel import RankSpec
from workers.model import cuda
from workers.model.cuda import card
from workers.model.decoder import Decoder
from workers.model.model_config import read_model_config
from workers.model.quantization.exact_scales import assumptions
from workers.model.weights import ShardSpec, WeightReader
from workers.rank.model_runner import ModelRunner
from workers.rank.rehearsed_groups import RehearsedGroups
from workers.rank.rehearsed_shards import layer_kinds, num_first_layers, rehearsed_shards
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
    """Do what the rank does before it serves, on the device "meta". Raises `CheckpointError`."""
    for shard in rehearsed_shards(spec):
        with contextlib.closing(RehearsedGroups(spec, _META)) as groups:
            _rehearse_place(spec, RankPlace(shard, groups))


def _rehearse_place(spec: RankSpec, place: RankPlace) -> None:
    """Do the same with this part of the model. Time stands still: no measurement of the host decides which
    kernels compute."""
    runner = _RehearsingRunner(
        CheckpointFolder(Path(spec.model_dir)),
        ComputeSettings.of(spec, _META),
        RankCapacity.of(spec)._replace(num_offload_tokens=0, auto_kv=None, records=None),
        ManualClock(),
        place=place,
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


class _RehearsingRunner(ModelRunner):
    """A runner whose weights have shapes alone, and that runs a layer of each kind."""

    def _load(
        self, checkpoint: CheckpointFolder, compute: ComputeSettings, shard: ShardSpec | None
    ) -> Decoder:
        config = read_model_config(checkpoint.path)
        held = shard or ShardSpec.whole(config)
        with WeightReader(
            checkpoint.path,
            config,
            held,
            compute.dtype,
            compute.device,
            expert_offload=compute.expert_offload,
            expert_copies=compute.expert_copies,
            form=compute.weights,
        ) as reader:
            reader.omit_values()
            decoder = Decoder(config, reader, held, is_deterministic=compute.is_deterministic)
            if not config.layer_shapes.input_size:  # else a layer's inputs are counted by the layers
                kinds = layer_kinds(config, reader)[held.layer_start : held.layer_end]
                del decoder.layers[num_first_layers(kinds) : -1]
        return decoder

    def run_largest(self, num_rows: int) -> None:
        """Run the largest steps."""
        self._run_largest(self.steps, num_rows)

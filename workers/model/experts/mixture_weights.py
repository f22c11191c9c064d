"""Read a rank's part of a layer's router, experts and shared experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from workers.model.experts.copy_slots import CopyPlace
from workers.model.experts.expert_products import ExpertWeights
from workers.model.experts.mixture_shape import DEFAULT_CLAMP, Clamp, ExpertActivation, MixtureShape
from workers.model.experts.quantized_experts import QuantizedExpertWeights
from workers.model.experts.stored_experts import ReadWhenTaken, StoredExperts
from workers.model.families.expert_traits import BranchNormNames, ExpertNames
from workers.model.linear_weights import LinearWeights
from workers.model.model_config import ModelConfig
from workers.model.norm import Norm
from workers.model.quantization.weight_parts import scaled
from workers.model.sizes import HeldExperts, held_experts, part
from workers.model.split_products import ProductRows, fused_rows
from workers.model.tensor_files import TensorFiles, WeightSlice


@dataclasses.dataclass(frozen=True, slots=True)
class SharedWeights:
    """The weights of the shared experts, which are one feed-forward, of ups alone where experts have no
    gates; and of the product [1, hidden_size] whose sigmoid multiplies its result, if there is one."""

    gate_up: LinearWeights
    down: LinearWeights
    gate: Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class BranchNorms:
    """The norms of a layer whose experts are a branch beside its feed-forward: of what the feed-forward
    gives, and of what the experts take and give, each of hidden_size."""

    dense_output: Norm
    experts_input: Norm
    experts_output: Norm


class ExpertOffload(NamedTuple):
    """The experts of each layer that the CPU computes, `num_in_host`, beside a `device` for the others, to
    which `upload` copies a tensor of host memory while weights are read."""

    num_in_host: int
    device: torch.device
    upload: Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class MixtureWeights:
    """The weights of a layer's experts: of the router [num_experts, hidden_size], in the dtype of the model
    or in float32, whichever holds more of what is stored; the float32 bias [num_experts] of the scores by
    which experts are chosen; the rank's `experts`, whose numbers are `held`, and which are in host memory
    where there is an `offload`; and of shared experts.

    Where experts are a branch beside a feed-forward, the norm of what the router takes, factors [num_experts]
    of the weights of chosen experts, and the norms of the branches. Where ranks hold `copies` of experts of
    others, the place of this rank among them."""

    router: LinearWeights
    correction: Tensor | None
    held: range
    experts: ExpertWeights | QuantizedExpertWeights
    shared: SharedWeights | None
    router_norm: Norm | None = None
    expert_scale: Tensor | None = None
    branch_norms: BranchNorms | None = None
    offload: ExpertOffload | None = None
    copies: CopyPlace | None = None


class MixtureWeightReader:
    """Reads the experts of one checkpoint for one of `tp` ranks, of which each `ep`-th part holds other
    experts. `num_in_host` of each layer are computed by the CPU, and `num_copies` have a slot at each
    rank."""

    def __init__(
        self,
        files: TensorFiles,
        config: ModelConfig,
        tp_rank: int,
        tp: int,
        *,
        ep: int,
        num_in_host: int = 0,
        num_copies: int = 0,
    ) -> None:
        self._files, self._config = files, config
        self._offload = ExpertOffload(num_in_host, files.device, files.on_device) if num_in_host else None
        self._expert_files = files.in_host_memory() if num_in_host else files
        self._hidden_size = config.hidden_size
        self._tp_rank, self._tp, self._ep = tp_rank, tp, ep
        self._copies = CopyPlace(tp_rank // (tp // ep), ep, num_copies) if num_copies else None

    def omit_values(self) -> None:
        """Read the experts that the CPU computes like all other tensors, whose values are omitted."""
        self._expert_files = self._files

    def layer(self, prefix: str) -> MixtureWeights:
        """Read the experts of the layer whose tensors begin with `prefix`."""
        shape, traits = self._config.mixture, self._config.traits.experts
        assert shape is not None
        assert traits is not None
        names, block = traits.names, f"{prefix}{traits.names.block}"
        num_experts = shape.rule.num_experts
        held = held_experts(shape, self._tp_rank, self._tp, self._ep)
        stored = StoredExperts(self._expert_files, names, block, shape, held, self._hidden_size)
        return MixtureWeights(
            self._router(names, block, num_experts),
            self._correction(names, block, num_experts),
            held.experts,
            self._experts(stored, shape, held),
            self._shared(names, block, shape.shared_size) if shape.shared_size else None,
            self._router_norm(f"{block}{names.router_norm}") if names.router_norm else None,
            self._floats(f"{block}{names.expert_scale}", num_experts) if names.expert_scale else None,
            self._branch_norms(prefix, traits.branch_norms) if traits.branch_norms else None,
            self._offload,
            self._copies,
        )

    def _floats(self, name: str, size: int) -> Tensor:
        return self._files.tensor(name, (size,), dtype=torch.float32).clone()

    def _norm(self, name: str) -> Norm:
        traits = self._config.traits
        weight = self._floats(name, self._hidden_size).add_(traits.norm_offset)
        return Norm(weight, self._config.rms_norm_eps, traits.is_norm_rounded_first)

    def _router_norm(self, name: str) -> Norm:
        weight = self._floats(name, self._hidden_size).mul_(self._hidden_size**-0.5)
        return Norm(weight, self._config.rms_norm_eps, self._config.traits.is_norm_rounded_first)

    def _branch_norms(self, prefix: str, names: BranchNormNames) -> BranchNorms:
        return BranchNorms(*(self._norm(f"{prefix}{name}.weight") for name in dataclasses.astuple(names)))

    def _router(self, names: ExpertNames, block: str, num_experts: int) -> LinearWeights:
        name = f"{block}{names.router}"
        stored = self._files.dtype_of(name)
        dtype = self._files.dtype if stored == self._files.dtype else torch.float32
        weight = self._files.tensor(name, (num_experts, self._hidden_size), dtype=dtype)
        bias = None
        if names.router_bias:
            bias = self._files.tensor(f"{block}{names.router_bias}", (num_experts,), dtype=dtype).clone()
        return LinearWeights((weight,), bias)

    def _correction(self, names: ExpertNames, block: str, num_experts: int) -> Tensor | None:
        if not names.correction:
            return None
        name = f"{block}{names.correction}"
        shape = (1, num_experts) if self._files.num_dims_of(name) == 2 else (num_experts,)
        return self._files.tensor(name, shape, dtype=torch.float32).flatten().clone()

    def _experts(
        self, stored: StoredExperts, shape: MixtureShape, held: HeldExperts
    ) -> ExpertWeights | QuantizedExpertWeights:
        factor = self._config.residual_multiplier
        # Experts that are exchanged or copied are tensors.
        is_fixed = self._offload is None and self._copies is None
        if is_fixed and (kept := stored.quantized()) is not None:
            of_all = kept.downs
            times_factor = ReadWhenTaken(len(of_all), lambda number: scaled(of_all[number], factor))
            others = self._beside_products(stored, shape, held)
            return QuantizedExpertWeights(kept.gates, kept.ups, times_factor, *others, self._files.dtype)
        gates, ups, downs = stored.products()
        if factor != 1:
            downs, unscaled = ReadWhenTaken(len(downs), lambda number: unscaled[number] * factor), downs
        return ExpertWeights(gates, ups, downs, *self._beside_products(stored, shape, held))

    def _beside_products(
        self, stored: StoredExperts, shape: MixtureShape, held: HeldExperts
    ) -> tuple[ExpertActivation, Tensor | None, Tensor | None, Clamp]:
        """Return what experts have beside their products: activation, biases and clamp."""
        down_bias, factor = stored.down_bias(), self._config.residual_multiplier
        if held.columns.start and down_bias is not None:
            # The first of the ranks that share an expert adds it.
            down_bias = torch.zeros_like(down_bias)
        if factor != 1 and down_bias is not None:
            down_bias = down_bias * factor
        activation = self._config.activation if shape.clamp is None else "clamped_swiglu"
        assert activation in ("silu", "gelu_tanh", "clamped_swiglu", "relu2")
        return activation, stored.gate_up_bias(), down_bias, shape.clamp or DEFAULT_CLAMP

    def _shared(self, names: ExpertNames, block: str, size: int) -> SharedWeights:
        hidden, held = self._hidden_size, part(size, self._tp_rank, self._tp)
        columns, prefix = slice(held.start, held.stop), f"{block}{names.shared}"
        inner = ("gate_proj", "up_proj") if names.is_gated else ("up_proj",)
        parts = [ProductRows(f"{prefix}{it}", size, columns) for it in inner]
        if names.shared_gate_up:
            parts = fused_rows(f"{prefix}{names.shared_gate_up}", parts)
        gate_up = self._files.product_parts(
            [WeightSlice(f"{it.name}.weight", (it.num_rows, hidden), it.rows) for it in parts]
        )
        name = f"{prefix}{names.shared_down}.weight"
        down = self._files.product_parts([WeightSlice(name, (hidden, size), columns=columns)])
        shared_gate = None
        if names.shared_gate:
            shared_gate = self._files.tensor(f"{block}{names.shared_gate}", (1, hidden))
        return SharedWeights(
            LinearWeights(gate_up, None),
            LinearWeights(down, None).times(self._config.residual_multiplier),
            shared_gate,
        )

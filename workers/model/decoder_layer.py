"""Compute one layer of the decoder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeGuard

from torch import Tensor

from workers.model.apply_norm import add_normed, apply_norm
from workers.model.attention.groups_backend import GroupsPlan
from workers.model.attention.interface import AttentionPlan, LayerAttention
from workers.model.expert_rows import RowProducts
from workers.model.experts.mixture import Mixture
from workers.model.head_norms import HeadNorms
from workers.model.latent_heads import LatentHeads
from workers.model.latent_projection import LatentProjection
from workers.model.layer_inputs import InputGate
from workers.model.layer_products import (
    AddedProduct,
    JoinedProducts,
    ParallelSum,
    Product,
    ProductMaker,
)
from workers.model.model_config import ModelConfig
from workers.model.native_layers import MOST_PRODUCTS, NativeProduct, PackedLayer
from workers.model.norm import Norm
from workers.model.output_gate import OutputGate
from workers.model.products import Linear, PackedLinear, Workspace
from workers.model.quantization.packed_product import PackedQuantizedLinear
from workers.model.relu2 import relu2
from workers.model.row_norms import RowNorms
from workers.model.state.state_mixer import StateMixer
from workers.model.thin_linear import ThinLinear
from workers.model.value_norm import ValueNorm
from workers.model.weights import LayerWeights


class DecoderLayer:
    """One layer over a flattened batch. Its KV, or its state, is layer `index` of the rank's. It may have no
    feed-forward, or nothing but one. The layers of a decoder share a `workspace`."""

    def __init__(
        self,
        weights: LayerWeights,
        config: ModelConfig,
        attention: LayerAttention,
        workspace: Workspace,
        value_norm: ValueNorm | None = None,
        *,
        is_deterministic: bool = False,
        is_split: bool = False,
    ) -> None:
        """Make a layer of a model of this `config`. `attention` lacks the norms and sinks of heads, which are
        of the weights; `value_norm` normalizes its values. `is_split`: other ranks add to its products."""
        self._workspace = workspace
        self._norms = norms = weights.norms
        self.qk_norms: RowNorms | HeadNorms | None = None
        has_heads = weights.qkv is not None
        if has_heads and (config.qk_row_norm or config.qk_own_norms):
            assert weights.q_norm is not None
            assert weights.k_norm is not None
            kind = RowNorms if config.qk_row_norm else HeadNorms
            self.qk_norms = kind(weights.q_norm, weights.k_norm)
        else:
            # A layer without keys of its own has no norm of keys, and uses none.
            k_norm = weights.k_norm or weights.q_norm
            attention = dataclasses.replace(attention, q_norm=weights.q_norm, k_norm=k_norm)
        attention = dataclasses.replace(attention, sinks=weights.sinks)
        self._value_norm = value_norm

        products = ProductMaker(is_deterministic, is_split)
        self._plain = weights.xielu or (relu2 if config.activation == "relu2" else None)
        activation = config.activation
        gate = None if activation == "xielu" or activation == "relu2" else activation
        # With a part of the heads, of the intermediate columns or of the experts, these compute a part of the
        # sum.
        self._projection: Linear | LatentProjection | JoinedProducts | None = None
        self._output_gate: OutputGate | None = None
        self.output: AddedProduct | None = None
        if weights.output is not None:
            self.output = products.added(weights.output, norms.attention_output)
        # Mixes tokens by a state, in place of attention.
        self.state_mixer: StateMixer | None = None
        if (state := weights.state) is not None:
            inputs = [products.make(it) for it in state.inputs]
            self._projection = inputs[0] if len(inputs) == 1 else JoinedProducts(inputs)
            self.state_mixer = state.make_mixer(is_deterministic=is_deterministic)
        elif weights.qkv is not None:
            self._projection = products.of_normed(weights.qkv, norms.attention_input)
            if config.traits.has_output_gate:
                assert weights.output is not None
                self._output_gate = OutputGate(weights.output.num_inputs)
        elif weights.latent is not None:
            shape = config.latent
            assert shape is not None
            self._projection = LatentProjection(
                weights.latent, shape, workspace, is_deterministic=is_deterministic
            )
            heads = LatentHeads(weights.latent.expansion.weight, shape, is_deterministic=is_deterministic)
            attention = dataclasses.replace(attention, latent=heads)
        self._attention = attention
        self._gate_up: Linear | None = None
        self.down: AddedProduct | None = None
        if weights.gate_up is not None and weights.down is not None:
            self._gate_up = products.of_normed(weights.gate_up, norms.feed_forward_input, gate)
            self.down = products.added(weights.down, norms.feed_forward_output)
            self._num_activated = self._gate_up.num_outputs // (1 if gate is None else 2)
        self.mixture: AddedProduct | None = None
        # The rank's part of `mixture`, also where that is joined with those of other ranks.
        self.own_mixture: Mixture | None = None
        if weights.mixture is not None:
            assert config.mixture is not None
            rule = config.mixture.rule
            mixture = Mixture(weights.mixture, rule, gate, is_deterministic=is_deterministic)
            self.mixture = self.own_mixture = mixture
        self._branch_norms = None if weights.mixture is None else weights.mixture.branch_norms
        # Computes the rank's rows alone, in steps of many rows, of which `workers.model.parallel` makes use.
        self.expert_rows: RowProducts | None = None
        # Adds both, in a layer of parallel attention and feed-forward.
        self.parallel_sum: ParallelSum | None = None
        if config.is_parallel:
            assert self.down is not None
            assert self.output is not None
            self.parallel_sum = ParallelSum(self.output, self.down)
        self._inputs = None
        if (gated := weights.inputs) is not None:
            assert gate is not None
            self._inputs = InputGate(
                products.make(gated.gate), gate, products.make(gated.projection), gated.norm
            )
        self._scalar = weights.scalar

    def packed(self) -> PackedLayer | None:
        """Return what the CPU kernels take of the layer to run it in one call; None where they cannot."""
        norms, output, mixer = self.qk_norms, self.output, self.state_mixer
        if self.parallel_sum is not None or self._has_layer_norms():
            return None
        if not (norms is None or type(norms) is RowNorms):
            return None
        if self._value_norm is not None or not self._attention.has_own_kv or self._changes_result():
            return None
        products = [it for it in self._projections() if _is_whole(it)]
        if not products or len(products) != len(self._projections()) or len(products) > MOST_PRODUCTS:
            return None
        if output is None or not _is_whole(output):
            return None
        layer = PackedLayer(
            products, output, self._norms, norms, self._attention, is_gated=self._output_gate is not None
        )
        if mixer is not None:
            if (packed := mixer.packed()) is None:
                return None
            layer = layer._replace(mixer=packed)
        if self.mixture is None and self.down is None:
            return layer
        if self._plain is not None:
            return None
        return self._with_feed_forward(layer) if self.mixture is None else self._with_mixture(layer)

    def _projections(self) -> Sequence[Linear]:
        """Return the products of the hidden states whose outputs lie one after another; none where there is
        more to it."""
        if isinstance(self._projection, JoinedProducts):
            return self._projection.products
        return (self._projection,) if isinstance(self._projection, Linear) else ()

    def replace_products(self, replaced: Callable[[str, Linear], Linear]) -> None:
        """Replace the products of attention and feed-forward, as far as the layer has them whole, each by
        `replaced` of its name and itself: `projection`, `output`, `gate_up` and `down`."""
        if isinstance(self._projection, Linear):
            self._projection = replaced("projection", self._projection)
        if isinstance(self.output, Linear):
            self.output = replaced("output", self.output)
        if self._gate_up is not None:
            self._gate_up = replaced("gate_up", self._gate_up)
        if isinstance(self.down, Linear):
            self.down = replaced("down", self.down)
        if self.parallel_sum is not None:
            assert self.output is not None
            assert self.down is not None
            self.parallel_sum = ParallelSum(self.output, self.down)

    def _with_feed_forward(self, layer: PackedLayer) -> PackedLayer | None:
        """Return the layer with its feed-forward, as `packed` does."""
        gate_up, down = self._gate_up, self.down
        if gate_up is None or down is None or not (_is_whole(gate_up) and _is_whole(down)):
            return None
        return layer._replace(gate_up=gate_up, down=down)

    def _with_mixture(self, layer: PackedLayer) -> PackedLayer | None:
        """Return the layer with its experts, as `packed` does."""
        mixture = self.mixture
        if not isinstance(mixture, Mixture) or mixture.packed is None or self._branch_norms is not None:
            return None
        layer, shared = layer._replace(mixture=mixture.packed), mixture.shared
        if shared is None:
            return layer
        gate_up, down, gate = shared.gate_up, shared.down, shared.gate
        if not (_is_whole(gate_up) and _is_whole(down)):
            return None
        if gate is None:
            return layer._replace(gate_up=gate_up, down=down)
        return layer._replace(gate_up=gate_up, down=down, shared_gate=gate) if _is_whole(gate) else None

    def _has_layer_norms(self) -> bool:
        """Whether some norm subtracts the mean."""
        norms = (getattr(self._norms, field.name) for field in dataclasses.fields(self._norms))
        return any(norm is not None and norm.is_layer_norm for norm in norms)

    def _changes_result(self) -> bool:
        """Whether more happens to the hidden states than that attention and feed-forward are added."""
        return self._inputs is not None or self._scalar != 1

    def forward(
        self,
        hidden: Tensor,
        plan: AttentionPlan,
        residual: Tensor | None = None,
        layer_input: Tensor | None = None,
    ) -> Tensor | None:
        """Add the layer's attention and feed-forward to `hidden` [num_tokens, hidden_size], in place.

        `residual` is the product that the layer before left to be added by this layer's first norm;
        `layer_input` [num_tokens, input_size] the layer's own input, if it has one. Returns the product that
        this layer leaves, or None.
        """
        residual = self._run_products(hidden, plan, residual)
        if not self._changes_result():
            return residual
        if residual is not None:
            hidden.add_(residual)
        if self._inputs is not None:
            assert layer_input is not None
            self._inputs.add_to(hidden, layer_input)
        if self._scalar != 1:
            hidden.mul_(self._scalar)
        return None

    def _run_products(self, hidden: Tensor, plan: AttentionPlan, residual: Tensor | None) -> Tensor | None:
        """Add attention and feed-forward as `forward` describes."""
        if self.output is None:
            return self._add_feed_forward(hidden, plan, residual)
        norms = self._norms
        taker = self._projection if self.parallel_sum is None else None  # of two, the norm is computed once
        given = self._input(hidden, norms.attention_input, residual, taker)
        mixed = self._mixed(given, plan)
        if self.parallel_sum is not None:
            activated = self._activated(given, self._workspace.take("gated", hidden, self._num_activated))
            plan.marks.mark()
            residual = self.parallel_sum.add_to(hidden, mixed, activated)
            plan.marks.mark()
            return residual
        if self.expert_rows is not None and self.expert_rows.serves(len(hidden)):
            self._add_by_rows(self.expert_rows, hidden, mixed, plan)
            return None
        residual = _add(hidden, self.output, mixed, norms.attention_output)
        plan.marks.mark()
        if self.mixture is None and self.down is None:
            return residual
        return self._add_feed_forward(hidden, plan, residual)

    def _mixed(self, given: _ProductInput, plan: AttentionPlan) -> Tensor:
        """Return what attention, or a state, mixes of the tokens."""
        projected = self._project(given)
        if self.qk_norms is not None:
            self.qk_norms.normalize(projected)
        plan.marks.mark()
        if self.state_mixer is not None:
            assert isinstance(plan, GroupsPlan), "states have blocks of their own"
            mixed = self.state_mixer.mix(projected, plan.states(self._attention))
        elif (gate := self._output_gate) is not None:
            qkv, gates = gate.split(projected)
            mixed = gate.multiply(plan.run(self._attention, qkv), gates)
        else:
            mixed = plan.run(self._attention, projected)
        plan.marks.mark()
        return mixed

    def _add_feed_forward(
        self, hidden: Tensor, plan: AttentionPlan, residual: Tensor | None
    ) -> Tensor | None:
        """Add the feed-forward, or experts, as `forward` describes."""
        take, norms = self._workspace.take, self._norms
        taker = self._gate_up if self.mixture is None else None
        given = self._input(hidden, norms.feed_forward_input, residual, taker)
        if self.mixture is not None and self._branch_norms is not None:
            self._add_branches(hidden, given, plan)
            return None
        if self.mixture is not None:
            residual = _add(hidden, self.mixture, given.rows, norms.feed_forward_output)
            plan.marks.mark()
            return residual
        assert self.down is not None
        activated = self._activated(given, take("gated", hidden, self._num_activated))
        plan.marks.mark()
        residual = _add(hidden, self.down, activated, norms.feed_forward_output)
        plan.marks.mark()
        return residual

    def _add_by_rows(self, products: RowProducts, hidden: Tensor, mixed: Tensor, plan: AttentionPlan) -> None:
        """Add attention and experts to the rank's rows of `hidden`, and take over the others' rows."""
        rows, norms = products.own(hidden), self._norms
        residual = _add(rows, products.output, mixed, norms.attention_output)
        plan.marks.mark()
        normed = self._normed(rows, norms.feed_forward_input, residual)
        residual = _add(rows, products.mixture, normed, norms.feed_forward_output)
        if residual is not None:
            rows.add_(residual)
        products.gather(hidden)
        plan.marks.mark()

    def _add_branches(self, hidden: Tensor, given: _ProductInput, plan: AttentionPlan) -> None:
        """Add what the feed-forward computes of `given`, and the experts of `hidden`, to `hidden`."""
        norms, norm = self._branch_norms, self._norms.feed_forward_output
        assert self.mixture is not None
        assert self.down is not None
        assert norms is not None
        assert norm is not None
        activated = self._activated(given, self._workspace.take("gated", hidden, self._num_activated))
        plan.marks.mark()
        dense = self.down(activated)
        total = apply_norm(dense, norms.dense_output, dense)
        add_normed(total, self.mixture(hidden), norms.experts_output)
        add_normed(hidden, total, norm)
        plan.marks.mark()

    def _project(self, given: _ProductInput) -> Tensor:
        """Return queries, keys and values, or queries alone where the layer has no others of its own; or what
        is mixed by a state."""
        projection, norm = self._projection, self._value_norm
        assert projection is not None
        num_outputs = projection.num_outputs
        if norm is None:
            return given.projected(projection, self._workspace.take("qkv", given.rows, num_outputs))
        qkv = self._workspace.take("qkv", given.rows, num_outputs + norm.num_added)
        given.projected(projection, qkv[:, :num_outputs])
        norm.normalize(qkv)
        return qkv

    def _input(
        self, hidden: Tensor, norm: Norm | None, residual: Tensor | None, taker: object
    ) -> _ProductInput:
        """Return what products take of the hidden states: their norm, or where `taker` is the one product and
        computes the norm itself, both. `residual` is added to `hidden` before."""
        is_taken = (
            norm is not None
            and residual is None
            and isinstance(taker, ThinLinear)
            and taker.takes_norm(norm, len(hidden))
        )
        if is_taken:
            return _ProductInput(hidden, norm)
        return _ProductInput(self._normed(hidden, norm, residual))

    def _normed(self, hidden: Tensor, norm: Norm | None, residual: Tensor | None) -> Tensor:
        """Add `residual` to `hidden`, in place, and return its norm; without one, `hidden` itself."""
        if norm is None:
            return hidden if residual is None else hidden.add_(residual)
        return apply_norm(hidden, norm, self._workspace.take("normed", hidden, hidden.shape[1]), residual)

    def _activated(self, given: _ProductInput, out: Tensor) -> Tensor:
        assert self._gate_up is not None
        if self._plain is not None:
            return self._plain(given.projected(self._gate_up, out), out)
        if given.norm is None:
            return self._gate_up.gated(given.rows, out)
        return given.projected(self._gate_up, out)


class _ProductInput(NamedTuple):
    """Rows [num_tokens, hidden_size] that a product takes, and the norm that the product computes of them."""

    rows: Tensor
    norm: Norm | None = None

    def projected(self, product: Linear | LatentProjection | JoinedProducts, out: Tensor) -> Tensor:
        """Write the product of the rows, or of their norm, to `out`."""
        if self.norm is None:
            return product(self.rows, out)
        assert isinstance(product, ThinLinear)
        return product.of_normed(self.rows, self.norm, out)


def _add(hidden: Tensor, product: AddedProduct, x: Tensor, norm: Norm | None) -> Tensor | None:
    """Add the product of x, or its norm, to `hidden`, and return None; or return the product, for the norm
    that follows to add."""
    if norm is None:
        return product.add_to(hidden, x)
    add_normed(hidden, product(x), norm)
    return None


def _is_whole(product: Product | AddedProduct | Linear) -> TypeGuard[NativeProduct]:
    """Whether the kernels compute a product from its rows as they are; one that is joined from several ranks
    is no such."""
    return isinstance(product, PackedLinear | PackedQuantizedLinear) and not product.is_padded

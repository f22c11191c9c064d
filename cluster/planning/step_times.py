"""Predict how long a replica's steps take: the least work of a step, over what the devices reach."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from cluster.planning.device_profile import DeviceProfile
from cluster.planning.device_split import DeviceSplit
from cluster.planning.planned_model import ITEM_BYTES, PlannedModel
from workers.config import DEVICE_TO_STEP_SIZES
from workers.model.sizes import StepWork

# Reading and multiplying overlap, but not where both take about as long: the norm of the two times.
_OVERLAP_NORM = 4.0
_SUMS_OF_LAYER = 2


class PrefillTime(NamedTuple):
    """The time of a prompt: until its first token, and for how long it keeps each stage busy."""

    latency_s: float
    busy_s: float


class StepParts(NamedTuple):
    """The parts of a step's time in seconds: reading weights, and KV of chunks of prompts, while multiplying;
    then reading the KV of sequences that decode, what each of them takes besides, launches and sums over
    ranks, and experts that the CPU computes; meanwhile KV comes over the bus."""

    read_s: float
    product_s: float
    kv_s: float
    sequences_s: float
    beside_s: float
    host_experts_s: float
    host_kv_s: float

    @property
    def together_s(self) -> float:
        """The time of reading and multiplying, which overlap."""
        return math.pow(self.read_s**_OVERLAP_NORM + self.product_s**_OVERLAP_NORM, 1 / _OVERLAP_NORM)

    @property
    def total_s(self) -> float:
        device_s = self.together_s + self.kv_s + self.sequences_s + self.beside_s
        return max(device_s + self.host_experts_s, self.host_kv_s)


class StepTimes:
    """The times of steps of a model on a split of devices.

    All ranks of a stage divide products, and KV by its heads; a latent is on each of them whole, unless its
    tokens are divided. Stages work on chunks of a prompt, or on parts of the sequences that decode, one after
    the other. What host memory has of the weights is computed there, and what it has of the KV is read over
    the bus in every step.
    """

    def __init__(
        self,
        model: PlannedModel,
        profile: DeviceProfile,
        split: DeviceSplit,
        device_tokens: float = math.inf,
    ) -> None:
        """`device_tokens` of KV are on the devices; what sequences have beyond it is in host memory."""
        self._model, self._profile, self._split = model, profile, split
        self._work = model.work_with_offload(split.expert_offload)
        is_divided = model.latent_kv == "split"
        # Of the KV of a token, what each rank of a stage has.
        self.kv_share = 1 / split.tp if is_divided else max(1 / split.tp, 1 / model.shape.kv_cells.num_cells)
        self._flop_s = profile.flop_s(model.product_precision(profile.kind))
        self._device_tokens = device_tokens
        self.chunk_tokens = DEVICE_TO_STEP_SIZES[profile.kind].chunk_tokens

    def prefill(self, num_tokens: int, num_cached: int = 0) -> PrefillTime:
        """Return the time of a prompt of so many tokens, whose first `num_cached` have KV already. At least
        one token is computed."""
        num_stages, start = self._split.pp, min(num_cached, num_tokens - 1)
        num_chunks = max(1, math.ceil((num_tokens - start) / self.chunk_tokens))
        computed = (num_tokens - start) / num_chunks
        read_s = num_chunks * self._read_s(computed)
        flops = self._work.of([(start, num_tokens - start)], 1).flops
        product_s = self._product_s(flops - self._host_flops(num_tokens - start))
        whole_s = max(read_s, product_s) + num_chunks * self._beside_s(computed)
        whole_s += num_chunks * self._host_experts_s(computed)
        # Stages follow each other by a chunk.
        latency_s = whole_s * (num_chunks + num_stages - 1) / (num_chunks * num_stages)
        return PrefillTime(latency_s, whole_s / num_stages)

    def decode_s(self, batch: float, context: float) -> float:
        """Return the time of a step of so many sequences with so many tokens each. With several stages each
        has a part of the sequences at a time."""
        return self.step_s(max(1.0, batch / self._split.pp), context)

    def step_s(self, decodes: float, context: float, chunks: Sequence[tuple[int, int]] = ()) -> float:
        """Return the time in which one step passes all stages: it decodes `decodes` sequences that have
        `context` tokens each in the mean, and computes `chunks` of prompts (tokens before, tokens computed).

        Weights are read once for all of them, while their products are computed. The KV of sequences that
        decode is read besides; that of a chunk's earlier tokens is read while its products are computed.
        With `pp` stages as many steps are under way, and each keeps a stage busy for this time / `pp`.
        """
        return self.parts_of_step(decodes, context, chunks).total_s

    def parts_of_step(
        self, decodes: float, context: float, chunks: Sequence[tuple[int, int]] = ()
    ) -> StepParts:
        """Return the parts of the time of such a step; of a step without rows they are 0."""
        num_rows = decodes + sum(num_tokens for _, num_tokens in chunks)
        if not num_rows:
            return StepParts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        flops, decoded_bytes, chunk_bytes = 0.0, 0.0, 0.0
        if decodes:
            # Of one sequence, since batches of means are no whole numbers.
            one = self._work.of([(context - 1, 1)], 1)
            flops, decoded_bytes = decodes * one.flops, decodes * self._kv_bytes(one, 1)
        if chunks:
            prompts = self._work.of(chunks, len(chunks))
            flops += prompts.flops
            chunk_bytes = self._kv_bytes(prompts, sum(num_tokens for _, num_tokens in chunks))
        return StepParts(
            read_s=self._read_s(num_rows) + self._kv_s(chunk_bytes),
            product_s=self._product_s(flops - self._host_flops(num_rows)),
            kv_s=self._kv_s(decoded_bytes),
            sequences_s=decodes * self._profile.sequence_us / 1e6,
            beside_s=self._beside_s(num_rows),
            host_experts_s=self._host_experts_s(num_rows),
            host_kv_s=self.host_kv_s(decodes * context),
        )

    def transfer_s(self, num_tokens: int) -> float:
        """Return the time by which the last chunk's KV reaches another replica, by the network."""
        return self.network_s(min(num_tokens, self.chunk_tokens))

    def network_s(self, num_tokens: float) -> float:
        """Return the time in which the KV of so many tokens crosses the network. Ranks that hold the same
        share the sending."""
        return num_tokens * self.token_bytes / self._split.tp / (1e9 * self._profile.network_gb_s)

    def host_kv_s(self, num_tokens: float) -> float:
        """Return the time in which sequences with so many tokens together bring those in host memory over
        the bus, which a step does while it computes."""
        beyond = max(0.0, num_tokens - self._device_tokens)
        if not beyond:
            return 0.0
        return beyond * self.token_bytes * self.kv_share / (1e9 * self._profile.host_link_gb_s)

    @functools.cached_property
    def token_bytes(self) -> float:
        """The KV that a token adds to a long sequence, of all layers without a window."""
        far = self._model.shape.max_context_tokens - 2
        read = [self._work.of([(start, 1)], 1).read_bytes for start in (far, far + 1)]
        return read[1] - read[0]

    def _kv_bytes(self, work: StepWork, num_tokens: int) -> float:
        """Return the bytes that a step of so many tokens reads beside weights."""
        return work.read_bytes - self._work.read_weight_bytes(num_tokens)

    def _kv_s(self, num_bytes: float) -> float:
        """Return the time in which the ranks of a stage read their shares of so much KV."""
        profile = self._profile
        return num_bytes * self.kv_share / (1e9 * profile.read_gb_s * profile.kv_efficiency)

    def _product_s(self, flops: float) -> float:
        """Return the time in which the ranks of a stage multiply together."""
        return flops / self._split.tp / (self._flop_s * self._profile.products_efficiency)

    def _read_s(self, num_tokens: float) -> float:
        """Return the time to read the weights once, of experts those that so many tokens choose."""
        num_bytes = self._work.read_weight_bytes(num_tokens) - self._host_expert_bytes(num_tokens)
        rate = 1e9 * self._profile.read_gb_s * self._profile.weights_efficiency
        return num_bytes / self._split.tp / rate

    @functools.cached_property
    def _host_share(self) -> float:
        """The experts of a layer that the CPU computes: of those that tokens choose no more, since devices
        have the ones that are chosen most."""
        mixture = self._model.shape.mixture
        return 0.0 if mixture is None else self._split.expert_offload / mixture.rule.num_experts

    def _host_expert_bytes(self, num_tokens: float) -> float:
        """Return the bytes of the experts in host memory that so many tokens choose."""
        if not self._host_share:
            return 0.0
        of_experts = self._work.read_weight_bytes(num_tokens) - self._work.read_weight_bytes(0)
        return self._host_share * of_experts

    def _host_flops(self, num_tokens: float) -> float:
        mixture = self._model.shape.mixture
        if mixture is None or not self._host_share:
            return 0.0
        num_weights = mixture.rule.num_chosen * mixture.weights_of_expert(self._model.shape.hidden_size)
        return self._host_share * 2.0 * num_tokens * self._num_expert_layers * num_weights

    @functools.cached_property
    def _num_expert_layers(self) -> int:
        shape = self._model.shape
        return sum(map(shape.has_experts, range(shape.num_layers)))

    def _host_experts_s(self, num_tokens: float) -> float:
        """Return the time in which the CPU computes its experts, and rows go there and back."""
        if not self._host_share:
            return 0.0
        profile = self._profile
        read_s = self._host_expert_bytes(num_tokens) / (1e9 * profile.host_read_gb_s)
        product_s = self._host_flops(num_tokens) / (1e12 * profile.host_tflop_s)
        row_bytes = 2 * num_tokens * self._model.shape.hidden_size * ITEM_BYTES
        layer_s = profile.host_layer_us / 1e6 + row_bytes / (1e9 * profile.host_link_gb_s)
        return max(read_s, product_s) + self._num_expert_layers * layer_s

    def _beside_s(self, num_tokens: float) -> float:
        """Return what a step of so many rows takes beside reading and multiplying: launches, and sums over
        the ranks of each stage."""
        profile, tp = self._profile, self._split.tp
        if tp == 1:
            return profile.step_us / 1e6
        num_sums = _SUMS_OF_LAYER * self._model.shape.num_layers
        num_bytes = 2 * (tp - 1) / tp * num_tokens * self._model.shape.hidden_size * ITEM_BYTES
        each_s = profile.collective_us / 1e6 + num_bytes / (1e9 * profile.link_gb_s)
        return profile.step_us / 1e6 + num_sums * each_s

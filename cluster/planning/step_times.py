"""Predict how long a replica's steps take: the least work of a step, over what the devices reach."""

from __future__ import annotations

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


class StepTimes:
    """The times of steps of a model on a split of devices.

    All ranks of a stage divide products, and KV by its heads; a latent is on each of them whole. Stages work
    on chunks of a prompt, or on parts of the sequences that decode, one after the other.
    """

    def __init__(self, model: PlannedModel, profile: DeviceProfile, split: DeviceSplit) -> None:
        self._model, self._profile, self._split = model, profile, split
        self._work = model.work
        self._kv_share = max(1 / split.tp, 1 / model.shape.kv_cells.num_cells)
        self._flop_s = profile.flop_s(model.product_precision(profile.kind))
        self.chunk_tokens = DEVICE_TO_STEP_SIZES[profile.kind].chunk_tokens

    def prefill(self, num_tokens: int, num_cached: int = 0) -> PrefillTime:
        """Return the time of a prompt of so many tokens, whose first `num_cached` have KV already. At least
        one token is computed."""
        num_stages, start = self._split.pp, min(num_cached, num_tokens - 1)
        num_chunks = max(1, math.ceil((num_tokens - start) / self.chunk_tokens))
        computed = (num_tokens - start) / num_chunks
        read_s = num_chunks * self._read_s(computed)
        product_s = self._product_s(self._work.of([(start, num_tokens - start)], 1).flops)
        whole_s = max(read_s, product_s) + num_chunks * self._beside_s(computed)
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
        num_rows = decodes + sum(num_tokens for _, num_tokens in chunks)
        if not num_rows:
            return 0.0
        flops, decoded_bytes, chunk_bytes = 0.0, 0.0, 0.0
        if decodes:
            # Of one sequence, since batches of means are no whole numbers.
            one = self._work.of([(context - 1, 1)], 1)
            flops, decoded_bytes = decodes * one.flops, decodes * self._kv_bytes(one, 1)
        if chunks:
            prompts = self._work.of(chunks, len(chunks))
            flops += prompts.flops
            chunk_bytes = self._kv_bytes(prompts, sum(num_tokens for _, num_tokens in chunks))
        product_s, read_s = self._product_s(flops), self._read_s(num_rows) + self._kv_s(chunk_bytes)
        together_s = math.pow(read_s**_OVERLAP_NORM + product_s**_OVERLAP_NORM, 1 / _OVERLAP_NORM)
        sequences_s = decodes * self._profile.sequence_us / 1e6
        return together_s + self._kv_s(decoded_bytes) + sequences_s + self._beside_s(num_rows)

    def transfer_s(self, num_tokens: int) -> float:
        """Return the time by which the last chunk's KV reaches another replica, by the network."""
        last = min(num_tokens, self.chunk_tokens)
        num_ranks = self._split.tp if self._kv_share == 1 / self._split.tp else 1
        return last * self.token_bytes / num_ranks / (1e9 * self._profile.network_gb_s)

    @property
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
        return num_bytes * self._kv_share / (1e9 * self._profile.read_gb_s)

    def _product_s(self, flops: float) -> float:
        """Return the time in which the ranks of a stage multiply together."""
        return flops / self._split.tp / (self._flop_s * self._profile.products_efficiency)

    def _read_s(self, num_tokens: float) -> float:
        """Return the time to read the weights once, of experts those that so many tokens choose."""
        num_bytes = self._work.read_weight_bytes(num_tokens) / self._split.tp
        return num_bytes / (1e9 * self._profile.read_gb_s * self._profile.weights_efficiency)

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

"""The interface of attention: a step's sequences, and what a backend does with them.

A backend plans once a step and runs once a layer. `run` contains everything between a layer's two products:
QK norm, rotary embedding, the KV write and attention itself. In shapes, num_tokens counts the new tokens of
all sequences of a step, one sequence after another."""

from __future__ import annotations

import ctypes
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.model.attention.quantized_kv import head_dim_of, is_quantized
from workers.model.exchange_sizes import ExchangeSizes
from workers.model.latent_heads import LatentHeads
from workers.model.latent_shape import LatentShape
from workers.model.norm import Norm


class SequenceSpan(NamedTuple):
    """`num_tokens` new tokens of one sequence from position `start`. Its block table `block_ids` covers at
    least start + num_tokens tokens; further entries are ignored."""

    start: int
    num_tokens: int
    block_ids: Sequence[int]


class Marks:
    """Takes the marks of a step's progress. This base only counts in `pieces` what kernels count there
    themselves: pieces of layers that were computed on the CPU."""

    def __init__(self) -> None:
        self.pieces = ctypes.c_int64()

    def mark(self) -> None:
        """Mark a piece of a layer as done or, on CUDA, queued."""

    def mark_layer(self) -> None:
        """Mark a layer as done or, on CUDA, queued."""


NO_MARKS = Marks()


class LayerRead(NamedTuple):
    """The blocks in host memory that attention sees of a layer of the KV, by their ids."""

    layer: int
    ids: Sequence[int]


class HostReader(ABC):
    """Reads the blocks that lie in host memory, for the attention of one step after another.

    Block ids from `first_id` on denote blocks in host memory; smaller ids denote blocks of the device.
    """

    # Whether a layer's blocks are staged on the device, one layer after another; else they are read in place.
    is_staged = True

    def __init__(self, first_id: int) -> None:
        self.first_id = first_id

    @abstractmethod
    def begin(self, reads: Sequence[LayerRead]) -> None:
        """Begin a step, before its first layer, with what is read in it. The plan's copies are done, or
        queued on the device's stream."""

    @abstractmethod
    def layer(self, layer: int) -> Tensor:
        """Return a layer of the step's staged blocks, in the order given to `begin`, or of all blocks in host
        memory, [num_blocks, 2, num_kv_heads, block_tokens, head_dim], as in the device's KV."""

    @abstractmethod
    def in_place(self) -> Tensor:
        """Return all blocks in host memory, shaped like the device's, where they are read in place."""

    @abstractmethod
    def done(self, layer: int) -> None:
        """Release a layer's blocks: the attention of one read has read them, or will have before later work
        of the device."""

    @abstractmethod
    def close(self) -> None:
        """Release what the reader holds."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step's sequences as a device knows them already, int32: the block tables of all slots, `tables`
    [num_slots, max_blocks], and `slots`, `starts` and `lengths` [num_sequences] as in `StepInput`. No
    sequence ends after `max_context_tokens`, in this step or any that reuses its CUDA graph.

    If every sequence has one new token, a plan made from a `DeviceStep` and the plan's runs read nothing else
    that differs between steps of as many sequences: a CUDA graph that captured both serves them all."""

    tables: Tensor
    slots: Tensor
    starts: Tensor
    lengths: Tensor
    max_context_tokens: int
    group_tables: Sequence[Tensor] = ()
    # Whether the same holds although a sequence has several new tokens: every step has the `lengths` of
    # `StepInput`, and none of its other arrays is read.
    is_recorded: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class StepInput:
    """One step's sequences. `tables` [num_slots, max_blocks] holds block tables, of which sequence i, in the
    order of the step's rows, has row `slots[i]`; its `lengths[i]` new tokens, at least one, begin at position
    `starts[i]`. Entries of a table after a sequence's last token are ignored.

    `host` is set if tables name blocks in host memory. `marks` takes the progress of the work. `device` says
    the same as the arrays, where they were uploaded already. `group_tables` are those of the groups of
    layers behind the first, whose entries before a sequence's window are ignored too."""

    tables: NDArray[np.int32]
    slots: NDArray[np.int32]
    starts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    block_tokens: int
    marks: Marks = NO_MARKS
    host: HostReader | None = None
    device: DeviceStep | None = None
    group_tables: Sequence[NDArray[np.int32]] = ()

    @staticmethod
    def on_device(device: DeviceStep, lengths: NDArray[np.int32], block_tokens: int) -> StepInput:
        """Return a step to record in a CUDA graph. Of its arrays on the host only `lengths` has a meaning;
        the others are placeholders."""
        nothing, no_table = np.zeros(len(lengths), np.int32), np.zeros((1, 1), np.int32)
        return StepInput(
            tables=no_table,
            slots=nothing,
            starts=nothing,
            lengths=lengths,
            block_tokens=block_tokens,
            device=device,
            group_tables=(no_table,) * len(device.group_tables),
        )

    @staticmethod
    def of(
        spans: Sequence[SequenceSpan],
        block_tokens: int,
        host: HostReader | None = None,
        marks: Marks = NO_MARKS,
    ) -> StepInput:
        """Make the step of `spans`, with a table of its own."""
        assert spans, "an empty step has no input"
        tables = np.zeros((len(spans), max(len(span.block_ids) for span in spans)), dtype=np.int32)
        for row, span in zip(tables, spans, strict=True):
            assert span.num_tokens > 0, span
            assert len(span.block_ids) * block_tokens >= span.start + span.num_tokens, span
            row[: len(span.block_ids)] = span.block_ids
        starts = np.array([span.start for span in spans], dtype=np.int32)
        lengths = np.array([span.num_tokens for span in spans], dtype=np.int32)
        slots = np.arange(len(spans), dtype=np.int32)
        return StepInput(tables, slots, starts, lengths, block_tokens, marks, host)

    def positions(self) -> NDArray[np.int64]:
        """Return the positions of the new tokens in their sequences, [num_tokens]."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        offsets: NDArray[np.int64] = self.starts - (ends - self.lengths)
        return np.arange(ends[-1]) + np.repeat(offsets, self.lengths)

    def token_blocks(self, positions: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the blocks of the new tokens, which have these positions, [num_tokens]."""
        blocks: NDArray[np.int32] = self.tables[
            np.repeat(self.slots, self.lengths), positions // self.block_tokens
        ]
        return blocks


class KvShape(NamedTuple):
    """The shape of a rank's KV, [num_blocks, num_layers, 2, num_kv_heads, block_tokens, head_dim], without
    `num_blocks` and kinds. Where layers have heads of several sizes, it is that of a view with one of the
    sizes. Heads with scales (`workers.model.attention.quantized_kv`) count without them."""

    num_layers: int
    num_kv_heads: int
    block_tokens: int
    head_dim: int


def kv_shape(kv: Tensor, num_scales: int = 1) -> KvShape:
    """Return the shape of a rank's KV, whose vectors have `num_scales` where it is quantized."""
    _, num_layers, _, num_kv_heads, block_tokens, _ = kv.shape
    return KvShape(num_layers, num_kv_heads, block_tokens, head_dim_of(kv, num_scales))


class Rotation(NamedTuple):
    """The rotary embedding of some layers: the rotation of the pairs (i, i + head_dim / 2) in radians a
    token, float32 `frequencies` [head_dim / 2], 0 for pairs that stay as they are, and the factor by which
    rotation multiplies queries and keys."""

    frequencies: Tensor
    scale: float = 1.0

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, with the factor, float32 [num_tokens, head_dim / 2]."""
        angles = positions[:, None].float() * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.scale != 1:
            factors = torch.where(self.frequencies == 0, 1.0, self.scale)
            cos, sin = cos * factors, sin * factors
        return cos, sin


class HeadKind(NamedTuple):
    """Layers of the KV whose heads are alike, where a model has several kinds: their number of key-value
    heads at a rank, the size of a head, which `layers` of the rank's KV they are, their windows, and the
    rotations that they have."""

    num_kv_heads: int
    head_dim: int
    layers: tuple[int, ...]
    windows: tuple[int, ...]
    rotations: tuple[Rotation, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionShape:
    """The properties of a rank's part of the model that a backend needs: its query heads, the window of each
    layer of its KV (0: none), the rotations that its layers have, and the factor of scores (None: the inverse
    square root of head_dim). Scores s become softcap * tanh(s / softcap), if that is not 0.

    With several `kinds` of heads, rotations are those of the kinds, and `reads` are the layers of the KV that
    the decoder's layers attend to, one after another. `has_sinks` says whether layers have sinks, with which
    backends are compared. With a `latent`, the KV is of latents, and rotations are those of its rotated
    part. With a `value_dim` the rows of the KV are keys, and so many of their first columns values: results
    have these for each head, or whole rows. `dtype` is that of queries and results; None: that of the KV,
    which has no scales."""

    num_heads: int
    windows: tuple[int, ...]
    rotations: tuple[Rotation, ...]
    score_scale: float | None = None
    softcap: float = 0.0
    kinds: tuple[HeadKind, ...] = ()
    reads: tuple[int, ...] = ()
    has_sinks: bool = False
    latent: LatentShape | None = None
    value_dim: int = 0
    dtype: torch.dtype | None = None

    @property
    def num_scales(self) -> int:
        """The scales of a vector of quantized KV: the values of latents are a part with a scale of its own,
        and so are the columns behind them."""
        return 2 if self.value_dim else 1

    def parts(self, head_dim: int) -> tuple[int, ...]:
        """Return the sizes of the parts of a vector of quantized KV that have a scale each."""
        return (self.value_dim, head_dim - self.value_dim) if self.value_dim else (head_dim,)

    def scale(self, head_dim: int) -> float:
        """Return the factor of products of queries and keys."""
        return head_dim**-0.5 if self.score_scale is None else self.score_scale


@dataclasses.dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one layer: its `index` in the rank's KV, its window (0: none), the norms of each
    head's queries and keys, if the family has them, and which `rotation` of the `AttentionShape`, or of its
    `kind` of heads, it has. A layer that has no keys and values of its own attends to those of another, which
    were written before.

    `sinks`, float32 [num_heads], are one more score of each query head, without a key and a value: their
    exponentials join the sums that probabilities are divided by. `latent` are the heads of a layer whose KV
    is of latents."""

    index: int
    window: int
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sinks: Tensor | None = None
    rotation: int = 0
    kind: int = 0
    has_own_kv: bool = True
    latent: LatentHeads | None = None


class PartialResults(NamedTuple):
    """Results of attention to some of the keys that queries see, to be merged with those of others: `mixed`
    float32 [num_tokens, num_heads, head_dim], and `log_sums` float32 [num_tokens, num_heads], the logarithms
    of the sums that they are divided by."""

    mixed: Tensor
    log_sums: Tensor


class AttentionPlan(ABC):
    """The attention of one step, planned."""

    def __init__(self, step: StepInput) -> None:
        self.marks = step.marks

    @property
    def parts(self) -> Sequence[AttentionPlan | None]:
        """The plans of each group of layers; None for one without layers here."""
        return (self,)

    def local(self, layer: LayerAttention) -> tuple[int, LayerAttention]:
        """Return the group of a layer, and the layer as that group's plan numbers it."""
        return 0, layer

    @abstractmethod
    def run(self, layer: LayerAttention, qkv: Tensor) -> Tensor:
        """Normalize and rotate queries and keys of `qkv` [num_tokens, (num_heads + 2 * num_kv_heads) *
        head_dim], which may be overwritten; write keys and values to their blocks; and attend causally. Of a
        layer without keys and values of its own, `qkv` has queries alone. Returns [num_tokens, num_heads *
        head_dim].

        A token at position i sees the keys j with j <= i and, with a window, i - window < j.

        Of a layer of latents, `qkv` is as `workers.model.latent_projection` computes it: queries and normed
        latents."""

    @abstractmethod
    def attend(self, layer: LayerAttention, queries: Tensor) -> Tensor:
        """Attend as `run` does from `queries` [num_tokens, num_heads * head_dim], which are rotated and whose
        rows may be apart, to keys and values that lie in their blocks."""

    def attend_parts(self, layer: LayerAttention, queries: Tensor) -> PartialResults:
        """Attend as `attend` does, with what is needed to merge the results with those of further keys. The
        layer has no sinks."""
        raise NotImplementedError("results of this backend are not merged with others")


class AttentionBackend(ABC):
    """A way to compute attention over a rank's `kv` [num_blocks, num_layers, 2, num_kv_heads, block_tokens,
    head_dim], whose heads are contiguous, of the model's `dtype` or quantized
    (`workers.model.attention.quantized_kv`). Made once for a rank. Latents are of one kind and one head."""

    name: str
    # Whether it can read blocks in host memory through staging buffers, and not only in place.
    can_stage: bool
    # Whether a sequence's results depend neither on the others of a step nor on its chunks.
    is_deterministic: bool
    # Whether it plans from a `DeviceStep`, so that a CUDA graph can capture a step that decodes.
    can_capture = False
    # Whether layers here keep a recurrent state, which a step may change in place.
    has_states = False

    def __init__(self, shape: AttentionShape, kv: Tensor) -> None:
        assert shape.dtype is not None or not is_quantized(kv)
        self.shape = shape
        self.kv = kv
        self.dtype = shape.dtype or kv.dtype

    @property
    def block_tokens(self) -> int:
        """The tokens of a block, of which ranks may hold parts."""
        return kv_shape(self.kv).block_tokens

    def exchanges(self, starts: NDArray[np.int32], lengths: NDArray[np.int32]) -> Sequence[ExchangeSizes]:
        """Return what the ranks of a stage exchange in each layer of a step of such sequences, in order."""
        return ()

    @property
    def split_tokens(self) -> int:
        """The number of tokens behind which short chunks have kernels of their own; 0: nowhere."""
        return 0

    @property
    def kvs(self) -> Sequence[Tensor]:
        """The KV of each group of layers, that of the first being `kv`."""
        return (self.kv,)

    @abstractmethod
    def plan(self, step: StepInput) -> AttentionPlan:
        """Plan a step. Blocks in host memory may be staged from now on. The plan holds until the next one."""

    @abstractmethod
    def over(self, shape: AttentionShape, kv: Tensor) -> AttentionBackend:
        """Return a backend of this kind over another KV, on the same device; one in plain torch where this
        kind does not serve it."""


MakeBackend = Callable[[AttentionShape, Tensor], AttentionBackend]


def to_device(values: NDArray[np.int64] | NDArray[np.int32], device: torch.device) -> Tensor:
    """Copy an array to the device, on CUDA through pinned memory and without waiting."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)

"""Join the parts of a model that several ranks share, around the products of a loaded decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from workers.model.decoder import Decoder
from workers.model.decoder_layer import DecoderLayer
from workers.model.exchange_sizes import ExchangeSizes
from workers.model.expert_rows import RowExchange, RowProducts, routed_row_bytes, row_parts
from workers.model.experts.mixture import Mixture
from workers.model.layer_products import AddedProduct, ParallelSum, Product
from workers.model.row_norms import RowNorms
from workers.model.sizes import kv_heads, part, sends_rows


class Collectives(RowExchange, Protocol):
    """The operations that the ranks of a stage do together, all in the same order."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by the sum over the ranks, equal bit for bit on all of them."""

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Gather the parts [num_rows, widths[rank]] side by side at rank 0; None at the others."""


class _Sum(NamedTuple):
    """The shape of what the ranks of a stage add up, and its dtype; None: the model's."""

    num_rows: int
    num_columns: int
    dtype: torch.dtype | None = None


# The exchanges of a layer whose experts are computed by rows, in this order: see `workers.model.expert_rows`.
_ExchangeKind = Literal["partial sums", "rows", "results", "hidden states"]
_EXCHANGES: tuple[_ExchangeKind, ...] = ("partial sums", "rows", "results", "hidden states")


class _Exchange(NamedTuple):
    """An exchange between the ranks of a stage in a step of `num_rows`."""

    kind: _ExchangeKind
    num_rows: int


class Unfinished:
    """Counts the collectives of a stage's computation, so that a rank whose computation failed can complete
    the collectives that the others wait for. Wraps the stage's real `collectives` and takes their place in
    the model."""

    def __init__(self, collectives: Collectives, decoder: Decoder) -> None:
        self._collectives = collectives
        self.tp, self.tp_rank = collectives.tp, collectives.tp_rank
        self.shares_memory = collectives.shares_memory
        self._decoder = decoder
        self._widths = [len(part(decoder.config.vocab_size, rank, self.tp)) for rank in range(self.tp)]
        self._expected: list[_Sum | _Exchange | ExchangeSizes] = []
        # How many rows this rank has received from each in the last exchange, and sent to each.
        self._num_received: list[int] = []
        self._num_sent: list[int] = []
        self._num_sampled = 0

    def begin(
        self,
        num_rows: int,
        num_sampled: int,
        *,
        embeds: bool = True,
        attention: Sequence[ExchangeSizes] = (),
    ) -> None:
        """Begin a computation of `num_rows` tokens: the embedding on the first stage, unless that is left
        out, the layers, each with these exchanges of its `attention`, and on the last stage the head for
        `num_sampled`, if any."""
        if self.tp == 1:
            return
        decoder, config = self._decoder, self._decoder.config
        self._expected = [
            it for layer in decoder.layers for it in (*attention, *self._of_layer(layer, num_rows))
        ]
        if embeds and decoder.embedding is not None:
            products = _Sum(num_rows, config.hidden_size)
            inputs = _Sum(num_rows, config.num_layers * config.layer_shapes.input_size)
            self._expected = [products, *([] if decoder.inputs is None else [inputs]), *self._expected]
        self._expected.reverse()
        self._num_sampled = num_sampled if self._decoder.head is not None else 0

    def _of_layer(self, layer: DecoderLayer, num_rows: int) -> list[_Sum | _Exchange]:
        """Return what a layer does together with the other ranks, in order."""
        config = self._decoder.config
        products = _Sum(num_rows, config.hidden_size)
        squares = [_Sum(num_rows, 2, torch.float32)] if isinstance(layer.qk_norms, RowNorms) else []
        if layer.state_mixer is not None and (num_summed := layer.state_mixer.num_summed):
            squares = [_Sum(num_rows, num_summed, torch.float32)]
        if layer.expert_rows is not None and layer.expert_rows.serves(num_rows):
            return [*squares, *(_Exchange(kind, num_rows) for kind in _EXCHANGES)]
        has_branches = config.mixture is not None and config.mixture.has_dense_branch
        if config.is_parallel:
            return [*squares, products]
        num_added = 3 if has_branches else 2
        if config.traits.has_single_blocks:
            num_added = 1
        return [*squares, *[products] * num_added]

    def begin_head(self, num_sampled: int) -> None:
        """Begin a computation of the head alone."""
        self._expected, self._num_sampled = [], num_sampled if self.tp > 1 else 0

    def all_reduce(self, tensor: Tensor) -> None:
        """Add up as the stage does, and count it."""
        expected = self._expected.pop()
        assert isinstance(expected, _Sum), f"a sum where the others have {expected}"
        found, others = tuple(tensor.shape), (expected.num_rows, expected.num_columns)
        assert found == others, f"a sum of {found} where the others add up {others}"
        self._collectives.all_reduce(tensor)

    def exchange(self, parts: Sequence[Tensor], num_rows: Sequence[int] | None = None) -> list[Tensor]:
        """Exchange rows as the stage does, and count it."""
        expected = self._expected[-1]
        assert not isinstance(expected, _Sum), f"an exchange where the others have {expected}"
        if isinstance(expected, ExchangeSizes):
            found_rows = list(map(len, parts)), parts[0].shape[1]
            assert found_rows == (list(expected.sent), expected.num_columns), f"{found_rows}, not {expected}"
        found = self._collectives.exchange(parts, num_rows)
        self._expected.pop()  # not before: it may lack memory, and sends nothing then
        self._num_sent, self._num_received = list(map(len, parts)), list(map(len, found))
        return found

    def gather_columns(self, tensor: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Gather as the stage does, and count it."""
        gathered = self._collectives.gather_columns(tensor, widths)
        self._num_sampled = 0
        return gathered

    def finish(self, like: Tensor) -> None:
        """Contribute zeros, of the dtype and device of `like`, where the others still expect this rank."""
        while self._expected:
            missing = self._expected[-1]
            if not isinstance(missing, _Sum):
                sizes = missing if isinstance(missing, ExchangeSizes) else self._sizes(missing, like)
                shapes = [(count, sizes.num_columns) for count in sizes.sent]
                self.exchange([like.new_zeros(it, dtype=sizes.dtype) for it in shapes], sizes.received)
            else:
                self.all_reduce(like.new_zeros((missing.num_rows, missing.num_columns), dtype=missing.dtype))
        if self._num_sampled:
            own = like.new_zeros((self._num_sampled, self._widths[self.tp_rank]), dtype=torch.float32)
            self.gather_columns(own, self._widths)

    def _sizes(self, missing: _Exchange, like: Tensor) -> ExchangeSizes:
        """Return the sizes of an exchange to which this rank contributes nothing."""
        hidden_size, mixture = self._decoder.config.hidden_size, self._decoder.config.mixture
        assert mixture is not None
        of_ranks = list(map(len, row_parts(missing.num_rows, self.tp)))
        own = [of_ranks[self.tp_rank]] * self.tp
        match missing.kind:
            case "partial sums":
                return ExchangeSizes(of_ranks, own, hidden_size)
            case "rows":
                width = routed_row_bytes(hidden_size, mixture.rule.num_chosen, like.element_size())
                return ExchangeSizes([0] * self.tp, None, width, torch.uint8)
            case "results":
                return ExchangeSizes(self._num_received, self._num_sent, hidden_size)
            case "hidden states":
                return ExchangeSizes(own, of_ranks, hidden_size)


def parallelize(decoder: Decoder, collectives: Collectives) -> None:
    """Make a decoder that holds one rank's part compute with the other ranks. Its layers and embedding then
    give whole results on every rank, its head on rank 0 and an empty [0, vocab_size] on the others. With one
    rank nothing changes."""
    if collectives.tp == 1:
        return
    assert (decoder.shard.tp_rank, decoder.shard.tp_size) == (collectives.tp_rank, collectives.tp)
    for layer in decoder.layers:
        if layer.parallel_sum is not None:
            assert layer.down is not None
            assert layer.output is not None
            layer.parallel_sum = _JoinedSum(layer.output, layer.down, collectives)
        layer.expert_rows = _expert_rows(decoder, layer, collectives)
        if layer.state_mixer is not None:
            layer.state_mixer.join(collectives.all_reduce, collectives.tp)
        if layer.output is not None:
            layer.output = _Summed(layer.output, collectives)
        if layer.down is not None:
            layer.down = _Summed(layer.down, collectives)
        if layer.mixture is not None:
            layer.mixture = _Summed(layer.mixture, collectives)
        if isinstance(layer.qk_norms, RowNorms):
            layer.qk_norms = _JoinedRowNorms(layer.qk_norms, decoder, collectives)
    vocab_size = decoder.config.vocab_size
    if decoder.embedding is not None:
        decoder.embedding = _SplitEmbedding(decoder.embedding, vocab_size, collectives)
    if (inputs := decoder.inputs) is not None:
        num_rows = decoder.config.layer_shapes.input_vocab_size
        inputs.lookup = _SplitEmbedding(inputs.lookup, num_rows, collectives)
    if decoder.head is not None:
        decoder.head = _SplitHead(decoder.head, vocab_size, collectives)


def _expert_rows(decoder: Decoder, layer: DecoderLayer, collectives: Collectives) -> RowProducts | None:
    """Return the products of a layer by rows; None where sums over all ranks are as good. Between GPUs
    exchanges of rows are not yet validated."""
    shape, mixture, shard = decoder.config.mixture, layer.mixture, decoder.shard
    if shape is None or not isinstance(mixture, Mixture) or decoder.device.type != "cpu":
        return None
    if layer.output is None:
        return None
    if not sends_rows(shape, shard.tp_size, shard.ep_size):
        return None
    return RowProducts(layer.output, mixture, shape, shard.ep_size, collectives)


class _Summed:
    """A product whose inputs are split over the ranks: the partial results are added up."""

    def __init__(self, product: AddedProduct, collectives: Collectives) -> None:
        self._product = product
        self._all_reduce = collectives.all_reduce

    def __call__(self, x: Tensor) -> Tensor:
        total = self._product(x)
        self._all_reduce(total)
        return total

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        return self(x)


class _JoinedSum(ParallelSum):
    """Attention and feed-forward whose inputs are split over the ranks: the partial results of both are added
    up at once."""

    def __init__(self, output: AddedProduct, down: AddedProduct, collectives: Collectives) -> None:
        super().__init__(output, down)
        self._all_reduce = collectives.all_reduce

    def add_to(self, hidden: Tensor, mixed: Tensor, activated: Tensor) -> Tensor:
        total = self.output(mixed).add_(self.down(activated))
        self._all_reduce(total)
        return total


class _JoinedRowNorms(RowNorms):
    """Norms of queries and keys whose heads are split over the ranks: the squares are added up."""

    def __init__(self, norms: RowNorms, decoder: Decoder, collectives: Collectives) -> None:
        super().__init__(norms.queries, norms.keys)
        config, rank, tp = decoder.config, collectives.tp_rank, collectives.tp
        self._sizes = torch.tensor(
            [config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim],
            dtype=torch.float32,
            device=norms.keys.weight.device,
        )
        # Of ranks that hold copies of a head, the first one's count.
        held = kv_heads(config.num_kv_heads, rank, tp)
        self._counts_keys = rank == 0 or kv_heads(config.num_kv_heads, rank - 1, tp) != held
        self._all_reduce = collectives.all_reduce

    def normalize(self, qkv: Tensor) -> None:
        parts = self.parts(qkv)
        wide = [part.float() for part in parts]
        squares = torch.stack([part.square().sum(1) for part in wide], 1)
        if not self._counts_keys:
            squares[:, 1] = 0
        self._all_reduce(squares)
        for kind, norm in enumerate((self.queries, self.keys)):
            factors = torch.rsqrt(squares[:, kind] / self._sizes[kind] + norm.eps)
            scaled = wide[kind] * factors[:, None]
            if norm.is_rounded_first:
                scaled = scaled.to(qkv.dtype)
            parts[kind].copy_(scaled * norm.weight)


class _SplitEmbedding:
    """Maps token ids [num_tokens] to rows of a table of `num_rows`: every rank looks up the ids that it
    holds, the other rows are zero, and all are added up."""

    def __init__(self, lookup: Product, num_rows: int, collectives: Collectives) -> None:
        self._lookup = lookup
        self._held = part(num_rows, collectives.tp_rank, collectives.tp)
        self._all_reduce = collectives.all_reduce

    def __call__(self, tokens: Tensor) -> Tensor:
        is_foreign = (tokens < self._held.start) | (tokens >= self._held.stop)
        rows = self._lookup((tokens - self._held.start).masked_fill_(is_foreign, 0))
        rows.masked_fill_(is_foreign[:, None], 0)
        self._all_reduce(rows)
        return rows


class _SplitHead:
    """Maps [num_rows, hidden_size] to [num_rows, vocab_size] at rank 0, and [0, vocab_size] at the others."""

    def __init__(self, product: Product, vocab_size: int, collectives: Collectives) -> None:
        self._product = product
        self._gather = collectives.gather_columns
        self._vocab_size = vocab_size
        self._widths = [len(part(vocab_size, rank, collectives.tp)) for rank in range(collectives.tp)]

    def __call__(self, x: Tensor) -> Tensor:
        local = self._product(x)
        gathered = self._gather(local, self._widths)
        return torch.empty_like(local[:0, :1]).expand(0, self._vocab_size) if gathered is None else gathered

"""Split the rows of a step over the ranks of a stage while the experts of a layer are computed.

After attention every rank holds a part of the sum of every row. Each rank receives the parts of its own rows,
a contiguous part of all, adds them up, and normalizes and routes these rows alone. A row is then sent once
to each rank that computes some of its experts, with their numbers and weights, and each of these returns one
row: the weighted sum of the results of its experts. The row's rank adds these sums in the order of the ranks.
Of the ranks with copies of an expert, sender and receiver find the one that computes a row from the row.
In the end all ranks exchange their rows, whole.

A rank of n sends (n - 1) / n of all rows in the first exchange and in the last, and its own rows twice times
the mean number of other ranks that a row is sent to: as many rows as two ring all-reduces where every row
goes to every rank, and else fewer. Numbers and weights take 8 bytes for each expert of a row that is sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from workers.model.experts.mixture import Mixture
from workers.model.experts.mixture_shape import MixtureShape
from workers.model.experts.routing import Routing
from workers.model.layer_products import AddedProduct
from workers.model.sizes import held_experts, part

# In a step of fewer rows, two sums over all ranks take less of a rank's time than four exchanges of rows, and
# are fewer waits. With 64 experts of 1024 x 384 on 4 ranks of a CPU (AVX512-BF16), of which 2 are chosen, a
# layer took 5.5 ms of a rank's time by sums and 5.7 ms by rows at 256 rows, and 19.9 and 15.4 ms at 1024.
LEAST_ROWS = 512
# The same by gloo: 66 and 82 ms at 1024 rows, and 134 and 134 ms at 2048.
LEAST_ROWS_BY_SOCKETS = 2048
_ALIGNMENT = 8


class RowExchange(Protocol):
    """The exchange of rows between the ranks of a stage; all take part in the same order."""

    @property
    def tp(self) -> int: ...

    @property
    def tp_rank(self) -> int: ...

    @property
    def shares_memory(self) -> bool:
        """Whether the ranks exchange rows through memory that they share."""

    def exchange(self, parts: Sequence[Tensor], num_rows: Sequence[int] | None = None) -> list[Tensor]:
        """Send `parts[rank]` [any, num_columns], contiguous and of one dtype, to each rank. Returns what each
        rank sends: `num_rows[rank]` rows, or, without these, as many as it does. The rank's own part is
        returned as it is."""


def row_parts(num_rows: int, tp: int) -> list[range]:
    """Return the rows of each rank."""
    return [part(num_rows, rank, tp) for rank in range(tp)]


def routed_row_bytes(hidden_size: int, num_chosen: int, item_bytes: int) -> int:
    """Return the size of a row that is sent with the numbers and weights of its experts."""
    return 8 * num_chosen + -(-hidden_size * item_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclasses.dataclass(frozen=True, slots=True)
class RoutedRows:
    """Rows [num_rows, hidden_size] and the experts of each, as they are sent: in bytes [num_rows, any], the
    numbers and weights of experts before the values of a row."""

    packed: Tensor

    @classmethod
    def of(cls, x: Tensor, routing: Routing) -> RoutedRows:
        """Pack rows with their experts."""
        num_chosen = routing.experts.shape[1]
        width = routed_row_bytes(x.shape[1], num_chosen, x.element_size())
        packed = torch.empty(len(x), width, dtype=torch.uint8)
        rows = cls(packed)
        rows._experts(num_chosen).copy_(routing.experts)
        rows._weights(num_chosen).copy_(routing.weights)
        rows.values(num_chosen, x.shape[1], x.dtype).copy_(x)
        return rows

    def routing(self, num_chosen: int) -> Routing:
        """Return the numbers and weights of the experts of each row."""
        return Routing(self._experts(num_chosen), self._weights(num_chosen))

    def values(self, num_chosen: int, hidden_size: int, dtype: torch.dtype) -> Tensor:
        """Return the rows, as a view."""
        start = 8 * num_chosen
        return self.packed[:, start : start + hidden_size * dtype.itemsize].view(dtype)

    def _experts(self, num_chosen: int) -> Tensor:
        return self.packed[:, : 4 * num_chosen].view(torch.int32)

    def _weights(self, num_chosen: int) -> Tensor:
        return self.packed[:, 4 * num_chosen : 8 * num_chosen].view(torch.float32)


class RowProducts:
    """The products of a layer with experts, of this rank's rows alone: `output` takes all rows of attention
    and gives the sum of the rank's rows, `mixture` takes and gives the rank's rows."""

    def __init__(
        self, output: AddedProduct, mixture: Mixture, shape: MixtureShape, ep: int, exchange: RowExchange
    ) -> None:
        self.output: AddedProduct = _ScatteredSum(output, exchange)
        self.mixture: AddedProduct = _SentMixture(mixture, shape, ep, exchange)
        self._exchange = exchange

    def serves(self, num_rows: int) -> bool:
        """Whether a step of so many rows is split by rows; the same at all ranks of a stage."""
        return num_rows >= (LEAST_ROWS if self._exchange.shares_memory else LEAST_ROWS_BY_SOCKETS)

    def own(self, hidden: Tensor) -> Tensor:
        """Return the rank's rows, as a view."""
        rows = part(len(hidden), self._exchange.tp_rank, self._exchange.tp)
        return hidden[rows.start : rows.stop]

    def gather(self, hidden: Tensor) -> None:
        """Fill `hidden` [num_rows, hidden_size], of which each rank has its own rows, with those of all."""
        rows = row_parts(len(hidden), self._exchange.tp)
        parts = self._exchange.exchange([self.own(hidden)] * self._exchange.tp, list(map(len, rows)))
        for rank, found in enumerate(parts):
            if rank != self._exchange.tp_rank:
                hidden[rows[rank].start : rows[rank].stop].copy_(found)


class _OwnRows:
    """A product of the rank's own rows, which the norm that follows adds to them."""

    def __call__(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor:
        return self(x)


class _ScatteredSum(_OwnRows):
    """A product whose inputs are split over the ranks: each rank adds up the partial results of its rows."""

    def __init__(self, product: AddedProduct, exchange: RowExchange) -> None:
        self._product, self._exchange = product, exchange

    def __call__(self, x: Tensor) -> Tensor:
        partial = self._product(x)
        rows = row_parts(len(partial), self._exchange.tp)
        num_own = len(rows[self._exchange.tp_rank])
        parts = [partial[it.start : it.stop] for it in rows]
        received = self._exchange.exchange(parts, [num_own] * self._exchange.tp)
        if len(received) == 2:
            return torch.add(*received)
        return torch.stack(received).sum(0)


class _SentMixture(_OwnRows):
    """A mixture whose experts are on several ranks: rows are sent to those of their experts."""

    def __init__(self, mixture: Mixture, shape: MixtureShape, ep: int, exchange: RowExchange) -> None:
        self._mixture, self._exchange = mixture, exchange
        self._num_chosen = shape.rule.num_chosen
        self._num_sharing = exchange.tp // ep
        held = [held_experts(shape, rank, exchange.tp, ep).experts for rank in range(exchange.tp)]
        numbers = torch.arange(shape.rule.num_experts)
        # Whether each rank holds something of each expert, [num_experts, tp].
        self._holders = torch.stack([(numbers >= it.start) & (numbers < it.stop) for it in held], 1)

    def __call__(self, x: Tensor) -> Tensor:
        rank, exchange = self._exchange.tp_rank, self._exchange.exchange
        routing = self._mixture.route(x)
        is_sent = self._is_sent(x, routing)
        own = is_sent[:, rank].nonzero().flatten()
        is_sent[:, rank] = False
        places = [column.nonzero().flatten() for column in is_sent.T]
        packed = RoutedRows.of(x, routing).packed
        received = exchange([packed[it] for it in places])
        received[rank] = packed[own]
        sums = self._sums(RoutedRows(torch.cat(received)), x)
        parts = list(torch.split(sums, [len(it) for it in received]))
        of_own = parts[rank]
        parts[rank] = x[:0]
        returned = exchange(parts, list(map(len, places)))
        places[rank], returned[rank] = own, of_own
        return _added(returned, places, x)

    def _is_sent(self, x: Tensor, routing: Routing) -> Tensor:
        """Return whether each rank computes something of each row, [num_rows, tp]."""
        if (copies := self._mixture.copies) is None:
            return self._holders[routing.experts].any(1)
        num_parts = self._exchange.tp // self._num_sharing
        of_parts = torch.zeros(len(x), num_parts, dtype=torch.bool)
        of_parts.scatter_(1, copies.slots.parts(x, routing.experts), value=True)
        return of_parts.repeat_interleave(self._num_sharing, 1)

    def _sums(self, rows: RoutedRows, like: Tensor) -> Tensor:
        """Return the weighted sums of the results of the experts that this rank computes."""
        if not len(rows.packed):
            return like.new_empty((0, like.shape[1]))
        x = rows.values(self._num_chosen, like.shape[1], like.dtype)
        return self._mixture.sum_held(x, rows.routing(self._num_chosen))


def _added(parts: Sequence[Tensor], places: Sequence[Tensor], like: Tensor) -> Tensor:
    """Add up the sums of every rank, which are of the rows at its `places`, in the order of the ranks."""
    total = torch.zeros(like.shape, dtype=torch.float32)
    for sums, rows in zip(parts, places, strict=True):
        total.index_add_(0, rows, sums.float())
    return total.to(like.dtype)

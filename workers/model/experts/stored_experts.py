"""Read the products of a layer's experts in the forms in which they are published: a tensor for each product
of each expert; one for each product of all experts, with outputs as rows or with inputs; or quantized to
MXFP4."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar, overload

import torch
from torch import Tensor

from workers.errors import CheckpointError
from workers.model.experts.mixture_shape import MixtureShape
from workers.model.experts.mxfp4 import BLOCK_BYTES, BLOCK_ITEMS, dequantized, quantized
from workers.model.families.expert_traits import ExpertNames
from workers.model.quantization.kept_forms import has_experts
from workers.model.quantization.quantized_weight import QuantizedWeight, are_alike
from workers.model.quantization.weight_parts import columns_of, moved
from workers.model.sizes import HeldExperts
from workers.model.tensor_files import TensorFiles, WeightSlice

_ALL = slice(None)


_Item = TypeVar("_Item")


class ReadWhenTaken(Sequence[_Item], Generic[_Item]):
    """Weights that are read, and converted, each time that they are taken: all experts of a layer at once may
    not fit beside those that are packed."""

    def __init__(self, count: int, read: Callable[[int], _Item]) -> None:
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> _Item: ...

    @overload
    def __getitem__(self, place: slice) -> ReadWhenTaken[_Item]: ...

    def __getitem__(self, place: int | slice) -> _Item | ReadWhenTaken[_Item]:
        chosen = range(self._count)[place]
        if isinstance(chosen, range):
            return ReadWhenTaken(len(chosen), lambda number: self._read(chosen[number]))
        return self._read(chosen)


class ExpertProducts(NamedTuple):
    """The weights of experts as `ExpertWeights` has them; no `gates` where experts have none."""

    gates: Sequence[Tensor]
    ups: Sequence[Tensor]
    downs: Sequence[Tensor]


class QuantizedProducts(NamedTuple):
    """The weights of experts as `QuantizedExpertWeights` has them."""

    gates: Sequence[QuantizedWeight]
    ups: Sequence[QuantizedWeight]
    downs: Sequence[QuantizedWeight]


class StoredExperts:
    """Reads the experts of one layer that a rank holds; the names of their tensors begin with `block`."""

    def __init__(
        self,
        files: TensorFiles,
        names: ExpertNames,
        block: str,
        shape: MixtureShape,
        held: HeldExperts,
        hidden_size: int,
    ) -> None:
        self._files, self._names, self._block = files, names, block
        self._num_experts, self._size, self._hidden_size = shape.rule.num_experts, shape.size, hidden_size
        self._held = held.experts
        self._columns = slice(held.columns.start, held.columns.stop)

    def products(self) -> ExpertProducts:
        """Read the products in the form that the checkpoint has, of rounded values where the form of weights
        says so."""
        rounded = self._kept_values() if self._files.form.rounded is not None else None
        if rounded is not None:
            return ExpertProducts(*map(self._dequantized, rounded))
        gate_up = f"{self._block}{self._names.gate_up}"
        if f"{gate_up}_blocks" in self._files:
            return self._quantized(gate_up, f"{self._block}{self._names.down}")
        if not self._names.is_gated or gate_up not in self._files:
            return self._each()
        return self._with_inputs_as_rows() if self._names.is_transposed else self._together()

    def quantized(self) -> QuantizedProducts | None:
        """Read the products as they are kept quantized; None where they are not, or where there are no
        products for their form."""
        found = self._kept_values()
        if found is None:
            return None
        inner = [*found.gates[:1], found.ups[0]]
        if not all(map(has_experts, (*inner, found.downs[0]))):
            return None
        return found if are_alike(inner) else None

    def _kept_values(self) -> QuantizedProducts | None:
        """Read the products as the checkpoint or the form of weights has them quantized, if either does."""
        if not self._names.is_gated:
            return self._kept_each() if self._files.may_quantize else None
        gate_up, down = (f"{self._block}{it}" for it in (self._names.gate_up, self._names.down))
        if f"{gate_up}_blocks" in self._files:
            return self._kept_blocks(gate_up, down) if self._files.form.keeps_stored else None
        if not self._files.may_quantize:
            return None
        if gate_up not in self._files:
            return self._kept_each()
        return None if self._names.is_transposed else self._kept_together(gate_up, down)

    def _dequantized(self, weights: Sequence[QuantizedWeight]) -> ReadWhenTaken[Tensor]:
        return ReadWhenTaken(len(weights), lambda place: weights[place].dequantized(self._files.dtype))

    def gate_up_bias(self) -> Tensor | None:
        """Read the biases of gates and ups, [num_held, 2 * num_columns], those of gates first."""
        if not self._names.gate_up_bias:
            return None
        return torch.cat([half[:, self._columns] for half in self._gate_and_up_bias()], 1)

    def _gate_and_up_bias(self) -> Sequence[Tensor]:
        """Read the biases of gates and of ups, [num_held, size] each."""
        names = self._names
        each = [f"{self._block}{it}" for it in (names.gate_bias, names.up_bias)]
        if each[0] in self._files:
            shape = (self._num_experts, self._size)
            return [self._files.tensor(it, shape, self._experts) for it in each]
        shape = (self._num_experts, 2 * self._size)
        bias = self._files.tensor(f"{self._block}{names.gate_up_bias}", shape, self._experts)
        return (bias[:, ::2], bias[:, 1::2]) if names.is_transposed else bias.chunk(2, 1)

    def down_bias(self) -> Tensor | None:
        """Read the biases of downs, [num_held, hidden_size]."""
        if not self._names.down_bias:
            return None
        shape = (self._num_experts, self._hidden_size)
        return self._files.tensor(f"{self._block}{self._names.down_bias}", shape, self._experts).clone()

    @property
    def _experts(self) -> slice:
        return slice(self._held.start, self._held.stop)

    def _each(self) -> ExpertProducts:
        self._leave_others()
        inner, outer = (self._size, self._hidden_size), (self._hidden_size, self._size)

        def each(name: str, shape: tuple[int, int], *slices: slice) -> Sequence[Tensor]:
            names = [f"{self._block}{name.format(expert=expert)}" for expert in self._held]
            if not any(map(self._files.is_quantized, names)):
                return [self._files.tensor(it, shape, *slices) for it in names]
            self._files.read.update(names)
            return ReadWhenTaken(len(names), lambda place: self._files.tensor(names[place], shape, *slices))

        return ExpertProducts(
            each(self._names.each_gate, inner, self._columns) if self._names.is_gated else (),
            each(self._names.each_up, inner, self._columns),
            each(self._names.each_down, outer, slice(None), self._columns),
        )

    def _kept_each(self) -> QuantizedProducts | None:
        inner, outer = (self._size, self._hidden_size), (self._hidden_size, self._size)

        def each(name: str, shape: tuple[int, int], rows: slice, columns: slice) -> list[WeightSlice]:
            names = [f"{self._block}{name.format(expert=expert)}" for expert in self._held]
            return [WeightSlice(it, shape, rows, columns) for it in names]

        self._leave_others()
        return self._kept(
            each(self._names.each_gate, inner, self._columns, _ALL) if self._names.is_gated else [],
            each(self._names.each_up, inner, self._columns, _ALL),
            each(self._names.each_down, outer, _ALL, self._columns),
        )

    def _kept_together(self, gate_up: str, down: str) -> QuantizedProducts | None:
        inner = (self._num_experts, 2 * self._size, self._hidden_size)
        outer = (self._num_experts, self._hidden_size, self._size)
        of_ups = slice(self._size + self._columns.start, self._size + self._columns.stop)

        def each(name: str, shape: tuple[int, ...], rows: slice, columns: slice) -> list[WeightSlice]:
            return [WeightSlice(name, shape, rows, columns, expert) for expert in self._held]

        return self._kept(
            each(gate_up, inner, self._columns, _ALL),
            each(gate_up, inner, of_ups, _ALL),
            each(down, outer, _ALL, self._columns),
        )

    def _kept(
        self, gates: list[WeightSlice], ups: list[WeightSlice], downs: list[WeightSlice]
    ) -> QuantizedProducts | None:
        """Return weights each of which is read when it is taken; None where the first expert's are not
        quantized. All experts have one format."""
        if any(self._files.quantized(first) is None for first in (*gates[:1], ups[0], downs[0])):
            return None

        def of(slices: list[WeightSlice]) -> ReadWhenTaken[QuantizedWeight]:
            self._files.read.update(it.name for it in slices)

            def read(number: int) -> QuantizedWeight:
                weight = self._files.quantized(slices[number])
                if weight is None:
                    name = slices[number].name
                    raise CheckpointError(f"{self._files.file_of(name)}: {name} has another form than others")
                return weight

            return ReadWhenTaken(len(slices), read)

        return QuantizedProducts(of(gates), of(ups), of(downs))

    def _kept_blocks(self, gate_up: str, down: str) -> QuantizedProducts | None:
        """Read experts of MXFP4; the outputs of gate and up take turns."""
        of_gate_up = self._blocks(gate_up, 2 * self._size, self._hidden_size)
        of_down = self._blocks(down, self._hidden_size, self._size)
        count, on_device = len(self._held), self._files.on_device
        if columns_of(quantized(*(it[0] for it in of_down)), self._columns) is None:
            return None

        def part(offset: int) -> ReadWhenTaken[QuantizedWeight]:
            blocks, scales = (it[:, offset::2][:, self._columns] for it in of_gate_up)
            return ReadWhenTaken(count, lambda it: moved(quantized(blocks[it], scales[it]), on_device))

        def read_down(number: int) -> QuantizedWeight:
            whole = quantized(*(it[number] for it in of_down))
            part = columns_of(whole, self._columns)
            assert part is not None
            return moved(part, on_device)

        return QuantizedProducts(part(0), part(1), ReadWhenTaken(count, read_down))

    def _leave_others(self) -> None:
        names = self._names
        each = [it for it in (names.each_gate, names.each_up, names.each_down) if it]
        for expert in set(range(self._num_experts)).difference(self._held):
            self._files.left.update(f"{self._block}{name.format(expert=expert)}" for name in each)

    def _together(self) -> ExpertProducts:
        names = (f"{self._block}{self._names.gate_up}", f"{self._block}{self._names.down}")
        gate_up_shape = (self._num_experts, 2 * self._size, self._hidden_size)
        down_shape = (self._num_experts, self._hidden_size, self._size)
        if any(map(self._files.is_quantized, names)):
            return self._dequantized_together(names, gate_up_shape, down_shape)
        gate_up = self._files.tensor(names[0], gate_up_shape, self._experts)
        down = self._files.tensor(names[1], down_shape, self._experts, slice(None), self._columns)
        gates, ups = gate_up[:, self._columns], gate_up[:, self._size :][:, self._columns]
        return ExpertProducts(list(gates), list(ups), list(down))

    def _dequantized_together(
        self, names: tuple[str, str], gate_up_shape: tuple[int, ...], down_shape: tuple[int, ...]
    ) -> ExpertProducts:
        """Read experts of which each is dequantized when it is taken."""
        self._files.read.update(names)
        held, columns, size = self._held, self._columns, self._size

        def read(name: str, shape: tuple[int, ...], *slices: slice) -> ReadWhenTaken[Tensor]:
            def of(place: int) -> Tensor:
                return self._files.tensor(name, shape, slice(held[place], held[place] + 1), *slices)[0]

            return ReadWhenTaken(len(held), of)

        of_ups = slice(size + columns.start, size + columns.stop)
        return ExpertProducts(
            read(names[0], gate_up_shape, columns),
            read(names[0], gate_up_shape, of_ups),
            read(names[1], down_shape, slice(None), columns),
        )

    def _with_inputs_as_rows(self) -> ExpertProducts:
        """Read experts whose outputs of gate and up are columns that take turns."""
        gate_up = self._files.tensor(
            f"{self._block}{self._names.gate_up}",
            (self._num_experts, self._hidden_size, 2 * self._size),
            self._experts,
        )
        down = self._files.tensor(
            f"{self._block}{self._names.down}",
            (self._num_experts, self._size, self._hidden_size),
            self._experts,
            self._columns,
        )

        def part(offset: int) -> ReadWhenTaken[Tensor]:
            outputs = gate_up[:, :, offset::2][:, :, self._columns]
            return ReadWhenTaken(len(outputs), lambda number: outputs[number].t().contiguous())

        return ExpertProducts(
            part(0), part(1), ReadWhenTaken(len(down), lambda number: down[number].t().contiguous())
        )

    def _quantized(self, gate_up: str, down: str) -> ExpertProducts:
        """Dequantize experts whose outputs are rows; those of gate and up take turns."""
        of_gate_up = self._blocks(gate_up, 2 * self._size, self._hidden_size)
        of_down = self._blocks(down, self._hidden_size, self._size)
        dtype, on_device = self._files.dtype, self._files.on_device
        count, columns = len(self._held), self._columns

        def part(offset: int) -> ReadWhenTaken[Tensor]:
            blocks, scales = (it[:, offset::2][:, columns] for it in of_gate_up)
            return ReadWhenTaken(count, lambda it: on_device(dequantized(blocks[it], scales[it], dtype)))

        def read_down(number: int) -> Tensor:
            blocks, scales = of_down
            whole = dequantized(blocks[number], scales[number], dtype)
            return on_device(whole[:, columns].contiguous())

        return ExpertProducts(part(0), part(1), ReadWhenTaken(count, read_down))

    def _blocks(self, name: str, num_rows: int, num_columns: int) -> tuple[Tensor, Tensor]:
        """Map the blocks and scales of a product, [num_held, num_rows, num_blocks, ...]."""
        if num_columns % BLOCK_ITEMS:
            raise CheckpointError(f"{name}: {num_columns} columns are no whole blocks of {BLOCK_ITEMS}")
        shape = (self._num_experts, num_rows, num_columns // BLOCK_ITEMS)
        blocks = self._files.bytes_of(f"{name}_blocks", (*shape, BLOCK_BYTES), self._experts)
        return blocks, self._files.bytes_of(f"{name}_scales", shape, self._experts)

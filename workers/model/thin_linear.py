"""A linear product on CUDA whose few rows are computed with what is before or behind them in one kernel."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from workers.model.finish import Finish
from workers.model.norm import Norm
from workers.model.products import GatedActivation, TorchLinear

# What is around a product: a norm before it, nothing, or that it is added to the hidden states.
Surroundings = Literal["norm", "none", "addition"]


class ThinLinear(TorchLinear):
    """A product by torch, but of up to 32 rows by `workers.model.cuda.thin_product` where that was found to
    take no longer."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        gate: GatedActivation | None = None,
        surroundings: Surroundings,
    ) -> None:
        from workers.model.cuda import thin_choice, thin_product

        super().__init__(weight, bias, gate=gate)
        self._kernels = thin_product
        if surroundings == "norm" and weight.dtype not in thin_product.NORM_DTYPES:
            surroundings = "none"
        self._surroundings = surroundings
        is_added, has_norm = surroundings == "addition", surroundings == "norm"
        assert gate is None or not is_added
        self._finish: Finish = "add" if is_added else gate or "store"
        self._plan = thin_choice.usable_plan(weight, bias, self._finish, has_norm=has_norm)
        self._arrivals = thin_product.allocate_arrivals(self.num_outputs, weight.device)

    def takes_norm(self, norm: Norm, num_rows: int) -> bool:
        """Whether a product of so many rows normalizes them itself."""
        return self._surroundings == "norm" and not norm.is_layer_norm and self._is_thin(num_rows)

    def of_normed(self, x: Tensor, norm: Norm, out: Tensor) -> Tensor:
        """Write the product of the norm of x, with the activation of the gate if there is one, to `out`."""
        assert self.takes_norm(norm, len(x))
        return self._multiply(x, out, norm)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self._finish != "store" or not self._is_alone(len(x)):
            return super().__call__(x, out)
        return self._multiply(x, x.new_empty(len(x), self.num_outputs) if out is None else out)

    def add_to(self, hidden: Tensor, x: Tensor) -> Tensor | None:
        if self._finish != "add" or not self._is_thin(len(x)):
            return super().add_to(hidden, x)
        self._multiply(x, hidden)
        return None

    def gated(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self._finish in ("store", "add") or not self._is_alone(len(x)):
            return super().gated(x, out)
        return self._multiply(x, x.new_empty(len(x), self.num_outputs // 2) if out is None else out)

    def _is_thin(self, num_rows: int) -> bool:
        return self._plan is not None and num_rows <= self._kernels.MOST_ROWS

    def _is_alone(self, num_rows: int) -> bool:
        """Whether so many rows, which have no norm before them, are computed here."""
        return self._surroundings == "none" and self._is_thin(num_rows)

    def _multiply(self, x: Tensor, out: Tensor, norm: Norm | None = None) -> Tensor:
        assert self._plan is not None
        self._kernels.multiply(
            x, self._weight, self._bias, out, self._arrivals, self._plan, norm=norm, finish=self._finish
        )
        return out

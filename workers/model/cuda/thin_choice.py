"""The choice of products of few rows on a device: each is tried there before it is used.

A plan of `thin_product` follows from a model, which no card has checked. On a device the product is therefore
computed once with the layer's own weight beside the former kernels, of a norm, a product by torch and a gate.
It is used where it compiles, equals them within rounding, and takes no longer."""

from __future__ import annotations

import functools
import logging
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from workers.model.cuda.card import card_of, compiles
from workers.model.cuda.layer_ops import gate_mul, rms_norm
from workers.model.cuda.thin_product import (
    DTYPES,
    MOST_ROWS,
    NORM_DTYPES,
    ThinPlan,
    ThinShape,
    allocate_arrivals,
    multiply,
    thin_plan,
)
from workers.model.finish import Finish
from workers.model.norm import Norm

_log = logging.getLogger("tandem.rank")
_NAME = "the product of few rows"
# The largest difference from the former kernels, over the largest result: results are rounded after other
# sums, and with a norm their rows were.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}
# How often both are timed, and how often memory is written before, so that launches are queued ahead. A
# product is taken unless it is slower by more than times vary.
_NUM_TIMES, _NUM_AHEAD, _MOST_RATIO = 5, 32, 1.02
# The multiprocessors of a device that there is none of: those of an H100.
_NUM_STAND_IN = 132


class ThinKind(NamedTuple):
    """What a product of few rows is compiled for and timed as: its dtype, sizes and finish, whether a norm
    goes before, and whether it has a bias."""

    dtype: torch.dtype
    shape: ThinShape
    finish: Finish
    has_norm: bool
    has_bias: bool


# The results of trials, by device and kind: layers have products of the same kinds.
_known_plans: dict[tuple[torch.device, ThinKind], ThinPlan | None] = {}


def usable_plan(weight: Tensor, bias: Tensor | None, finish: Finish, *, has_norm: bool) -> ThinPlan | None:
    """Return the plan of products with a weight [num_weight_rows, num_inputs]; None where the former kernels
    remain."""
    if weight.dtype not in DTYPES or (has_norm and weight.dtype not in NORM_DTYPES):
        return None
    num_parts = 2 if finish in ("silu", "gelu_tanh") else 1
    shape = ThinShape(len(weight) // num_parts, weight.shape[1], num_parts)
    device, kind = weight.device, ThinKind(weight.dtype, shape, finish, has_norm, bias is not None)
    if (device, kind) not in _known_plans:
        plan: ThinPlan | None = thin_plan(shape, card_of(device), num_multiprocessors(device))
        # Without a device the interpreter computes, which takes long for a trial.
        if device.type == "cuda" and plan is not None and not is_usable(weight, bias, kind, plan):
            plan = None
        _known_plans[device, kind] = plan
    return _known_plans[device, kind]


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of a device's multiprocessors."""
    if device.type != "cuda":
        return _NUM_STAND_IN
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def is_usable(weight: Tensor, bias: Tensor | None, kind: ThinKind, plan: ThinPlan) -> bool:
    """Try a plan on the weight's device."""
    trial = ThinTrial(weight, bias, kind, plan)
    if not compiles(f"{_NAME} ({kind})", trial.run):
        return False
    trial.run_former()
    if not trial.equals_former():
        _log.warning("%s (%s) differs from the former kernels, which are taken", _NAME, kind)
        return False
    ours_us, former_us = median_us(trial.run, weight.device), median_us(trial.run_former, weight.device)
    is_fast = ours_us <= _MOST_RATIO * former_us
    _log.info(
        "%s (%s) takes %.1f us, the former kernels %.1f%s",
        _NAME, kind, ours_us, former_us, "" if is_fast else ", which are taken",
    )  # fmt: skip
    return is_fast


class ThinTrial:
    """Drawn rows, their product in one kernel, and by the former kernels."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        kind: ThinKind,
        plan: ThinPlan,
        num_rows: int = MOST_ROWS,
    ) -> None:
        self._weight, self._bias, self._finish, self._plan = weight, bias, kind.finish, plan
        num_outputs, num_inputs, _ = kind.shape
        draw = torch.Generator().manual_seed(3)
        x = torch.randn(num_rows, num_inputs, generator=draw)
        self._x = x.to(weight.device, weight.dtype)
        factors = torch.rand(num_inputs, generator=draw).add_(0.5).to(weight.device)
        self._norm = Norm(factors, 1e-6) if kind.has_norm else None
        self._out, self._former = (self._x.new_zeros(num_rows, num_outputs) for _ in range(2))
        self._arrivals = allocate_arrivals(num_outputs, weight.device)

    def run(self) -> None:
        """Compute the product in one kernel."""
        multiply(
            self._x, self._weight, self._bias, self._out, self._arrivals, self._plan,
            norm=self._norm, finish=self._finish,
        )  # fmt: skip

    def run_former(self) -> None:
        """Compute the product by the former kernels."""
        x = self._x if self._norm is None else rms_norm(self._x, self._norm)
        transposed, bias, finish = self._weight.t(), self._bias, self._finish
        if finish == "add" and bias is None:
            self._former.addmm_(x, transposed)
        elif finish == "add" and bias is not None:
            self._former.add_(torch.addmm(bias, x, transposed))
        elif finish == "store" and bias is None:
            torch.mm(x, transposed, out=self._former)
        elif finish == "store" and bias is not None:
            torch.addmm(bias, x, transposed, out=self._former)
        else:
            product = torch.mm(x, transposed) if bias is None else torch.addmm(bias, x, transposed)
            gate_mul(product, finish, self._former)

    def equals_former(self) -> bool:
        """Whether both results are equal within rounding."""
        most = _TOLERANCE[self._weight.dtype] * float(self._former.abs().max())
        return float((self._out - self._former).abs().max()) <= most


def median_us(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of work on the device, with nothing of it in the caches."""
    num_bytes: int = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    flushed = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(_NUM_TIMES)]
    for _ in range(_NUM_AHEAD):
        flushed.zero_()
    for begin, end in pairs:
        flushed.zero_()
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize(device)
    return statistics.median(float(begin.elapsed_time(end)) * 1e3 for begin, end in pairs)

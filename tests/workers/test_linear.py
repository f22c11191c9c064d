"""Packed products: tried at load, and done without where torch has them no more, or other ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from workers.model import decoder as linear_module
from workers.model.decoder import Linear
from workers.model.weights import LinearWeights

CPU = torch.device("cpu")


class FakeOps:
    """torch's functions but for some, under their names."""

    def __init__(self, **replaced: Any) -> None:
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(torch.ops.mkldnn, name)


def _raises(*_: object) -> Any:
    raise RuntimeError("mkldnn::_linear_pointwise() expected at most 5 argument(s)\nDeclaration: ...")


def _missing(*_: object) -> Any:
    raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")


def _doubled(*arguments: Any) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(*arguments)
    return result * 2


@pytest.fixture(autouse=True)
def _try_anew() -> Iterator[None]:
    linear_module._works.cache_clear()
    yield
    linear_module._works.cache_clear()


def linear() -> tuple[Linear, torch.Tensor, torch.Tensor]:
    """A product made with whatever there is, its argument, and what it must give."""
    generator = torch.Generator().manual_seed(3)
    weight, bias = torch.randn(40, 48, generator=generator), torch.randn(40, generator=generator)
    x = torch.randn(21, 48, generator=generator)
    return Linear(LinearWeights(weight, bias)), x, F.linear(x, weight, bias)


def test_this_torch_has_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tandem.rank"):
        assert linear_module.can_pack(CPU, torch.float32)
    assert not linear_module.can_pack(CPU, torch.float16)
    assert not linear_module.can_pack(torch.device("cuda"), torch.float32)
    assert not caplog.records
    product, x, expected = linear()
    torch.testing.assert_close(product(x), expected)


@pytest.mark.parametrize(
    ("replaced", "named"),
    [
        ({"_reorder_linear_weight": _missing}, "no attribute '_reorder_linear_weight'"),
        ({"_linear_pointwise": _raises}, "expected at most 5 argument(s)"),
        ({"_linear_pointwise": _doubled}, "results are off by"),
    ],
)
def test_without_them_plain_products_are_used_and_one_line_says_so(
    replaced: dict[str, Any],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(linear_module, "_OPS", FakeOps(**replaced))
    with caplog.at_level(logging.WARNING, "tandem.rank"):
        for _ in range(2):
            product, x, expected = linear()
            torch.testing.assert_close(product(x), expected)
    (record,) = caplog.records
    assert named in record.getMessage()
    assert "\n" not in record.getMessage()

"""Linear products on CUDA: by torch, without dependence on the batch, and of float8 weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model import cuda, native
from workers.model.layer_products import JoinedProducts
from workers.model.make_linear import make_linear, refuse_nondeterministic
from workers.model.products import InvariantLinear, Linear, ScaledLinear, TorchLinear
from workers.model.quantization.rounded_weight import rounded
from workers.model.quantization.stored_format import CodeType, Layout, StoredFormat

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-6}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True)
def _use_triton(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton serve the device of the tests, and nothing else the CPU."""
    monkeypatch.setattr(cuda, "DEVICE_TYPES", {device.type})
    monkeypatch.setattr(native, "load", lambda: None)
    torch.manual_seed(3)


def check(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


def problem(
    num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw inputs, weight and bias of a product whose values are about 1."""
    x, weight = torch.randn(num_rows, num_inputs), torch.randn(num_outputs, num_inputs) * num_inputs**-0.5
    x, weight, bias = (it.to(device, dtype) for it in (x, weight, torch.randn(num_outputs)))
    return x, weight, bias


@dtypes
@pytest.mark.parametrize("kind", [TorchLinear, InvariantLinear])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(34, 20), (64, 64), (70, 130)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_use_of_a_product(
    device: torch.device,
    dtype: torch.dtype,
    kind: type[TorchLinear | InvariantLinear],
    num_outputs: int,
    num_inputs: int,
    has_bias: bool,
) -> None:
    x, weight, bias = problem(5, num_outputs, num_inputs, dtype, device)
    linear: Linear = kind(weight, bias if has_bias else None)
    assert (linear.num_outputs, linear.num_inputs) == (num_outputs, num_inputs)
    expected = F.linear(x.float(), weight.float(), bias.float() if has_bias else None)
    out = torch.empty(5, num_outputs, dtype=dtype, device=device)
    assert linear(x, out) is out
    check(out, expected)
    assert torch.equal(linear(x), out)
    floats = linear.floats(x)
    assert floats.dtype == torch.float32
    check(floats.to(dtype), expected)
    gate, up = out.float().chunk(2, -1)
    check(linear.gated(x), F.silu(gate) * up)
    hidden = torch.randn(5, num_outputs).to(device, dtype)
    total = hidden.float() + expected
    rest = linear.add_to(hidden, x)
    check(hidden if rest is None else hidden + rest, total)
    assert torch.equal(linear.lookup(torch.tensor([3, 0], device=device)), weight[[3, 0]])


@dtypes
def test_an_invariant_product_is_the_same_bits_in_any_company(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Wherever the row is, and however many others there are; on a device, where products by torch differ."""
    x, weight, bias = problem(150, 40, 96, dtype, device)
    linear = make_linear(weight, bias, is_deterministic=True)
    assert isinstance(linear, InvariantLinear)
    whole = linear(x)
    for first, end in ((0, 1), (77, 78), (149, 150), (3, 66), (20, 150)):
        assert torch.equal(linear(x[first:end]), whole[first:end]), (first, end)
    refuse_nondeterministic(device, dtype)


@dtypes
def test_a_nan_spoils_its_row_only(device: torch.device, dtype: torch.dtype) -> None:
    x, weight, _ = problem(70, 40, 96, dtype, device)
    linear = InvariantLinear(weight)
    clean = linear(x)
    x[7, 5] = float("nan")
    spoilt = linear(x)
    assert bool(spoilt[7].isnan().all())
    spoilt[7] = clean[7]
    assert torch.equal(spoilt, clean)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32] if not torch.cuda.is_available() else [torch.bfloat16]
)
def test_float8_weights(device: torch.device, dtype: torch.dtype) -> None:
    """Against the product of what float8 has made of weights and inputs."""
    x, weight, bias = problem(6, 64, 96, torch.float32, device)
    x[2] = 0.0
    scales = weight.abs().amax(1) / 448
    packed = (weight / scales[:, None]).to(torch.float8_e4m3fn)
    linear: Linear = ScaledLinear(packed, scales, bias.to(dtype))
    row_scales = x.abs().amax(1, keepdim=True).clamp(min=1e-9) / 448
    rounded = (x.to(dtype).float() / row_scales).to(torch.float8_e4m3fn).float() * row_scales
    expected = F.linear(rounded, packed.float() * scales[:, None], bias)
    actual = linear(x.to(dtype))
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), expected, rtol=0.03, atol=0.03)
    torch.testing.assert_close(actual.float(), F.linear(x, weight, bias), rtol=0.1, atol=0.15)
    hidden = torch.ones(6, 64, dtype=dtype, device=device)
    rest = linear.add_to(hidden, x.to(dtype))
    assert rest is not None
    assert torch.equal(rest, actual)
    assert linear.gated(x.to(dtype)).shape == (6, 32)
    torch.testing.assert_close(
        linear.lookup(torch.tensor([5], device=device)), weight[[5]], rtol=0.07, atol=1e-3
    )


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_products_side_by_side(device: torch.device, is_deterministic: bool) -> None:
    """One of a quantized weight beside one of floats, as layers with a state have them."""
    x, few, _ = problem(5, 6, 64, torch.float32, device)
    many = rounded(torch.randn(70, 64, device=device) / 8, StoredFormat(Layout.PLAIN, CodeType.INT8))
    assert many is not None
    products = [make_linear(it, is_deterministic=is_deterministic) for it in (many, few)]
    joined = JoinedProducts(products)
    assert joined.num_outputs == 76
    found = joined(x, torch.empty(5, 76, device=device))
    check(found, F.linear(x, torch.cat((many.dequantized(), few))))

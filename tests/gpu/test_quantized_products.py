"""Products with quantized weights on CUDA, against `QuantizedWeight.dequantized` in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from drawn_weights import draw, moved
from torch import Tensor

from workers.model import cuda, native
from workers.model.make_linear import make_linear
from workers.model.products import GatedActivation
from workers.model.quantization import device_linear
from workers.model.quantization.device_linear import DeviceQuantizedLinear, Float8Linear
from workers.model.quantization.quantized_weight import Codes, QuantizedWeight

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-6}
# The interpreter's products of bfloat16 are wrong.
DTYPES = [torch.float32, torch.float16]
if torch.cuda.is_available():
    DTYPES.append(torch.bfloat16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
HALF = torch.float16 if not torch.cuda.is_available() else torch.bfloat16
# Enough inputs for two segments of tiles of 128, the last of which is not full.
SEGMENTED = 1024 + 64


@pytest.fixture(autouse=True)
def _use_triton(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton serve the device of the tests, and nothing else the CPU."""
    monkeypatch.setattr(cuda, "DEVICE_TYPES", {device.type})
    monkeypatch.setattr(native, "load", lambda: None)
    torch.manual_seed(5)


def product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """Return the product in float64."""
    wide = F.linear(x.cpu().double(), weight.dequantized().double())
    return wide if bias is None else wide + bias.cpu().double()


def gated(gate_up: Tensor, activation: GatedActivation) -> Tensor:
    """Return activation(gate) * up in float64."""
    gates, ups = gate_up.cpu().double().chunk(2, -1)
    return (F.silu(gates) if activation == "silu" else F.gelu(gates, approximate="tanh")) * ups


def check(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    tolerance = TOLERANCES[actual.dtype] if tolerance is None else tolerance
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=tolerance, atol=tolerance)


FORMS = [
    (Codes.UINT4, 32, 128, True),
    (Codes.UINT4, 128, 256, True),
    (Codes.UINT4, 64, 192, True),
    (Codes.UINT4, 300, 300, True),
    (Codes.UINT4, 20, 100, False),
    (Codes.INT8, 128, 128, False),
    (Codes.INT8, 32, 96, False),
    (Codes.INT8, 77, 77, True),
    (Codes.E4M3, 128, 256, False),
    (Codes.E4M3, 131, 131, False),
    (Codes.E2M1, 16, 144, False),
    (Codes.E2M1, 32, 160, False),
    (Codes.IQ4_NL, 32, 160, False),
    (Codes.IQ4_NL, 16, 48, True),
]


@dtypes
@pytest.mark.parametrize(
    ("codes", "group", "num_inputs", "has_offsets"), FORMS, ids=lambda it: getattr(it, "value", str(it))
)
def test_products_of_every_form(
    device: torch.device, dtype: torch.dtype, codes: Codes, group: int, num_inputs: int, has_offsets: bool
) -> None:
    """With few rows, and with as many as take a tile of their own."""
    weight = draw(codes, 29, num_inputs, group, has_offsets=has_offsets)
    for num_rows in (3,) if dtype == torch.float32 else (3, 70):
        x = torch.randn(num_rows, num_inputs).to(device, dtype)
        actual = make_linear(moved(weight, device))(x)
        assert actual.dtype == dtype
        check(actual, product(x, weight))


@dtypes
@pytest.mark.parametrize(("has_bias", "activation"), [(False, "silu"), (True, "gelu_tanh")])
@pytest.mark.parametrize("has_segments", [False, True])
def test_every_use_of_a_product(
    device: torch.device, dtype: torch.dtype, has_bias: bool, activation: GatedActivation, has_segments: bool
) -> None:
    """In one segment of the inputs, and in several."""
    num_inputs = (SEGMENTED if dtype != torch.float32 else 288) if has_segments else 64
    weight = draw(Codes.UINT4, 34, num_inputs, 32, has_offsets=True, has_order=True)
    bias = torch.randn(34).to(device, dtype) if has_bias else None
    linear = make_linear(moved(weight, device), bias, gate=activation)
    assert (linear.num_outputs, linear.num_inputs) == weight.shape
    x = torch.randn(5, num_inputs).to(device, dtype)
    expected = product(x, weight, bias)
    out = torch.empty(5, 34, dtype=dtype, device=device)
    assert linear(x, out) is out
    check(out, expected)
    assert torch.equal(linear(x), out)
    floats = linear.floats(x)
    assert floats.dtype == torch.float32
    check(floats, expected, TOLERANCES[dtype])
    check(linear.gated(x), gated(out, activation))
    columns = torch.empty(5, 20, dtype=dtype, device=device)
    linear.gated(x, columns[:, :17])
    assert torch.equal(columns[:, :17], linear.gated(x))
    hidden = torch.randn(5, 34).to(device, dtype)
    total = hidden.cpu().double() + expected
    assert linear.add_to(hidden, x) is None
    check(hidden, total)


@pytest.mark.parametrize("codes", list(Codes))
@pytest.mark.parametrize("has_offsets", [False, True])
def test_every_code_is_decoded_exactly(device: torch.device, codes: Codes, has_offsets: bool) -> None:
    num_codes = 1 << codes.num_bits
    weight = draw(codes, 3, num_codes, 16, has_offsets=has_offsets, has_order=has_offsets)
    every = torch.arange(num_codes, dtype=torch.int32).to(torch.uint8)
    packed = every if codes.num_bits == 8 else every[::2] | (every[1::2] << 4)
    weight = dataclasses.replace(weight, packed=packed.repeat(3, 1).contiguous())
    linear = DeviceQuantizedLinear(moved(weight, device))
    ids = torch.tensor([2, 0, 2], device=device)
    rows = linear.lookup(ids).cpu()
    torch.testing.assert_close(rows, weight.dequantized()[ids.cpu()], rtol=0, atol=0, equal_nan=True)
    # A product with the unit matrix takes the weights apart.
    if codes is not Codes.E4M3:
        units = torch.eye(num_codes, device=device)
        torch.testing.assert_close(linear(units).cpu(), weight.dequantized().t(), rtol=2e-7, atol=1e-9)


@dtypes
@pytest.mark.parametrize("scales_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_inputs", "group"), [(64, 32), (256, 128), (120, 20)])
def test_scales_have_16_bits_where_these_hold_them(
    device: torch.device, dtype: torch.dtype, scales_dtype: torch.dtype, num_inputs: int, group: int
) -> None:
    """And there are no offsets where the code 8 means zero."""
    weight = draw(Codes.UINT4, 10, num_inputs, group)
    scales = weight.scales.to(scales_dtype).float()
    weight = dataclasses.replace(weight, scales=scales, offsets=scales * -8)
    linear = make_linear(moved(weight, device))
    assert isinstance(linear, DeviceQuantizedLinear)
    kept = linear._weight
    assert (kept.scales.dtype, kept.offsets, kept.kernel_codes) == (scales_dtype, None, "int4")
    x = torch.randn(3, num_inputs).to(device, dtype)
    check(linear(x), product(x, weight))
    rows = linear.lookup(torch.tensor([7, 1], device=device)).cpu()
    torch.testing.assert_close(rows, weight.dequantized()[[7, 1]], rtol=1e-6, atol=1e-8)


def test_a_long_row_is_looked_up(device: torch.device) -> None:
    weight = draw(Codes.UINT4, 2, 1300, 26, has_offsets=True)
    rows = DeviceQuantizedLinear(moved(weight, device)).lookup(torch.tensor([1], device=device))
    assert torch.equal(rows.cpu(), weight.dequantized()[1:])


def test_no_ids_and_no_rows(device: torch.device) -> None:
    linear = DeviceQuantizedLinear(moved(draw(Codes.INT8, 8, 32, 32, quantizes_inputs=True), device))
    assert linear.lookup(torch.tensor([], dtype=torch.int64, device=device)).shape == (0, 32)
    assert linear(torch.empty(0, 32, device=device)).shape == (0, 8)


def test_a_part_of_the_outputs_is_multiplied_where_it_lies(device: torch.device) -> None:
    weight = moved(draw(Codes.UINT4, 40, 96, 32, has_offsets=True), device)
    x = torch.randn(3, 100).to(device, HALF)[:, 2:98]
    part = DeviceQuantizedLinear(weight.rows(slice(7, 30)))
    whole = DeviceQuantizedLinear(weight)
    assert torch.equal(part(x), whole(x)[:, 7:30])


@pytest.mark.parametrize(
    ("codes", "group", "quantizes_inputs"),
    [
        (Codes.UINT4, 32, False),
        (Codes.UINT4, 64, False),
        (Codes.E2M1, SEGMENTED, False),
        (Codes.INT8, SEGMENTED, True),
        (Codes.E4M3, 64, True),
    ],
    ids=lambda it: getattr(it, "value", str(it)),
)
def test_a_deterministic_product_is_the_same_bits_in_any_company(
    device: torch.device, codes: Codes, group: int, quantizes_inputs: bool
) -> None:
    """Segments side by side, as few rows have them, and one after another; wherever the row is."""
    weight = moved(draw(codes, 20, SEGMENTED, group, quantizes_inputs=quantizes_inputs), device)
    linear = make_linear(weight, torch.randn(20).to(device, HALF), is_deterministic=True)
    assert isinstance(linear, DeviceQuantizedLinear)
    x = torch.randn(66, SEGMENTED).to(device, HALF)
    whole = linear.floats(x)
    for first, end in ((0, 1), (65, 66), (3, 40)):
        assert torch.equal(linear.floats(x[first:end]), whole[first:end]), (first, end)
    assert torch.equal(linear.gated(x[50:51]), linear.gated(x)[50:51])
    hidden = torch.zeros(1, 20, dtype=HALF, device=device)
    linear.add_to(hidden, x[7:8])
    assert torch.equal(hidden, whole[7:8].to(HALF))


@dtypes
@pytest.mark.parametrize("form", [(Codes.UINT4, 128, False), (Codes.INT8, 256, True), (Codes.E4M3, 32, True)])
def test_a_row_that_is_not_finite_spoils_itself_only(
    device: torch.device, dtype: torch.dtype, form: tuple[Codes, int, bool]
) -> None:
    codes, group, quantizes_inputs = form
    weight = draw(codes, 10, 256, group, has_offsets=codes is Codes.UINT4, quantizes_inputs=quantizes_inputs)
    linear = DeviceQuantizedLinear(moved(weight, device))
    x = torch.randn(9, 256).to(device, dtype)
    clean = linear(x)
    x[7, 5] = float("nan")
    spoilt = linear(x)
    assert bool(spoilt[7].isnan().all())
    spoilt[7] = clean[7]
    assert torch.equal(spoilt, clean)


def rounded_rows(x: Tensor, codes: Codes) -> Tensor:
    """Round the rows to int8 or e4m3 with a scale each, of which the inverse is a factor, too."""
    wide = x.cpu().float()
    largest = 127.0 if codes is Codes.INT8 else 448.0
    most = wide.abs().amax(1, keepdim=True)
    most = torch.where(most > 0, most, 1.0)
    scaled = wide * (torch.full_like(most, largest) / most)  # a number over a tensor is rounded twice
    rounded = scaled.round() if codes is Codes.INT8 else scaled.to(torch.float8_e4m3fn)
    return rounded.double() * (most / largest).double()


@dtypes
@pytest.mark.parametrize("codes", [Codes.INT8, Codes.E4M3])
@pytest.mark.parametrize(
    ("group", "num_inputs", "has_offsets"),
    [(128, 256, False), (64, 192, True), (32, 96, False), (131, 131, True), (SEGMENTED, SEGMENTED, False)],
)
def test_inputs_are_rounded_as_the_checkpoint_means_them(
    device: torch.device, dtype: torch.dtype, codes: Codes, group: int, num_inputs: int, has_offsets: bool
) -> None:
    weight = draw(codes, 21, num_inputs, group, has_offsets=has_offsets, quantizes_inputs=True)
    linear = make_linear(moved(weight, device))
    x = torch.randn(6 if dtype == torch.float32 else 70, num_inputs).to(device, dtype)
    x[0] = 0.0
    check(linear(x), product(rounded_rows(x, codes), weight))


def test_products_of_integers_have_exact_sums(device: torch.device) -> None:
    """With scales that are powers of two, nothing is rounded but the result."""
    weight = draw(Codes.INT8, 16, 320, 320, quantizes_inputs=True)
    weight = dataclasses.replace(weight, scales=torch.full((16, 1), 2.0**-12))
    x = torch.randint(-126, 127, (4, 320)).float()
    x[:, 0] = 127.0
    actual = DeviceQuantizedLinear(moved(weight, device))(x.to(device))
    assert torch.equal(actual.cpu(), product(x, weight).float())


def test_rows_of_float8_are_multiplied_by_torch_where_it_can(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in Triton where results shall not depend on the batch, or where the form is another one."""
    monkeypatch.setattr(device_linear, "has_float8_products", lambda _: True)
    weight = draw(Codes.E4M3, 32, 48, 48, quantizes_inputs=True)
    others = [
        dataclasses.replace(weight, quantizes_inputs=False),
        dataclasses.replace(weight, order=torch.randperm(48)),
        draw(Codes.E4M3, 32, 48, 16, quantizes_inputs=True),
        draw(Codes.E4M3, 30, 48, 48, quantizes_inputs=True),
        draw(Codes.INT8, 32, 48, 48, quantizes_inputs=True),
    ]
    for other in others:
        assert type(make_linear(moved(other, device))) is DeviceQuantizedLinear
    assert type(make_linear(moved(weight, device), is_deterministic=True)) is DeviceQuantizedLinear
    bias = torch.randn(32).to(device, torch.bfloat16)
    linear = make_linear(moved(weight, device), bias, gate="gelu_tanh")
    assert type(linear) is Float8Linear
    x = torch.randn(70, 48).to(device, torch.bfloat16)
    actual = linear(x)
    # Of rounded rows in bfloat16, many lie between two codes.
    check(actual, product(rounded_rows(x, Codes.E4M3), weight, bias), 0.1)
    hidden = torch.ones_like(actual)
    linear.add_to(hidden, x)
    assert torch.equal(hidden, actual + 1)
    check(linear.gated(x), gated(actual, "gelu_tanh"))
    few = x[:3].to(HALF)
    check(make_linear(moved(weight, device))(few), product(rounded_rows(few, Codes.E4M3), weight))


@pytest.mark.gpu
@pytest.mark.parametrize("codes", [Codes.UINT4, Codes.INT8, Codes.E4M3])
def test_a_graph_holds_every_use_of_a_product(device: torch.device, codes: Codes) -> None:
    """Nothing of them waits for the host, and memory that a graph takes is its own."""
    weight = draw(codes, 64, SEGMENTED, SEGMENTED, quantizes_inputs=codes is not Codes.UINT4)
    linear = make_linear(moved(dataclasses.replace(weight, order=torch.randperm(SEGMENTED)), device))
    x = torch.zeros(5, SEGMENTED, dtype=HALF, device=device)
    ids, hidden = torch.tensor([3, 9], device=device), torch.zeros(5, 64, dtype=HALF, device=device)

    def step() -> list[Tensor]:
        hidden.zero_()
        linear.add_to(hidden, x)
        return [linear(x), linear.gated(x), linear.floats(x), linear.lookup(ids)]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    x.copy_(torch.randn(5, SEGMENTED))
    graph.replay()
    actual = [part.clone() for part in (*recorded, hidden)]
    expected = step()
    assert all(map(torch.equal, actual, (*expected, hidden)))


def test_parts_of_a_product_are_joined(device: torch.device) -> None:
    parts = [draw(Codes.UINT4, num_outputs, 64, 32, has_offsets=True) for num_outputs in (5, 12)]
    x = torch.randn(2, 64).to(device, HALF)
    linear = make_linear([moved(part, device) for part in parts])
    check(linear(x), torch.cat([product(x, part) for part in parts], 1))
